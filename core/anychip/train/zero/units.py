"""Which parameters are gathered together? Those of a unit: a block of a model, or what is left.

A unit is one or several modules whose use brings all their weights; when it is over, the weights go
again. The *root* is the model itself, with the parameters that are in no other unit: it is whole
from the beginning of forward to the end of backward. Where several modules are called by themselves
in place of the model, like the stages of a pipeline's rank, each is the root of its own units.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from anychip.train.zero.weights import FlatWeights

Policy = str | int | Sequence[str | Sequence[str]]
"""``"blocks"``: each member of the model's lists of modules. A number: modules of at most so many
bytes of parameters, as large as can be. Or paths of modules, several together for one unit."""


Init = Callable[[nn.Module], object]
"""Writes the first values of a module's own parameters and buffers."""


@dataclass(eq=False)
class Unit:
    """Modules that are gathered together.

    Attributes:
        name: path of its first module; empty for the root.
        modules: whose forward needs the weights.
        weights: its buffers: one dtype each, trained or frozen.
        trained: the parameters that may get a gradient.
        arrived: those that have got theirs in this backward.
        uses: of its modules, whose output has its gradient in this backward, and whose inputs have
            not yet: numbers.
        ahead: uses that a backward has not gone past: numbers.
    """

    name: str
    modules: tuple[nn.Module, ...]
    weights: list[FlatWeights] = field(default_factory=list)
    trained: frozenset[Tensor] = frozenset()
    arrived: set[Tensor] = field(default_factory=set)
    uses: set[int] = field(default_factory=set)
    ahead: set[int] = field(default_factory=set)

    @property
    def is_root(self) -> bool:
        """It is whole from forward's beginning to backward's end."""
        return not self.name

    @property
    def nbytes(self) -> int:
        """Of its weights, when they are whole."""
        return sum(weights.nbytes for weights in self.weights)

    def gather(self, *, exact: bool = False) -> None:
        """Begins to bring its weights."""
        for weights in self.weights:
            weights.gather(exact=exact)

    def wait(self) -> None:
        """Returns when work queued on the current stream may read them."""
        for weights in self.weights:
            weights.wait()

    def release(self) -> None:
        """Gives their memory back."""
        for weights in self.weights:
            weights.release()


def divide(model: nn.Module, policy: Policy, roots: Sequence[nn.Module] = ()) -> list[Unit]:
    """The units of a model, in its order, the root last; of several roots, one after the other.

    They have no weights yet.

    Raises:
        ValueError: a path that the model does not have, twice, or inside another one; or a policy
            that is none.
    """
    if roots:
        found = [unit for root in roots for unit in divide(root, _within(root, policy))]
        if len(found) < len(roots) + (0 if isinstance(policy, (str, int)) else len(policy)):
            raise ValueError(f"units: paths expected that one of the roots has, got {policy!r}")
        return found
    paths = [_paths_of(entry) for entry in _entries(model, policy)]
    _check(model, list(itertools.chain.from_iterable(paths)))
    units = [Unit(names[0], tuple(map(model.get_submodule, names))) for names in paths]
    return [*units, Unit("", (model,))]


def _within(root: nn.Module, policy: Policy) -> Policy:
    if isinstance(policy, (str, int)):
        return policy
    known = dict(root.named_modules()).keys()
    return [entry for entry in policy if known >= set(_paths_of(entry))]


def own_parameters(model: nn.Module, units: Sequence[Unit]) -> list[dict[str, nn.Parameter]]:
    """Of each unit, its parameters by their first name in the model.

    A parameter of several units belongs to the root, which is whole whenever one of them is used.

    Raises:
        ValueError: a parameter that no root has, or several.
    """
    holders: dict[nn.Parameter, list[int]] = {}
    for number, unit in enumerate(units):
        for param in _unique(p for module in unit.modules for p in module.parameters()):
            if not unit.is_root:
                holders.setdefault(param, []).append(number)
    found: list[dict[str, nn.Parameter]] = [{} for _ in units]
    names = {param: name for name, param in model.named_parameters()}
    for number, unit in enumerate(units):
        for param in unit.modules[0].parameters() if unit.is_root else ():
            mine = holders.get(param, [])
            if param not in names:
                raise ValueError(f"roots: a parameter of {tuple(param.shape)} is in two of them")
            found[mine[0] if len(mine) == 1 else number][names.pop(param)] = param
    if names:
        raise ValueError(f"roots: {', '.join(names.values())} are in none of them")
    return found


