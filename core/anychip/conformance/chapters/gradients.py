"""Are gradients right, through autograd, in all the ways that autograd may ask for them?

Values: a design, and every fixed call that has a gradient, against the oracle's derivative and
bound; some inputs only, gradients that are expanded or strided, twice through one graph. Rules: one
of several outputs, the second derivative, and that a changed saved tensor is noticed.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from anychip.conformance import blocks, calling_rules, designs, first_calls
from anychip.conformance.arithmetic import UNIT, Rounded
from anychip.conformance.calling_rules import alike
from anychip.conformance.calls import READ_ONLY_LAYOUTS, Call, Layout, PlacedCall, place, stream
from anychip.conformance.case import (
    Case,
    Context,
    check,
    check_equal_bits,
    check_same_bits,
    expect_error,
)
from anychip.conformance.formats import FORMATS, Array
from anychip.conformance.many_times import can_repeat, large_calls
from anychip.conformance.oracles import Oracle, oracle_of
from anychip.conformance.oracles.oracle import numbers
from anychip.conformance.trial import (
    AnyOperator,
    Rule,
    Subject,
    Trial,
    may_vary,
    rule_cases,
    samples_rule,
)
from anychip.dispatch.operator import registered


class GradientTrial(Trial):
    """A call whose differentiable arguments are leaves of a graph."""

    def __init__(
        self, operator: AnyOperator, call: Call, dtype: torch.dtype, seed: int = 0
    ) -> None:
        super().__init__(operator, call, dtype, seed)
        spec = operator.spec
        named = dict(zip(self.signature.positional, self.arguments[0], strict=True))
        given = {name for name, arg in named.items() if arg is not None}
        leaves = {id(named[n]): n for n in spec.differentiable[::-1] if n in given}
        self.leaf_names = tuple(leaves.values())[::-1]  # of one that is two arguments the first
        self.gradient_names = [f"gradient of {name}" for name in self.leaf_names]
        self.saved_names = [name for name in spec.saved if name in given]
        self.stream = stream(f"{spec.name}/{call.label}", seed)
        self._known: tuple[Sequence[Tensor], dict[str, Rounded]] | None = None

    def run(self, placed: PlacedCall) -> list[Tensor]:
        """The outputs that have gradients: an index has none."""
        return [y for y in super().run(placed) if y.is_floating_point()]

    def leaves(self, placed: PlacedCall, names: Sequence[str]) -> list[Tensor]:
        """Those arguments of a placed call, requiring gradients."""
        places = [self.signature.positional.index(name) for name in names]
        return [placed.args[place].requires_grad_() for place in places]

    def start(self, context: Context) -> tuple[PlacedCall, list[Tensor]]:
        """A placed call in which every leaf requires a gradient, and the leaves."""
        placed = self.place(context)
        return placed, self.leaves(placed, self.leaf_names)

    def output_gradients(self) -> list[Tensor]:
        """Random gradients of those outputs, on the host; each in its output's dtype."""
        generator = torch.Generator().manual_seed(self.stream)
        forms = [y for y in self.form[: self.signature.num_outputs] if y.is_floating_point()]
        found = [torch.randn(f.shape, generator=generator).to(f.dtype) for f in forms]
        return [grad.abs() for grad in found] if self.call.one_sign else found

    def placed_gradients(self, context: Context) -> list[Tensor]:
        """The same on the device."""
        return [g.to(context.device) for g in self.output_gradients()]

    def gradients(self, oracle: Oracle, grads: Sequence[Tensor]) -> dict[str, Rounded]:
        """The oracle's gradient of every leaf, kept for the next question with the same grads."""
        if self._known is not None and self._known[0] is grads:
            return self._known[1]
        args, attrs = self.arguments
        assert oracle.backward is not None
        with np.errstate(all="ignore"):
            found = oracle.backward(
                tuple(map(numbers, grads)), *(numbers(arg, self.call) for arg in args), **attrs
            )
        pairs = zip(self.operator.spec.differentiable, found, strict=True)
        named = {name: value for name, value in pairs if value is not None}
        for first, second in alike(args, self.written):
            if args[first] is args[second]:  # one leaf, whose gradient is the sum of both
                ends = [self.signature.positional[index] for index in (first, second)]
                if set(ends) <= named.keys():
                    parts = [named[end].stored(FORMATS[args[first].dtype]) for end in ends]
                    named |= dict.fromkeys(ends, parts[0] + parts[1])
        self._known = grads, named
        return named


