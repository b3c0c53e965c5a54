"""Do the bytes that we say a call sends pass through the kernel's network interface?"""

import pytest

from anychip.comm import wire_nbytes
from tests.integration.collectives.processes import Server

NBYTES = 4 * 2**20
CALLS = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send"]


@pytest.mark.grid
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("call", CALLS)
def test_loopback_counter_sees_the_bytes_that_are_promised(
    quiet_network: Server, call: str, world_size: int
) -> None:
    outcomes = quiet_network.run("bytes_on_loopback", world_size, call=call, nbytes=NBYTES)
    assert [outcome.error for outcome in outcomes] == [""] * world_size
    seen, counted = outcomes[0].value
    assert counted == NBYTES
    expected = float(wire_nbytes(call, NBYTES, world_size) * world_size)
    # Above it are the headers of packets, acknowledgements, gloo's own and two barriers.
    assert expected <= min(seen) <= 1.02 * expected
