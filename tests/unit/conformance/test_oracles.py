"""Are the oracles right? Against torch in float64, and their gradients against differences.

Neither shares code with them, nor with the references that the operators fall back to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anychip.conformance.arithmetic import Rounded
from anychip.conformance.calls import Call
from anychip.conformance.formats import FORMATS
from anychip.conformance.oracles import ORACLES, Oracle, philox
from anychip.conformance.oracles.oracle import numbers
from anychip.dispatch.signature import Signature
from anychip.operators import all_specs

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


def double(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return [double(entry) for entry in arg]
    return arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg


# Forward, against torch in float64


def torch_rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def torch_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return y.transpose(1, 2)


def torch_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> list[Tensor]:
    turn = torch.complex(cos, sin)[:, None, :]
    results = []
    for x in (q, k):
        first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        turned = torch.complex(first, second) * turn
        parts = (turned.real, turned.imag)
        results.append(torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1))
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


def torch_l2_norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(tensors)


PEERS: dict[str, Callable[..., Any]] = {
    "rms_norm": torch_rms_norm,
    "layer_norm": torch_layer_norm,
    "gelu": F.gelu,
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "rope": torch_rope,
    "attention": torch_attention,
    "linear": F.linear,
    "embedding": lambda indices, weight: F.embedding(indices, weight),
    "cross_entropy": torch_cross_entropy,
    "l2_norm": torch_l2_norm,
}


@pytest.mark.parametrize("name", PEERS)
def test_oracle_agrees_with_torch_in_float64(name: str) -> None:
    compared = 0
    for call in quick_calls(name):
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
            "step": step.clone(),
            "exp_avg": m.clone(),
            "exp_avg_sq": v.clone(),
        }
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
            (second >> 32) ^ c[1] ^ k[0],
            second % 2**32,
            (first >> 32) ^ c[3] ^ k[1],
            first % 2**32,
        ]
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
    "dropout": ("7x9.p:0.1", "33x40.p:1"),
    "gelu": ("17.none", "17.tanh", "2x3x16.tanh"),
    "swiglu": ("17", "2x3x16"),
    "rope": ("2x5x4+4x8.half", "2x9x6+1x12.interleaved"),
    "attention": ("2x5x4+4x8.causal", "1x17x4+2x16.causal", "2x9x6+1x12.full", "heads"),
    "linear": ("2x4.33-17.bias", "3.8-5"),
    "embedding": ("2x3.of:5x17", "ends"),
    "cross_entropy": (
        "6x11", "6x11.sum", "6x11.none", "6x11.smooth:0.1", "6x11.z:0.01", "6x11.all",
        "6x11.all-mean", "ignored:all-but-last",
    ),
}  # fmt: skip
CASES = [(name, label) for name, labels in GRADIENT_CALLS.items() for label in labels]


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


@pytest.mark.parametrize("name", ORACLES)
def test_calls_have_labels_that_are_unique_and_words(name: str) -> None:
    labels = [call.label for call in ORACLES[name].calls()]
    assert len(set(labels)) == len(labels)
    assert all(set(label) <= set(WORD) for label in labels)


WORD = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.:+-"


@pytest.mark.parametrize("name", ORACLES)
def test_every_operator_of_ours_has_an_oracle_with_every_layout(name: str) -> None:
    assert set(ORACLES) == {spec.name for spec in all_specs()}
    layouts = {call.layout for call in ORACLES[name].calls()}
    assert layouts == {"contiguous", "offset", "strided", "transposed"}


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda d: FORMATS[d].name)
@pytest.mark.parametrize("name", ORACLES)
def test_call_made_twice_has_the_same_numbers(name: str, dtype: torch.dtype) -> None:
    call = quick_calls(name)[3]
    first, second = (arguments(name, call, dtype)[0] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        if isinstance(a, Tensor):
            assert torch.equal(a, b)
