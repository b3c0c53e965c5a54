"""Where is a model cut into stages? Where the dearest stage is as cheap as can be.

A pipeline is as fast as its slowest stage. :func:`partition` is exact; what a layer costs comes
from :func:`estimate_costs` (arithmetic counted on tensors without data), from
:func:`measure_costs` (seconds), or from the caller.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from anychip.contract import Cost
from anychip.dispatch.operator import Operator, registered
from anychip.dispatch.signature import Signature
from anychip.train.parallel.simulator import Time
from anychip.train.parallel.stage import Model, make_stage, num_layers, on_paper


class LayerCost(NamedTuple):
    """Of one microbatch through one layer, in one unit: operations, or seconds."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """What a stage is balanced by: in the steady state each microbatch takes both."""
        return self.forward + self.backward


def partition(costs: Sequence[Time] | Sequence[Sequence[Time]], stages: int) -> list[range]:
    """Cuts layers into consecutive, non-empty stages such that the dearest one is cheapest.

    Among those cuts one with the least sum of squares, which is the most even.

    Args:
        costs: of the layers, at least 0; or one row of them for each stage, where stages are on
            chips of different speed.

    Raises:
        ValueError: fewer layers than stages, or a cost below 0; another number of rows.

    Source: linear partition by dynamic programming, O(stages * layers^2).
    """
    is_row = not any(isinstance(row, Sequence) for row in costs)
    rows = cast("Sequence[Sequence[Time]]", [costs] * stages if is_row else costs)
    if len(rows) != stages or len({len(row) for row in rows}) > 1:
        raise ValueError(f"a row of costs for each of {stages} stages expected, got {len(rows)}")
    count = len(rows[0]) if rows else len(costs)
    if not 1 <= stages <= count:
        raise ValueError(f"from 1 to {count} stages of {count} layers, got {stages}")
    if any(cost < 0 for row in rows for cost in row):
        raise ValueError(f"costs of at least 0 expected, got {list(costs)}")
    sums: list[list[Time]] = [[0, *accumulate(row)] for row in rows]
    dearest, _ = _cut(sums, max, lambda cost: cost)
    limit = dearest
    _, cuts = _cut(sums, lambda a, b: a + b, lambda cost: cost * cost if cost <= limit else None)
    return [range(start, stop) for start, stop in pairwise(cuts)]


def _cut(
    rows: Sequence[Sequence[Time]], join: Callable[[Any, Any], Any], value: Callable[[Time], Any]
) -> tuple[Any, list[int]]:
    """The least joined value of all cuts, and the first of its cuts. A value None is forbidden.

    Args:
        rows: of each stage the sums of the costs of the first 0, 1, ... layers.
    """
    count = len(rows[0]) - 1
    best: list[list[tuple[Any, int] | None]] = [[(0, 0), *[None] * count]]
    for number, sums in enumerate(rows, 1):
        row: list[tuple[Any, int] | None] = [None] * (count + 1)
        for stop in range(number, count + 1):
            for start in range(number - 1, stop):
                before, here = best[-1][start], value(sums[stop] - sums[start])
                if before is None or here is None:
                    continue
                joined = join(before[0], here)
                found = row[stop]
                if found is None or joined < found[0]:
                    row[stop] = (joined, start)
        best.append(row)
    cuts = [count]
    for row in reversed(best[1:]):
        entry = row[cuts[-1]]
        assert entry is not None, "there is a cut with the least dearest stage"
        cuts.append(entry[1])
    last = best[-1][count]
    assert last is not None, "a number of layers not below that of stages can be cut"
    return last[0], cuts[::-1]


def split_layers(
    model: Model, stages: int, costs: Sequence[LayerCost] | Sequence[Sequence[LayerCost]]
) -> list[range]:
    """The layers of each stage, for :func:`~anychip.train.parallel.stage.make_stage`.

    Args:
        costs: of the layers, or one row of them for each stage.

    Raises:
        ValueError: costs of another number of layers, or fewer layers than stages.
    """
    count = num_layers(model)
    is_row = any(isinstance(cost, LayerCost) for cost in costs)
    rows = cast("Sequence[Sequence[LayerCost]]", [costs] * stages if is_row else costs)
    for row in rows:
        if len(row) != count:
            raise ValueError(
                f"split_layers: costs of the {count} layers of {type(model).__name__} expected, "
                f"got {len(row)}"
            )
    return partition([[cost.total for cost in row] for row in rows], stages)


def stage_costs(costs: Sequence[LayerCost], layers: Sequence[range]) -> list[LayerCost]:
    """The costs of stages, as the simulator takes them."""
    return [
        LayerCost(sum(costs[i].forward for i in part), sum(costs[i].backward for i in part))
        for part in layers
    ]


def estimate_costs(
    model: Model, inputs: Tensor, targets: Tensor | None = None, *, flops_per_byte: float = 0.0
) -> list[LayerCost]:
    """Operations of each layer, counted without computing or allocating.

    Our operators count as their specs say, others by torch's formulas (of matrix products and
    attention; what has no formula counts nothing).

    Args:
        inputs, targets: of one microbatch; only shape, dtype and device are looked at.
        flops_per_byte: what the device computes in the time in which it moves a byte. A call of one
            of our operators counts its operations or this times its bytes, whichever is more. With
            0 a decoder's norms and activations cost next to nothing.
    """
    costs = []
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with on_paper(model), fake as mode, torch.no_grad():
        x = mode.from_tensor(inputs)
        y = None if targets is None else mode.from_tensor(targets)
        for layer, is_last in _layers(model):
            params: dict[str, Tensor] = {
                n: mode.from_tensor(p) for n, p in layer.named_parameters()
            }
            arguments = (x, y) if is_last and y is not None else (x,)
            with _Count(flops_per_byte) as count:
                x = torch.func.functional_call(layer, params, arguments)
            costs.append(LayerCost(count.forward, count.backward))
    return costs


def weigh_costs(model: Model, num_tokens: int) -> list[LayerCost]:
    """Operations of each layer if its weights were all there is: two for each and token, and twice
    as many backward. Tables of which one row is read count like all others.

    Source: Kaplan et al. 2020, arXiv:2001.08361, section 2.1.
    """
    counts = [sum(p.numel() for p in layer.parameters()) for layer, _ in _layers(model)]
    return [LayerCost(2.0 * num_tokens * n, 4.0 * num_tokens * n) for n in counts]


def measure_costs(
    model: Model,
    inputs: Tensor,
    targets: Tensor | None = None,
    *,
    repeats: int = 3,
    synchronize: Callable[[], None] = lambda: None,
) -> list[LayerCost]:
    """Seconds of each layer on the device that the model is on; the shortest of a few runs.

    Gradients of the model are left as they were.

    Args:
        inputs, targets: one microbatch.
        repeats: runs that count, after one that does not.
        synchronize: waits for the device, like ``chip.synchronize``.
    """
    x, costs = inputs, []
    for layer, is_last in _layers(model):
        arguments = (targets,) if is_last and targets is not None else ()
        runs = []
        for _ in range(repeats + 1):
            x = x.detach().requires_grad_(x.is_floating_point())
            synchronize()
            start = time.perf_counter()
            output = layer(x, *arguments)
            synchronize()
            middle = time.perf_counter()
            wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
            if wanted:
                torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)
            synchronize()
            runs.append(LayerCost(middle - start, time.perf_counter() - middle))
        x = output.detach()
        costs.append(LayerCost(*(min(column) for column in zip(*runs[1:], strict=True))))
    return costs


def _layers(model: Model) -> list[tuple[nn.Module, bool]]:
    """Each layer as a stage of its own, and whether it is the last."""
    count = num_layers(model)
    return [(make_stage(model, range(i, i + 1)), i == count - 1) for i in range(count)]


class _Count(TorchDispatchMode):
    """Adds up what the operators that run within it cost."""

    def __init__(self, flops_per_byte: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops_per_byte = flops_per_byte
        self.forward = self.backward = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        packet = func._overloadpacket
        operator = _operators().get(packet._qualified_op_name)
        if operator is not None:
            spec = operator.spec
            tensors, attrs = _bind(operator.signature, args, kwargs)
            self.forward += self._of(spec.cost(*tensors, **attrs))
            if spec.backward_cost is not None:
                self.backward += self._of(spec.backward_cost(*tensors, **attrs))
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=results)
            self.forward += flops
            self.backward += 2 * flops  # a product's gradient is two products
        return results

    def _of(self, cost: Cost) -> float:
        return max(float(cost.flops), self.flops_per_byte * cost.nbytes)


def _operators() -> dict[str, Operator[..., Any]]:
    """The operators by the names under which torch sees their forward direction."""
    return {
        f"{operator.spec.namespace}::{name}{suffix}": operator
        for name, operator in registered().items()
        for suffix in ("", "_forward")
    }


def _bind(
    signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Tensors and attributes of a call that torch shows with all of them in a row."""
    count = len(signature.positional)
    tensors = [*args[:count], *[None] * (count - len(args))]  # what is None at the end is left out
    given = dict(zip(signature.attr_names, args[count:], strict=False))
    return tensors, {**dict(signature.attrs), **given, **kwargs}
