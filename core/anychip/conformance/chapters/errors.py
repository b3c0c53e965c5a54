"""Does a mistake end in the documented exception, which names it, and with nothing written?

Per operator: an argument that is missing, unknown, of another kind, dtype, shape or device, and an
attribute of another type. After each mistake the arguments have the bits that they had, and the
right call gives the result that it gave before. A call that no row takes is an error under the
policy ``strict``, and is counted with its reason otherwise; a row that says it is the chip's own
does not run the reference. Then the methods of the contract. What ranks do wrong between each
other is in the collectives chapter, indices of devices in the device chapter.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

import anychip
from anychip.conformance.calls import PlacedCall
from anychip.conformance.case import (
    Case,
    Context,
    check,
    check_equal_bits,
    check_same_bits,
    expect_error,
)
from anychip.conformance.formats import FORMATS
from anychip.conformance.oracles import Oracle, oracle_of
from anychip.conformance.trial import AnyOperator, Trial
from anychip.contract import HOST, ContractError, FallbackError
from anychip.dispatch.operator import registered
from anychip.dispatch.resolution import named
from anychip.dispatch.tally import ProvenanceRow

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
ANY_SHAPES = frozenset({"embedding", "clip", "unscale_and_check", "l2_norm", "sums_of_squares"})
"""Operators of several tensors whose lengths say nothing about each other's."""
Mistake = tuple[str, Arguments, tuple[str, ...]]
"""What is wrong, the call, and the words that the message has to have."""


def cases(context: Context) -> Iterator[Case]:
    """Per operator a case per kind of mistake; then the contract's methods."""
    for name, operator in registered().items():
        subject: dict[str, Any] = {"operator": operator, "oracle": oracle_of(operator.spec)}
        for label, types, make in MISTAKES:
            run = partial(check_mistakes, types=types, make=make, **subject)
            yield Case(id=f"errors/{name}/{label}", run=run)
        yield Case(id=f"errors/{name}/fallback", run=partial(check_fallback, **subject))
        if len(context.dtypes) < len(FORMATS):
            yield Case(id=f"errors/{name}/unclaimed", run=partial(check_unclaimed, **subject))
    for name, check_method in METHODS.items():
        yield Case(id=f"errors/methods/{name}", run=check_method)


# Operators


def trial_of(operator: AnyOperator, oracle: Oracle, dtype: torch.dtype | None = None) -> Trial:
    """The small call that gives most of the optional arguments."""
    asked: torch.dtype = dtype or getattr(torch, operator.spec.free_dtypes[0])
    trials = [Trial(operator, call, asked) for call in oracle.plain]

    def given(trial: Trial) -> tuple[int, int]:
        args = [arg for arg in trial.arguments[0] if arg is not None]
        return len(args), sum(arg.dim() for arg in args if isinstance(arg, Tensor))

    return max(trials, key=given)


def check_mistakes(
    context: Context,
    *,
    operator: AnyOperator,
    oracle: Oracle,
    types: tuple[type[Exception], ...],
    make: Callable[[Context, AnyOperator, PlacedCall], Iterator[Mistake]],
) -> None:
    """Each mistake of a kind: type and words of the error; nothing is written; all goes on."""
    trial = trial_of(operator, oracle)
    wanted = [result.clone() for result in trial.run(trial.place(context))]
    placed = trial.place(context)
    for what, (args, attrs), words in make(context, operator, placed):
        context.call = f"{operator.spec.name} with {what}"
        expect_error(types, context.call, operator, *args, mentions=words, **attrs)
        problem = placed.touched(())
        check(problem is None, f"{context.call} was refused, and has written: {problem}")
    note = " of the right call after the mistakes"
    check_same_bits(trial.names(), trial.run(placed), wanted, note)


def missing(context: Context, operator: AnyOperator, placed: PlacedCall) -> Iterator[Mistake]:
    """Each argument that has no default, left out."""
    signature = operator.signature
    given = dict(zip(signature.positional, placed.args, strict=True))
    for name in signature.positional:
        if name not in signature.defaults:
            rest = {key: value for key, value in given.items() if key != name}
            yield f"no {name}", ((), {**rest, **placed.attrs}), (name,)
    for name in signature.required_attrs:
        rest = {key: value for key, value in placed.attrs.items() if key != name}
        yield f"no {name}", (placed.args, rest), (name,)


def unknown(context: Context, operator: AnyOperator, placed: PlacedCall) -> Iterator[Mistake]:
    """An argument too many, by name and by place."""
    attrs = {**placed.attrs, "no_such_argument": 1}
    yield "an unknown argument", (placed.args, attrs), ("no_such_argument",)
    more = (*placed.args, None)
    yield "an argument too many", (more, dict(placed.attrs)), (str(len(more)),)


def kind(context: Context, operator: AnyOperator, placed: PlacedCall) -> Iterator[Mistake]:
    """A number where there has to be a tensor, and None where there must be something."""
    for index, name in enumerate(operator.signature.positional):
        wrong: list[Any] = [1.5] if operator.signature.optional[index] else [1.5, None]
        for value in wrong:
            yield f"{name} = {value}", (_with(placed, index, value), dict(placed.attrs)), (name,)


