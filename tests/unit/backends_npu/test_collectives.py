"""What HCCL takes is said before the call, and two ranks on one device are refused at the start."""

from __future__ import annotations

import pytest
import torch

from anychip import CommunicationError
from anychip.contract.collectives import CALLS
from anychip_npu.collectives import capabilities, refuse_shared

# HCCL API reference of CANN 8.5, Atlas A2 training products: HcclAllReduce and HcclReduceScatter
# take int8, int16, int32, int64, float16, float32, bfp16; the others unsigned ones too.
REDUCED = {
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.bfloat16,
}
MOVED = REDUCED | {torch.uint8, torch.bool}


def test_capabilities_are_those_of_the_reference() -> None:
    found = capabilities()
    for call in CALLS:
        if call == "reduce_scatter":
            assert found.dtypes[call] == REDUCED
        elif call == "all_reduce":  # torch_npu casts the unsigned byte to int32 there
            assert found.dtypes[call] == REDUCED | {torch.uint8}
        elif call != "barrier":
            assert found.dtypes[call] == MOVED
    assert set(found.reductions) == REDUCED | {torch.uint8}
    assert found.reductions[torch.float16] == {"sum", "avg", "max", "min"}
    assert found.reductions[torch.int64] == {"sum", "max", "min"}


def test_ranks_with_devices_of_their_own_are_accepted() -> None:
    refuse_shared(["0 of all on a", "1 of all on a", "0 of all on b"], "world, rank 0 of 3")


def test_ranks_with_one_device_are_named() -> None:
    with pytest.raises(CommunicationError) as caught:
        refuse_shared(["0 of all on a", "1 of all on a", "0 of all on a"], "world, rank 2 of 3")
    assert caught.value.ranks == (0, 2)
    assert "ranks 0 and 2 have device 0 of all on a" in str(caught.value)
    assert "set_device" in str(caught.value)
