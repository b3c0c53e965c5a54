"""What is called of torch and torch_npu for each row of the emulator's operator table.

What a case is: :mod:`tests.npu.aclnn_case`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from tests.npu.aclnn_case import FLOATS, Case, Function


def in_place(method: str, *arguments: Any, **named: Any) -> Function:
    """Calls a method with a trailing underscore on a copy of the first tensor."""

    def call(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        copy = first.clone()
        getattr(copy, method)(*others, *arguments, **named)
        return copy

    return call


def listed(function: Function, *arguments: Any) -> Function:
    """Calls a function of lists with each tensor, and its half, as one list."""

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(function(*[[t, t[:1] / 2] for t in tensors], *arguments))

    return call


def unary() -> list[Case]:
    """Rows of one tensor, and those that write into it."""
    positive = {"sqrt": 0.1, "rsqrt": 0.1, "reciprocal": 0.1, "log": 0.1, "log2": 0.1}
    names = "abs neg sign ceil floor round sqrt rsqrt reciprocal exp log log2 sin cos erf tanh"
    cases = [
        Case((f"aclnn{name.capitalize()}",), getattr(torch, name), low=positive.get(name))
        for name in f"{names} sigmoid relu".split()
    ]
    written = "floor sqrt rsqrt reciprocal exp log tanh sigmoid relu".split()
    return cases + [
        Case((f"aclnnInplace{name.capitalize()}",), in_place(f"{name}_"), low=positive.get(name))
        for name in written
    ]


TWO = ((3, 5), (3, 5))
THREE = ((3, 5), (3, 5), (3, 5))
MASK = torch.tensor([[True, False, True, False, True]] * 3)
INDEX = torch.tensor([2, 0, 1])
COLUMNS = torch.tensor([[0, 2, 1, 4, 3], [1, 3, 0, 2, 4], [3, 0, 2, 4, 1]])
PLACES = torch.tensor([[0, 2, 1, 4, 3], [1, 1, 0, 2, 4], [3, 0, 2, 2, 1]])


def arithmetic() -> list[Case]:
    """Rows of two and three tensors, and of numbers."""
    return [
        Case(("aclnnAdd",), lambda a, b: torch.add(a, b, alpha=2), TWO),
        Case(("aclnnSub",), lambda a, b: torch.sub(a, b, alpha=2), TWO),
        Case(("aclnnRsubs",), lambda a: torch.rsub(a, 0.5, alpha=2)),
        Case(("aclnnAdds",), lambda a: torch.add(a, 0.5)),
        Case(("aclnnSubs",), lambda a: torch.sub(a, 0.5)),
        Case(("aclnnInplaceAdd",), in_place("add_", alpha=3), TWO),
        Case(("aclnnInplaceSub",), in_place("sub_", alpha=3), TWO),
        Case(("aclnnInplaceAdds",), in_place("add_", 0.5)),
        Case(("aclnnInplaceSubs",), in_place("sub_", 0.5)),
        Case(("aclnnMul",), torch.mul, TWO),
        Case(("aclnnMuls",), lambda a: a * 1.5),
        Case(("aclnnInplaceMul",), in_place("mul_"), TWO),
        Case(("aclnnInplaceMuls",), in_place("mul_", 1.5)),
        Case(("aclnnDiv",), torch.div, TWO, low=0.5),
        Case(("aclnnDivs",), lambda a: a / 1.5),
        Case(("aclnnInplaceDiv",), in_place("div_"), TWO, low=0.5),
        Case(("aclnnInplaceDivs",), in_place("div_", 1.5)),
        Case(("aclnnMaximum",), torch.maximum, TWO),
        Case(("aclnnMinimum",), torch.minimum, TWO),
        Case(("aclnnPowTensorScalar",), lambda a: a.pow(3)),
        Case(("aclnnInplacePowTensorScalar",), in_place("pow_", 3)),
        Case(("aclnnPowTensorTensor",), torch.pow, TWO, low=0.5),
        Case(("aclnnPowScalarTensor",), lambda a: torch.pow(2.0, a)),
        Case(("aclnnRemainderTensorScalar",), lambda a: torch.remainder(a, 4.0), low=0.5),
        Case(("aclnnClamp",), lambda a: torch.clamp(a, -0.5, 0.75)),
        Case(("aclnnAddcmul",), lambda a, b, c: torch.addcmul(a, b, c, value=0.5), THREE),
        Case(("aclnnAddcdiv",), lambda a, b, c: torch.addcdiv(a, b, c, value=0.5), THREE, low=0.5),
        Case(("aclnnInplaceAddcmul",), in_place("addcmul_", value=0.5), THREE),
        Case(("aclnnInplaceAddcdiv",), in_place("addcdiv_", value=0.5), THREE, low=0.5),
        Case(("aclnnLerps",), lambda a, b: torch.lerp(a, b, 0.3), TWO),
        Case(("aclnnInplaceLerps",), in_place("lerp_", 0.3), TWO),
        Case(("aclnnInplaceLerp",), in_place("lerp_"), THREE),
        Case(("aclnnSWhere",), lambda a, b, m: torch.where(m, a, b), TWO, extra=(MASK,)),
    ]


def comparisons() -> list[Case]:
    """Rows whose result is a truth value."""
    cases = []
    for name in "eq ne gt ge lt le".split():
        function = getattr(torch, name)
        prefix = f"aclnn{name.capitalize()}"
        cases.append(Case((f"{prefix}Tensor",), function, TWO))
        cases.append(Case((f"{prefix}Scalar",), lambda a, f=function: f(a, 0.25)))
    flags = ((MASK, ~MASK.roll(1, 1)), ())
    for row, function in (
        ("LogicalAnd", torch.logical_and),
        ("LogicalOr", torch.logical_or),
        ("BitwiseAndTensor", torch.bitwise_and),
        ("BitwiseOrTensor", torch.bitwise_or),
        ("BitwiseXorTensor", torch.bitwise_xor),
    ):
        cases.append(Case((f"aclnn{row}",), function, (), extra=flags[0]))
    return [
        *cases,
        Case(("aclnnLogicalNot",), torch.logical_not, (), extra=(MASK,)),
        Case(("aclnnBitwiseNot",), torch.bitwise_not, (), extra=(MASK,)),
        Case(("aclnnIsFinite",), lambda a: torch.isfinite(a / a.relu())),
        Case(("aclnnEqual",), lambda a: torch.tensor(torch.equal(a, a + 1)), dtypes=FLOATS[:1]),
        Case(("aclnnAll",), lambda m: m.all(1), (), extra=(MASK,)),
        Case(("aclnnAny",), lambda m: m.any(0), (), extra=(MASK,)),
        Case(("aclnnFloorDivide",), torch.floor_divide, (), extra=(PLACES, PLACES + 1)),
        Case(("aclnnFloorDivides",), lambda a: a // 2, (), extra=(PLACES,)),
        Case(
            ("aclnnDivMods",),
            lambda a: torch.div(a - 2, 2, rounding_mode="floor"),
            (),
            extra=(PLACES,),
        ),
        Case(("aclnnBitwiseAndScalar",), lambda a: a & 5, (), extra=(PLACES,)),
        Case(("aclnnBitwiseOrScalar",), lambda a: a | 5, (), extra=(PLACES,)),
        Case(("aclnnBitwiseXorScalar",), lambda a: a ^ 5, (), extra=(PLACES,)),
        Case(("aclnnLeftShift",), lambda a, b: a << b, (), extra=(PLACES, PLACES)),
        Case(("aclnnLeftShifts",), lambda a: a << 3, (), extra=(PLACES,)),
        Case(("aclnnRightShift",), lambda a: (a - 2) >> 1, (), extra=(PLACES,)),
    ]


def activations() -> list[Case]:
    """Rows with a gradient of their own."""
    f = torch.nn.functional
    return [
        Case(
            ("aclnnGelu",),
            f.gelu,
            reference=lambda a: f.gelu(a, approximate="tanh"),
            backward=("aclnnGeluBackward",),
        ),
        Case(("aclnnSilu",), f.silu, backward=("aclnnSiluBackward",)),
        Case(("aclnnTanh",), torch.tanh, backward=("aclnnTanhBackward",)),
        Case(("aclnnSigmoid",), torch.sigmoid, backward=("aclnnSigmoidBackward",)),
        Case(("aclnnSoftmax",), lambda a: f.softmax(a, -1), backward=("aclnnSoftmaxBackward",)),
        Case(
            ("aclnnLogSoftmax",),
            lambda a: f.log_softmax(a, -1),
            backward=("aclnnLogSoftmaxBackward",),
        ),
        Case(
            ("aclnnLayerNorm",),
            lambda a, w, b: f.layer_norm(a, (8,), w, b),
            ((3, 8), (8,), (8,)),
            backward=("aclnnLayerNormBackward",),
            units=24,
        ),
        Case(
            ("aclnnMseLoss",),
            lambda a, b: f.mse_loss(a, b),
            TWO,
            backward=("aclnnMseLossBackward",),
        ),
        Case(
            ("aclnnLogSoftmax", "aclnnNLLLoss"),
            lambda a, t: f.cross_entropy(a, t, ignore_index=2),
            backward=("aclnnNLLLossBackward", "aclnnLogSoftmaxBackward"),
            extra=(torch.tensor([1, 2, 4]),),
        ),
        Case(
            ("aclnnEmbedding",),
            lambda w, i: f.embedding(i, w),
            ((7, 4),),
            backward=("aclnnEmbeddingDenseBackward",),
            extra=(torch.tensor([[1, 6, 1], [0, 2, 1]]),),
        ),
    ]


def products() -> list[Case]:
    """Rows of matrices."""
    return [
        Case(("aclnnMm",), torch.mm, ((4, 6), (6, 3)), backward=("aclnnMm",)),
        Case(("aclnnMatmul",), torch.matmul, ((2, 4, 6), (6, 3))),
        Case(("aclnnBatchMatMul",), torch.bmm, ((2, 4, 6), (2, 6, 3))),
        Case(("aclnnAddmm",), torch.addmm, ((3,), (4, 6), (6, 3))),
        Case(("aclnnBaddbmm",), torch.baddbmm, ((2, 4, 3), (2, 4, 6), (2, 6, 3))),
    ]


def shaping() -> list[Case]:
    """Rows that copy, fill, mask and join."""
    return [
        Case(("aclnnInplaceCopy",), lambda a: a.t().contiguous()),
        Case(("aclnnInplaceZero",), in_place("zero_")),
        Case(("aclnnInplaceOne",), lambda a: torch.ones(3, device=a.device)),
        Case(
            ("aclnnInplaceFillTensor",),
            lambda a, v: in_place("fill_", v)(a),
            extra=(torch.tensor(2.5),),
        ),
        Case(
            ("aclnnInplaceMaskedFillTensor",),
            lambda a, m, v: in_place("masked_fill_", m, v.to(a.dtype))(a),
            extra=(MASK, torch.tensor(2.0)),
        ),
        Case(
            ("aclnnCast",),
            lambda a: torch_npu().npu_dtype_cast(a, torch.float32),
            reference=lambda a: a,
            dtypes=FLOATS[1:],
        ),
        Case(("aclnnChunkCat",), chunked),
        Case(("aclnnInplaceFillScalar",), in_place("fill_", 2.5)),
        Case(("aclnnArange",), lambda a: torch.arange(2, 9, 3, device=a.device)),
        Case(("aclnnEye",), lambda a: torch.eye(3, 4, device=a.device)),
        Case(("aclnnCat",), lambda a, b: torch.cat([a, b], 1), TWO),
        Case(("aclnnStack",), lambda a, b: torch.stack([a, b], 1), TWO),
        Case(("aclnnConstantPadNd",), lambda a: torch.nn.functional.pad(a, (1, 2), value=3.0)),
        Case(("aclnnRepeat",), lambda a: a.repeat(2, 1, 3)),
        Case(("aclnnFlip",), lambda a: a.flip(1)),
        Case(("aclnnTril",), lambda a: a.tril(1)),
        Case(("aclnnTriu",), lambda a: a.triu(1)),
        Case(("aclnnInplaceTril",), in_place("tril_", 1)),
        Case(("aclnnInplaceTriu",), in_place("triu_", 1)),
        Case(("aclnnInplaceMaskedFillScalar",), in_place("masked_fill_", 2.0), extra=(MASK,)),
        Case(("aclnnMaskedSelect",), torch.masked_select, extra=(MASK,)),
        Case(("aclnnNonzero",), torch.nonzero, (), extra=(MASK,)),
    ]


def indexing() -> list[Case]:
    """Rows that select and place by indices, and that sort."""
    return [
        Case(("aclnnIndex",), lambda a, i: a[i], extra=(INDEX[:2],)),
        Case(
            ("aclnnIndexPutImpl",),
            lambda a, i: in_place("index_put_", (i,), a[:2])(a),
            extra=(INDEX[:2],),
        ),
        Case(("aclnnIndexSelect",), lambda a, i: a.index_select(0, i), extra=(INDEX,)),
        Case(("aclnnGather",), lambda a, i: a.gather(1, i), extra=(PLACES,)),
        Case(("aclnnScatter",), lambda a, b, i: a.scatter(1, i, b), TWO, extra=(COLUMNS,)),
        Case(
            ("aclnnInplaceScatter",),
            lambda a, b, i: in_place("scatter_", 1, i, b)(a),
            TWO,
            extra=(COLUMNS,),
        ),
        Case(("aclnnScatterValue",), lambda a, i: a.scatter(1, i, 2.5), extra=(COLUMNS[:, :2],)),
        Case(
            ("aclnnInplaceScatterValue",),
            lambda a, i: in_place("scatter_", 1, i, 2.5)(a),
            extra=(COLUMNS[:, :2],),
        ),
        Case(
            ("aclnnIndexAdd",),
            lambda a, b, i: a.index_add(0, i, b, alpha=2),
            TWO,
            extra=(torch.tensor([1, 1, 0]),),
        ),
        Case(
            ("aclnnSearchSorted",),
            lambda e, i: torch.searchsorted(e, i, right=True),
            (),
            extra=(torch.tensor([0, 2, 2, 5]), PLACES),
        ),
        Case(("aclnnRepeatInterleaveIntWithDim",), lambda a: a.repeat_interleave(2, dim=1)),
        Case(("aclnnScatterAdd",), lambda a, b, i: a.scatter_add(1, i, b), TWO, extra=(PLACES,)),
        Case(("aclnnTopk",), lambda a: tuple(a.topk(2)), dtypes=FLOATS[:1]),
        Case(("aclnnSort",), lambda a: tuple(a.sort(descending=True)), dtypes=FLOATS[:1]),
    ]


def chunked(a: torch.Tensor) -> torch.Tensor:
    """Two tensors, each in two chunks of rows, side by side."""
    return torch._chunk_cat([a, a * 2], 0, 2)


def reductions() -> list[Case]:
    """Rows that make fewer numbers of many."""
    return [
        Case(("aclnnReduceSum",), lambda a: a.sum(1)),
        Case(("aclnnMean",), lambda a: a.mean(1)),
        Case(("aclnnLinalgVectorNorm",), lambda a: torch.linalg.vector_norm(a)),
        Case(("aclnnLogSumExp",), lambda a: torch.logsumexp(a, 1)),
        Case(("aclnnAmax",), lambda a: a.amax(1)),
        Case(("aclnnAminmax",), lambda a: torch.stack(a.aminmax(dim=1))),
        Case(("aclnnAmin",), lambda a: a.amin(1)),
        Case(("aclnnMax",), lambda a: a.max()),
        Case(("aclnnMin",), lambda a: a.min()),
        Case(("aclnnMaxDim",), lambda a: tuple(a.max(1)), dtypes=FLOATS[:1]),
        Case(("aclnnArgMax",), lambda a: a.argmax(1), dtypes=FLOATS[:1]),
        Case(("aclnnCumsum",), lambda a: a.cumsum(1)),
        Case(("aclnnVarCorrection",), lambda a: a.var(1), units=24),
        Case(("aclnnStd",), lambda a: a.std(1), units=24),
    ]


def lists() -> list[Case]:
    """Rows over lists."""
    t = torch
    return [
        Case(("aclnnForeachSqrt",), listed(t._foreach_sqrt), low=0.1),
        Case(("aclnnForeachReciprocal",), listed(t._foreach_reciprocal), low=0.1),
        Case(("aclnnForeachNeg",), listed(t._foreach_neg)),
        Case(("aclnnForeachNorm",), listed(t._foreach_norm)),
        Case(("aclnnForeachAddScalarV2",), listed(t._foreach_add, 0.5)),
        Case(("aclnnForeachMulScalarV2",), listed(t._foreach_mul, 1.5)),
        Case(("aclnnForeachDivScalarV2",), listed(t._foreach_div, 1.5)),
        Case(("aclnnForeachAddListV2",), listed(t._foreach_add), TWO),
        Case(("aclnnForeachSubListV2",), listed(t._foreach_sub), TWO),
        Case(("aclnnForeachMulList",), listed(t._foreach_mul), TWO),
        Case(("aclnnForeachDivList",), listed(t._foreach_div), TWO, low=0.5),
        Case(("aclnnForeachMaximumList",), listed(t._foreach_maximum), TWO),
        Case(("aclnnForeachAddScalarList",), listed(t._foreach_add, [0.5, 2.0])),
        Case(("aclnnForeachMulScalarList",), listed(t._foreach_mul, [0.5, 3.0])),
        Case(("aclnnForeachDivScalarList",), listed(t._foreach_div, [0.5, 3.0])),
        Case(("aclnnForeachLerpScalar",), listed(t._foreach_lerp, 0.3), TWO),
        Case(("aclnnForeachAddcmulScalarV2",), listed(t._foreach_addcmul, 0.5), THREE),
        Case(("aclnnForeachAddcdivScalarV2",), listed(t._foreach_addcdiv, 0.5), THREE, low=0.5),
        Case(("aclnnForeachCopy",), copied_lists, TWO),
        Case(("aclnnForeachZeroInplace",), zeroed_list),
    ]


def copied_lists(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The first of a list after the second was copied to it."""
    copy = a.clone()
    torch._foreach_copy_([copy], [b])
    return copy


