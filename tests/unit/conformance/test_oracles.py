"""Are the oracles right? Against torch in float64, and their gradients against its autograd.

That shares no code with them, nor with the references that the operators fall back to; of dropout
it takes the mask that the operator gives.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anychip.conformance import designs
from anychip.conformance.arithmetic import Rounded
from anychip.conformance.calls import Call, tensors_of
from anychip.conformance.case import bits_of
from anychip.conformance.covering import CoveringArray
from anychip.conformance.formats import FORMATS
from anychip.conformance.oracles import ORACLES, fixed, philox, update
from anychip.conformance.oracles.oracle import numbers
from anychip.dispatch.operator import registered
from anychip.dispatch.signature import Signature
from anychip.operators import all_specs
from anychip.operators.codes import NF4
from tests.unit.dispatch.plain import PLAIN

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


def small_calls(name: str, *, ordinary: bool = True) -> list[Call]:
    """Calls of ordinary numbers, or of any, each option of the operator among them."""
    asked = designs.Asked(registered()[name], (torch.float32,), "operators", lambda *_: None)
    designed = (row.call for _, _, row in asked.rows(CoveringArray(2), 0))
    found = [*ORACLES[name].plain, *designed, *ORACLES[name].calls]
    found = [c for c in found if (c.statistical or not ordinary) and not c.full]
    return [c for c in found if sum(t.numel() for t in tensors_of(arguments(name, c)[0])) < 30_000]


def double(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return [double(entry) for entry in arg]
    return arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg


# Against torch in float64, both ways


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


PEERS: dict[str, Callable[..., Any]] = {
    **PLAIN, "l2_norm": torch.nn.utils.get_total_norm, "sums_of_squares": exact_sums,
    "dequantize": torch_dequantize,
}  # fmt: skip


def listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def assert_close(got: Rounded, want: Tensor, scale: float, what: str) -> None:
    """Within some roundings of float64: of the number, and of the largest that it comes from."""
    value = want.detach().numpy()
    own = float(np.max(np.abs(value[np.isfinite(value)]), initial=0.0))
    bound = 1e-12 * (own + scale) + 1e-300
    np.testing.assert_allclose(got.value, value, rtol=1e-9, atol=bound, err_msg=what)


@pytest.mark.grid
@pytest.mark.parametrize("name", PEERS)
def test_oracle_agrees_with_torch_in_float64(name: str) -> None:
    calls = small_calls(name)
    for call in calls:
        args, attrs = arguments(name, call)
        want = listed(PEERS[name](*map(double, args), **attrs))
        found = ORACLES[name].forward(*map(numbers, args), **attrs)
        for got, expected in zip(found, want, strict=False):
            assert_close(got, expected, 0.0, f"{name} {call.label}")
    assert len(calls) >= 15


@pytest.mark.grid
@pytest.mark.parametrize("name", PLAIN)
def test_gradient_oracle_agrees_with_torch_in_float64(name: str) -> None:
    backward, signature = ORACLES[name].backward, SIGNATURES[name]
    places = [signature.positional.index(each) for each in SPECS[name].differentiable]
    generator, compared = torch.Generator().manual_seed(4), 0
    assert backward is not None
    for call in small_calls(name):
        args, attrs = arguments(name, call)
        if name == "group_norm" and not args[0].numel():
            continue  # torch's gradient is NaN, for a sum of nothing
        wide = [arg.clone() if isinstance(arg, Tensor) else arg for arg in map(double, args)]
        leaves = [wide[place].requires_grad_() for place in places if wide[place] is not None]
        outputs = listed(PLAIN[name](*wide, **attrs))[: signature.num_outputs]
        given = [y for y in outputs if y.is_floating_point()]
        if not any(y.requires_grad for y in given):
            continue  # of no group at all nothing depends on anything
        grads = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in given]
        want = torch.autograd.grad(given, leaves, grads, materialize_grads=True)
        given_grads = tuple(Rounded.exact(g.numpy()) for g in grads)
        found = backward(given_grads, *map(numbers, args), **attrs)
        assert [f is None for f in found] == [wide[place] is None for place in places]
        scale = max(float(t.abs().max()) if t.numel() else 0.0 for t in (*grads, *want))
        for got, expected in zip((f for f in found if f is not None), want, strict=True):
            assert_close(got, expected, scale, f"{name} {call.label}")
            compared += 1
    assert compared >= 10


RULES: Mapping[str, tuple[type[torch.optim.Optimizer], Mapping[str, Any], tuple[str, ...]]] = {
    "adamw": (torch.optim.AdamW, {"eps": "eps"}, ("exp_avg", "exp_avg_sq")),
    "sgd": (torch.optim.SGD, {"momentum": "momentum", "nesterov": "nesterov"},
            ("momentum_buffer",)),
}  # fmt: skip
"""torch's optimizer, its names of attributes, and of states."""


