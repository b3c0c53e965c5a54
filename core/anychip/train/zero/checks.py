"""What an optimizer takes: messages for what it does not."""

import difflib
import gc
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as _DDP

from anychip.contract import UnsupportedError
from anychip.operators.codes import FORMATS
from anychip.train.optim import Rule
from anychip.train.optim.rule import BLOCK
from anychip.train.zero.tiers import Device, tiers_of
from anychip.train.zero.weights import state_shape

KEPT = ("params", "name", "param_names", "initial_lr")
"""What torch and people keep in a parameter group beside a rule's options."""


def trainable(model: nn.Module | Iterable[Tensor] | Iterable[dict[str, Any]]) -> list[Any]:
    """Parameters or groups, as torch's optimizers take them."""
    if isinstance(model, nn.Module):
        found: list[Any] = [p for p in model.parameters() if p.requires_grad]
        if not found:
            raise ValueError(f"{type(model).__name__} has no parameter that requires gradients")
        return found
    return list(model)


def check_stage(stage: int) -> None:
    """0 to 3."""
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage!r}")


def check_arguments(
    stage: int, bucket_nbytes: int | None, reduction: str, rule: Rule, how: Mapping[str, Any]
) -> None:
    """What an optimizer is made with."""
    check_stage(stage)
    if bucket_nbytes is not None and bucket_nbytes < 1:
        raise ValueError(f"bucket_nbytes must be at least 1, got {bucket_nbytes}")
    if reduction not in ("avg", "sum"):
        raise ValueError(f"reduction must be 'avg' or 'sum', got {reduction!r}")
    if not rule.writes:
        raise ValueError("the rule writes no parameter; chain one that does, like optim.adamw")
    if how.get("gather_format") is not None:
        check_format(how["gather_format"], stage)


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """As Python says it of a function that lists them."""
    for name in sorted(set(given) - set(known)):
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"zero.Optimizer has no argument {name!r}{hint}")


def check_duplicates(duplicates: Collection[Tensor], trained: Collection[Tensor]) -> None:
    """Other stages of a pipeline have them too; this one trains them."""
    foreign = set(duplicates) - set(trained)
    if foreign:
        raise ValueError(f"duplicates: {len(foreign)} parameters that are not trained here")


def check_format(name: str, stage: int) -> None:
    """A format of codes, for weights that stand beside those that are updated."""
    if name not in FORMATS:
        raise ValueError(f"gather_format must be one of {', '.join(FORMATS)}, got {name!r}")
    if stage != 3:
        raise ValueError(f"gather_format is for stage 3, which gathers copies; got stage {stage}")


def check_carries(carries: Sequence[str], *, is_scaled: bool, are_tied: bool) -> None:
    """What an exchange carries from step to step means the same in both.

    Raises:
        UnsupportedError: it would not.
    """
    reasons = {
        "the loss scale, a factor of gradients, changes; compute in bfloat16": is_scaled,
        "weights are tied over stages, whose gradients are summed by another call": are_tied,
    }
    for reason in (reason for reason, holds in reasons.items() if holds and carries):
        raise UnsupportedError(
            f"an exchange that carries {', '.join(carries)} from step to step: {reason}"
        )


def check_offload(how: Mapping[str, Any], stage: int, rule: Rule, *, has_masters: bool) -> None:
    """What is elsewhere is there, is cut as it can be, and can be updated in pieces.

    Raises:
        ValueError: it cannot, or another name or place than there is.
        UnsupportedError: the rule needs whole parameters.
    """
    if how.get("chunk_nbytes", 1) < 1:
        raise ValueError(f"chunk_nbytes must be at least 1, got {how['chunk_nbytes']}")
    kinds = tiers_of(how.get("offload") or {})
    away = {kind for kind, tier in kinds.items() if not isinstance(tier, Device)}
    if away and not rule.in_pieces:
        raise UnsupportedError(
            "offload: the rule needs the norms of whole parameters while it updates them, and what "
            "is elsewhere comes in pieces; take another rule, like adamw, or no offload"
        )
    wrong = {
        "gradients are whole on each rank before stage 2": "gradients" in away and stage < 2,
        "weights are whole on each rank before stage 3": "weights" in away and stage < 3,
        "weights of 32 bits have no masters": "masters" in away and not has_masters,
        "weights of 16 bits are made of masters, which are on the device; offload these too": (
            "weights" in away and has_masters and "masters" not in away
        ),
        "gather_format makes codes of masters, which have to be on the device": (
            "masters" in away and how.get("gather_format") is not None
        ),
    }
    for sentence, is_so in wrong.items():
        if is_so:
            raise ValueError(f"offload: {sentence}")


def module_of_stage_3(module: nn.Module | None) -> nn.Module:
    """Whose modules say when which weights are needed."""
    if module is None:
        raise ValueError(
            "stage 3 gathers weights while their modules run, and has been given parameters alone: "
            "zero.Optimizer(groups, rule, comm, stage=3, module=model)"
        )
    return module


