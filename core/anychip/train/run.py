"""The parts of a run: settings, a backend and the ranks of a job become what steps need."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import anychip
from anychip import registry, runtime
from anychip.comm import agree, gather_objects
from anychip.contract import AnychipError, Backend, Communicator
from anychip.train import checkpoint, data, files, models, parallel, precision, preparing, zero
from anychip.train.choosing import settle
from anychip.train.config import OF_MODEL, Config, dump
from anychip.train.cutting import (
    cut,
    gather_speeds,
    has_chips,
    ideal_seconds,
    layer_costs,
    make_schedule,
    mesh_sizes,
    require_trained,
    rule_of,
)
from anychip.train.trackers import Trackers, find, make
from anychip.train.watching import Watch
from anychip.train.zero.tiers import in_text

if TYPE_CHECKING:
    from torch import Tensor

BEST = "best"
"""Folder in that of a run, with the checkpoint of its best evaluation."""

MODEL = "model"
"""Folder in that of a run, with what a model's directory has besides weights."""

_Keep = Callable[[Sequence[str], Config], data.Tokens]
"""Has files in ``data.cache``."""


class TrainingError(AnychipError, RuntimeError):
    """The loss or the gradient is not finite, or there is none, so that no step can follow."""


class Texts(NamedTuple):
    """What a run reads.

    Attributes:
        tokens: (N,) that are trained on.
        tokenizer: that made them.
        held_out: (M,) that are not trained on; None: nothing is held out.
    """

    tokens: Tensor | data.Mixture
    tokenizer: data.Tokenizer
    held_out: data.TokenRow | None = None


@dataclass(kw_only=True, slots=True)
class Run:
    """The parts of a run on one rank, on the device, at the step where it goes on.

    Attributes:
        mesh: the ranks of the job, with the axes ``data`` and ``pipeline``.
        model: the decoder, or this rank's stage or stages of it.
        pipeline: what runs the stages; None with one stage.
        names: of the whole model's parameters; None with one stage.
        held_out: what the model is asked about; None: nothing.
        saver: writes checkpoints while training goes on; None: training waits for them.
        trackers: what watches it; of several ranks the first has them.
        watch: what measures its steps.
        step: updates done.
        begun: updates that were done when this process began.
    """

    config: Config
    mesh: parallel.Mesh
    model: models.Decoder | parallel.Stage | parallel.Stages
    policy: precision.PrecisionPolicy
    loader: data.Loader
    optimizer: zero.Optimizer = field(init=False)
    pipeline: parallel.Pipeline | None = None
    names: checkpoint.Names | None = None
    held_out: data.HeldOut | None = None
    saver: checkpoint.Saver | None = None
    trackers: Trackers = field(default_factory=Trackers)
    watch: Watch = field(default_factory=Watch)
    step: int = 0
    begun: int = 0

    @property
    def comm(self) -> Communicator:
        """All ranks of the job."""
        return self.mesh.comm

    @property
    def is_first(self) -> bool:
        """This is the rank that writes and shows."""
        return self.comm.rank == 0