def cases(context: Context) -> Iterator[Case]:
    """Per differentiable operator a design, and by dtype a case per call, and one per rule."""
    yield from first_calls.cases("gradients", context, GradientTrial, gradients_of, judge)
    yield from designs.cases("gradients", context, check_row)
    for name, operator in registered().items():
        if not operator.spec.differentiable:
            continue
        oracle = oracle_of(operator.spec)
        for dtype, represented in context.dtypes_of(operator.spec).items():
            where = f"gradients/{name}/{FORMATS[dtype].name}"
            of = Subject(operator, oracle, dtype)
            for call in oracle.calls:
                if call.gradient:
                    run = partial(check_values, of=of, call=call)
                    full = oracle.is_full(call, dtype)
                    yield Case(id=f"{where}/{call.label}", run=run, full=full)
            yield from rule_cases(where, of, context, RULES, represented=represented)


def check_values(context: Context, of: Subject, *, call: Call) -> None:
    """The gradient of every differentiable argument; no argument is written.

    Of a large call the same bits twice: where a sum is split, its parts may come in any order.
    """
    trial = GradientTrial(of.operator, call, of.dtype, context.seed)
    placed, leaves = trial.start(context)
    grads = trial.output_gradients()
    trial.gradients(of.oracle, grads)  # kept: what comes late is not waited for by chance
    found = backward(context, trial, placed, leaves, grads)
    compare(context, trial, of.oracle, grads, found)
    placed.check_apart(trial.gradient_names, found)
    trial.check_untouched(placed)
    if may_vary(trial):
        again = backward(context, trial, placed, leaves, grads)
        check_same_bits(trial.gradient_names, again, found, ", asked for again")
        turned = [g.mT.contiguous().mT if g.dim() > 1 else g for g in grads]
        found = backward(context, trial, placed, leaves, turned)
        compare(context, trial, of.oracle, grads, found, ", of transposed ones")


def gradients_of(context: Context, trial: GradientTrial) -> Sequence[Tensor]:
    """Gradients of a call on arguments of its own, none of which it writes."""
    placed, leaves = trial.start(context)
    found = backward(context, trial, placed, leaves, trial.output_gradients())
    trial.check_untouched(placed)
    return found


def judge(context: Context, of: Subject, trial: GradientTrial, found: Sequence[Tensor]) -> None:
    """Compares gradients with the oracle's."""
    compare(context, trial, of.oracle, trial.output_gradients(), found)


def check_row(context: Context, of: Subject, row: designs.DesignedCall) -> None:
    """The gradients that are asked for, of an output's gradient that lies somewhere.

    As of results: made, then mostly with other numbers, then again, or the same graph again.
    """
    trial = GradientTrial(of.operator, row.call, of.dtype, context.seed)
    names = row.asked(trial.leaf_names)
    plain = trial.output_gradients()
    layouts = row.gradient_layouts(len(plain))
    grads = list(map(laid_out_gradient, map(row.change, plain), layouts))
    trial.gradients(of.oracle, grads)  # kept: what comes late is not waited for by chance
    placed = trial.place(context)
    given = [
        place(grad, context.device, lies if grad.dim() else "contiguous").tensor
        for grad, lies in zip(grads, layouts, strict=True)
    ]
    leaves = trial.leaves(placed, names)
    run_other, check_other = other_gradients(context, placed, row, trial, names)
    with designs.stream_of(context, row.caller):
        # Before too: what it leaves behind would show in what is compared.
        before = run_other() if row.between == "in the same memory" else ()
        outputs = trial.run(placed)
        kept = [y.detach().clone() for y in outputs]
        found = torch.autograd.grad(outputs, leaves, given, retain_graph=True)
        kept += [grad.clone() for grad in found]
        others = [grad.clone() for grad in run_other()]
        left = [y.detach().clone() for y in (*outputs, *found)]
        outputs_again = row.again(partial(trial.run, placed))
        kept += [y.detach().clone() for y in outputs_again]
        graph = outputs if row.between == "nothing" else outputs_again
        again = row.again(partial(torch.autograd.grad, graph, leaves, given))
        left += [y.detach().clone() for y in outputs_again]
        others_again = before or run_other()
    compare(context, trial, of.oracle, grads, found, names=names)
    placed.check_apart(names, found)
    trial.check_untouched(placed)
    check_other()
    labels = [f"output {number}" for number in range(len(outputs))]
    repeated = [f"{label} of a call made again" for label in labels]
    check_same_bits([*labels, *names, *repeated], left, kept, ", after another call")
    if of.is_bitwise:
        check_same_bits(names, again, found, ", asked for again")
        if others:
            check_same_bits(names, others_again, others, ", of another call, made again")
    else:
        compare(context, trial, of.oracle, grads, again, ", asked for again", names)


