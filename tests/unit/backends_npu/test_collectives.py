"""What HCCL takes is said before the call."""

import torch

from anychip.contract import CALLS
from anychip_npu.collectives import capabilities

# HCCL API reference of CANN 8.5, Atlas A2 training products: HcclAllReduce and HcclReduceScatter
# take int8, int16, int32, int64, float16, float32, bfp16; the others unsigned ones too.
REDUCED = {torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.bfloat16}
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