def build(
    config: Config,
    chip: Backend,
    comm: Communicator | None = None,
    *,
    read: Callable[[Config], Texts] | None = None,
    fuse: models.Fuse | None = None,
) -> Run:
    """The parts of a fresh run; reads the data, writes nothing. With several ranks a collective.

    Args:
        comm: all ranks of the job; those that the backend finds when None.
        read: gives the texts of settings; None: :func:`read_texts`.
        fuse: ``anychip.fuse``, for a model of another library; None: it stays as it is.

    Raises:
        OSError, ValueError: a data file is missing, empty, binary or too short; the parallel sizes
            do not multiply to the number of ranks; the directory of a model has none.
        UnsupportedError: a precision or stage that this chip or version does not have.
        MissingExtraError: the library of a tracker, of a form of data or of a model is missing.
        CommunicationError: the ranks differ in backend, versions or settings; one did not come.
    """
    comm = comm or chip.communicator(
        timeout_s=config.run.timeout_s, heartbeat_s=config.run.heartbeat_s
    )
    find(config.run.trackers)
    _compare(comm, config, chip)
    trackers = make(config.run.trackers if comm.rank == 0 else ())
    mesh = parallel.Mesh(comm, mesh_sizes(config.parallel, comm.world_size))
    policy = precision.policy(config.run.precision, chip)
    if has_chips(config):
        decided = gather_objects(comm, policy.name)
        policy = precision.common_policy(config.run.precision, chip, decided)
    config = settle(config, chip, comm, policy)
    texts = (read or read_texts)(config)
    loader = _loader(config, chip, mesh, texts)
    torch.manual_seed(config.run.seed)
    whole = _whole(config, fuse)
    run = Run(config=config, mesh=mesh, model=whole, policy=policy, loader=loader)
    run.watch = Watch(chip, ideal_seconds(config, chip, comm, whole, policy.dtype))
    torch.manual_seed(rank_seed(config.run.seed, comm.rank))
    # Nothing here draws from it; its state is saved, and alike for alike runs.
    random.seed(rank_seed(config.run.seed, comm.rank))
    run.trackers, run.held_out = trackers, _held_out(config, texts)
    run.saver = checkpoint.Saver() if config.checkpoint.asynchronous else None
    if config.parallel.pipeline > 1:
        _cut(run, whole, chip)
    run.model.to(chip.device())
    _add_optimizer(run)
    return run


def _whole(config: Config, fuse: models.Fuse | None) -> models.Decoder:
    whole = models.build(config.model, fuse)
    if isinstance(whole, models.Pretrained):
        whole.packs = config.has_messages
    return whole


def _loader(config: Config, chip: Backend, mesh: parallel.Mesh, texts: Texts) -> data.Loader:
    replicas = mesh.axis("data")
    settings = config.data
    loader = data.Loader(
        texts.tokens, context=config.model.context, batch_size=settings.batch_size,
        seed=config.run.seed, device=chip.device(), rank=replicas.rank,
        world_size=replicas.world_size, tokenizer=texts.tokenizer, prefetch=settings.prefetch,
        cross_document_targets=settings.cross_document_targets,
        shuffle_buffer=settings.shuffle_buffer,
        pin=chip.memory.pinned if "pinned_memory" in chip.capabilities else None,
    )  # fmt: skip
    if mesh.comm.world_size > 1:  # hosts have files of their own
        agree(mesh.comm, "tokens", loader.tokens.digest)
    return loader


def _held_out(config: Config, texts: Texts) -> data.HeldOut | None:
    if texts.held_out is None:
        return None
    tokens, context = texts.held_out, config.model.context
    if config.eval.batches:
        # With the target of the last one.
        most = config.eval.batches * config.data.batch_size * context + 1
        tokens = tokens.part(0, min(len(tokens), most))
    across = config.data.cross_document_targets
    return data.HeldOut(
        tokens, context=context, tokenizer=texts.tokenizer, cross_document_targets=across
    )


def loss_reduction(config: Config) -> models.LossReduction:
    """Of a batch's loss: a mean, unless batches differ in their numbers of targets."""
    return "mean" if config.data.cross_document_targets and not config.has_messages else "sum"


def _cut(run: Run, whole: models.Decoder, chip: Backend) -> None:
    """This rank keeps its stages of the model.

    Raises:
        OSError, ValueError: the schedule cannot be read, or made for so many micro-batches; or some
            rank would train nothing.
        UnsupportedError: a model of another library that cannot be cut.
    """
    config, comm = run.config, run.mesh.axis("pipeline")
    schedule = make_schedule(config)
    layers = cut(whole, layer_costs(config, whole, gather_speeds(config, chip, comm)), schedule)
    reduction = loss_reduction(config)
    owners = schedule.owners()
    every = [parallel.make_stage(whole, part, reduction=reduction) for part in layers]
    stages = [part for part in every if isinstance(part, parallel.Stage)]
    if isinstance(whole, models.Pretrained):
        few = torch.arange(min(config.model.context, 8)) % config.model.vocab_size
        parallel.check_cut(whole, stages, few[None])
    require_trained(stages, owners)
    mine = [stage for number, stage in enumerate(stages) if owners[number] == comm.rank]
    stages = [stage.to(chip.device()) for stage in mine]
    run.model = stages[0] if len(stages) == 1 else parallel.Stages(stages)
    run.names = checkpoint.names_of(whole, models.parameter_groups(whole, 0.0))
    run.pipeline = parallel.Pipeline(
        stages, comm, schedule, tied=run.model.tied, autocast=run.policy.autocast
    )


