"""How many bytes of a call go over the wire, by the algorithms of the process communicator.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005, section 3, for the bounds; these algorithms reach them from 64 KiB on.
"""

from fractions import Fraction

SMALL_NBYTES = 64 * 1024
"""Up to this payload all_reduce sends everything to everybody, which saves one step of two."""


def wire_nbytes(call: str, nbytes: int, world_size: int) -> Fraction:
    """Bytes that a rank sends in one call, on average over the ranks, without headers.

    Args:
        call: one of :data:`~anychip.contract.CALLS`.
        nbytes: payload, as :class:`~anychip.contract.Traffic` counts it.
        world_size: ranks in the group.

    Raises:
        ValueError: there is no such call.
    """
    others = world_size - 1
    share = Fraction(others, world_size) * nbytes
    if call == "all_reduce":
        return Fraction(others * nbytes) if nbytes <= SMALL_NBYTES else 2 * share
    if call in ("all_gather", "reduce_scatter", "broadcast", "all_to_all"):
        return share
    if call == "send":
        return Fraction(nbytes)
    if call in ("recv", "barrier"):
        return Fraction(0)
    raise ValueError(f"there is no call {call!r}")
