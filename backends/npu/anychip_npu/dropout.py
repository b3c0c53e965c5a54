"""Rows of dropout: none. The mask of the specification is a function of (seed, offset, index).

CANN draws bits of its own (aclnnDropoutGenMaskV2): with them the same seed would drop other
elements than on every other chip, and a training could not be continued elsewhere.
"""

from __future__ import annotations

from anychip_npu.table import left_to_reference

_PAGE = (
    "https://gitcode.com/Ascend/op-plugin/blob/26.1.0/docs/en/custom_APIs/torch_npu/"
    "%28beta%29torch_npu-_npu_dropout.md"
)

for _operator in (
    "dropout",
    "bias_dropout_add",
    "dropout_add_rms_norm",
    "dropout_add_layer_norm",
):
    left_to_reference(
        _operator,
        reason="CANN draws its own bits; the mask is that of Philox4x32-10 on every chip",
        page=_PAGE,
    )
