"""Accelerate with ``zero.Optimizer`` on several ranks: who wraps the model, reduces and clips?

Not Accelerate. A model that ours trains stays as it is; all else is Accelerate's, so that with
other optimizers, or on one rank, this is ``accelerate.Accelerator``.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from anychip.integrations.sharing import (
    around_loading,
    load_whole,
    refuse,
    shared_of,
    trains,
    whole_state,
)  # fmt: skip
from anychip.train.data.extra import require
from anychip.train.zero import Optimizer

_accelerate = require("accelerate", "anychip.integrations.accelerate", extra="hf")
_Accelerator: Any = _accelerate.Accelerator


class Accelerator(_Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator``, which knows :class:`~anychip.train.zero.Optimizer`.

    ``prepare(model, optimizer, ...)`` takes both in one call.
    """

    _opt: Optimizer | None = None

    def prepare(self, *args: Any, **options: Any) -> Any:
        """As Accelerate's.

        Raises:
            UnsupportedError: what cannot work with an optimizer of several ranks.
        """
        for opt in filter(None, map(shared_of, args)):
            self._check(opt)
            self._opt = opt
        return super().prepare(*args, **options)

    def _check(self, opt: Optimizer) -> None:
        kind, size = self.distributed_type, self.num_processes
        refuse("Accelerate", {
            f"the optimizer has {opt.comm.world_size} ranks, and Accelerate {size} processes: make "
            "the communicator after the Accelerator": opt.comm.world_size != size,
            f"{kind.value} cuts or wraps the model too: leave its plugin out; stages 1 to 3 of "
            "zero.Optimizer are the same partition": not kind.value.startswith("MULTI_"),
            "a second optimizer of several ranks: make one, with a group for each": (
                self._opt not in (None, opt)
            ),
            "mixed_precision='fp16' scales the loss, and looks for overflows on one rank alone: "
            "mixed_precision='bf16' needs no scale": bool(self.scaler or opt.scaler),
            "torch.compile of the whole model sees weights come and go in stage 3: compile its "
            "blocks, block.compile(), or take stage 2": (
                self.state.dynamo_plugin.backend.value != "NO" and opt.stage == 3
            ),
            "a parallelism_config has other axes than data: leave it out": bool(
                self.parallelism_config
            ),
        })  # fmt: skip

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """As Accelerate's; a model of ours gets autocast and compilation, and is not wrapped."""
        if self._opt is not None and trains(self._opt, model):
            around_loading(self._opt, model)
            device_placement, evaluation_mode = False, True
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """As Accelerate's; states of ours are where the parameters are."""
        placement = False if isinstance(optimizer, Optimizer) else device_placement
        return super().prepare_optimizer(optimizer, placement)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """As Accelerate's; gradients are sent while it computes."""
        with self._opt.reducing() if self._opt is not None else nullcontext():
            super().backward(loss, **options)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """As Accelerate's: gradients stay on this rank, and add up."""
        mine = self._opt is not None and trains(self._opt, model)
        with self._opt.no_sync() if mine and self._opt else super().no_sync(model):
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """As Accelerate's, by the norm of all ranks' gradients.

        Raises:
            UnsupportedError: another norm, or some parameters of ours.
        """
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        opt = self._opt
        if opt is None or not any(param in opt.state for param in params):
            return super().clip_grad_norm_(params, max_norm, norm_type)
        refuse("Accelerate", {
            "the norm of some gradients, or another than the Euclidean one: "
            "clip_grad_norm_(model.parameters(), max_norm) clips all": (
                norm_type != 2 or not set(params).issuperset(opt.state)
            ),
        })  # fmt: skip
        return opt.clip_grad_norm_(max_norm)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """As Accelerate's, in whole tensors. In stage 3 a collective call, and rank 0 has them."""
        found = whole_state(self._opt, self.unwrap_model(model))
        return super().get_state_dict(model, unwrap) if found is None else found

    def load_state(self, *args: Any, **options: Any) -> None:
        """As Accelerate's, of what it has saved on any number of ranks."""
        handle = self.register_load_state_pre_hook(self._load_weights)
        try:
            super().load_state(*args, **options)
        finally:
            handle.remove()

    def _load_weights(self, models: list[nn.Module], folder: str) -> None:
        # safetensors loads in a way of its own, and refuses a model with views for parameters.
        for number, model in list(enumerate(models)):
            if self._opt is None or not trains(self._opt, model):
                continue
            last, file = f"_{number}" if number else "", Path(folder)
            if (file / f"model{last}.safetensors").exists():
                state = load_file(file / f"model{last}.safetensors")
            else:
                state = torch.load(file / f"pytorch_model{last}.bin", weights_only=True)
            load_whole(model, state)
            models.remove(model)

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerate's; knows no optimizer any more."""
        self._opt = None
        return super().free_memory(*objects)
