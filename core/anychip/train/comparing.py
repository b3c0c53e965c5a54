"""Does this chip compute what another one does? Each operator of a run again, on the same inputs.

``anychip train --compare NAME``. A mode of torch's dispatcher sees every call of a step: anychip's
operators whole, in both directions, since they take door 1 under a mode, and those of torch that
are outside of them. Inputs are copied before the call, which may write them; what both chips give
is compared within

    2 ulp(want) + 2 (c + n) u max|want|

u is 2^-24, of float64 2^-53; c and n are the roundings and the length that the operator's bound
states, for torch's 4 and 1; n is at least the length of the sum that the shapes imply: elements of
the largest input per element of the result, of a product the common dim. Integers, truth values and
results of random operators are equal; random operators of torch, whose generators are each chip's
own, are left out and counted, and so is what the other chip does not have.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import flop_registry

from anychip import registry, runtime
from anychip.contract import HOST, AnychipError, Backend
from anychip.dispatch.operator import Operator, registered
from anychip.train.run import Run

_ROUNDINGS = 4.0
_UNDEFINED = ("empty", "new_empty", "resize", "set_", "record_stream")
"""Beginnings of names of torch's operators whose results have no defined values, or none."""


class DifferenceError(AnychipError, RuntimeError):
    """Two chips give different results for one call."""


class Compared(NamedTuple):
    """Calls of one operator: how many, and the largest error in units of its bound."""

    calls: int
    worst: float