@pytest.mark.parametrize("name", RULES)
def test_oracle_of_an_update_rule_agrees_with_torch_optimizer_in_float64(name: str) -> None:
    rule, named, states = RULES[name]
    compared = 0
    for call in small_calls(name):
        args, attrs = arguments(name, call)
        params, grads, *moments, lr, step, scale, clip, found_inf, _ = map(double, args)
        if attrs.get("decoupled") or (found_inf is not None and found_inf):
            continue
        leaves = [torch.nn.Parameter(p.clone()) for p in params]
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad / (1.0 if scale is None else scale) * (1.0 if clip is None else clip)
        given = {theirs: attrs[ours] for theirs, ours in named.items()}
        if name == "adamw":
            given["betas"] = (attrs["beta1"], attrs["beta2"])
        optimizer: Any = rule(leaves, lr=float(lr), weight_decay=attrs["weight_decay"],
                              foreach=False, **given)  # fmt: skip
        for leaf, *kept in zip(leaves, *(each or [None] * len(leaves) for each in moments),
                               strict=True):  # fmt: skip
            pairs = zip(states, kept, strict=True)
            known = {state: t.clone() for state, t in pairs if t is not None}
            optimizer.state[leaf] = known | {"step": step.clone()}
        optimizer.step()
        want = ORACLES[name].forward(*map(numbers, args), **attrs)
        some = [state for state, each in zip(states, moments, strict=True) if each]
        moved = [optimizer.state[leaf][state] for state in some for leaf in leaves]
        for got, expected in zip([*leaves, *moved], want, strict=False):
            assert_close(expected, got, 1.0, call.label)
        compared += 1
    assert compared >= 10


def test_adamw_oracle_with_found_inf_keeps_every_number() -> None:
    given = {"found_inf": 1.0, "copies": (torch.bfloat16,), "scale": 1024.0}
    args, attrs = arguments("adamw", fixed.Point("found-inf", given).call("adamw"))
    want = ORACLES["adamw"].forward(*map(numbers, args), **attrs)
    kept = [*args[0], *args[2], *args[3], args[5], *args[9]]
    for before, expected in zip(kept, want, strict=True):
        np.testing.assert_array_equal(before.double().numpy(), expected.value)
        np.testing.assert_array_equal(expected.worst, 0.0)


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


def test_copy_of_a_parameter_that_its_type_cannot_hold_is_infinite() -> None:
    values = np.array([1.0, 65_519.0, 65_520.0, -1e6])
    stored = Rounded.exact(np.zeros(4), FORMATS[torch.float16])
    (copied,) = update.copies([Rounded.exact(values)], [stored], [stored])
    with np.errstate(over="ignore"):
        assert (np.isinf(copied.value) == np.isinf(values.astype(np.float16))).all()
    assert (np.sign(copied.value) == np.sign(values)).all()


@pytest.mark.parametrize("name", ORACLES)
def test_calls_have_labels_that_are_unique_and_words(name: str) -> None:
    labels = [call.label for call in ORACLES[name].calls]
    assert len(set(labels)) == len(labels)
    assert all(set(label) <= set(WORD) for label in labels)


@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm"])
def test_norm_is_asked_with_a_wider_weight_and_with_a_wider_bias(name: str) -> None:
    """A row that reads both as of one type loses the digits of the wider one."""
    pairs = [arguments(name, call)[0][-2:] for call in small_calls(name, ordinary=False)]
    wider = {w.dtype.itemsize - b.dtype.itemsize for w, b in pairs if b is not None}
    assert min(wider) < 0 < max(wider)


WORD = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.:+-"


@pytest.mark.parametrize("name", ORACLES)
def test_every_operator_of_ours_has_an_oracle_whose_calls_lie_plainly(name: str) -> None:
    assert set(ORACLES) == {spec.name for spec in all_specs()}
    elsewhere = {call.label for call in ORACLES[name].calls if call.layout != "contiguous"}
    assert elsewhere <= {"sequence-first", "channels-last", "square-mask-turned"}
    assert ORACLES[name].plain


@pytest.mark.grid
@pytest.mark.parametrize("dtype", FORMATS, ids=lambda d: FORMATS[d].name)
@pytest.mark.parametrize("name", ORACLES)
def test_call_made_twice_has_the_same_numbers(name: str, dtype: torch.dtype) -> None:
    call = ORACLES[name].plain[-1]
    first, second = (arguments(name, call, dtype)[0] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        if isinstance(a, Tensor):
            assert torch.equal(bits_of(a), bits_of(b))