def zeroed_list(a: torch.Tensor) -> torch.Tensor:
    """The only tensor of a list that is set to zero."""
    copy = a.clone()
    torch._foreach_zero_([copy])
    return copy


def attention(layout: str, causal: bool) -> tuple[Function, Function]:
    """npu_fusion_attention of [2, heads, 6, 8] in a layout, and the reference of both."""

    def laid_out(x: torch.Tensor) -> torch.Tensor:
        batch, _, length, _ = x.shape
        if layout == "BSND":
            return x.transpose(1, 2)
        if layout == "BSH":
            return x.transpose(1, 2).reshape(batch, length, -1)
        return x.permute(2, 0, 1, 3).reshape(length, batch, -1) if layout == "SBH" else x

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(6, 6, dtype=torch.bool, device=q.device).triu(1) if causal else None
        return torch_npu().npu_fusion_attention(
            laid_out(q), laid_out(k), laid_out(v), q.shape[1], layout,
            atten_mask=mask, scale=8**-0.5, next_tockens=0 if causal else 2147483647,
        )[0]  # fmt: skip

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=True
        )
        return laid_out(out)

    return call, reference


ENDS = (3, 8)


def packed_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of two sequences, packed one after another."""
    mask = torch.ones(2048, 2048, dtype=torch.bool, device=q.device).triu(1)
    return torch_npu().npu_fusion_attention(
        q, k, v, q.shape[1], "TND", atten_mask=mask, scale=8**-0.5, sparse_mode=3,
        actual_seq_qlen=list(ENDS), actual_seq_kvlen=list(ENDS),
    )[0]  # fmt: skip


def packed_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same, sequence by sequence."""
    parts = []
    for start, end in zip((0, *ENDS), ENDS, strict=False):
        one, two, three = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            one, two, three, is_causal=True, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def rms_norm(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    """Zhang and Sennrich 2019, equation 4."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gamma


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary positions on the halves of the last dimension."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def rotated_neighbours(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary positions on neighbours of the last dimension."""
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cosine + turned * sine


def torch_npu() -> Any:
    """The adapter, which is imported only when a case runs."""
    return importlib.import_module("torch_npu")


def fused() -> list[Case]:
    """Rows of torch_npu's own functions."""
    f = torch.nn.functional
    gated, turned = ((3, 32),), ((2, 3, 5, 64),) * 3
    grads = ("aclnnFlashAttentionScoreGrad",)
    queries, keys = (2, 4, 6, 8), (2, 2, 6, 8)
    attentions = [
        Case(("aclnnFlashAttentionScore",), call, (queries, keys, keys), reference, grads, units=24)
        for layout in ("BNSD", "BSND", "BSH", "SBH")
        for causal in (True, False)
        for call, reference in [attention(layout, causal)]
    ]
    return [
        *attentions,
        Case(("aclnnFlashAttentionVarLenScore",), packed_attention,
             ((8, 4, 8), (8, 2, 8), (8, 2, 8)), packed_reference,
             ("aclnnFlashAttentionUnpaddingScoreGrad",), units=24),
        Case(("aclnnSwiGlu",), lambda x: torch_npu().npu_swiglu(x), gated,
             lambda x: f.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], ("aclnnSwiGluGrad",)),
        Case(("aclnnGeGluV3",), lambda x: torch_npu().npu_geglu(x, -1, 1)[0], gated,
             lambda x: x.chunk(2, -1)[0] * f.gelu(x.chunk(2, -1)[1], approximate="tanh"),
             ("aclnnGeGluV3Backward",), units=16),
        Case(("aclnnFastGelu",), lambda x: torch_npu().npu_fast_gelu(x), gated,
             lambda x: x * torch.sigmoid(1.702 * x), ("aclnnFastGeluBackward",)),
        Case(("aclnnRotaryPositionEmbeddingV2",), lambda *t: torch_npu().npu_rotary_mul(*t),
             turned, rotated, ("aclnnRotaryPositionEmbeddingGrad",)),
        Case(("aclnnRotaryPositionEmbeddingV2",),
             lambda *t: torch_npu().npu_rotary_mul(*t, "interleave"),
             turned, rotated_neighbours, ("aclnnRotaryPositionEmbeddingGrad",)),
        Case(("aclnnCrossEntropyLoss",),
             lambda x, t: torch_npu().npu_cross_entropy_loss(x, t, ignore_index=2)[0].reshape(()),
             ((4, 5),), lambda x, t: f.cross_entropy(x, t, ignore_index=2),
             ("aclnnCrossEntropyLossGrad",), extra=(torch.tensor([1, 2, 4, 0]),)),
        Case(("aclnnForeachNonFiniteCheckAndUnscale",), unscaled, ((3, 5),),
             lambda x: (torch.tensor([0.0]), x / 4), dtypes=FLOATS[:1]),
        Case(("aclnnForeachNonFiniteCheckAndUnscale",), lambda x: unscaled(x / 0)[0], ((3, 5),),
             lambda x: torch.tensor([1.0]), dtypes=FLOATS[:1]),
    ]  # fmt: skip


