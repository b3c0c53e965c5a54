"""Which transport does a chip get, of the table?"""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

import anychip.registry  # noqa: F401 - which puts comm into backends
from anychip.comm import world
from anychip.comm.job import Job
from anychip.comm.staged import Staged
from anychip.contract import Backend, OperatorTable, Probe
from anychip_cpu.backend import CpuBackend


class Acme(Backend):
    name = device_type = "acme"
    api, operators = (2, 0), OperatorTable()

    def probe(self) -> Probe:
        return Probe.ready(1)


class Asked:
    """A job that says what it was asked for; like a job's, gloo's library is the host's."""

    rank, world, world_size = 0, "everyone", 1

    def __init__(self) -> None:
        self.store = HashStore()

    def host(self, group: str, device: str | None = None) -> Any:
        found: Any = SimpleNamespace(made=f"host of {group}", capabilities=None, num_tags=7,
                                     reduces_on_host=True, description="by gloo")  # fmt: skip
        return found if device is None else Staged(found, device)

    def library(self, name: str, device: str, **wishes: Any) -> Any:
        return Job.library(self, name, device) if name == "gloo" else (name, device)  # type: ignore[arg-type]


def transport(chip: Backend) -> Any:
    job: Any = Asked()
    return world.transport_of(chip, job)


def test_chip_with_a_library_gets_it() -> None:
    chip = Acme()
    chip.c10d_backend = "accl"
    assert transport(chip) == ("accl", "acme")


def test_host_gets_messages_between_hosts() -> None:
    assert transport(CpuBackend()).made == "host of everyone"


@pytest.mark.parametrize("named", [None, "gloo"])
def test_chip_without_a_library_goes_through_the_host_and_says_so(named: str | None) -> None:
    chip = Acme()
    chip.c10d_backend = named
    with pytest.warns(RuntimeWarning, match="'acme' has no collectives of its own"):
        staged = transport(chip)
    assert (staged.device, staged.num_tags) == ("acme", 7)
    assert staged.description == "acme tensors staged through the host; by gloo"


def test_ranks_with_different_chips_go_through_the_host() -> None:
    """Also the chip that has a library, which the others have not."""
    chip, job = Acme(), Asked()
    chip.c10d_backend, job.world_size = "accl", 2
    job.store.set("device types/1", "cpu")
    staged: Any = world.transport_of(chip, job)  # type: ignore[arg-type]
    assert (staged.device, staged._host.made) == ("acme", "host of everyone")
    job.store.set("device types/1", "acme")
    assert world.transport_of(chip, job) == ("accl", "acme")  # type: ignore[arg-type]


def test_chip_may_bring_a_transport() -> None:
    class Own(Acme):
        def transport(self, job: Any) -> Any:
            return f"own, rank {job.rank}"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert transport(Own()) == "own, rank 0"


@pytest.mark.parametrize("wrong", [{"timeout_s": 0}, {"heartbeat_s": -1.0}, {"check": "never"}])
def test_setting_without_a_meaning_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CpuBackend().communicator(**wrong)