def read_texts(config: Config, *, show: preparing.Show = preparing.say_nothing) -> Texts:
    """What is trained on, and what is held out.

    Args:
        show: is told how far it is what ``data.cache`` wants prepared before the run begins.

    Raises:
        OSError, ValueError: as :func:`read_data`.
    """
    tokens, tokenizer = read_data(config, show=show)
    if config.eval.files:
        return Texts(tokens, tokenizer, read_held_out(config, tokenizer, show=show))
    if not config.eval.fraction:
        return Texts(tokens, tokenizer)
    tokens, held_out = tokens.split(config.eval.fraction)
    return Texts(tokens, tokenizer, held_out)


def read_held_out(
    config: Config, tokenizer: data.Tokenizer, *, show: preparing.Show = preparing.say_nothing
) -> data.TokenRow:
    """The tokens (M,) of ``eval.files``, all of them.

    Raises:
        OSError, ValueError: as reading raises.
    """
    config = replace(config, data=replace(config.data, filters=()))
    return _row(config.eval.files, tokenizer, config, partial(preparing.cached, show=show))


def read_data(
    config: Config, *, show: preparing.Show = preparing.say_nothing
) -> tuple[data.Mixture, data.Tokenizer]:
    """The tokens (N,) of the files, or of Python's documentation, and what made them.

    Raises:
        OSError, ValueError: as reading and training a tokenizer raise; or ``model.vocab_size`` is
            smaller than the tokenizer's; or a prepared directory is not what the settings say.
    """
    paths, weights = config.data.files, config.data.weights
    tokenizer = known_tokenizer(config)
    if tokenizer is None:
        for path in filter(data.is_prepared, map(Path, paths)):
            raise data.PreparedError(
                f"{path} is tokens already, of which no tokenizer is trained; set "
                f"data.tokenizer={path / 'tokenizer.json'}"
            )
        tokenizer = data.train_bpe(_documents(paths, config), config.model.vocab_size)
    parts = [(path,) for path in paths] if weights else [paths]
    keep: _Keep = partial(preparing.cached, show=show)
    if config.data.shuffle_buffer:
        keep = partial(preparing.streamed, share=len(parts), show=show)
    rows = [_row(part, tokenizer, config, keep) for part in parts]
    return data.Mixture(rows, weights or (1.0,)), tokenizer


def _row(
    paths: Sequence[str], tokenizer: data.Tokenizer, config: Config, keep: _Keep
) -> data.TokenRow:
    """What is prepared stays where it is; the rest is made into tokens, in memory or a cache."""
    pieces = list[data.Tokens]()
    for is_prepared, names in groupby(paths, lambda path: data.is_prepared(Path(path))):
        group = [*names]
        if pieces and isinstance(pieces[-1], preparing.Growing):
            raise ValueError(
                f"{group[0]} cannot stand behind files of which tokens are still made "
                "(data.shuffle_buffer); name what is prepared first, or set data.weights"
            )
        if is_prepared:
            pieces += [_opened(Path(path), tokenizer, config) for path in group]
        elif config.data.cache:
            pieces.append(keep(group, config))
        else:
            pieces.append(data.InMemory(_tokenized(group, tokenizer, config)))
    if not paths:
        pieces.append(data.InMemory(_tokenized(paths, tokenizer, config)))
    return data.join(pieces, tokenizer.end_of_document if config.data.end_of_document else None)


