"""Is torch_npu's switch for HF32 off for as long as anybody needs it, and then as it was?"""

from types import SimpleNamespace

import pytest
import torch

from anychip_npu.numerics import exact_products


@pytest.mark.parametrize("allowed", [True, False])
def test_switch_is_off_within_calls_that_overlap_and_put_back_after_them(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    matmul = SimpleNamespace(allow_hf32=allowed)
    monkeypatch.setattr(torch, "npu", SimpleNamespace(matmul=matmul), raising=False)
    exact_products.__enter__()
    exact_products.__enter__()
    assert not matmul.allow_hf32
    exact_products.__exit__(None, None, None)
    assert not matmul.allow_hf32
    exact_products.__exit__(None, None, None)
    assert matmul.allow_hf32 == allowed