def norms() -> list[Case]:
    """Rows of torch_npu's own norms, alone and after a sum."""
    f = torch.nn.functional
    norm = ((3, 16), (16,))
    return [
        Case(("aclnnRmsNorm",), lambda x, g: torch_npu().npu_rms_norm(x, g, 1e-6)[0], norm,
             rms_norm, ("aclnnRmsNormGrad",), units=24),
        Case(("aclnnAddRmsNorm",), lambda x, y, g: torch_npu().npu_add_rms_norm(x, y, g, 1e-6)[2],
             ((3, 16), (3, 16), (16,)), lambda x, y, g: x + y),
        Case(("aclnnAddRmsNorm",), lambda x, y, g: torch_npu().npu_add_rms_norm(x, y, g, 1e-6)[0],
             ((3, 16), (3, 16), (16,)), lambda x, y, g: rms_norm(x + y, g), units=24),
        Case(("aclnnAddLayerNorm",),
             lambda x, y, g, b: torch_npu().npu_add_layer_norm(x, y, g, b, 1e-5, True)[0],
             ((3, 16), (3, 16), (16,), (16,)),
             lambda x, y, g, b: f.layer_norm(x + y, (16,), g, b, 1e-5), units=24),
        Case(("aclnnAddLayerNorm",),
             lambda x, y, g, b: torch_npu().npu_add_layer_norm(x, y, g, b, 1e-5, True)[3],
             ((3, 16), (3, 16), (16,), (16,)), lambda x, y, g, b: x + y),
    ]  # fmt: skip