def _opened(path: Path, tokenizer: data.Tokenizer, config: Config) -> data.Prepared:
    """Tokens that were prepared, if they are what the settings would make."""
    found, settings = data.Prepared(path), config.data
    theirs = found.about["tokenizer"]
    if theirs != tokenizer.name:
        named = path / "tokenizer.json" if theirs != data.ByteTokenizer.name else theirs
        raise data.PreparedError(
            f"{path} was prepared with the tokenizer {theirs}, and data.tokenizer = "
            f"{settings.tokenizer!r} is {tokenizer.name}; set data.tokenizer={named}, or prepare "
            "it with the other"
        )
    if found.is_marked != config.has_messages:
        kinds = ("text", "messages")
        raise data.PreparedError(
            f"{path} is {kinds[found.is_marked]}, and the settings (data.field, model.path) are "
            f"for {kinds[config.has_messages]}"
        )
    if config.has_messages:
        assert isinstance(config.model, models.PretrainedConfig)
        mine = data.describe_template(models.load_tokenizer(config.model.path))
        if found.about["template"] != mine:
            raise data.PreparedError(f"{path} was prepared with another chat template")
    elif not settings.end_of_document:
        raise data.PreparedError(
            f"{path} has an end-of-document token between documents; leave data.end_of_document "
            "at true"
        )
    if settings.verify:
        found.verify()
    return found


def known_tokenizer(config: Config) -> data.Tokenizer | None:
    """What makes tokens, where that is no question of the data; None: ``bpe`` is still to be.

    Raises:
        OSError, ValueError: it cannot be read, or has more tokens than the model.
        MissingExtraError: its library is not installed.
    """
    if config.data.tokenizer == "bpe":
        return None
    most = config.model.vocab_size
    tokenizer = preparing.open_tokenizer(config.tokenizer_path)
    if tokenizer.vocab_size > most:
        raise ValueError(
            f"the tokenizer {config.tokenizer_path} has {tokenizer.vocab_size} tokens, and "
            f"model.vocab_size is {most}; set model.vocab_size={tokenizer.vocab_size}"
        )
    return tokenizer


def _documents(paths: Sequence[str], config: Config) -> Iterable[str]:
    if not paths:
        return [data.decode(data.python_documentation())]
    return data.read_documents(paths, field=config.data.field)


def _tokenized(paths: Sequence[str], tokenizer: data.Tokenizer, config: Config) -> Tensor:
    if config.has_messages:
        assert isinstance(config.model, models.PretrainedConfig)
        found = data.read_messages(paths, field=config.data.field)
        return data.tokenize_messages(found, models.load_tokenizer(config.model.path))
    if config.data.tokenizer == "bytes" and not paths:
        return data.python_documentation()
    end = config.data.end_of_document
    return data.tokenize(_documents(paths, config), tokenizer, end_of_document=end)


def rank_seed(seed: int, rank: int) -> int:
    """Seed of a rank's generators: other dropout on every rank. Rank 0 has the run's own."""
    if rank == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def restore(run: Run, out: Path) -> None:
    """Goes to the checkpoint in a directory.

    Settings of the optimizer come from the run's configuration, not from the checkpoint.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is damaged or does not fit.
        ValueError: it is past the run's last step.
    """
    step = require_checkpoint(out)
    if step > run.config.run.steps:
        raise ValueError(
            f"{out} has been trained for {step} steps already, and run.steps is "
            f"{run.config.run.steps}; ask for more steps"
        )
    options = [dict(group) for group in run.optimizer.param_groups]
    state = checkpoint.resume(out, **_saved(run))
    for group, mine in zip(run.optimizer.param_groups, options, strict=True):
        group.clear()
        group.update(mine)
    run.step = run.begun = state.step


def restore_weights(run: Run, out: Path, *, same_text: bool, averaged: bool = False) -> None:
    """Goes to the checkpoint in a directory, to be asked and not trained.

    Args:
        same_text: what was trained on must be what the run has.
        averaged: the averages of the weights.

    Raises:
        CheckpointError: it is damaged or does not fit.
    """
    parts = _saved(run) if same_text else {**_saved(run), "data": None}
    found = checkpoint.resume(out, **parts, weights_only=True, averaged=averaged)
    run.step = run.begun = found.step


