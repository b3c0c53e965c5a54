"""Does a model trained on the device learn what float64 learns, within what float32 allows?

A small decoder, 200 steps, float32, built from our operators and trained by our optimizer on the
device. Its curve of losses is compared with float64's, in units of the spread of float32 runs that
differ by the order of sums only (:mod:`anychip.conformance.oracles.training`, which says how the
limit comes about, and how small a bias of all gradients it still finds). And the work has to have
been done here: by our operators, as often as the model calls them, on the device. A curve that is
off is trained again with rows replaced, until it is known which one is to blame
(:mod:`anychip.conformance.culprit`).
"""

import math
from collections import Counter
from collections.abc import Iterator
from functools import partial

import numpy as np
from torch import Tensor

import anychip
from anychip.conformance import culprit, trainee
from anychip.conformance.case import Case, Context, Curve, check
from anychip.conformance.oracles import training as oracle
from anychip.dispatch.tally import ProvenanceRow
from anychip.train import optim, zero

Key = tuple[str, str, str, str]

CODED_DEVIATIONS = (1.25e-3, 1.26e-3, 1.25e-3, 1.25e-3, 1.30e-3)
"""Root mean squares of the losses minus float64's, of five float32 runs with AdamW's states in 8
bits whose weights began an ULP apart. Codes of equal steps give 5.6e-3, codes that are rounded down
3.3e-2."""
CODED_LIMIT = 2.0
"""Of such a run, in units of the largest of these."""
FEW, FAR = 8, 8.0
"""Of a search for what is to blame: steps at least, and limits that the deviation is to exceed."""


def cases(context: Context) -> Iterator[Case]:
    """A curve per recipe, and one with states in 8 bits."""
    for name in oracle.RECIPES:
        yield Case(id=f"training/{name}", run=partial(curve, name=name))
    run = partial(curve, name="adamw", states="8bit")
    yield Case(id="training/states-8bit", run=run, full=True)


def coded(known: oracle.Envelope) -> oracle.Envelope:
    """The envelope for states in 8 bits, whose spread no step's rounding in float32 has."""
    spread = max(CODED_DEVIATIONS)
    return known._replace(
        spread=np.full_like(known.spread, spread),
        limit=CODED_LIMIT,
        deviations=np.asarray(CODED_DEVIATIONS) / spread,
    )


def rule_of(recipe: oracle.Recipe, states: str = "float32") -> optim.Rule:
    """The recipe, in our rules."""
    if recipe.momentum is not None:
        return optim.sgd(recipe.rate, momentum=recipe.momentum)
    return optim.chain(
        optim.clip_by_global_norm(recipe.max_norm),
        optim.adamw(
            recipe.rate,
            beta1=recipe.beta1,
            beta2=recipe.beta2,
            eps=recipe.eps,
            weight_decay=recipe.weight_decay,
            states=states,
        ),
    )


def curve(context: Context, *, name: str, states: str = "float32") -> None:
    """The deviation of the losses is below the limit; the operators were called, on the device."""
    recipe, known = oracle.RECIPES[name], oracle.load(name)
    known = coded(known) if states == "8bit" else known
    context.call = f"{oracle.STEPS} steps of {name} on {context.device}, states in {states}"
    before = counts()
    losses, params = train(context, recipe, states)
    called = {key: count - before[key] for key, count in counts().items() if count > before[key]}
    context.served_by = served_by(called)
    check_work(called, recipe, states)
    place = trainee.place_of(context.device)
    moved = [name for name, param in params.items() if param.device != place]
    check(not moved, f"parameters that are not on {context.device} afterwards: {moved}")
    deviation = known.deviation(losses)
    context.curve = Curve(
        tuple(losses), tuple(known.losses.tolist()), tuple(known.spread.tolist()), deviation,
        known.limit,
    )  # fmt: skip
    if not deviation <= known.limit:
        called_parts = ((operator, direction) for operator, direction, _, _ in called)
        parts = culprit.parts_of(context.device.type, called_parts)
        steps, limit = horizon(losses, known)

        def train_again(steps: int, limit: float) -> bool:
            return known.deviation(train(context, recipe, states, steps)[0]) <= limit

        quick = partial(train_again, steps, limit)
        whole = partial(train_again, oracle.STEPS, known.limit)
        check(False, f"{_off(losses, known)}\n{culprit.accuse(parts, quick, whole)}")