def materialise(
    unit: Unit, params: Mapping[str, nn.Parameter], device: str, init: Init | None
) -> None:
    """Gives the parameters of a unit that are on the meta device memory, and first values.

    They stay the same objects. Buffers of their modules come with them.

    Args:
        params: that the unit owns.
        init: is called with each module that has some of them itself; None: its
            ``reset_parameters()``.

    Raises:
        ValueError: a module has no ``reset_parameters()``, and there is no ``init``.
    """
    owned = {param for param in params.values() if param.is_meta}
    for module in dict.fromkeys(m for outer in unit.modules for m in outer.modules()):
        mine = [p for p in module.parameters(recurse=False) if p in owned and p.is_meta]
        reset = init or getattr(type(module), "reset_parameters", None)
        if mine and reset is None:
            raise ValueError(
                f"{type(module).__name__} is on the meta device and has no reset_parameters(); say "
                "what its first values are: zero.Optimizer(..., init=lambda module: ...)"
            )
        for param in mine:
            real = torch.empty_like(param, device=device)
            torch.utils.swap_tensors(param, nn.Parameter(real, param.requires_grad))
        for name, buffer in module.named_buffers(recurse=False) if mine else ():
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=device))
        if mine and reset is not None:
            with torch.no_grad():
                reset(module)


def _unique(params: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
    yield from dict.fromkeys(params)


def _entries(model: nn.Module, policy: Policy) -> Sequence[str | Sequence[str]]:
    if isinstance(policy, str):
        if policy != "blocks":
            raise ValueError(f"units: 'blocks', a size in bytes or paths expected, got {policy!r}")
        return _blocks(model)
    if isinstance(policy, int):
        if policy < 1:
            raise ValueError(f"units: at least 1 byte expected, got {policy}")
        return [path for path in _by_size(model, "", policy) if path]
    return policy


def _blocks(model: nn.Module) -> list[str]:
    """The members of its lists of modules, the outermost ones."""
    lists = [path for path, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    prefixes = [f"{path}." if path else "" for path in lists]
    outer = [p for p in prefixes if not any(p != o and p.startswith(o) for o in prefixes)]
    return [
        f"{prefix}{name}"
        for prefix in outer
        for name, member in model.get_submodule(prefix.removesuffix(".")).named_children()
        if any(True for _ in member.parameters())
    ]


def _by_size(module: nn.Module, path: str, max_nbytes: int) -> list[str]:
    """The largest modules that are not larger, below one that is."""
    nbytes = sum(param.nbytes for param in module.parameters())
    if nbytes <= max_nbytes and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [path] if nbytes else []
    inner = f"{path}." if path else ""
    children = list(module.named_children())
    found = [_by_size(child, f"{inner}{name}", max_nbytes) for name, child in children]
    return list(itertools.chain.from_iterable(found))


def _paths_of(entry: str | Sequence[str]) -> list[str]:
    return [entry] if isinstance(entry, str) else list(entry)


def _check(model: nn.Module, paths: Sequence[str]) -> None:
    known = dict(model.named_modules())
    for path in paths:
        if not path or path not in known:
            raise ValueError(f"units: {type(model).__name__} has no module {path!r}")
        if isinstance(known[path], (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(f"units: {path} is a list of modules, which nobody calls; name them")
        if paths.count(path) > 1:
            raise ValueError(f"units: {path} is named twice")
        outer = [other for other in paths if path.startswith(f"{other}.")]
        if outer:
            raise ValueError(f"units: {path} is inside {outer[0]}, which is a unit")