def require_checkpoint(out: Path) -> int:
    """The step at which a run in a directory would go on.

    Raises:
        FileNotFoundError: there is nothing to go on with.
    """
    step = checkpoint.saved_step(out)
    if step is None:
        raise FileNotFoundError(
            f"there is no checkpoint in {out} to go on with; nothing was changed. To begin anew "
            f"with the same settings: anychip train {out / 'config.toml'} --out ANOTHER"
        )
    return step


def save(run: Run, out: Path) -> None:
    """Writes the checkpoint of where the run is. With several ranks a collective."""
    keep = run.config.checkpoint.keep
    checkpoint.save(out, step=run.step, keep=keep, saver=run.saver, **_saved(run))


def save_best(run: Run, out: Path) -> None:
    """Writes a checkpoint that stays until a better one, with what describes the run beside it.

    With several ranks a collective. The folder is one of a run, for whatever takes a run's.

    Raises:
        OSError, CheckpointError: as :func:`anychip.train.checkpoint.save`; or it is a link.
    """
    best = out / BEST
    if best.is_symlink():
        raise checkpoint.CheckpointError(
            f"{best} is a link, which is not followed; remove it, or use another directory"
        )
    if run.is_first:
        best.mkdir(exist_ok=True)
        write_inputs(run, best)
    checkpoint.save(best, step=run.step, saver=run.saver, **_saved(run))


def write_inputs(run: Run, out: Path) -> None:
    """What a run is made of, beside its results."""
    files.write(out / "config.toml", dump(run.config))
    tokenizer, model = run.loader.tokenizer, run.config.model
    if isinstance(model, models.PretrainedConfig):
        models.copy_description(Path(model.path), out / MODEL)
    if isinstance(tokenizer, data.BPETokenizer) and run.config.data.tokenizer != OF_MODEL:
        tokenizer.save(out / "tokenizer.json")


def end_saving(run: Run) -> None:
    """Waits for the checkpoint that is being written, if there is one. A collective."""
    if run.saver is not None:
        run.saver.close()


def _saved(run: Run) -> dict[str, Any]:
    """What a checkpoint is made of."""
    parts = {"model": run.model, "optimizer": run.optimizer, "data": run.loader}
    return {**parts, "names": run.names, "comm": run.comm}


def whole_model(run: Run) -> models.Decoder:
    """The decoder, to be run on every rank. With stages a collective, and a copy."""
    if run.pipeline is None:
        assert isinstance(run.model, models.Decoder)
        return run.model
    assert isinstance(run.model, (parallel.Stage, parallel.Stages))
    comm = run.mesh.axis("pipeline")
    model = models.build(run.config.model)
    model.load_state_dict(parallel.whole_state_dict(run.model, comm, run.optimizer))
    return model.to(run.loader.device)


def _add_optimizer(run: Run) -> None:
    config, stages = run.config, run.mesh.axis("pipeline")
    parts = run.pipeline.stages if run.pipeline else {}
    last = parts.get(run.pipeline.num_stages - 1) if run.pipeline else None
    run.optimizer = zero.Optimizer(
        models.parameter_groups(run.model, config.optimizer.weight_decay), rule_of(config),
        run.mesh.axis("data"), stage=config.optimizer.stage, precision=run.policy,
        model_comm=stages if stages.world_size > 1 else None,
        duplicates=last.tied if isinstance(last, parallel.Stage) else (), module=run.model,
        roots=tuple(parts.values()), offload=in_text(config.optimizer.offload),
    )  # fmt: skip


def _compare(comm: Communicator, config: Config, chip: Backend) -> None:
    """Ranks that differ would go on until a call between them does not fit, or never ends.

    Ranks on different chips have the same operators, and each chip its own implementations.
    """
    if comm.world_size == 1:
        return
    distribution, version = registry.provenance_of(chip)
    alike = chip.name if has_chips(config) else ""
    agree(comm, "version of anychip", anychip.__version__)
    agree(comm, "specifications of operators", runtime.specifications())
    agree(comm, "backend", f"{chip.name} of {distribution} {version}", among=alike)
    agree(comm, "implementations of operators", runtime.digest(), among=alike)
    agree(comm, "settings", json.dumps(asdict(config), default=str))
