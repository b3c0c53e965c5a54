"""How are the ranks of a job arranged? A mesh: a grid with named axes, and a group along each.

``Mesh(comm, {"data": 2, "pipeline": 2})`` gives rank ``data * 2 + pipeline``: the **last axis
varies fastest**, as in torch.distributed's DeviceMesh, so that ranks which talk most (the last
axis) are neighbours, on one machine when machines are filled in order.
"""

import difflib
import math
from collections.abc import Mapping

from anychip.comm import alone
from anychip.contract import Communicator


class Mesh:
    """A grid of ranks. Every rank of ``comm`` makes it, with the same sizes: splitting is a call.

    Args:
        comm: all ranks of the grid.
        sizes: axis name to number of ranks along it, slowest axis first. They multiply to
            ``comm.world_size``.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks; the message says what would.

    Attributes:
        comm: as given.
        sizes: as given.
        coordinates: axis name to this rank's place along it.
    """

    def __init__(self, comm: Communicator, sizes: Mapping[str, int]) -> None:
        self.comm, self.sizes = comm, dict(sizes)
        _check(self.sizes, comm.world_size)
        self.coordinates = coordinates(self.sizes, comm.rank)
        self._groups: dict[tuple[str, ...], Communicator] = {
            (name,): self._split(name) for name in self.sizes
        }

    def __repr__(self) -> str:
        places = ", ".join(f"{n} {self.coordinates[n]} of {s}" for n, s in self.sizes.items())
        return f"Mesh(rank {self.comm.rank}: {places})"

    def axis(self, *names: str) -> Communicator:
        """The ranks that differ from this one along these axes only, in the order of the mesh.

        Several axes are merged into one group, like the replicas of weights that neither ``data``
        nor ``context`` cuts. It is made when it is first asked for, by all ranks of the mesh, and
        the same afterwards, whatever the order of the names.

        Raises:
            ValueError: no axis, or one that the mesh does not have.
        """
        for name in names:
            if name not in self.sizes:
                near = difflib.get_close_matches(name, self.sizes, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(self.sizes)}"
                raise ValueError(f"mesh: no axis is named {name!r}; {hint}")
        if not names:
            raise ValueError(f"mesh: at least one axis expected; it has {', '.join(self.sizes)}")
        merged = tuple(name for name in self.sizes if name in names)
        if merged not in self._groups:
            self._groups[merged] = self._split(*merged)
        return self._groups[merged]

    def _split(self, *names: str) -> Communicator:
        name = " x ".join(names)
        if math.prod(self.sizes[name] for name in names) == 1:
            rank = self.comm.ranks[self.comm.rank]
            return alone(name=name, world_rank=rank, device=self.comm.device)
        return self.comm.split(groups(self.sizes, *names), name=name)


def coordinates(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Axis name to the place of a rank along it; the last axis varies fastest."""
    places: dict[str, int] = {}
    for name in reversed(list(sizes)):
        rank, places[name] = divmod(rank, sizes[name])
    return {name: places[name] for name in sizes}


def groups(sizes: Mapping[str, int], *names: str) -> list[list[int]]:
    """The groups of ranks that differ along some axes only; each rank is in exactly one, in order.

    Ranks of the merged last axes are neighbours, so that sums over them and then over the others
    have the bits of one sum over all (docs/communication.md).
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes.values())):
        places = coordinates(sizes, rank)
        elsewhere = tuple(place for name, place in places.items() if name not in names)
        found.setdefault(elsewhere, []).append(rank)
    return list(found.values())


def _check(sizes: Mapping[str, int], world_size: int) -> None:
    if not sizes:
        raise ValueError('mesh: at least one axis expected, like {"data": 2}; got none')
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"mesh: the size of axis {name!r} must be at least 1, got {size!r}")
    product = math.prod(sizes.values())
    if product == world_size:
        return
    fitting = []
    for name, size in sizes.items():
        rest = product // size
        if world_size % rest == 0:
            fitting.append(f"{name} = {world_size // rest}")
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    advice = f"start {product} ranks" + "".join(f", or write {change}" for change in fitting)
    text = " x ".join(f"{name} {size}" for name, size in sizes.items())
    raise ValueError(f"mesh: {text} = {product} ranks, and this job has {ranks}; {advice}")
