"""Can bytes that arrive from a socket or a file run code? Every way in is walked with a payload."""

import ast
import contextlib
import hashlib
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anychip.comm import alone, frames, gather_objects
from anychip.comm.joining import LOOPBACK
from anychip.comm.ledger import Ledger
from anychip.comm.liveness import Liveness
from anychip.comm.meeting import meet
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator, Membership
from anychip.registry import probe_cache, probing
from anychip.train import checkpoint, config, data, optim, parallel, zero
from anychip.train.checkpoint import dcp
from anychip_cpu.backend import CpuBackend

ROOT = Path(__file__).parents[3]
ALLOWED = {"core/anychip/train/checkpoint/dcp.py": {"pickle"}}  # names what may be built
UNPICKLERS = {"cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "pickle", "shelve"}


class Payload:
    """Makes a file where it is unpickled."""

    def __init__(self, planted: Path) -> None:
        self.planted = planted

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.planted}",))


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_checkpoint(version: int) -> Callable[[bytes, Path], None]:
    def arrive(sent: bytes, folder: Path) -> None:
        (folder / "checkpoint").mkdir()
        digest = hashlib.sha256(sent).hexdigest()
        entries = {}
        for part in checkpoint.PARTS:
            name = f"{part}-{digest[:16]}.pt"
            (folder / "checkpoint" / name).write_bytes(sent)
            entries[part] = {"name": name, "nbytes": len(sent), "sha256": digest}
        about = {"format": checkpoint.FORMAT, "version": version, "anychip": "0", "step": 1}
        if version == checkpoint.WHOLE_TENSORS:
            about["files"] = entries
        else:
            about |= {"progress": entries["progress"], "files": {}, "tensors": {}}
        (folder / "checkpoint" / "manifest.json").write_text(json.dumps(about))
        model = torch.nn.Linear(2, 2)
        checkpoint.resume(folder, model=model, optimizer=torch.optim.SGD(model.parameters()))

    return arrive


def from_tensors(sent: bytes, folder: Path) -> None:
    """The file of tensors is the bytes, and the manifest's hashes are theirs."""
    model = torch.nn.Linear(2, 2)
    opt = zero.Optimizer(model, optim.adamw(0.1), alone())
    path = checkpoint.save(folder, step=1, model=model, optimizer=opt) / "manifest.json"
    manifest = json.loads(path.read_text())
    ((name, entry),) = manifest["files"].items()
    (path.parent / name).write_bytes(sent)
    entry["nbytes"] = len(sent)
    entry["header_sha256"] = hashlib.sha256(sent[: entry["header_nbytes"]]).hexdigest()
    for box in (box for tensor in manifest["tensors"].values() for box in tensor["boxes"]):
        box["offset"] = 0
        box["sha256"] = hashlib.sha256(sent[: box["nbytes"]]).hexdigest()
    path.write_text(json.dumps(manifest))
    checkpoint.resume(folder, model=model, optimizer=opt)
    raise ValueError("they count as numbers")


def from_dcp(sent: bytes, folder: Path) -> None:
    (folder / ".metadata").write_bytes(sent)
    model = torch.nn.Linear(2, 2)
    dcp.load(folder, model=model, optimizer=zero.Optimizer(model, optim.adamw(0.1), alone()))


def from_file(read: Callable[[Path], Any], suffix: str) -> Callable[[bytes, Path], None]:
    def arrive(sent: bytes, folder: Path) -> None:
        (folder / f"file{suffix}").write_bytes(sent)
        read(folder / f"file{suffix}")

    return arrive


def from_store(ask: Callable[[Any], Any]) -> Callable[[bytes, Path], None]:
    """Whatever is asked for is in the store already, by somebody else."""

    def arrive(sent: bytes, folder: Path) -> None:
        answers = SimpleNamespace(
            get=lambda key: sent, set=lambda key, value: None,
            compare_set=lambda key, before, after: sent, multi_get=lambda keys: [sent] * len(keys),
            wait=lambda keys, limit: None, check=lambda keys: True, add=lambda key, value: 1,
        )  # fmt: skip
        ask(answers)

    return arrive


def from_probe_child(sent: bytes, folder: Path) -> None:
    child = probing._Child.__new__(probing._Child)
    child.answer_file = folder / "answer"
    child.answer_file.write_bytes(sent)
    child.answer(1.0)


