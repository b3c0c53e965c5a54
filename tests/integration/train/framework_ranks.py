"""One rank of a job that trains in other frameworks' loops, with their AdamW and with ours.

    python framework_ranks.py OUT FRAMEWORK...

Rank 0 writes OUT: by framework losses and rates of each case, sentences of what is refused, bytes.
"""

import importlib
import json
import logging
import os
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import anychip
from anychip.comm import alone
from anychip.train import optim, precision, zero
from tests.integration.collectives.cases import loopback_nbytes

STEPS, ACCUMULATION, MAX_NORM, LR = 20, 2, 0.5, 1e-3
NUMEL = 1 << 20
"""Parameters of the model whose bytes are counted."""


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(NUMEL // 96, 96))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.weight[:, input_ids[0]].mean()}


class Case(NamedTuple):
    """What is trained and how; ``stage`` None: with torch's AdamW."""

    stage: int | None
    accumulation: int = 1
    precision: str = "no"
    steps: int = STEPS
    wide: bool = False
    saves: str = ""
    """Where step 10 is saved; the run ends there, and another goes on."""
    resumes: bool = False
    plain: bool = False
    """In their own class, whatever the optimizer."""
    options: tuple[tuple[str, Any], ...] = ()

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
        config = transformers.LlamaConfig(**sizes, **heads)
        return Wide() if self.wide else transformers.AutoModelForCausalLM.from_config(config)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.stage is None:
            return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
        comm = anychip.use("cpu").communicator(timeout_s=60)
        return zero.Optimizer(model, optim.adamw(LR, weight_decay=0.1), comm, stage=self.stage)

    @property
    def is_ours(self) -> bool:
        """By a class of ours; on one rank theirs do."""
        return (
            not self.plain
            and self.stage is not None
            and dist.is_initialized()
            and dist.get_world_size() > 1
        )


def examples() -> list[dict[str, Tensor]]:
    tokens = torch.randint(0, 96, (512, 12), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in tokens]


def rate(step: int) -> float:
    return 1.0 / (1 + step)


def forget(*, everything: bool = False) -> None:
    """What Accelerate remembers: of the precision of others, or of the processes, too."""
    state = importlib.import_module("accelerate").state
    state.AcceleratorState._reset_state(everything)
    state.GradientState._reset_state()


# Each framework: losses and rates of the steps that this run has made


def in_trainer(case: Case) -> list[Any]:
    args = transformers.TrainingArguments(
        case.saves or "out", max_steps=case.steps, per_device_train_batch_size=2, logging_steps=1,
        use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=LR, warmup_steps=3,
        lr_scheduler_type="cosine", max_grad_norm=MAX_NORM, save_steps=STEPS // 2,
        save_strategy="steps" if case.saves else "no", bf16=case.precision == "bf16",
        gradient_accumulation_steps=case.accumulation, **dict(case.options),
    )  # fmt: skip
    where = "anychip.integrations.transformers" if case.is_ours else "transformers"
    model = case.model()
    given = {"model": model, "args": args, "train_dataset": examples()}
    optimizers = (case.optimizer(model), None)
    trainer = importlib.import_module(where).Trainer(**given, optimizers=optimizers)
    trainer.train(resume_from_checkpoint=f"{case.saves}/checkpoint-10" if case.resumes else None)
    log = trainer.state.log_history
    # The log that is saved goes on.
    found = [(row["loss"], row["learning_rate"]) for row in log if "loss" in row]
    return found[STEPS // 2 :] if case.resumes else found


def in_accelerate(case: Case) -> list[Any]:
    forget(everything=True)
    importlib.import_module("accelerate").Accelerator(cpu=True)  # which makes the process group
    forget()
    where = "anychip.integrations.accelerate" if case.is_ours else "accelerate"
    accelerator = importlib.import_module(where).Accelerator(
        cpu=True, gradient_accumulation_steps=case.accumulation, mixed_precision=case.precision,
        step_scheduler_with_optimizer=False, **dict(case.options),
    )  # fmt: skip
    model = case.model()
    optimizer = case.optimizer(model)
    scheduler, loader = LambdaLR(optimizer, rate), DataLoader(examples(), batch_size=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    done, losses, found = 0, [], []
    if case.resumes:
        accelerator.load_state(case.saves)
        done = STEPS // 2
        loader = accelerator.skip_first_batches(loader, done * case.accumulation)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            found.append((losses[-1], optimizer.param_groups[0]["lr"]))
            scheduler.step()
            done += 1
            if case.saves and not case.resumes and done == STEPS // 2:
                accelerator.save_state(case.saves)
        if done == case.steps:
            return found
    raise AssertionError("there are more steps than batches")


def in_lightning(case: Case) -> list[Any]:
    lightning = importlib.import_module("pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    found: list[Any] = []

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = case.model()

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            found.append((loss.item(), self.optimizers().param_groups[0]["lr"]))
            return loss

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = case.optimizer(self)
            scheduler = {"scheduler": LambdaLR(optimizer, rate), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    ours = importlib.import_module("anychip.integrations.lightning")
    size = dist.get_world_size() if dist.is_initialized() else 1
    options = dict(case.options)
    is_ours = case.is_ours or options.pop("strategy", None) is not None
    compiles = options.pop("compiled", False)
    if case.precision != "plugin":
        options["precision"] = "bf16-mixed" if case.precision == "bf16" else "32-true"
    saves = lightning.callbacks.ModelCheckpoint(
        case.saves, filename="{epoch}", every_n_epochs=1, save_top_k=-1
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=size, max_steps=case.steps, logger=False,
        strategy=ours.ZeroStrategy() if is_ours else "ddp" if size > 1 else "auto",
        gradient_clip_val=MAX_NORM, accumulate_grad_batches=case.accumulation,
        limit_train_batches=STEPS // 2 * case.accumulation if case.saves else None,
        enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=bool(case.saves), callbacks=[saves] if case.saves else [],
        **options,
    )  # fmt: skip
    # Lightning goes on with the second batch of an epoch, with every optimizer: all are alike here.
    rows = examples()[:1] * 512 if case.saves else examples()
    module = torch.compile(Module(), backend="eager") if compiles else Module()
    trainer.fit(
        module, DataLoader(rows, batch_size=2),
        ckpt_path=f"{case.saves}/epoch=0.ckpt" if case.resumes else None, weights_only=False,
    )  # fmt: skip
    return found


WHOLE = StateDictOptions(full_state_dict=True)


def in_torch(case: Case) -> list[Any]:
    """A loop of one's own: FSDP2, or DDP where ``plain``, which reduce; the rule updates shards."""
    model = case.model()
    wrapped: Any = DistributedDataParallel(model) if case.plain else fully_shard(model)
    optimizer = case._replace(stage=None).optimizer(model)
    if case.stage is not None:
        optimizer = zero.Optimizer(model, optim.adamw(LR, weight_decay=0.1), alone())
    scheduler, found, done = LambdaLR(optimizer, rate), [], 0
    if case.resumes:
        found_states = torch.load(case.saves, weights_only=False)  # rank 0's, whole
        weights, states, scheduled, done = found_states
        given = {"model_state_dict": weights, "optim_state_dict": states}
        set_state_dict(model, optimizer, **given, options=WHOLE)
        scheduler.load_state_dict(scheduled)
    for step in range(done, case.steps):
        row = examples()[2 * step + dist.get_rank()]
        loss = wrapped(**{name: each[None] for name, each in row.items()})["loss"]
        loss.backward()
        if isinstance(optimizer, zero.Optimizer) and not case.plain:
            optimizer.clip_grad_norm_(MAX_NORM)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        found.append((loss.item(), optimizer.param_groups[0]["lr"]))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if case.saves and step + 1 == STEPS // 2:
            whole = get_state_dict(model, optimizer, options=WHOLE)
            if dist.get_rank() == 0:
                torch.save((*whole, scheduler.state_dict(), step + 1), case.saves)
            dist.barrier()
    return found


# A case's function, and the example.
FRAMEWORKS: dict[str, tuple[Callable[[Case], list[Any]], str]] = {
    "trainer": (in_trainer, "transformers_trainer"),
    "accelerate": (in_accelerate, "accelerate_loop"),
    "lightning": (in_lightning, "lightning_trainer"), "torch": (in_torch, "fsdp2_loop"),
}  # fmt: skip


def example(framework: str, size: int) -> list[float]:
    """Its losses."""
    path = Path(__file__).parents[3] / "examples" / f"{FRAMEWORKS[framework][1]}.py"
    given = [size] if framework == "lightning" else []
    losses: list[float] = runpy.run_path(str(path))["main"](*given)
    return losses


def nbytes_of_three_steps(run: Callable[[Case], Any], case: Case) -> int:
    """What the loopback interface has seen of a run of six steps more than of one of three.

    The least of two each: on a busy machine the kernel sends some packets twice.
    """
    counts: dict[int, list[int]] = {3: [], 6: []}
    for steps in (3, 6, 3, 6):
        dist.barrier()
        before = loopback_nbytes()
        run(case._replace(steps=steps))
        dist.barrier()
        counts[steps].append(loopback_nbytes() - before)
    return min(counts[6]) - min(counts[3])


# What is refused


def prepared(stage: int = 2, kind: Any = None, compiler: str | None = None, **options: Any) -> Any:
    """An accelerator of ours, the model and the optimizer that it has prepared."""
    forget()
    ours = importlib.import_module("anychip.integrations.accelerate")
    accelerator, case = ours.Accelerator(cpu=True, dynamo_backend=compiler), Case(stage)
    for name, value in options.items():
        setattr(accelerator, name, value)
    if kind is not None:
        accelerator.state.distributed_type = kind
    model = case.model()
    return accelerator, *accelerator.prepare(model, case.optimizer(model))


def prepare_as(kind: str) -> None:
    prepared(kind=importlib.import_module("accelerate").DistributedType(kind))


def clip_some() -> None:
    accelerator, model, _ = prepared()
    accelerator.clip_grad_norm_(list(model.parameters())[:1], 1.0)


def prepare_two() -> None:
    accelerator = prepared()[0]
    model = Case(1).model()
    accelerator.prepare(model, Case(1).optimizer(model))


def fit_scaled() -> None:
    mixed = importlib.import_module("pytorch_lightning").plugins.MixedPrecision
    plugin = mixed("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    in_lightning(Case(2, precision="plugin", options=(("plugins", [plugin]),)))


def fit_part() -> None:
    class Part(Case):
        def optimizer(self, model: Any) -> torch.optim.Optimizer:
            return super().optimizer(model.net)

    in_lightning(Part(3))


def fit_compiled() -> None:
    in_lightning(Case(3, options=(("compiled", True),)))


def update_cut(*, partly: bool = False, states: str = "float32", **options: Any) -> None:
    model = Case(0).model()
    fully_shard(model.model if partly else model)  # type: ignore[arg-type]
    given = {"comm": alone(), **options}
    zero.Optimizer(model, optim.adamw(LR, states=states), **given)


REFUSED: dict[str, dict[str, Callable[[], Any]]] = {
    "trainer": {"their own": lambda: in_trainer(Case(0, plain=True))},
    "accelerate": {
        "their own": lambda: in_accelerate(Case(0, plain=True)),
        "deepspeed": lambda: prepare_as("DEEPSPEED"), "fsdp": lambda: prepare_as("FSDP"),
        "fp16": lambda: prepared(scaler=torch.amp.GradScaler("cpu")),
        "some gradients": clip_some, "two optimizers": prepare_two,
        "compiled": lambda: prepared(3, compiler="eager"),
    },
    "lightning": {
        "their own": lambda: in_lightning(Case(0, plain=True)),
        "AdamW": lambda: in_lightning(Case(None, options=(("strategy", "ours"),))),
        "values": lambda: in_lightning(Case(2, options=(("gradient_clip_algorithm", "value"),))),
        "fp16": fit_scaled, "part": fit_part, "compiled": fit_compiled,
    },
    "torch": {
        "several ranks": lambda: update_cut(comm=anychip.use("cpu").communicator()),
        "8bit": lambda: update_cut(states="8bit"),
        "partly": lambda: update_cut(partly=True),
        "scaled": lambda: update_cut(precision=precision.policy("fp16", anychip.use("cpu"))),
    },
}  # fmt: skip


def sentence(call: Callable[[], Any]) -> str:
    """With which it is refused."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


VARIANTS = {
    "": Case(None), "accumulating": Case(None, ACCUMULATION), "bf16": Case(None, precision="bf16"),
    "ddp": Case(None, plain=True),
}  # fmt: skip
STAGES = {
    1: {"": (2,)},
    2: {"": (0, 3), "accumulating": (1, 2), "bf16": (3,)},
    "torch": {"": (0,), "ddp": (0,)},
}


def results(framework: str, size: int) -> dict[str, Any]:
    """Of all cases."""
    (run, _), is_torch = FRAMEWORKS[framework], framework == "torch"
    found: dict[str, Any] = {}
    forget()
    for name, numbers in STAGES["torch" if is_torch else size].items():
        cases = {str(stage): VARIANTS[name]._replace(stage=stage) for stage in (None, *numbers)}
        found[name] = {stage: run(case) for stage, case in cases.items()}
    for stage in (1, 3) if size > 1 and not is_torch else (0,):
        case = Case(stage, saves=f"saved-{framework}-{stage}")
        found[f"resumed {stage}"] = [run(case), run(case._replace(resumes=True))]
    forget()
    if size > 1:
        found["example"] = example(framework, size)
        found["refused"] = {name: sentence(call) for name, call in REFUSED[framework].items()}
    if size > 1 and not is_torch:
        case = Case(2, accumulation=ACCUMULATION, wide=True)
        found["nbytes"] = nbytes_of_three_steps(run, case)
    return found


def main(out: str, *frameworks: str) -> None:
    """All cases; rank 0 writes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    anychip.use("cpu")
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    found = {framework: results(framework, size) for framework in frameworks}
    if rank == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