GROUPS = torch.tensor([2, 2, 6])


def product_of_groups(group_type: int) -> Function:
    """npu_grouped_matmul of the rows (0) or the columns (2) of the first tensor, as one result."""

    def call(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        left = x if group_type == 0 else x.contiguous().t()
        found = torch_npu().npu_grouped_matmul(
            [left], [weight], group_list=ends, split_item=3, group_type=group_type
        )[0]
        # Nothing is said of the product of an empty group.
        return found if group_type == 0 else found[[0, 2]]

    return call


def rows_of_groups(x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """The first two rows with the first weight, the others with the last one."""
    return torch.cat([x[:2] @ weight[0], x[2:] @ weight[2]])


def columns_of_groups(x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """A product of the first two rows, and one of the others."""
    return torch.stack([x[:2].t() @ weight[:2], x[2:].t() @ weight[2:]])


EXPERTS = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]])
PROBABILITIES = torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 0.25], [0.125, 0.5]])


def permuted_reference(tokens: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Copies of tokens, expert by expert."""
    pairs = [(e, i) for i, row in enumerate(experts.tolist()) for e in row]
    return torch.stack([tokens[i] for _, i in sorted(pairs)])


def there_and_back(
    tokens: torch.Tensor, experts: torch.Tensor, probabilities: torch.Tensor
) -> torch.Tensor:
    """Tokens sent to their experts, and weighted together again."""
    packed, places = torch_npu().npu_moe_token_permute(tokens, experts)
    weights = probabilities.to(tokens.dtype)
    return torch_npu().npu_moe_token_unpermute(packed * 2, places, weights)


def experts() -> list[Case]:
    """Rows of mixtures of experts, products of groups, and a token's quantisation."""
    back = ("aclnnMoeTokenPermuteGrad",)
    return [
        Case(("aclnnMoeGatingTopKSoftmax",),
             lambda x: tuple(torch_npu().npu_moe_gating_top_k_softmax(x, None, 2)), ((4, 6),),
             lambda x: (*x.softmax(-1).topk(2), torch.arange(8).reshape(2, 4).t())),
        Case(("aclnnMoeTokenPermute",),
             lambda x, e: torch_npu().npu_moe_token_permute(x, e)[0], ((4, 6),),
             permuted_reference, back, extra=(EXPERTS,)),
        Case(("aclnnMoeTokenUnpermute",), there_and_back, ((4, 6),),
             lambda x, e, p: 2 * x * p.to(x).sum(1, keepdim=True),
             ("aclnnMoeTokenUnpermuteGrad", *back), extra=(EXPERTS, PROBABILITIES)),
        Case(("aclnnGroupedMatmulV5",), product_of_groups(0), ((6, 4), (3, 4, 5)), rows_of_groups,
             extra=(GROUPS,)),
        Case(("aclnnGroupedMatmulV5",), product_of_groups(2), ((6, 4), (6, 5)), columns_of_groups,
             extra=(GROUPS,)),
        Case(("aclnnDynamicQuantV2",), lambda x: tuple(torch_npu().npu_dynamic_quant(x)),
             ((3, 8),), quantised, dtypes=FLOATS[1:]),
    ]  # fmt: skip


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in 8 bits, and what 1 stands for."""
    # In float32, as the page says, so that both round the same quotient.
    unit = x.float().abs().amax(-1) / 127
    return (x.float() / unit[:, None]).round().to(torch.int8), unit.double()


def unscaled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether something was not finite, and the tensor divided by 4."""
    copy, found = x.clone(), torch.zeros(1, device=x.device)
    scale = torch.full((1,), 0.25, device=x.device)
    torch._amp_foreach_non_finite_check_and_unscale_([copy], found, scale)
    return found, copy


CASES = [
    *unary(),
    *arithmetic(),
    *comparisons(),
    *activations(),
    *products(),
    *shaping(),
    *indexing(),
    *reductions(),
    *lists(),
    *norms(),
    *fused(),
    *experts(),
]
