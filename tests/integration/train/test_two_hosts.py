"""``torchrun -m anychip train`` on two machines of two ranks: what it gives, and how it ends.

The machines are network namespaces; what they do not show is that they are of one kernel.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.integration import two_hosts
from tests.integration.train.forked import Server
from tests.integration.train.processes import is_running, num_rows, on_two_hosts, processes
from tests.integration.train.test_launched import ENDLESS
from tests.integration.train.test_ranks import SETTINGS, Trained, trained

pytestmark = pytest.mark.grid

PORTS = range(40_000, 41_000)
# Who listens at the interface of the default route, or at the one of the host's name, listens at
# another one than the cable; and the kernel has few ports to give away.
MACHINE = f"""
ip link add other type veth peer name end && ip address add 10.79.0.1$RANK/24 dev other &&
ip link set other up && ip link set end up && ip route add default dev other &&
echo {PORTS[0]} {PORTS[-1]} >/proc/sys/net/ipv4/ip_local_port_range || exit 1
"""
# The hosts' names lead nowhere here, so that the addresses are named.
RENDEZVOUS = {
    "static": "--rdzv-backend static --node-rank $RANK --master-addr $MASTER_ADDR"
    " --master-port $MASTER_PORT",
    "c10d": "--rdzv-backend c10d --rdzv-id job --rdzv-endpoint $MASTER_ADDR:$MASTER_PORT"
    " --rdzv-conf is_host=$((1 - RANK)) --local-addr 10.78.0.$((RANK + 1))",
}
NETEM = "tc qdisc add dev eth0 root netem delay 5ms 1ms loss 1% || exit 1\n"


def on_hosts(
    rendezvous: str, *settings: str, cwd: Path, machine: str = MACHINE
) -> AbstractContextManager[subprocess.Popen[str]]:
    """A run on both hosts."""
    torchrun = f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 2"
    words = "-m anychip train --out out --backend cpu"
    script = f'{machine} exec {torchrun} {RENDEZVOUS[rendezvous]} {words} "$@"'
    secret = {"ANYCHIP_SECRET": "of the two hosts"}
    return on_two_hosts(1, "sh", "-c", script, "sh", *settings, cwd=cwd, **secret)


def has_netem() -> bool:
    prefix = two_hosts.prefix() or []
    tried = subprocess.run(
        [*prefix, "sh", "-c", NETEM.replace("eth0", "lo")], capture_output=True, check=False
    )
    return tried.returncode == 0


@pytest.mark.parametrize(("rendezvous", "stage", "machine"), [
    pytest.param("static", 0, MACHINE, id="static-stage_0"),
    pytest.param("c10d", 3, MACHINE, id="c10d-stage_3"),
    pytest.param("static", 3, NETEM, id="delays_and_losses"),
])  # fmt: skip
def test_two_hosts_of_two_ranks_equal_one_host_of_four(
    ranks: Server, tmp_path: Path, rendezvous: str, stage: int, machine: str
) -> None:
    if machine is NETEM and not has_netem():
        pytest.skip("not run: this kernel, or this system without tc, has no netem")
    settings = (f"optimizer.stage={stage}",)
    with on_hosts(rendezvous, *SETTINGS, *settings, cwd=tmp_path, machine=machine) as job:
        _, errors = job.communicate(timeout=250)
    assert job.returncode == 0, errors
    wanted = trained(ranks, tmp_path, *settings, world_size=4, out="one")
    Trained(tmp_path / "out").assert_same(wanted)


def ranks_of(job: subprocess.Popen[str]) -> dict[int, int]:
    """The process of each rank."""
    found = {}
    for pid in processes(job.pid):
        settings = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if b"TORCHELASTIC_USE_AGENT_STORE=True" in settings:
            found |= {int(text[5:]): pid for text in settings if text.startswith(b"RANK=")}
    return found


SILENCE = (
    "ranks 2, 3 have not been heard of for 4 s: their processes are stopped, or their machine,"
    " 10.78.0.2, is out of reach",
    "rank 0 has not been heard of for 4 s: its process is stopped, or its machine, 10.78.0.1,"
    " is out of reach",
)


@pytest.mark.parametrize("rendezvous", RENDEZVOUS)
def test_a_cut_cable_ends_the_ranks_of_both_hosts_which_name_the_others(
    tmp_path: Path, rendezvous: str
) -> None:
    settings = (*ENDLESS, "run.heartbeat_s=4", "optimizer.stage=2")
    with on_hosts(rendezvous, *settings, cwd=tmp_path) as job:
        while num_rows(tmp_path / "out") < 25:
            assert job.poll() is None, job.communicate()[1]
            time.sleep(0.05)
        pids = ranks_of(job)
        assert sorted(pids) == [0, 1, 2, 3]
        for rank, pid in pids.items():
            places = two_hosts.listeners(pid, own=True)
            assert places
            assert {address for address, _ in places} == {two_hosts.HOSTS[rank // 2]}
            assert all(port in PORTS for _, port in places)
        job.send_signal(signal.SIGUSR1)
        while any(map(is_running, pids.values())):
            time.sleep(0.05)
        if rendezvous == "c10d":
            # torch's launcher asks a store that is out of reach, as long as the kernel lets it.
            for pid in processes(job.pid)[1:]:
                os.kill(pid, signal.SIGKILL)
        _, errors = job.communicate(timeout=100)
    if rendezvous == "static":
        assert job.returncode == 1
    said = re.findall(r"^anychip: data, rank (\d) of 4: [^:]*: (.*)$", errors, re.MULTILINE)
    assert {int(rank) // 2 for rank, _ in said} == {0, 1}, errors
    assert all(reason == SILENCE[int(rank) // 2] for rank, reason in said), said