def attribute(context: Context, operator: AnyOperator, placed: PlacedCall) -> Iterator[Mistake]:
    """Something that is neither number, text nor list."""
    for name in operator.signature.attr_names:
        attrs = {**placed.attrs, name: object()}
        yield f"{name} = an object", (placed.args, attrs), (name,)


def dtype(context: Context, operator: AnyOperator, placed: PlacedCall) -> Iterator[Mistake]:
    """complex64, which no argument has, in place of each tensor."""
    for index, name, change in _tensors(operator, placed):
        wrong = change(lambda t: torch.zeros_like(t, dtype=torch.complex64))
        args = _with(placed, index, wrong)
        yield f"{name} of complex64", (args, dict(placed.attrs)), (name, "complex64")


def shape(context: Context, operator: AnyOperator, placed: PlacedCall) -> Iterator[Mistake]:
    """Each tensor longer by one in each of its dims, where the others then do not fit to it."""
    refused = 0
    for index, name, change in _tensors(operator, placed):
        tensor = _listed(placed.args[index])[0]
        for dim in range(tensor.dim()):
            longer = list(tensor.shape)
            longer[dim] += 1
            args = _with(placed, index, change(partial(_zeros, longer)))
            if _is_refused(operator, args, placed.attrs):
                refused += 1
                yield f"{name} of shape {tuple(longer)}", (args, dict(placed.attrs)), ()
    is_ours = operator.spec.namespace == "anychip"
    wanted = is_ours and _num_tensors(placed) > 1 and operator.spec.name not in ANY_SHAPES
    check(refused or not wanted, f"{operator.spec.name} takes tensors whose shapes do not fit")


def _zeros(shape: list[int], tensor: Tensor) -> Tensor:
    return tensor.new_zeros(shape)


def _is_refused(operator: AnyOperator, args: Sequence[Any], attrs: Any) -> bool:
    """Whether the specification's own check says that the shapes do not fit together."""
    if operator.spec.check is None:
        return False
    try:
        operator.spec.check(*args, **attrs)
    except ValueError:
        return True
    return False


def device(context: Context, operator: AnyOperator, placed: PlacedCall) -> Iterator[Mistake]:
    """One of several tensors on another device."""
    if _num_tensors(placed) < 2:
        return
    elsewhere = torch.device("meta" if context.device.type == HOST else HOST)
    for index, name, change in _tensors(operator, placed):
        args = _with(placed, index, change(lambda t: t.to(elsewhere)))
        words = (name, elsewhere.type)
        yield f"{name} on {elsewhere}", (args, dict(placed.attrs)), words


def _num_tensors(placed: PlacedCall) -> int:
    return len(placed.placed)


def _with(placed: PlacedCall, index: int, value: Any) -> tuple[Any, ...]:
    return (*placed.args[:index], value, *placed.args[index + 1 :])


def _tensors(
    operator: AnyOperator, placed: PlacedCall
) -> Iterator[tuple[int, str, Callable[[Callable[[Tensor], Tensor]], Any]]]:
    """Tensor arguments: place, name, and a copy of the argument with (the first) one changed."""
    for index, name in enumerate(operator.signature.positional):
        if placed.args[index] is not None and len(_listed(placed.args[index])):
            yield index, name, partial(_changed, placed.args[index])