def horizon(losses: list[float], known: oracle.Envelope) -> tuple[int, float]:
    """How many steps tell a curve that is off from one that is not, and the deviation between.

    As many as take it FAR beyond the limit. The deviation of a few steps varies more than that of
    all, which the limit is for; what is asked is the geometric mean of both.
    """
    for steps in range(FEW, oracle.STEPS):
        deviation = known.deviation(losses[:steps])
        if not deviation <= FAR * known.limit:
            return steps, known.limit * math.sqrt(FAR)
    return oracle.STEPS, known.limit


def _off(losses: list[float], known: oracle.Envelope) -> str:
    """By how much a curve is off, and where it begins."""
    off = np.abs(np.asarray(losses) - known.losses) / known.spread
    first = int(np.argmax(~(off <= 3.0 * known.limit)))
    return (
        f"the losses deviate by {known.deviation(losses):.4g} of the samples' spread, limit "
        f"{known.limit:.4g} (the samples' own: up to {known.deviations.max():.3g}); first far "
        f"off at step {first}: got {losses[first]:.9g}, want {known.losses[first]:.9g} within "
        f"about {3 * known.spread[first]:.2g}; at the end {losses[-1]:.9g}, want "
        f"{known.losses[-1]:.9g}"
    )


def train(
    context: Context, recipe: oracle.Recipe, states: str = "float32", steps: int = oracle.STEPS
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses by step, and the parameters."""
    model = trainee.decoder(oracle.SIZES, context.device)
    opt = zero.Optimizer(model, rule_of(recipe, states), trainee.alone_on(context.device))
    losses = []
    for step in range(steps):
        tokens, targets = trainee.batch(oracle.SIZES, step)
        loss = model(tokens.to(context.device), targets.to(context.device))
        opt.backward(loss)
        opt.step()
        opt.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses], dict(model.named_parameters())


# Who did the work


def counts() -> Counter[Key]:
    """Calls so far, by operator, direction, implementation and whether it was a fallback."""
    found: Counter[Key] = Counter()
    for row in anychip.provenance().rows():
        found[row.operator, row.direction, who(row), row.fallback_reason or ""] += row.calls
    return found


def who(row: ProvenanceRow) -> str:
    """In one word or two."""
    return row.kind if row.kind == "reference" else f"{row.provider} ({row.kind})"


def served_by(called: dict[Key, int]) -> str:
    """Implementations with the operators that each served; fallbacks say so."""
    servants: dict[str, set[str]] = {}
    for operator, direction, name, fallback in called:
        label = f"{name}, a fallback" if fallback else name
        servants.setdefault(label, set()).add(
            operator if direction == "forward" else f"d {operator}"
        )
    return "; ".join(f"{name}: {', '.join(sorted(ops))}" for name, ops in sorted(servants.items()))


def check_work(called: dict[Key, int], recipe: oracle.Recipe, states: str = "float32") -> None:
    """Each operator of a step was called as often as a step calls it, in both directions."""
    layers = oracle.SIZES.layers
    in_each = dict.fromkeys(("add_layer_norm", "attention", "gelu"), layers)
    others = {"layer_norm": layers + 1, "linear": 4 * layers + 1, "embedding": 2}
    a_step = {**in_each, **others, "cross_entropy": 1}
    wanted = {(name, d): n for name, n in a_step.items() for d in ("forward", "backward")}
    adamw = "adamw_8bit" if states == "8bit" else "adamw"
    wanted["sgd" if recipe.momentum is not None else adamw, "forward"] = 1
    found: Counter[tuple[str, str]] = Counter()
    for (operator, direction, _, _), count in called.items():
        found[operator, direction] += count
    for (operator, direction), count in wanted.items():
        got = found[operator, direction]
        check(
            got == count * oracle.STEPS,
            f"{operator} {direction}: {count * oracle.STEPS} calls expected in {oracle.STEPS} "
            f"steps, {got} were counted: something else did the work",
        )