def check_options(given: set[str], known: Iterable[str]) -> None:
    """Only what the rule knows, and what torch or a person keeps in a group."""
    for name in sorted(given - {*known, *KEPT}):
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(known))}"
        raise ValueError(f"parameter group: the rule has no option {name!r}; {hint}")


_16_BITS = (torch.bfloat16, torch.float16)


def has_16_bits(given: Iterable[Any]) -> bool:
    """Whether any of these parameters or groups needs masters."""
    found: list[Any] = []
    for entry in given:
        params = entry["params"] if isinstance(entry, dict) else entry
        found += [params] if isinstance(params, (Tensor, tuple)) else list(params)
    return any((p[1] if isinstance(p, tuple) else p).dtype in _16_BITS for p in found)


def check_parameter(param: Tensor, device: str, *, may_have_master: bool) -> None:
    """float32, or of 16 bits where it can have a master; with values, and not frozen.

    Args:
        device: torch's device type of what ranks send: of no values, where shapes alone are asked.
    """
    if not param.requires_grad:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} does not require gradients; leave frozen "
            "parameters out of the groups"
        )
    if param.is_meta and device != "meta":
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is on the meta device, without values; "
            "stage 3 on several ranks makes them, elsewhere: model.to_empty(device=...), and init"
        )
    if param.dtype in _16_BITS:
        if may_have_master and hasattr(param, "grad_dtype"):
            return
        raise UnsupportedError(
            f"a parameter of shape {tuple(param.shape)} is {param.dtype}, and is updated in float32"
            ": give it when the optimizer is made, with torch 2.10 or later"
        )
    if param.dtype != torch.float32:
        raise UnsupportedError(
            f"a parameter of shape {tuple(param.shape)} is {param.dtype}; parameters of 32 or 16 "
            "bits are updated"
        )


def check_clip(present: Collection[Tensor], *, are_away: bool) -> None:
    """Gradients can be multiplied where they are: there are some, on the device."""
    if not present:
        raise RuntimeError("clip: no parameter has a gradient; call backward() first")
    if are_away:
        raise UnsupportedError(
            "clip_grad_norm_: the gradients are not on the device, and would be read and written "
            "once more; give the rule: optim.chain(optim.clip_by_global_norm(max_norm), rule)"
        )


def check_reduced_once(params: Collection[Tensor]) -> None:
    """RuntimeError when torch's DistributedDataParallel averages the gradients of any as well."""
    if not torch.distributed.is_initialized():
        return  # and it needs that
    # It leaves no mark on what it wraps, and has a list of the parameters among its attributes. Not
    # by gc.get_objects: a tuple that another thread is making must not be had by anybody else.
    lists = [each for each in gc.get_referrers(*params) if type(each) is list]
    having = [each for each in gc.get_referrers(*lists) if type(each) is dict or _is_ddp(each)]
    if any(map(_is_ddp, (*having, *gc.get_referrers(*having)))):
        raise RuntimeError(
            "the model is in torch's DistributedDataParallel, and zero.Optimizer averages its "
            "gradients too: leave the model as it is (anychip.integrations does in Accelerate, "
            "transformers' Trainer and Lightning), or keep DDP and give the optimizer "
            "anychip.comm.alone(device=...)"
        )


def _is_ddp(found: object) -> bool:
    return issubclass(type(found), _DDP)  # other objects may be proxies of what is gone


def check_memory(params: Sequence[Tensor]) -> None:
    """Parameters that go into one buffer are on one device, and share no memory."""
    devices = sorted({str(param.device) for param in params})
    if len(devices) > 1:
        raise UnsupportedError(
            f"parameters of one group on one device expected, got {', '.join(devices)}; split a "
            "model over devices by a pipeline"
        )
    for first, second in pairwise(sorted((p for p in params if p.numel()), key=Tensor.data_ptr)):
        if second.data_ptr() < first.data_ptr() + first.nbytes:
            raise UnsupportedError(
                f"two parameters, of shapes {tuple(first.shape)} and {tuple(second.shape)}, share "
                "memory; use one parameter twice instead (tied weights)"
            )


def check_state(made: Mapping[str, Tensor], values: Tensor, blocks: Mapping[str, int]) -> None:
    """A partitioned parameter has states of its own shape, or with an entry per block, only.

    Args:
        made: its states.
        values: this rank's piece of it.
        blocks: as :class:`~anychip.train.optim.Rule` has them.
    """
    for name, tensor in made.items():
        if BLOCK % blocks.get(name, 1):
            raise UnsupportedError(
                f"the rule's state {name!r} has one entry per {blocks[name]} elements; shards "
                f"begin at multiples of {BLOCK}, of which only divisors can be partitioned. Use "
                "stage 0"
            )
        if tuple(tensor.shape) != state_shape(tuple(values.shape), blocks.get(name)):
            raise UnsupportedError(
                f"the rule's state {name!r} has the shape {tuple(tensor.shape)} for a parameter of "
                f"{values.numel()} elements; only states of the parameter's shape can be "
                "partitioned. Use stage 0"
            )