def _changed(arg: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return change(arg) if isinstance(arg, Tensor) else [change(arg[0]), *arg[1:]]


def _listed(arg: Any) -> Sequence[Tensor]:
    return [arg] if isinstance(arg, Tensor) else arg


MISTAKES: tuple[tuple[str, tuple[type[Exception], ...], Any], ...] = (
    ("missing", (TypeError,), missing),
    ("unknown", (TypeError,), unknown),
    ("kind", (TypeError,), kind),
    ("attribute", (TypeError,), attribute),
    ("dtype", (ValueError,), dtype),
    ("shape", (ValueError,), shape),
    ("device", (ValueError,), device),
)


def check_unclaimed(context: Context, *, operator: AnyOperator, oracle: Oracle) -> None:
    """A dtype that the backend does not claim is refused, or right: never quietly another one."""
    taken = named(operator.spec.free_dtypes) - {*context.dtypes}
    for other in (found for found in FORMATS if found in taken):
        trial = trial_of(operator, oracle, other)
        placed = trial.place(context)
        try:
            results = trial.run(placed)
        except ContractError:  # a TypeError, and no refusal: a result of another dtype, like this
            raise
        except (RuntimeError, TypeError, ValueError):  # the chip's own words are not prescribed
            problem = placed.touched(())
            check(problem is None, f"{other} was refused, and has written: {problem}")
            continue
        forms = () if trial.written else trial.form
        for name, got, form in zip(trial.names(), results, forms, strict=False):
            check(got.dtype == form.dtype, f"{name}: {form.dtype} expected, got {got.dtype}")
        wanted, statistical = trial.expected(oracle), trial.call.statistical
        trial.compare(context, results, wanted, statistical=statistical)


# Fallback


def check_fallback(context: Context, *, operator: AnyOperator, oracle: Oracle) -> None:
    """A call is served by the row that is counted for it, or is refused under ``strict``."""
    trial = trial_of(operator, oracle)
    placed = trial.place(context)
    before = _counts(operator)
    with _watched(operator) as ran:
        trial.run(placed)
    counted = _counts(operator) - before
    told = [f"{calls} of {row[0]}" for row, calls in counted.items()]
    check(sum(counted.values()) == 1, f"one call, counted as {told or 'none'}")
    implementation, row_kind, provider, reason = next(iter(counted))
    # A row may map to the reference's own steps, in pieces; what is native or compiled may not.
    check(
        not ran or row_kind not in ("native", "compiled"),
        f"{implementation} says that it is {row_kind}, and the reference did the work",
    )
    is_fallback = provider == "reference"
    check(is_fallback == (reason is not None), f"served by {provider}, fallback: {reason!r}")
    placed = trial.place(context)
    with anychip.policy(fallback="strict"):
        if not is_fallback:
            trial.run(placed)
            return
        name = operator.spec.name
        run = partial(trial.run, placed)
        expect_error(FallbackError, f"{name} under the policy strict", run, mentions=(name,))
    problem = placed.touched(())
    check(problem is None, f"refused under the policy strict, and has written: {problem}")


def _counts(operator: AnyOperator) -> Counter[tuple[str, str, str, str | None]]:
    def key(row: ProvenanceRow) -> tuple[str, str, str, str | None]:
        return row.implementation, row.kind, row.provider, row.fallback_reason

    rows = anychip.provenance().rows()
    name = operator.spec.name
    return Counter(
        {key(r): r.calls for r in rows if r.operator == name and r.direction == "forward"}
    )


@contextmanager
def _watched(operator: AnyOperator) -> Iterator[list[bool]]:
    """Notes, in this thread, when the code of the operator's reference runs."""
    code, ran = getattr(operator.spec.forward, "__code__", None), list[bool]()

    def notice(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is code:
            ran.append(True)

    before = sys.getprofile()
    sys.setprofile(notice)
    try:
        yield ran
    finally:
        sys.setprofile(before)


# Methods of the contract


def allocate(context: Context) -> None:
    """A size that is no number of bytes; nothing is allocated."""
    memory = context.backend.memory
    for wrong in (-1, -(2**40)):
        expect_error(ValueError, f"allocate({wrong})", memory.allocate, wrong, mentions=("-",))
    for odd in ("16", None, 0.5):
        expect_error((TypeError, ValueError), f"allocate({odd!r})", memory.allocate, odd)
    check(memory.allocate(16).nbytes() == 16, "no allocation after mistakes")


def copy(context: Context) -> None:
    """Sizes that do not fit: an error, and the target stays as it is."""
    memory = context.backend.memory
    target = torch.full((6, 4), 7.0, device=context.device)
    for wrong in ((5, 4), (6, 3), (24,), (7,)):
        what, copied = f"copy_async of shape {wrong} to (6, 4)", partial(memory.copy_async, target)
        expect_error((RuntimeError, ValueError), what, copied, torch.zeros(wrong))
        context.backend.synchronize()
        kept = torch.full((6, 4), 7.0)
        check_equal_bits("the target of a copy that was refused", target.cpu(), kept)
    memory.copy_async(target, torch.ones(6, 4))
    context.backend.synchronize()
    check_equal_bits("copy after mistakes", target.cpu(), torch.ones(6, 4))


def generator(context: Context) -> None:
    """A seed that is no integer."""
    for wrong in ("1", None):
        expect_error((TypeError, ValueError, RuntimeError), f"generator({wrong!r})",
                     context.backend.generator, wrong)  # fmt: skip
    check(isinstance(context.backend.generator(1), torch.Generator), "no generator after mistakes")


def communicator(context: Context) -> None:
    """Settings that mean nothing: a time limit of no time, a check that does not exist."""
    make = context.backend.communicator
    for name, wrong in (("timeout_s", 0.0), ("heartbeat_s", -1.0), ("check", "sometimes")):
        expect_error(ValueError, f"communicator({name}={wrong!r})", make, mentions=(name,),
                     **{name: wrong})  # fmt: skip
    comm = make()
    x = torch.ones(3, device=context.device)
    for groups in ([[0, 0]], [[0], [1]], []):
        expect_error(ValueError, f"split({groups})", comm.split, groups, name="wrong")
    comm.all_reduce(x)
    check(x.tolist() == [1.0] * 3, f"all_reduce on one rank after mistakes gave {x.tolist()}")


METHODS: dict[str, Callable[[Context], None]] = {
    "memory.allocate": allocate,
    "memory.copy_async": copy,
    "generator": generator,
    "communicator": communicator,
}
