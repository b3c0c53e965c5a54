"""Are the oracles right? Against torch in float64, and their gradients against differences.

Neither shares code with them, nor with the references that the operators fall back to.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anychip.conformance.arithmetic import Rounded
from anychip.conformance.calls import LAYOUTS, Call, tensors_of
from anychip.conformance.formats import FORMATS
from anychip.conformance.oracles import ORACLES, Oracle, philox, update
from anychip.conformance.oracles.oracle import numbers
from anychip.dispatch.signature import Signature
from anychip.operators import all_specs
from anychip.operators.codes import NF4
from tests.unit.dispatch.plain import PLAIN, weight_numbers

SIGNATURES = {spec.name: Signature.parse(spec) for spec in all_specs()}
SPECS = {spec.name: spec for spec in all_specs()}


@pytest.fixture(autouse=True)
def numpy_is_quiet() -> Iterator[None]:
    """Inf and NaN are among the inputs, and numpy warns of what follows from them."""
    with np.errstate(all="ignore"):
        yield


def arguments(name: str, call: Call, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    args, attrs = call.arguments(name, dtype)
    return SIGNATURES[name].bind(args, attrs)


def quick_calls(name: str) -> list[Call]:
    return [call for call in ORACLES[name].calls() if not call.full]


SLOW = {("attention_dropout", f"length:{length}") for length in (128, 129, 256)}
"""Calls for which a peer that goes from word to word takes too long."""


def small_calls(name: str) -> list[Call]:
    """Those that a peer can answer row by row, or number by number."""
    found = [call for call in quick_calls(name) if (name, call.label) not in SLOW]
    return [c for c in found if sum(t.numel() for t in tensors_of(arguments(name, c)[0])) < 30_000]


def double(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return [double(entry) for entry in arg]
    return arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg


# Forward, against torch in float64


def torch_rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Any:
    total = x + residual
    return torch_rms_norm(total, weight, eps=eps), total


def torch_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> Any:
    total = x + residual
    return torch_layer_norm(total, weight, bias, eps=eps), total


def torch_softmax(
    x: Tensor, mask: Tensor | None, bias: Tensor | None, *, scale: float, causal: bool
) -> Tensor:
    """torch's softmax row by row, over the keys that a row sees, where there are some."""
    scores = x * scale + (0.0 if bias is None else bias)
    visible = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand_as(x)
    rows = torch.zeros_like(scores).view(-1, x.shape[-1] or 1)
    queries = x.shape[-2] if x.dim() > 1 else 1
    for index in range(len(rows)):
        row = scores.reshape(rows.shape)[index]
        seen = visible.reshape(rows.shape)[index] & ~row.isneginf()
        if causal:
            seen = seen & (torch.arange(len(row)) <= index % queries + len(row) - queries)
        if seen.any():
            rows[index, seen] = torch.softmax(row[seen], 0)
    return rows.view(x.shape)


def torch_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, **_: Any
) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if not k.shape[2]:
        return torch.zeros_like(q).transpose(1, 2)
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    seen = seen.tril(k.shape[2] - q.shape[2]) if causal else seen
    # torch gives 0 to a query that sees nothing.
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
    return y.transpose(1, 2)


