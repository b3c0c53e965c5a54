"""At which address do ranks listen, and what does rank 0 say that is not as it should be?"""

import socket

import pytest
from torch.distributed import HashStore

from anychip.comm import heartbeat, joining
from anychip.comm.joining import Launched, listening_address, loopback_store, rendezvous


@pytest.mark.parametrize(
    ("host", "interface", "is_one_machine", "expected"),
    [
        ("127.0.0.1", None, False, "127.0.0.1"), ("192.0.2.1", None, True, "127.0.0.1"),
        ("", None, False, "127.0.0.1"), ("192.0.2.1", "lo", True, "127.0.0.1"),
        ("192.0.2.1", "127.0.0.2", False, "127.0.0.2"), ("192.0.2.1", "::1", False, "::1"),
        ("127.0.0.3", None, False, "127.0.0.1"),
    ],
)  # fmt: skip
def test_address_is_the_chosen_ones_or_the_narrowest(
    host: str, interface: str | None, is_one_machine: bool, expected: str
) -> None:
    assert listening_address(host, 9, interface, is_one_machine=is_one_machine) == expected


def test_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"ANYCHIP_INTERFACE=eth77: .* there are .*lo"):
        listening_address("", 0, "eth77", is_one_machine=True)


def test_store_of_one_machine_listens_on_loopback_alone() -> None:
    store = loopback_store()
    other = "127.0.0.2"  # loopback as well: a store at all addresses would answer there
    socket.create_connection(("127.0.0.1", store.port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((other, store.port), timeout=5)


@pytest.mark.parametrize(("secret", "missing", "said"), [
    (b"", "", "unauthenticated"), (b"of sixteen letters", "it was not built", "not built"),
])  # fmt: skip
def test_what_is_missing_is_said_by_rank_0_alone(
    monkeypatch: pytest.MonkeyPatch, secret: bytes, missing: str, said: str
) -> None:
    monkeypatch.setattr(heartbeat, "load", lambda: (None, missing))
    monkeypatch.setattr(joining, "_store", lambda *place: HashStore())

    def meet(rank: int) -> None:
        place = Launched(rank, 2, "127.0.0.1", 1, False)
        settings = {
            "is_one_machine": True, "interface": None, "secret": secret, "flight_record": None,
            "host_transport": None,
        }  # fmt: skip
        rendezvous(lambda: place, timeout_s=1.0, **settings)

    with pytest.warns(RuntimeWarning, match=said) as warned:
        meet(0)
    assert len(warned) == 1
    meet(1)
