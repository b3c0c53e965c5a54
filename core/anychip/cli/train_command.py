"""``anychip train``: reads the settings, refuses what cannot be, trains, and shows the result."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from time import strftime
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from rich.console import Console

from anychip.cli.exit_codes import Terminated
from anychip.cli.ranks import run_ranks, this_rank
from anychip.cli.settings import SettingsCommand, list_settings

if TYPE_CHECKING:
    from anychip.contract import Backend
    from anychip.train import preparing
    from anychip.train.comparing import Comparison
    from anychip.train.config import Config
    from anychip.train.interruption import Interruption
    from anychip.train.loop import Run
    from anychip.train.profiling import Profile
    from anychip.train.report import StepRecord
    from anychip.train.run import Texts

SCHEMA = 1
SAID_EVERY_S = 10.0


class _Options(NamedTuple):
    """What a rank is told as the launcher is: see the command's help."""

    resume: bool
    as_json: bool
    compare: str | None
    profile: int | None


class _Path(click.Path):
    """A path that is not empty: Path("") would be this directory."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not value:
            self.fail("a path expected, got ''", param, ctx)
        return super().convert(value, param, ctx)


PATH = _Path(path_type=Path)


@click.command("train", cls=SettingsCommand)
@click.argument("arguments", nargs=-1, metavar="[CONFIG.toml] [key=value ...]")
@click.option(
    "--backend",
    metavar="NAME[,NAME...]",
    help="The chip to train on, or one for each part of a pipeline; chosen when not given.",
)
@click.option(
    "--data", type=PATH, multiple=True, help="Text files.  [default: what Python's help() shows]"
)
@click.option(
    "--model", type=PATH, help="Directory of a model of transformers, to be trained on: model.path."
)
@click.option("--steps", type=click.IntRange(min=1), help="Updates in all: run.steps.")
@click.option(
    "--nproc", type=click.IntRange(min=1), default=1, help="Processes on this machine: ranks."
)
@click.option("--out", type=PATH, help="Directory for the results.  [default: runs/<time>]")
@click.option("--resume", is_flag=True, help="Go on with the run in --out, with its settings.")
@click.option(
    "--compare",
    metavar="NAME",
    help="Make every call of an operator on this chip too; stop at the first difference.",
)
@click.option(
    "--profile",
    type=click.IntRange(min=1),
    metavar="N",
    help="Time the operators of N steps: trace.json for Perfetto, and a table.",
)
@click.option("--settings", "lists", is_flag=True, help="List every setting; train nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, for programs.")
@click.pass_context
def command(
    ctx: click.Context, /, arguments: tuple[str, ...], backend: str | None, data: tuple[Path, ...],
    model: Path | None, steps: int | None, nproc: int, out: Path | None, resume: bool,
    compare: str | None, profile: int | None, lists: bool, as_json: bool,
) -> int:  # fmt: skip
    """Train a language model on text; without a CONFIG a small GPT, in about a minute.

    Settings are tables of the CONFIG or key=value, like model.width=256; --settings lists them, and
    config.toml in the results has them all.
    """
    if lists:
        given = {**ctx.params, "nproc": nproc > 1, "lists": False, "as_json": False}
        if others := [name for name, value in given.items() if value]:
            raise click.UsageError(f"--settings trains nothing; leave out {', '.join(others)}")
        list_settings(as_json=as_json)
        return 0
    rank = this_rank()
    if rank is not None and nproc > 1:
        raise click.UsageError("--nproc starts the ranks itself; leave it out under torchrun")
    if rank is not None and out is None:
        raise click.UsageError("several ranks need --out, one directory for all of them")
    # Of several ranks the first looks: there may be files when the others come.
    directory = out if rank and out else _out_directory(out, resume=resume)
    path, texts, settings = split(arguments, data)
    settings += [f"run.steps={steps}"] if steps is not None else []
    settings += [f"data.files={json.dumps(texts)}"] if texts else []
    settings += [f"model.path={json.dumps(str(model))}"] if model is not None else []
    if resume and path is None:
        path = directory / "config.toml"
    options = _Options(resume, as_json, compare, profile)
    if nproc > 1:
        return _launch(nproc, path, settings, backend, directory, options)
    return _train(path, settings, backend, directory, options)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends what is under way as Ctrl-C does, with an exit code of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, before)


def _launch(
    nproc: int, path: Path | None, settings: list[str], backend: str | None, out: Path,
    options: _Options,
) -> int:  # fmt: skip
    """Starts the ranks, each with this command and the chip that was chosen here."""
    import anychip
    from anychip import registry
    from anychip.train import config, cutting, lock, trackers

    configuration = config.load(path, settings, note=lambda _: None)  # rank 0 says it
    cutting.mesh_sizes(configuration.parallel, nproc)
    trackers.find(configuration.run.trackers)
    names = chip_names(backend, configuration)
    if len(names) > 1:
        cutting.chips_of_stages(names, configuration)
        known = {name: registry.require(name) for name in dict.fromkeys(names)}
        chosen = ",".join(known[name] for name in names)
    else:
        chosen = registry.name_of(anychip.use(backend, config=next(iter(names), None)))
    words = ["train", *([str(path)] if path else []), *settings]
    words += ["--backend", chosen, "--out", str(out)]
    words += ["--resume"] * options.resume + ["--json"] * options.as_json
    words += ["--compare", options.compare] if options.compare else []
    words += ["--profile", str(options.profile)] if options.profile else []
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with lock.hold(out):  # nobody trains there; the first rank holds it from here on
        pass
    with lock.hold(logs):
        return run_ranks(nproc, words, logs)


def chip_names(backend: str | None, configuration: Config) -> tuple[str, ...]:
    """What ``--backend``, else ANYCHIP_BACKEND, else the settings name: at most one chip for all
    ranks, or one for each part of a pipeline's.
    """
    from anychip.registry import environment

    named = backend or environment.backend_name() or configuration.run.backend
    return tuple(named.split(",")) if isinstance(named, str) else named or ()


def _own_chip(backend: str | None, configuration: Config) -> tuple[Backend, tuple[str, ...]]:
    """The chip of this rank, in use; and the names of all."""
    import anychip
    from anychip import registry
    from anychip.registry import environment
    from anychip.train import cutting

    names = chip_names(backend, configuration)
    if len(names) < 2:
        chip = anychip.use(backend, config=next(iter(names), None))
        registry.take_device(chip)
        return chip, names
    place = environment.launched()
    chips = cutting.chips_of_stages(names, configuration)
    cutting.mesh_sizes(configuration.parallel, place.world_size if place else 1)
    rank = place.rank if place else 0
    mine = [chips[other % len(chips)] for other in range(rank + 1)]
    chip = anychip.use(mine[-1])
    first = rank - (environment.local_rank() or 0)
    registry.take_device(chip, mine[first:-1].count(mine[-1]))
    return chip, names


@_terminable()
def _train(
    path: Path | None, settings: list[str], backend: str | None, out: Path, options: _Options
) -> int:
    from anychip import registry
    from anychip.train import config, interruption

    # With --json, stdout has the result and nothing else. Of several ranks the first speaks.
    console = Console(stderr=options.as_json, highlight=False, quiet=bool(this_rank()))
    configuration = config.load(path, settings, note=lambda text: _say(console, text))
    chip, names = _own_chip(backend, configuration)
    _say(console, str(chip.decision))
    # config.toml names the chip, so that --resume does not choose another one.
    chosen = names if len(names) > 1 else registry.name_of(chip)
    named = replace(configuration, run=replace(configuration.run, backend=chosen))
    # A rank that left others between their meeting and the first step would look lost to them.
    asked = None if this_rank() is None else interruption.Interruption(of_rank=True)
    with asked or nullcontext():
        return _run(named, chip, out, console, asked, options)


def _reading() -> Callable[[Config], Texts]:
    """Reads what is trained on, and says in a line now and then how far the cache of it is."""
    from anychip.train.run import read_texts

    said = time.monotonic()

    def show(out: Path, at: preparing.Progress) -> None:
        nonlocal said
        if time.monotonic() - said >= SAID_EVERY_S:
            said = time.monotonic()
            click.echo(
                f"anychip: {out}: file {at.files} of {at.num_files}, {at.documents:,} documents, "
                f"{at.tokens:,} tokens",
                err=True,
            )

    return partial(read_texts, show=show)


def _run(
    named: Config,
    chip: Backend,
    out: Path,
    console: Console,
    asked: Interruption | None,
    options: _Options,
) -> int:
    import anychip
    from anychip import runtime
    from anychip.train import comparing, display, interruption, lock, loop, profiling

    with runtime.device_errors(chip.device_type):
        run = loop.build(named, chip, read=_reading(), fuse=anychip.fuse)
    out.mkdir(parents=True, exist_ok=True)
    with lock.hold(out) if run.is_first else nullcontext():
        if options.resume:
            loop.restore(run, out)
        elif run.is_first:
            _require_empty(out)  # there may have been another one since
        _say(console, _plan(run))
        is_trained = False
        try:
            other, count = options.compare, options.profile
            with (
                display.Display(console, steps=named.run.steps, done=run.step) as show,
                comparing.compared(chip, other, run, out) if other else nullcontext() as comparison,
                profiling.profiled(run, chip, count, out) if count else nullcontext() as profile,
            ):
                rows = loop.train(run, out, show, asked, show.evaluated)
            is_trained = True
            sample = loop.finish(run, out, rows)
        except interruption.Interrupted as stop:
            if run.is_first:
                click.echo(f"anychip: {stop}", err=True)
            if run.comm.world_size > 1 and not is_trained:
                # The first that ends makes a launcher end the others: all are here, and hear
                # nothing.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                run.comm.barrier()
            return 128 + stop.signal
    if not run.is_first:
        return 0
    if options.as_json:
        click.echo(json.dumps(_to_json(chip, out, run, rows, comparison, profile), indent=2))
    else:
        _show(console, named, rows, sample, out)
        for found in filter(None, (comparison, profile)):
            _say(console, f"\n{found}")
    return 0


def _out_directory(out: Path | None, *, resume: bool) -> Path:
    """Where the results go, after a look at what is there."""
    if resume:
        if out is None:
            raise click.UsageError("--resume needs --out, the directory of the run to go on with")
        if not (out / "config.toml").is_file():
            raise FileNotFoundError(f"there is no run in {out}: it has no config.toml")
        from anychip.train import run

        run.require_checkpoint(out)
        return out
    directory = out or Path("runs") / strftime("%Y%m%d-%H%M%S")
    if directory.exists():
        _require_empty(directory)
    return directory


def _require_empty(directory: Path) -> None:
    """But for the lock, and the logs of ranks that ended before there was anything else."""
    names = {path.name for path in directory.iterdir()} if directory.is_dir() else {directory.name}
    if names - {"logs", ".lock"}:
        raise FileExistsError(
            f"{directory} exists and is not empty; nothing was written. To go on with the run in "
            "it, add --resume; to begin another, name another --out"
        )


def split(
    arguments: tuple[str, ...], data: tuple[Path, ...]
) -> tuple[Path | None, list[str], list[str]]:
    """The CONFIG, the texts and the settings.

    An option takes one value, so that of ``--data *.txt`` all but the first arrive as arguments.
    """
    settings = [text for text in arguments if "=" in text]
    configs = [Path(text) for text in arguments if text.endswith(".toml") and "=" not in text]
    texts = [text for text in arguments if "=" not in text and not text.endswith(".toml")]
    if len(configs) > 1:
        raise click.UsageError(f"one CONFIG expected, got {', '.join(map(str, configs))}")
    if texts and not data:
        raise click.UsageError(
            f"{texts[0]!r} is neither CONFIG.toml nor key=value; a text to train on goes after "
            "--data"
        )
    return (configs[0] if configs else None), [*map(str, data), *texts], settings


def _plan(run: Run) -> str:
    config, tokenizer = run.config, run.loader.tokenizer
    num_params = sum(param.numel() for param in run.model.parameters())
    files = config.data.files
    text = ", ".join(files) if files else "the documentation that comes with Python"
    unit = "bytes" if tokenizer.vocab_size == 256 else "tokens"
    replicas, stages = run.mesh.sizes["data"], run.mesh.sizes["pipeline"]
    tokens = config.data.batch_size * config.data.accumulation * config.model.context * replicas
    begun = f", going on after step {run.step}" if run.step else ""
    kind = getattr(config.model, "family", type(config.model).__name__.removesuffix("Config"))
    trained = sum(param.numel() for param in run.model.parameters() if param.requires_grad)
    adapters = f", of which {trained:,} are trained," if trained < num_params else ""
    there = run.loader.tokens.extent()
    lines = [
        f"{kind} with {num_params:,} parameters{' on rank 0' * (stages > 1)}{adapters} in "
        f"{run.policy.name} ({run.policy.why})",
        f"{there.tokens:,} {unit}{' as yet' * (not there.is_whole)} of {text}",
        f"{config.run.steps} steps of {tokens:,} {unit}{begun}",
    ]
    if run.comm.world_size > 1:
        how = [f"{replicas} replicas, ZeRO stage {config.optimizer.stage}"] * (replicas > 1)
        named = config.run.backend
        where = f" on {', '.join(named)}" if isinstance(named, tuple) else ""
        stage_text = f"{config.parallel.stages} stages by {config.parallel.schedule}{where}"
        how += [stage_text] * (stages > 1)
        lines.append(f"{run.comm.world_size} ranks: {'; '.join(how)}")
    return "\n".join(lines)


def _show(console: Console, config: Config, rows: list[StepRecord], sample: str, out: Path) -> None:
    from anychip.train.display import curve
    from anychip.train.evaluation import rows_of
    from anychip.train.report import best_of

    held_out, more = "", ""
    if found := rows_of(out):
        best = best_of(found)
        held_out = f"; held out {found[-1].loss:.4f}, at best {best.loss:.4f} at step {best.step}"
        more = ", eval.jsonl" + ", best" * (out / "best").exists()
    text = printable(sample.strip(), console.encoding)
    told = f"A sample:\n{text}\n\n" if text else ""
    _say(console, f"\n{curve(rows)}\n\n{told}{_served(out)}\n")
    _say(
        console,
        f"loss {rows[0].loss:.4f} -> {rows[-1].loss:.4f}{held_out}; in {out}: metrics.jsonl, "
        f"loss.png, sample.txt, provenance.json, config.toml, checkpoint{more}",
    )
    if rows[-1].step < config.run.steps:
        _say(
            console,
            f"ended after step {rows[-1].step}: the last {config.eval.patience} evaluations have "
            "found no lower held-out loss (eval.patience)",
        )


def _served(out: Path) -> str:
    """What served the operators, on each rank of a pipeline."""
    import anychip
    from anychip.dispatch.tally import Provenance, ProvenanceRow

    found = json.loads((out / "provenance.json").read_text(encoding="utf-8"))
    parts = found.get("pipeline", ())
    return "\n\n".join(
        f"Rank {rank} of the pipeline, on {part['backend']} ({part['device']}):\n"
        + str(Provenance(ProvenanceRow(**row) for row in part["operators"]))
        for rank, part in enumerate(parts)
    ) or str(anychip.provenance())


def printable(text: str, encoding: str) -> str:
    """What a model wrote, without what would steer the terminal or has no place in its encoding."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
    return shown.encode(encoding, errors="replace").decode(encoding)


def _say(console: Console, text: str) -> None:
    """Prints as it is: no markup, no wrapping."""
    console.print(text, markup=False, soft_wrap=True)


def _to_json(
    chip: Backend,
    out: Path,
    run: Run,
    rows: list[StepRecord],
    comparison: Comparison | None,
    profile: Profile | None,
) -> dict[str, Any]:
    import anychip
    from anychip.train.evaluation import rows_of
    from anychip.train.report import best_of

    found, held_out = rows_of(out), None
    if found:
        held_out = {"last": asdict(found[-1]), "best": asdict(best_of(found))}
    return {
        **({"comparison": comparison.to_json()} if comparison else {}),
        **({"profile": profile.result} if profile else {}),
        **({"held_out": held_out} if held_out else {}),
        **({"trackers": run.trackers.status} if run.trackers.status else {}),
        "schema": SCHEMA, "out": str(out), "backend": chip.name, "decision": str(chip.decision),
        "steps": rows[-1].step, "first_loss": rows[0].loss, "last_loss": rows[-1].loss,
        "operators": anychip.provenance().to_json()["operators"],
    }  # fmt: skip