def from_probe_cache(sent: bytes, folder: Path) -> None:
    (folder / "probes.json").write_bytes(sent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANYCHIP_CACHE_DIR", str(folder))
        assert probe_cache.read() == {}
    raise ValueError("it counts as empty")


def from_rank(sent: bytes, folder: Path) -> None:
    class Sent:
        def __reduce__(self) -> Any:
            return Payload(folder / "planted").__reduce__()

    def work(comm: Communicator) -> None:
        gather_objects(comm, Sent() if comm.rank else 1)

    run_ranks(2, work)


def from_side_channel(sent: bytes, folder: Path) -> None:
    frames.Reader(b"key" * 11).feed(sent.ljust(frames.NBYTES)[: frames.NBYTES], {0, 1})


def call_rank_0(store: Any) -> None:
    none: Any = {"heartbeat_s": 1.0, "progress_s": 1.0, "on_failure": print, "on_question": print}
    Liveness(store, 1, 2, address=LOOPBACK, secret=b"", **none)


def calls_of(store: Any) -> Ledger:
    return Ledger(store, Membership((0, 1), 0), check="always", ask=print)


def documents(path: Path) -> list[str]:
    return list(data.read_documents([str(path)]))


NO_CODE = "Weights only load failed|Detected pickle protocol 4"
UTF8 = "'utf-8' codec can't decode"
WAYS: dict[str, tuple[Callable[[bytes, Path], None], str]] = {
    "store: side channel": (from_store(call_rank_0), "rank 0 does not take this rank"),
    "store: calls": (from_store(lambda s: calls_of(s).enter("")), UTF8),
    "store: answers": (from_store(lambda s: calls_of(s).missing(1)), UTF8),
    "store: places": (from_store(lambda s: meet(s, 0, 2, timeout_s=1.0, where="")), UTF8),
    "side channel": (from_side_channel, "not made with the key of this connection"),
    "object of a rank": (from_rank, "Weights only load failed"),
    "checkpoint": (from_checkpoint(checkpoint.VERSION), NO_CODE),
    "checkpoint of version 2": (from_checkpoint(checkpoint.WHOLE_TENSORS), NO_CODE),
    "checkpoint: tensors": (from_tensors, "a number of steps expected|they count as numbers"),
    "checkpoint of torch": (from_dcp, "names posix.system, which|persistent id"),
    "tokenizer": (from_file(data.BPETokenizer.load, ".json"), UTF8),
    "text": (from_file(documents, ".txt"), "is binary"),
    "jsonl": (from_file(documents, ".jsonl"), "UTF-8 expected"),
    "parquet": (from_file(documents, ".parquet"), "is damaged, or no Parquet"),
    "config": (from_file(lambda path: config.load(path, []), ".toml"), "is not TOML"),
    "rates": (from_file(lambda path: parallel.read_rates(path, CpuBackend()), ".json"), UTF8),
    "probe cache": (from_probe_cache, "it counts as empty"),
    "probe child": (from_probe_child, UTF8),
}


@pytest.mark.parametrize("make", [pickle.dumps, saved], ids=["pickle", "torch.save"])
@pytest.mark.parametrize(("arrive", "refusal"), WAYS.values(), ids=WAYS)
def test_bytes_that_arrive_run_no_code(
    tmp_path: Path, arrive: Callable[[bytes, Path], None], refusal: str,
    make: Callable[[object], bytes],
) -> None:  # fmt: skip
    planted = tmp_path / "planted"
    sent = make(Payload(planted))
    with pytest.raises(Exception, match=refusal):
        arrive(sent, tmp_path)
    assert not planted.exists()
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(Payload(planted)))
    assert planted.exists(), "the payload is none"


def unpicklings(tree: ast.Module) -> set[str]:
    """What could run code that arrives, by name."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [getattr(node, "module", None), *(alias.name for alias in node.names)]
            found |= {name for name in names if name and name.split(".")[0] in UNPICKLERS}
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            options = {option.arg for option in node.keywords}
            is_load = called.endswith("torch.load") and "weights_only" not in options
            if is_load or called in ("eval", "exec") or "object_list" in called:
                found.add(called)
            if called.endswith(("all_gather_object", "gather_object")):
                found.add(called)
    return found


def test_nothing_of_ours_can_unpickle() -> None:
    files = [path for part in ("core", "backends") for path in (ROOT / part).rglob("*.py")]
    found = {
        str(path.relative_to(ROOT)): names for path in files
        if (names := unpicklings(ast.parse(path.read_text(encoding="utf-8"))))
    }  # fmt: skip
    assert found == ALLOWED
    bad = "import dill\nfrom marshal import loads\ntorch.load(x)\ndist.all_gather_object(a)"
    assert len(unpicklings(ast.parse(bad))) == 4