def torch_attention_dropout(
    q: Tensor, k: Tensor, v: Tensor, rng: Tensor, *index: Any, p: float, causal: bool, **attrs: Any
) -> Tensor:
    """Weight by weight: attention to one-hot values gives the weights, which are then dropped."""
    (batch, keys, kv_heads, _), scale = k.shape, attrs.pop("scale")
    one_hot = torch.eye(keys, dtype=q.dtype)[None, :, None].expand(batch, keys, kv_heads, keys)
    padded = [F.pad(t, (0, max(keys - t.shape[3], 0))) for t in (q, k)]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    weights = torch_attention(*padded, F.pad(one_hot, (0, padded[0].shape[3] - keys)),
                              causal=causal, scale=scale)[..., :keys]  # fmt: skip
    weights, (seed, offset) = weights.transpose(1, 2), rng.tolist()  # (B, H, Sq, Sk)
    words = philox.words(seed, offset, weights.numel()).tolist()
    if any(given is not None for given in index):
        places = weight_numbers(weights.shape, index, attrs).flatten().tolist()
        words = [int(philox.words(seed, offset + n // 4, 4)[n % 4]) for n in places]
    kept = (torch.tensor(words) >= math.floor(p * 2**32)).view(weights.shape)
    dropped = torch.where(kept, weights / (1.0 - p), 0.0) if p < 1.0 else 0.0 * weights
    return torch.einsum("bhqk,bkhd->bqhd", dropped, v.repeat_interleave(q.shape[2] // kv_heads, 2))


def torch_attention_varlen(q: Tensor, k: Tensor, v: Tensor, *ends: Tensor, **attrs: Any) -> Tensor:
    """A nested tensor of the sequences, which torch's attention takes one by one."""
    y = torch.zeros_like(q)
    for (first, last), (start, end) in zip(*(itertools.pairwise(t.tolist()) for t in ends)):  # noqa: B905
        if first < last and start < end:
            own = (q[None, first:last], k[None, start:end], v[None, start:end])
            y[first:last] = torch_attention(*own, **attrs)[0]
    return y


def torch_grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, **_: object) -> Tensor:
    y = x.new_zeros(x.shape[0], weight.shape[1])
    for group, (start, end) in enumerate(itertools.pairwise([0, *offsets.tolist()])):
        y[start:end] = F.linear(x[start:end], weight[group])
    return y


def torch_unpermute(x: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    scales = None if weights is None else weights.to(x.dtype)
    bags = F.embedding_bag(row_map, x, mode="sum", per_sample_weights=scales)
    return bags if len(row_map) else x.new_zeros(0, x.shape[1])


def torch_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> list[Tensor]:
    turn = torch.complex(cos, sin)[:, None, :]
    results = []
    for x in (q, k):
        x, rest = x[..., : 2 * cos.shape[1]], x[..., 2 * cos.shape[1] :]
        first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        turned = torch.complex(first, second) * turn
        parts = (turned.real, turned.imag)
        whole = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
        results.append(torch.cat((whole, rest), -1))
    return results


def torch_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> Tensor:
    flat, index = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    rows = F.cross_entropy(
        flat, index, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    valid = index != ignore_index
    rows = rows + torch.where(valid, z_loss * flat.logsumexp(-1) ** 2, 0.0)
    if reduction == "none":
        return rows.reshape(target.shape)
    return rows.sum() / valid.sum() if reduction == "mean" else rows.sum()


def torch_linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **options: Any
) -> Tensor:
    return torch_cross_entropy(F.linear(x, weight, bias), target, **options)


def torch_l2_norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(tensors)


def exact_sums(tensors: Sequence[Tensor]) -> Tensor:
    """By fractions."""
    found = []
    for tensor in tensors:
        total = sum((Fraction(v) ** 2 for v in tensor.reshape(-1).tolist()), Fraction(0))
        whole = int(total * 2**298)
        found.append([float(whole >> 32 * place & 0xFFFFFFFF) for place in range(19)] + [0.0, 0.0])
    return torch.tensor(found, dtype=torch.float64)


NIBBLES = {
    "int4": [*range(8), *range(-8, 0)], "nf4": NF4,
    "e2m1": [v * sign for sign in (1, -1) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)],
}  # fmt: skip


def torch_dequantize(
    codes: Tensor, scales: Tensor, *, shape: Sequence[int], format: str, block: int
) -> Tensor:
    numbers, name = codes.tolist(), format.removeprefix("mx_")
    if name in NIBBLES:
        nibbles = [n for code in numbers for n in (code % 16, code // 16 % 16)]
        numbers = [NIBBLES[name][n] for n in nibbles]
    elif name != "int8":
        is_e4m3 = name == "e4m3"
        numbers = codes.view(torch.float8_e4m3fn if is_e4m3 else torch.float8_e5m2).float().tolist()
    if name != format:
        scales = torch.where(scales == 255, math.nan, 2.0 ** (scales.double() - 127))
    count = math.prod(shape)
    products = [n * scales[i // block] for i, n in enumerate(numbers[:count])]
    return torch.tensor(products, dtype=torch.float64).view(tuple(shape))


def torch_hadamard(x: Tensor, *, block: int | None) -> Tensor:
    length, matrix = block or x.shape[-1], torch.ones(1, 1, dtype=x.dtype)
    while matrix.shape[0] < length:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=x.dtype))
    rows = x.reshape(-1, length) if x.numel() else x
    return (rows @ matrix[: rows.shape[-1]] / length**0.5).view(x.shape)


def torch_top_k(x: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    order = torch.sort(-x.abs(), dim=-1, stable=True).indices[..., :k]
    return x.gather(-1, order), order


PEERS: dict[str, Callable[..., Any]] = {
    "rms_norm": torch_rms_norm, "layer_norm": torch_layer_norm, "add_rms_norm": torch_add_rms_norm,
    "add_layer_norm": torch_add_layer_norm,
    "group_norm": lambda x, w, b, *, num_groups, eps: torch.group_norm(x, num_groups, w, b, eps),
    "gelu": F.gelu, "silu": F.silu, "relu": F.relu, "relu2": lambda x: F.relu(x) ** 2,
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "softplus": F.softplus,
    "conv1d": lambda x, w, b: F.conv1d(
        F.pad(x, (w.shape[1], 0)), w[:, None], b, groups=x.shape[1]
    )[..., 1:],
    "conv2d": F.conv2d,
    "bias_gelu": lambda x, bias, *, approximate: F.gelu(x + bias, approximate=approximate),
    "geglu": lambda gate, up, *, approximate: F.gelu(gate, approximate=approximate) * up,
    "softmax": torch_softmax, "swiglu": lambda gate, up: F.silu(gate) * up, "rope": torch_rope,
    "attention": torch_attention, "attention_dropout": torch_attention_dropout,
    "attention_varlen": torch_attention_varlen, "linear": lambda *args, **_: F.linear(*args),
    "grouped_linear": torch_grouped_linear, "unpermute": torch_unpermute,
    "permute": PLAIN["permute"],
    "embedding": lambda indices, weight: F.embedding(indices, weight),
    "cross_entropy": torch_cross_entropy, "linear_cross_entropy": torch_linear_cross_entropy,
    "l2_norm": torch_l2_norm, "sums_of_squares": exact_sums, "dequantize": torch_dequantize,
    "hadamard": torch_hadamard, "top_k": torch_top_k,
}  # fmt: skip


@pytest.mark.grid
@pytest.mark.parametrize("name", PEERS)
def test_oracle_agrees_with_torch_in_float64(name: str) -> None:
    compared = 0
    for call in small_calls(name):
        if "special" in call.label or call.label == "nan":
            continue
        args, attrs = arguments(name, call)
        want = ORACLES[name].forward(*map(numbers, args), **attrs)
        found = PEERS[name](*map(double, args), **attrs)
        for got, expected in zip(
            [found] if isinstance(found, Tensor) else found, want, strict=False
        ):
            sizes = np.abs(expected.value[np.isfinite(expected.value)])
            scale = float(np.max(sizes, initial=0.0))
            np.testing.assert_allclose(
                got.numpy(), expected.value, rtol=1e-9, atol=1e-12 * scale + 1e-300,
                err_msg=f"{name} {call.label}",
            )  # fmt: skip
            compared += 1
    assert compared >= 10


@pytest.mark.parametrize("label", ["plain", "first", "late", "decay", "eps", "betas", "scale-clip"])
def test_adamw_oracle_agrees_with_torch_optimizer_in_float64(label: str) -> None:
    call = next(c for c in quick_calls("adamw") if c.label == label)
    args, attrs = arguments("adamw", call)
    params, grads, firsts, seconds, lr, step, scale, clip, *_ = map(double, args)
    leaves = [torch.nn.Parameter(p.clone()) for p in params]
    for leaf, grad in zip(leaves, grads, strict=True):
        leaf.grad = grad / (1.0 if scale is None else scale) * (1.0 if clip is None else clip)
    optimizer = torch.optim.AdamW(
        leaves, lr=float(lr), betas=(attrs["beta1"], attrs["beta2"]), eps=attrs["eps"],
        weight_decay=attrs["weight_decay"], foreach=False,
    )  # fmt: skip
    for leaf, m, v in zip(leaves, firsts, seconds, strict=True):
        optimizer.state[leaf] = {
            "step": step.clone(), "exp_avg": m.clone(), "exp_avg_sq": v.clone(),
        }  # fmt: skip
    optimizer.step()
    want = ORACLES["adamw"].forward(*map(numbers, args), **attrs)
    state = [optimizer.state[leaf] for leaf in leaves]
    found = [*leaves, *(s["exp_avg"] for s in state), *(s["exp_avg_sq"] for s in state)]
    for got, expected in zip(found, want, strict=False):
        np.testing.assert_allclose(got.detach().numpy(), expected.value, rtol=1e-9, atol=1e-14)


def test_adamw_oracle_with_found_inf_keeps_every_number() -> None:
    call = next(c for c in quick_calls("adamw") if c.label == "found-inf")
    args, attrs = arguments("adamw", call)
    want = ORACLES["adamw"].forward(*map(numbers, args), **attrs)
    kept = [*args[0], *args[2], *args[3], args[5], *args[9]]
    for before, expected in zip(kept, want, strict=True):
        np.testing.assert_array_equal(before.double().numpy(), expected.value)
        np.testing.assert_array_equal(expected.worst, 0.0)


SGD_LABELS = ("plain", "momentum", "nesterov", "decay", "decay-plain", "scale-clip")


@pytest.mark.parametrize("label", SGD_LABELS)
def test_sgd_oracle_agrees_with_torch_optimizer_in_float64(label: str) -> None:
    call = next(c for c in quick_calls("sgd") if c.label == label)
    args, attrs = arguments("sgd", call)
    params, grads, buffers, lr, _, scale, clip, *_ = map(double, args)
    leaves = [torch.nn.Parameter(p.clone()) for p in params]
    for leaf, grad in zip(leaves, grads, strict=True):
        leaf.grad = grad / (1.0 if scale is None else scale) * (1.0 if clip is None else clip)
    optimizer = torch.optim.SGD(
        leaves, lr=float(lr), momentum=attrs["momentum"], nesterov=attrs["nesterov"],
        weight_decay=attrs["weight_decay"], foreach=False,
    )  # fmt: skip
    for leaf, buffer in zip(leaves, buffers, strict=False):
        optimizer.state[leaf] = {"momentum_buffer": buffer.clone()}
    optimizer.step()
    want = ORACLES["sgd"].forward(*map(numbers, args), **attrs)
    found = [*leaves, *(optimizer.state[leaf]["momentum_buffer"] for leaf in leaves if buffers)]
    for got, expected in zip(found, want, strict=False):
        np.testing.assert_allclose(got.detach().numpy(), expected.value, rtol=1e-9, atol=1e-14)


def test_lion_and_lamb_oracles_follow_their_equations() -> None:
    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    given = ([torch.tensor([2.0, 2.0, 2.0])], [torch.tensor([1.0, -9.0, 0.0])])
    none = (None,) * 4
    lion = ORACLES["lion"].forward(
        *map(numbers, (*given, [torch.tensor([-1.0, 0.0, 0.0])], one / 2, zero, *none)),
        beta1=0.5, beta2=0.75, weight_decay=0.5,
    )  # fmt: skip
    # Averages 0, -4.5 and 0: the first may have any sign, the last has none.
    np.testing.assert_allclose(lion[0].value, [1.5, 2.0, 1.5])
    np.testing.assert_allclose(lion[1].value, [-0.5, -2.25, 0.0])
    assert lion[0].worst[0] > 1e6 > lion[0].worst[2]
    moments = [[torch.zeros(3)], [torch.zeros(3)]]
    lamb = ORACLES["lamb"].forward(
        *map(numbers, (*given, *moments, one, zero, *none, None)),
        beta1=0.5, beta2=0.5, eps=0.5, weight_decay=0.25,
    )  # fmt: skip
    # u = g / (|g| + 0.5) + 0.25 p; its length and that of p are the ratio.
    u = np.array([1 / 1.5, -9 / 9.5, 0.0]) + 0.5
    np.testing.assert_allclose(lamb[0].value, 2.0 - np.sqrt(12.0) / np.linalg.norm(u) * u)


def test_clip_and_unscale_oracles_follow_their_equations() -> None:
    tensors = [torch.tensor([3.0, -4.0])]
    clipped = ORACLES["clip"].forward(*map(numbers, (tensors, torch.tensor(5.0))), max_norm=1.0)
    np.testing.assert_allclose(clipped[0].value, np.array([3.0, -4.0]) / (5.0 + 1e-6), rtol=1e-15)
    unscale = ORACLES["unscale_and_check"].forward
    for entry, flag in ((1.0, 0.0), (math.inf, 1.0), (math.nan, 1.0)):
        grads = [torch.tensor([8.0, entry])]
        found = unscale(*map(numbers, (grads, torch.tensor(4.0), torch.tensor(0.0))))
        assert float(found[0].value[0]) == 2.0
        assert float(found[1].value) == flag


def test_dropout_oracle_keeps_by_integer_comparison() -> None:
    words = philox.words(1, 2, 1000)
    for p in (0.0, 2.0**-32, 0.1, 0.5, 1.0 - 2.0**-32, 1.0):
        np.testing.assert_array_equal(
            philox.kept(1, 2, 1000, p), [int(w) >= math.floor(p * 2**32) for w in words]
        )
    assert philox.kept(1, 2, 1000, 0.0).all()
    assert not philox.kept(1, 2, 1000, 1.0).any()


# Philox, against the definition in Python integers


def plain_philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """Salmon et al. 2011, section 3.3, word by word."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (second >> 32) ^ c[1] ^ k[0], second % 2**32, (first >> 32) ^ c[3] ^ k[1],
            first % 2**32,
        ]  # fmt: skip
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(c)


@pytest.mark.parametrize(("counter", "key", "want"), philox.KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], want: tuple[int, ...]
) -> None:
    assert plain_philox(counter, key) == want
    got = philox.block(np.array(counter, dtype=np.uint64)[:, None], key)[:, 0]
    assert tuple(map(int, got)) == want


@pytest.mark.parametrize(
    ("seed", "offset"), [(0, 0), (7, 2**32 - 2), (-1, 5), (2**40 + 3, -3), (-(2**63), 2**63 - 2)]
)
def test_philox_words_are_blocks_at_consecutive_unsigned_counters(seed: int, offset: int) -> None:
    key = (seed % 2**64 % 2**32, seed % 2**64 >> 32)
    want: list[int] = []
    for index in range(6):
        counter = (offset + index) % 2**64
        want += plain_philox((counter % 2**32, counter >> 32, 0, 0), key)
    assert [int(w) for w in philox.words(seed, offset, 22)] == want[:22]


# Gradients, against central differences of the forward oracle


GRADIENT_CALLS = {
    "rms_norm": ("3x17", "4x40.eps:0.5", "2x3x33"),
    "layer_norm": ("3x17", "4x40.eps:0.5", "4x40.bias:none"),
    "add_rms_norm": ("3x17", "4x40.eps:0.5", "2x3x33"),
    "add_layer_norm": ("3x17", "4x40.eps:0.5", "4x40.bias:none"),
    "dropout": ("7x9.p:0.1", "33x40.p:1"),
    "bias_dropout_add": ("7x9.p:0.1", "11x40.p:1", "8x33.bias:none"),
    "dropout_add_rms_norm": ("3x17", "4x40.eps:0.5", "11x40.p:1"),
    "dropout_add_layer_norm": ("3x17", "2x3x33", "4x40.bias:none"),
    "group_norm": ("2x6x5x7.3", "3x6x40.2.eps:0.5", "3x6x40.2.bias:none", "2x3.3"),
    "gelu": ("17.none", "17.tanh", "2x3x16.tanh"),
    "silu": ("17",), "relu2": ("17",), "sigmoid": ("17",), "tanh": ("17",),
    "softplus": ("17.beta:1", "17.beta:0.3"),
    "bias_gelu": ("17.none", "17.tanh", "2x3x16.tanh"),
    "swiglu": ("17", "2x3x16"),
    "geglu": ("17.none", "17.tanh", "2x3x16.tanh"),
    "softmax": (
        "3x17", "2x3x33", "2x7x3.causal", "2x3x4x21.mask:full", "2x3x5x18.everything",
        "4x20.hidden", "2x5x12.additive", "6x40.negative",
    ),
    "rope": (
        "2x5x4+4x8.half", "2x9x6+2x12.interleaved", "2x5x3+1x12.half.rotary:8",
        "2x5x3+1x12.interleaved.rotary:2",
    ),
    "attention": (
        "2x5x4+4x8.causal", "1x17x4+2x16.causal", "2x9x6+2x12.full", "heads", "3of20.causal",
        "20of3.causal",
    ),
    "attention_dropout": (
        "2x5x4+4x8.p:0.1", "2x7x4+2x8.p:0.5", "2x7x4+2x8.p:1", "3of20.p:0.3", "20of3.p:0.3",
    ),
    "attention_varlen": (
        "3+5+4.causal", "0+4+0+0+3+0.full", "padded:4.full", "apart", "0+4+0+0+3+0.causal.keys",
    ),
    "linear": ("2x4.33-17.bias", "3.8-5"),
    "grouped_linear": ("4+0+3.rest:2.33-17", "none.rest:3.8-4", "0+0.rest:4.8-4", "apart"),
    "linear_cross_entropy": (
        "6.8-11.bias", "6.8-11", "2x5.24-130.sum", "2x5.24-130.none", "2x5.24-130.smooth:0.1",
        "2x5.24-130.all", "2x5.24-130.all-mean", "ignored:last",
    ),
    "conv1d": ("2x5x7.4", "2x3x1.4", "2x4x16.3.bias:none"),
    "conv2d": (
        "2x3x7x5.4x3x3x3", "1x4x11x10.6x2x2x3", "2x6x9x8.12x1x3x3", "1x2x4x3.3x2x2x2",
        "2x3x16x16.8x3x4x4",
    ),
    "permute": ("9x8.4of4", "40x24.8of64", "uneven", "9x8.4of4.outside.int32"),
    "unpermute": ("9x33.of:4", "9x33.of:4.unweighted", "5x65.of:8", "0x8.of:2"),
    "embedding": ("2x3.of:5x17", "ends"),
    "hadamard": ("3x8", "5x16", "5x192.block:64", "5x192.block:1"),
    "cross_entropy": (
        "6x11", "6x11.sum", "6x11.none", "6x11.smooth:0.1", "6x11.z:0.01", "6x11.all",
        "6x11.all-mean", "ignored:all-but-last",
    ),
}  # fmt: skip
CASES = [(name, label) for name, labels in GRADIENT_CALLS.items() for label in labels]


@pytest.mark.grid
@pytest.mark.parametrize(("name", "label"), CASES, ids=[f"{n}-{c}" for n, c in CASES])
def test_gradient_oracle_agrees_with_differences_of_the_forward_oracle(
    name: str, label: str
) -> None:
    oracle, rng = ORACLES[name], np.random.default_rng(4)
    call = next(c for c in oracle.calls() if c.label == label)
    args, attrs = arguments(name, call)
    given = [numbers(arg) for arg in args]
    count = SIGNATURES[name].num_outputs
    grads = tuple(
        Rounded.exact(rng.standard_normal(y.shape)) for y in oracle.forward(*given, **attrs)[:count]
    )
    assert oracle.backward is not None
    found = oracle.backward(grads, *given, **attrs)
    for argument, gradient in zip(SPECS[name].differentiable, found, strict=True):
        place = SIGNATURES[name].positional.index(argument)
        if given[place] is None:
            assert gradient is None
            continue
        assert gradient is not None
        direction = rng.standard_normal(gradient.shape)
        want = directional(oracle, given, attrs, place, direction, grads)
        got = float((gradient.value * direction).sum())
        scale = float(np.abs(gradient.value * direction).sum()) + 1.0
        assert abs(got - want) <= 1e-7 * scale, f"gradient of {argument}"


def directional(
    oracle: Oracle,
    given: Sequence[Any],
    attrs: dict[str, Any],
    place: int,
    direction: np.ndarray[Any, np.dtype[np.float64]],
    grads: Sequence[Rounded],
) -> float:
    """Derivative of sum(grads * outputs) along a direction of one argument; error about 1e-9."""

    def objective(step: float) -> float:
        moved = list(given)
        moved[place] = Rounded.exact(given[place].value + step * direction)
        outputs = oracle.forward(*moved, **attrs)
        return sum(float((g.value * y.value).sum()) for g, y in zip(grads, outputs, strict=False))

    h = 1e-3
    # Five points: the error is of the order of h^4.
    near, far = objective(h) - objective(-h), objective(2 * h) - objective(-2 * h)
    return (8 * near - far) / (12 * h)


def test_copy_of_a_parameter_that_its_type_cannot_hold_is_infinite() -> None:
    values = np.array([1.0, 65_519.0, 65_520.0, -1e6])
    stored = Rounded.exact(np.zeros(4), FORMATS[torch.float16])
    (copied,) = update.copies([Rounded.exact(values)], [stored], [stored])
    with np.errstate(over="ignore"):
        assert (np.isinf(copied.value) == np.isinf(values.astype(np.float16))).all()
    assert (np.sign(copied.value) == np.sign(values)).all()


@pytest.mark.parametrize("name", ORACLES)
def test_calls_have_labels_that_are_unique_and_words(name: str) -> None:
    labels = [call.label for call in ORACLES[name].calls()]
    assert len(set(labels)) == len(labels)
    assert all(set(label) <= set(WORD) for label in labels)


@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm"])
def test_norm_is_asked_with_a_wider_weight_and_with_a_wider_bias(name: str) -> None:
    """A row that reads both as of one type loses the digits of the wider one."""
    pairs = [arguments(name, call)[0][-2:] for call in quick_calls(name)]
    wider = {w.dtype.itemsize - b.dtype.itemsize for w, b in pairs if b is not None}
    assert min(wider) < 0 < max(wider)


WORD = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.:+-"


@pytest.mark.parametrize("name", ORACLES)
def test_every_operator_of_ours_has_an_oracle_with_every_layout(name: str) -> None:
    assert set(ORACLES) == {spec.name for spec in all_specs()}
    layouts = {call.layout for call in ORACLES[name].calls()}
    assert layouts == {"contiguous", *LAYOUTS}


@pytest.mark.grid
@pytest.mark.parametrize("dtype", FORMATS, ids=lambda d: FORMATS[d].name)
@pytest.mark.parametrize("name", ORACLES)
def test_call_made_twice_has_the_same_numbers(name: str, dtype: torch.dtype) -> None:
    call = quick_calls(name)[3]
    first, second = (arguments(name, call, dtype)[0] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        if isinstance(a, Tensor):
            assert torch.equal(a, b)