def other_gradients(
    context: Context, placed: PlacedCall, row: designs.DesignedCall, trial: GradientTrial,
    names: Sequence[str],
) -> designs.OtherCall:  # fmt: skip
    """The same call with other numbers, if there is to be one, and its backward pass."""
    other = designs.with_other_numbers(trial, context, row)
    if other is None:
        return designs.OtherCall()
    given = [(g * 0.5).to(context.device) for g in other.output_gradients()]

    def gradients(placed: PlacedCall) -> Sequence[Tensor]:
        leaves = other.leaves(placed, names)
        return torch.autograd.grad(other.run(placed), leaves, given)

    return designs.between(gradients, placed, other, context, row)


def backward(
    context: Context, trial: GradientTrial, placed: PlacedCall, leaves: Sequence[Tensor],
    grads: Sequence[Tensor], **options: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients through autograd, by ``torch.autograd.grad``."""
    outputs = trial.run(placed)
    given = [grad.to(context.device) for grad in grads]
    return torch.autograd.grad(outputs, leaves, given, **options)


def compare(
    context: Context, trial: GradientTrial, oracle: Oracle, grads: Sequence[Tensor],
    found: Sequence[Tensor | None], note: str = "", names: Sequence[str] | None = None,
) -> None:  # fmt: skip
    """Compares gradients of all leaves, or of these, with the oracle's: dtype, shape, values."""
    wanted = trial.gradients(oracle, grads)
    for name, got in zip(names or trial.leaf_names, found, strict=True):
        if got is None:
            continue
        argument = trial.arguments[0][trial.signature.positional.index(name)]
        check(got.dtype == argument.dtype, f"gradient of {name}: {argument.dtype}, got {got.dtype}")
        settled, statistical = trial.settled(got, wanted[name]), trial.call.statistical
        context.compare(f"gradient of {name}{note}", settled, wanted[name], statistical=statistical)


# Rules


def each_trial(context: Context, of: Subject) -> Iterator[GradientTrial]:
    for call in of.oracle.plain[::2]:
        yield GradientTrial(of.operator, call, of.dtype, context.seed)


def most_dims(context: Context, of: Subject) -> GradientTrial:
    """Of the plain calls that rules ask, one whose output has the most dims above 1."""
    trials = [GradientTrial(of.operator, call, of.dtype, context.seed) for call in of.oracle.plain]

    def dims(trial: GradientTrial) -> int:
        return max(sum(n > 1 for n in y.shape) if y.numel() else -1 for y in trial.form)

    return max(trials, key=dims)


def laid_out_gradient(grad: Tensor, layout: Layout) -> Tensor:
    """With one number along the dim that lies in one place."""
    if layout not in READ_ONLY_LAYOUTS or not grad.dim() or not grad.numel():
        return grad
    return grad.narrow(0 if layout == "expanded" else -1, 0, 1).expand_as(grad)


def rule_lying(context: Context, of: Subject) -> None:
    """An output's gradient lies with two dims turned, as where heads or batches are not first, or
    is one number along a dim, as of a sum; all else lies as it comes.
    """
    for call in of.oracle.plain:
        trial = GradientTrial(of.operator, call, of.dtype, context.seed)
        plain = trial.output_gradients()
        dims = range(max((g.dim() for g in plain), default=0))
        for a, b in itertools.combinations_with_replacement(dims, 2):
            grads = [_lying(g, a, b, len(dims)) for g in plain]
            placed = [_lying(g.to(context.device), a, b, len(dims)) for g in plain]
            found = backward(context, trial, *trial.start(context), placed)
            note = f", of an output's gradient with dims {a} and {b} " + ("one", "turned")[a != b]
            compare(context, trial, of.oracle, grads, found, note)


def _lying(grad: Tensor, a: int, b: int, dims: int) -> Tensor:
    """Two dims turned in memory; or, of one dim, one number along it."""
    if grad.dim() < dims:
        return grad
    if a == b:
        return grad.narrow(a, 0, min(1, grad.shape[a])).expand_as(grad)
    # From the second to the last one it is channels last.
    return grad.movedim(a, b).contiguous().movedim(b, a)


def rule_loss_scale(context: Context, of: Subject) -> None:
    """Large gradients, as a loss scale makes them; what is not finite does not get lost: the check
    for it, which lowers the scale, comes after all backward passes.
    """
    trial = most_dims(context, of)
    scale = 2.0**4 if of.dtype == torch.float16 else 2.0**24
    grads = [g * scale for g in trial.output_gradients()]
    placed, leaves = trial.start(context)
    found = backward(context, trial, placed, leaves, grads)
    compare(context, trial, of.oracle, grads, found, f" for output gradients times {scale:g}")
    for value in (math.nan, math.inf):
        found = backward(context, trial, placed, leaves, [torch.full_like(g, value) for g in grads])
        for name, got in zip(trial.leaf_names, found, strict=True):
            text = f"gradient of {name}: it is finite, and the output gradient is {value}"
            check(not bool(got.isfinite().all()), text)


def rule_two_threads(context: Context, of: Subject) -> None:
    """Two threads ask for gradients at once: no room that both write to."""
    call = next(call for call in of.oracle.plain if call.gradient)
    labels = (call.label, f"{call.label}.other")
    trials = [GradientTrial(of.operator, replace(call, label=n), of.dtype) for n in labels]

    def ask(trial: GradientTrial, placed: PlacedCall) -> Sequence[Tensor]:
        leaves = trial.leaves(placed, trial.leaf_names)
        return backward(context, trial, placed, leaves, trial.output_gradients())

    for trial, found, alone in calling_rules.at_once(context, trials, ask):
        note = " while another thread asks for it too"
        if of.is_bitwise:
            check_same_bits(trial.gradient_names, found, alone, note)
        compare(context, trial, of.oracle, trial.output_gradients(), found, note)


def rule_one_output(context: Context, of: Subject) -> None:
    """Of several outputs only one is used; the gradients of the others are 0."""
    for trial in each_trial(context, of):
        grads = trial.output_gradients()
        for used in range(len(grads)):
            placed, leaves = trial.start(context)
            output, given = trial.run(placed)[used], grads[used].to(context.device)
            found = torch.autograd.grad([output], leaves, [given], allow_unused=True)
            masked = [g if i == used else torch.zeros_like(g) for i, g in enumerate(grads)]
            compare(context, trial, of.oracle, masked, found, f" where only output {used} is used")


def rule_deferred(context: Context, of: Subject) -> None:
    """What may wait is asked for by a second call with the same tensors: the bits of one call."""
    spec = of.operator.spec
    for trial in each_trial(context, of):
        placed, _ = trial.start(context)
        given = trial.placed_gradients(context)
        outputs = trial.run(placed)  # kept: torch 2.11 frees what a graph saved with its end
        node = cast("Any", outputs[0].grad_fn)

        def ask(names: Sequence[str], node: Any = node, given: Any = given) -> dict[str, Tensor]:
            gradient, choice, attrs = node.call
            pair = choice.row if choice.row.paired else None
            needs = tuple(name in names for name in spec.differentiable)
            with torch.no_grad():
                found = gradient.backward(pair, given, node.saved_tensors, attrs, needs)
            return {n: g for n, g in zip(spec.differentiable, found, strict=True) if n in names}

        whole = ask(trial.leaf_names)
        waiting = [name for name in spec.deferrable if name in trial.leaf_names]
        for count in range(1, len(waiting) + 1):
            for late in itertools.combinations(waiting, count):
                first = [name for name in trial.leaf_names if name not in late]
                for names in filter(None, (first, late)):
                    for name, got in ask(names).items():
                        note = f"gradient of {name}, with that of {' and '.join(late)} asked later"
                        check_equal_bits(note, got, whole[name])


def rule_blocks(context: Context, of: Subject) -> None:
    """Over keys in blocks, joined by lse, y and gradients are those of all keys.

    Of 16 bits in their own type, then in float32, which blocks lose nothing in.
    """
    for trial, wide in itertools.product(each_trial(context, of), (None, torch.float32)):
        (q, k, v, *ends), attrs = trial.arguments
        if q.shape != (*k.shape[:-2], *q.shape[-2:]) or not all(t.equal(ends[0]) for t in ends):
            continue  # queries and keys are not cut alike
        placed, (grad,) = trial.place(context), trial.output_gradients()
        named = {**attrs, "out_dtype": wide}
        given = [q, k, v, grad.to(wide or q.dtype)]
        on_device = (*placed.args[:3], given[-1].to(context.device))
        got = blocks.by_operator(of.operator, on_device, next(iter(placed.args[3:]), None), **named)
        known = [numbers(t) for t in given]
        with np.errstate(all="ignore"):
            want = blocks.by_oracle(known, ends[0].tolist() if ends else None, **named)
        for name, found, expected in zip(("y", "dq", "dk", "dv"), got, want, strict=True):
            context.compare(f"{name} of blocks of keys", found, expected, statistical=False)


def rule_saved(context: Context, of: Subject) -> None:
    """A saved tensor that is changed before backward is an error, not a wrong gradient."""
    # An argument that may be None is asked about in a call that has it.
    trials = list(each_trial(context, of))
    check(bool(trials), f"the samples of {of.operator.spec.name} have no call to differentiate")
    by_name = {name: trial for trial in trials[::-1] for name in trial.saved_names}
    for name, trial in by_name.items():
        placed = trial.place(context)
        argument = placed.args[trial.signature.positional.index(name)]
        leaves = trial.leaves(placed, trial.leaf_names)
        outputs = trial.run(placed)
        with torch.no_grad():
            argument.zero_()  # which every dtype has
        given = trial.placed_gradients(context)
        what, words = (
            f"{name} was changed after the forward pass; backward",
            "modified by an inplace",
        )
        grad = partial(torch.autograd.grad, outputs, leaves, given)
        expect_error(RuntimeError, what, grad, mentions=(f"{words} operation",))


STEP = 1e-4
"""Step of the central difference. Its own error is of the order of STEP^2 = 1e-8 and float64's
1e-16 / STEP = 1e-12, both below float32's 6e-8."""
SECOND_ORDER_ROUNDINGS = 256
"""Allowed norm-wise for a second derivative, in units of u and besides sqrt(number of elements):
the chain of a reference differentiated twice is a few dozen roundings deep, with factors of about
4. Where its terms cancel, the bound of the first derivative, with terms of their size, counts."""


def rule_twice(context: Context, of: Subject) -> None:
    """The second derivative, against a central difference of the oracle's first, in float64."""
    for trial in each_trial(context, of):
        placed, leaves = trial.start(context)
        grads = trial.output_gradients()
        given = [g.to(context.device) for g in grads]
        first = torch.autograd.grad(trial.run(placed), leaves, given, create_graph=True)
        generator = torch.Generator().manual_seed(trial.stream + 1)
        along = [torch.randn(t.shape, generator=generator) for t in first]
        depends = [(f, v.to(context.device)) for f, v in zip(first, along, strict=True)
                   if f.requires_grad]  # fmt: skip
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if depends:
            found = torch.autograd.grad(
                [f for f, _ in depends], leaves, [v for _, v in depends], allow_unused=True
            )
        wanted = hessian_product(trial, of.oracle, grads, [v.double().numpy() for v in along])
        bounds = trial.gradients(of.oracle, grads)
        for name, got, want in zip(trial.leaf_names, found, wanted, strict=True):
            check_norm(f"second derivative for {name}", got, want, bounds[name].worst)


def hessian_product(
    trial: GradientTrial, oracle: Oracle, grads: Sequence[Tensor], along: Sequence[Array]
) -> list[Array]:
    """``H v`` of ``sum grads * outputs`` by leaf; H is symmetric: this is d(gradient) along v.

    Where the gradient jumps, as top_k's does where two elements change places, a step over the jump
    gives a quotient that grows as the step shrinks. Of two steps the smaller quotient counts.
    """
    args, attrs = trial.arguments
    places = [trial.signature.positional.index(name) for name in trial.leaf_names]
    given = tuple(numbers(g) for g in grads)

    def gradient(step: float) -> list[Array]:
        moved = [numbers(arg) for arg in args]
        for index, v in zip(places, along, strict=True):
            moved[index] = Rounded.exact(moved[index].value + step * v)
        assert oracle.backward is not None
        with np.errstate(all="ignore"):
            found = oracle.backward(given, *moved, **attrs)
        return [g.value for g in found if g is not None]

    def quotients(step: float) -> list[Array]:
        pairs = zip(gradient(step), gradient(-step), strict=True)
        return [(plus - minus) / (2 * step) for plus, minus in pairs]

    both = zip(quotients(STEP), quotients(STEP / 64), strict=True)
    return [min(pair, key=lambda found: float(np.linalg.norm(found))) for pair in both]


def check_norm(name: str, got: Tensor | None, want: Array, first_bound: Array) -> None:
    """Norm-wise comparison; no gradient at all stands for 0."""
    actual = np.zeros(want.shape) if got is None else got.detach().cpu().double().numpy()
    size = float(np.linalg.norm(want))
    relative = SECOND_ORDER_ROUNDINGS + float(np.sqrt(want.size))
    limit = UNIT * (relative * size + float(np.linalg.norm(first_bound)))
    error = float(np.linalg.norm(actual - want))
    check(
        error <= limit, f"{name}: off by {error:.4g} in norm {size:.4g}; the limit is {limit:.4g}"
    )


def rule_leaks(context: Context, of: Subject) -> None:
    """A backward pass lets go of what it needs, and of what the forward pass has left it."""
    trial = GradientTrial(of.operator, of.oracle.plain[0], of.dtype, context.seed)
    placed, leaves = trial.start(context)
    grads = trial.placed_gradients(context)
    calling_rules.check_no_leak(context, lambda: backward(context, trial, placed, leaves, grads))


def rule_many_times(context: Context, of: Subject) -> None:
    """Gradients of what a large call repeats are those of the small one."""
    trial = GradientTrial(of.operator, of.oracle.plain[0], of.dtype, context.seed)
    grads = trial.output_gradients()
    small = dict(zip(trial.leaf_names, backward(context, trial, *trial.start(context), grads),
                     strict=True))  # fmt: skip
    wanted = trial.gradients(of.oracle, grads)
    forms = trial.form[: trial.signature.num_outputs]
    for large in large_calls(trial, context):
        along = [at for at, y in zip(large.outputs, forms, strict=False) if y.is_floating_point()]
        asked = GradientTrial(of.operator, large.call, of.dtype, context.seed)
        many = [large.of(grad, at) for grad, at in zip(grads, along, strict=True)]
        found = backward(context, asked, *asked.start(context), many)
        for name, got in zip(asked.leaf_names, found, strict=True):
            if (at := large.arguments.get(name)) is not None:
                large.compare(context, f"gradient of {name}", got, small[name], wanted[name], at)


def _has_lse(of: Subject, _: Context) -> bool:
    return of.operator.spec.name in ("attention", "attention_varlen")


def _twice(of: Subject, _: Context) -> bool:
    return of.operator.spec.double_backward == "reference" and of.dtype == torch.float32


RULES = (
    Rule("lying", rule_lying, of_no_type=True),
    Rule("loss-scale", rule_loss_scale, of_each_type=True),
    Rule("two-threads", rule_two_threads, of_no_type=True),
    Rule("leaks", rule_leaks, calling_rules.counts_memory, of_no_type=True),
    Rule("one-output", rule_one_output, lambda of, _: of.operator.signature.num_outputs > 1),
    Rule("deferred", rule_deferred, lambda of, _: of.is_bitwise and of.operator.spec.deferrable),
    Rule("blocks", rule_blocks, _has_lse),
    Rule("many-times", rule_many_times, can_repeat, of_no_type=True),
    Rule("saved", rule_saved, of_no_type=True),
    Rule("twice", rule_twice, _twice),
    samples_rule(check_values),
)