class Comparison(TorchDispatchMode):
    """Within it, calls on one chip are made on another one too.

    Args:
        chip: the one in use.
        other: another one, whose tensors this process can have too.
        file: gets the inputs of the first call that differs.
        step: the number of the step, for messages.

    Raises:
        DifferenceError: by the call itself; nothing is done after it.
        ValueError: both have the same type of device.
    """

    def __init__(self, chip: Backend, other: Backend, file: Path, step: Callable[[], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if chip.device_type == other.device_type:
            raise ValueError(
                f"--compare {other.name}: the run is on {chip.name}, whose tensors are on "
                f"{chip.device_type!r} too; name a backend with other devices"
            )
        self.chip, self.other, self.file, self.step = chip, other, file, step
        self.operators: dict[str, Compared] = {}
        self.left_out: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._concerns(func, args, kwargs):
            return func(*args, **kwargs)
        with torch.no_grad():
            copies = self._moved((args, kwargs), self.other.device())
            before = self._moved((args, kwargs), torch.device(HOST))
            got = func(*args, **kwargs)
            try:
                want = func(*copies[0], **copies[1])
            except (RuntimeError, ValueError) as error:
                reason = str(error).partition("\n")[0][:120]
                self.left_out[f"{func} on {self.other.name}: {reason}"] += 1
                return got
            infos = [argument.alias_info for argument in func._schema.arguments]
            written = [i for i, info in enumerate(infos) if info is not None and info.is_write]
            changed = [(args[i], copies[0][i]) for i in written if i < len(args)]
            found = tree_flatten([got, [a for a, _ in changed]])[0]
            self._compare(func, before, found, tree_flatten([want, [b for _, b in changed]])[0])
        return got

    def _concerns(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a call computes something on the chip."""
        name, leaves = func._schema.name.partition("::")[2], tree_flatten((args, kwargs))[0]
        here = self.chip.device_type
        if not any(_type_of(leaf) == here for leaf in leaves) or name.startswith(_UNDEFINED):
            return False
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.left_out[f"{func}: random"] += 1
            return False
        is_view = all(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        return not (is_view and func._schema.returns)

    def _moved(self, tree: Any, device: torch.device) -> Any:
        """Tensors of the chip, and the chip itself where it is named, elsewhere; each once."""
        done: dict[int, Tensor] = {}

        def move(leaf: Any) -> Any:
            if _type_of(leaf) != self.chip.device_type:
                return leaf
            if isinstance(leaf, torch.device):
                return device
            if id(leaf) not in done:
                done[id(leaf)] = leaf.detach().to(device, copy=True)
            return done[id(leaf)]

        return tree_map(move, tree)

    def _compare(self, func: Any, before: Any, found: list[Any], wanted: list[Any]) -> None:
        name = func._schema.name
        roundings, length = _stated(func, before[0])
        worst = 0.0
        for number, (got, want) in enumerate(zip(found, wanted, strict=True)):
            if got is None and want is None:
                continue
            got, want = torch.as_tensor(got), torch.as_tensor(want)
            n = max(length, _length(func, before, want))
            errors = _errors(runtime.on_host(got), runtime.on_host(want), roundings + n)
            largest = float(errors.max()) if errors.numel() else 0.0
            worst = max(worst, largest)
            if largest > 1.0:
                raise DifferenceError(self._told(func, before, number, got, want, errors))
        known = self.operators.get(name, Compared(0, 0.0))
        self.operators[name] = Compared(known.calls + 1, max(known.worst, worst))

    def _told(
        self, func: Any, before: Any, number: int, got: Tensor, want: Tensor, errors: Tensor
    ) -> str:
        """What differs, where, and how to see it again."""
        torch.save({"operator": str(func), "args": before[0], "kwargs": before[1]}, self.file)
        first = int((errors.reshape(-1) > 1.0).nonzero()[0])
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), errors.shape))
        mine, other = (float(runtime.on_host(t).reshape(-1)[first]) for t in (got, want))
        apart = ""
        if got.is_floating_point() and math.isfinite(mine - other):
            ulp = torch.finfo(got.dtype).eps * 2.0 ** math.floor(math.log2(abs(other) or 1e-38))
            apart = f", {abs(mine - other) / ulp:.3g} ULP of {got.dtype}"
        names = [a.name for a in func._schema.arguments]
        call = ", ".join(
            f"{key}={_form(value)}"
            for key, value in [*zip(names, before[0], strict=False), *before[1].items()]
        )
        again = f"{Path(sys.executable).name} -m anychip.train.comparing {self.file}"
        return (
            f"step {self.step()}: {func}({call}) differs on {self.chip.name} from "
            f"{self.other.name}\n  result {number} at {index}: got {mine!r}, want {other!r}"
            f"{apart}; "
            f"{float(errors.max()):.3g} times the bound, {int((errors > 1.0).sum())} of "
            f"{errors.numel()} elements\n  its inputs: {self.file}; again: {again} "
            f"{registry.name_of(self.chip)} {registry.name_of(self.other)}"
        )

    def to_json(self) -> dict[str, Any]:
        """``backend``, ``operators`` with ``calls`` and ``worst``, and ``left_out`` with counts."""
        operators = {name: found._asdict() for name, found in sorted(self.operators.items())}
        left_out = dict(sorted(self.left_out.items()))
        return {"backend": self.other.name, "operators": operators, "left_out": left_out}

    def __str__(self) -> str:
        calls = sum(found.calls for found in self.operators.values())
        lines = [
            f"{calls} calls of {len(self.operators)} operators agree with {self.other.name}; "
            "calls, and the largest error in units of the bound:",
            *(f"  {n}  {f.calls}  {f.worst:.2g}" for n, f in sorted(self.operators.items())),
            *(f"  left out: {what}, {n} times" for what, n in sorted(self.left_out.items())),
        ]
        return "\n".join(lines)


@contextmanager
def compared(chip: Backend, name: str, run: Run | None, out: Path) -> Iterator[Comparison]:
    """Context in which the operators of a chip are compared with those of another backend.

    Args:
        run: whose step is named; None: there is none.
        out: directory for ``difference.pt``, of rank r above 0 ``difference<r>.pt``.

    Raises:
        UnknownBackendError, BackendUnavailableError: the other one is not there, or not beside
            this one in one process.
        ValueError, DifferenceError: as :class:`Comparison`.
    """
    step = (lambda: run.step + 1) if run is not None else (lambda: 0)
    file = out / f"difference{(run.comm.rank if run is not None else 0) or ''}.pt"
    with Comparison(chip, registry.choose(name), file, step) as comparison:
        yield comparison


def _type_of(leaf: Any) -> str | None:
    if isinstance(leaf, torch.device):
        return leaf.type
    return leaf.device.type if isinstance(leaf, Tensor) else None


def _operator_of(func: Any) -> tuple[Operator[..., Any], bool] | None:
    """anychip's operator, and whether it is the backward; None: it is torch's."""
    namespace, _, name = func._schema.name.partition("::")
    for ending in ("_backward", "_forward", ""):
        operator = registered().get(name.removesuffix(ending)) if name.endswith(ending) else None
        if operator is not None and operator.spec.namespace == namespace:
            return operator, ending == "_backward"
    return None


def _stated(func: Any, args: tuple[Any, ...]) -> tuple[float, float]:
    """Roundings and length by the operator's bound; a backward's length is that of its shapes."""
    known = _operator_of(func)
    if known is None:
        return _ROUNDINGS, 1.0
    operator, is_backward = known
    bound = operator.spec.bound
    if is_backward:
        return bound.backward, 1.0
    count = len(operator.signature.positional)
    attrs = dict(operator.signature.attrs)
    attrs |= dict(zip(operator.signature.attr_names, args[count:], strict=False))
    return bound.forward, float(bound.length(*args[:count], **attrs))


def _length(func: Any, before: Any, want: Tensor) -> float:
    sizes = sorted(leaf.numel() for leaf in tree_flatten(before)[0] if isinstance(leaf, Tensor))
    per_result = max(want.numel(), 1)
    if func._overloadpacket in flop_registry or _operator_of(func) is not None:
        # Of a product (m, k) x (k, n) this is k.
        return math.sqrt(math.prod(sizes[-2:]) / per_result) if len(sizes) > 1 else 1.0
    return max(1.0, sizes[-1] / per_result) if sizes else 1.0


def _errors(got: Tensor, want: Tensor, roundings: float) -> Tensor:
    """Of each element, in units of the bound; infinite where anything else differs."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return torch.full((1,), math.inf)
    if not got.is_floating_point():
        return torch.where(got == want, 0.0, math.inf)
    unit = 2.0**-53 if want.dtype == torch.float64 else 2.0**-24
    a, b = got.double(), want.double()
    finite = b.isfinite()
    largest = b[finite].abs().max() if bool(finite.any()) else b.new_zeros(())
    bound = 2 * torch.finfo(want.dtype).eps * b.abs() + 2 * roundings * unit * largest
    bound += torch.finfo(want.dtype).tiny
    errors = (a - b).abs() / bound
    alike = (a == b) | (a.isnan() & b.isnan())
    return torch.where(alike, 0.0, errors.nan_to_num(math.inf, math.inf))


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"[{', '.join(map(_form, value))}]" if isinstance(value, (list, tuple)) else repr(value)


def again(file: Path, name: str, other: str) -> None:
    """Makes the call of a ``difference.pt`` on both chips once more.

    Raises:
        DifferenceError: they differ.
    """
    saved = torch.load(file, weights_only=True)
    chip = runtime.use(name)
    namespace, packet, overload = saved["operator"].split(".")
    func = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    with compared(chip, other, None, file.parent) as comparison:
        place = chip.device()
        args, kwargs = tree_map(
            lambda leaf: leaf.to(place) if isinstance(leaf, Tensor) else leaf,
            (saved["args"], saved["kwargs"]),
        )
        func(*args, **kwargs)
    print(comparison)


if __name__ == "__main__":
    try:
        again(Path(sys.argv[1]), *sys.argv[2:4])
    except DifferenceError as difference:
        sys.exit(f"{difference}")
