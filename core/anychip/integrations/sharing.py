"""What do the classes of all frameworks need of an optimizer that several ranks share?"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from anychip.contract import HOST, UnsupportedError
from anychip.train.zero import Optimizer

_followed: WeakSet[nn.Module] = WeakSet()


def refuse(framework: str, reasons: Mapping[str, bool]) -> None:
    """UnsupportedError with the first sentence that holds."""
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise UnsupportedError(f"{framework} with zero.Optimizer on several ranks: {reason}")


def shared_of(optimizer: Any) -> Optimizer | None:
    """Our optimizer of several ranks, bare or as a framework has wrapped it; else None."""
    while not isinstance(optimizer, Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    is_shared = isinstance(optimizer, Optimizer) and optimizer.comm.world_size > 1
    return optimizer if is_shared else None


def trains(opt: Optimizer, model: nn.Module) -> bool:
    """It has parameters of the model."""
    return any(param in opt.state for param in model.parameters())


def around_loading(opt: Optimizer, model: nn.Module) -> None:
    """From now on ``model.load_state_dict``, by all ranks, reaches every part at every stage."""
    if model in _followed:
        return
    _followed.add(model)
    stack = ExitStack()

    def before(*_: Any) -> None:
        stack.enter_context(opt.whole(writes=True))

    def after(*_: Any) -> None:
        stack.close()

    model.register_load_state_dict_pre_hook(before)
    model.register_load_state_dict_post_hook(after)


def whole_state(opt: Optimizer | None, model: nn.Module) -> dict[str, Any] | None:
    """The state dict of a model in memory of its own, on rank 0, and an empty one on the others.

    From stage 1 on parameters are views of buffers, of which safetensors and Accelerate keep one
    alone. A collective call. None: the model's own will do.
    """
    if opt is None or opt.sharded is None or not opt.sharded.partition.states:
        return None
    if opt.sharded.module is model:
        return opt.sharded.state_dict(to_rank=0)
    found = dict(model.state_dict(keep_vars=True)) if opt.comm.rank == 0 else {}
    copies = {t: t.detach().to(HOST, copy=True) for t in found.values() if isinstance(t, Tensor)}
    return {n: copies[t] if isinstance(t, Tensor) else t for n, t in found.items()}


def load_whole(model: nn.Module, state: Mapping[str, Any]) -> None:
    """``model.load_state_dict`` of a file that has one of the names of a tied weight."""
    names = model.state_dict(keep_vars=True)
    given = {t: state[n] for n, t in names.items() if n in state and isinstance(t, Tensor)}
    others = {n: given[t] for n, t in names.items() if isinstance(t, Tensor) and t in given}
    model.load_state_dict({**others, **state})
