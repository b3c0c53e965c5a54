"""Why quantize, dequantize, top_k and what is near to them stay with the reference."""

from __future__ import annotations

from anychip_npu.table import left_to_reference

_DOCS = "https://gitcode.com/Ascend/op-plugin/blob/master/docs/zh/custom_APIs/torch_npu/"

left_to_reference(
    "quantize",
    "forward",
    reason=(
        "npu_dynamic_quant has the same equation for rows of 16 bits, but its page says neither "
        "how ties round nor what a row of zeros or with a NaN becomes, and it draws nothing"
    ),
    page=f"{_DOCS}torch_npu-npu_dynamic_quant.md",
)
left_to_reference(
    "dequantize",
    "forward",
    reason=(
        "npu_anti_quant has one scale per column and writes 16 bits; this operator has one per "
        "block and writes float32"
    ),
    page=f"{_DOCS}torch_npu-npu_anti_quant.md",
)
left_to_reference(
    "top_k",
    reason=(
        "it selects by magnitude, ties by index: aten::topk says nothing of ties, and "
        "npu_moe_gating_top_k_softmax selects by the softmax of the numbers"
    ),
    page=f"{_DOCS}torch_npu-npu_moe_gating_top_k_softmax.md",
)
left_to_reference("hadamard", reason="torch_npu 2.13.0 has no transform of this kind that trains")
