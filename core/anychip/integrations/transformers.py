"""transformers' Trainer with ``zero.Optimizer`` on several ranks: what does it do by itself?

It saves and loads. The rest it does by Accelerate: its accelerator becomes ours.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from anychip.integrations.accelerate import Accelerator
from anychip.integrations.sharing import around_loading, shared_of, whole_state
from anychip.train.data.extra import require

_transformers = require("transformers", "anychip.integrations.transformers", extra="hf")
_Trainer: Any = _transformers.Trainer


class Shared:
    """Makes any Trainer one that knows ``zero.Optimizer``: ``class Mine(Shared, SFTTrainer)``.

    Give it the optimizer as ``optimizers=(opt, None)``, or let the Trainer make it of its parameter
    groups, which leave norms and biases without weight decay: ``optimizer_cls_and_kwargs=(
    zero.Optimizer, {"rule": rule, "comm": comm, "stage": 3, "module": model})``.
    """

    accelerator: Any
    args: Any
    model: nn.Module
    optimizer: Any

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's, with an accelerator of ours."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.__class__ = Accelerator  # it has nothing of its own until it prepares

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        # .to("cpu:0") copies what is on "cpu", and parameters are views of the optimizer's buffers.
        places = {p.device for p in model.parameters()}
        if any((p.type, p.index or 0) != (device.type, device.index or 0) for p in places):
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def _load_from_checkpoint(self, *args: Any, **options: Any) -> None:
        if (opt := shared_of(self.optimizer)) is not None:
            around_loading(opt, self.model)
        super()._load_from_checkpoint(*args, **options)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None:
            state_dict = whole_state(shared_of(self.optimizer), self.model)
        super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        before, opt = self.optimizer, shared_of(self.optimizer)
        if opt is not None:  # rank 0 alone asks it for its state, which all ranks have
            state = opt.state_dict(to_rank=0)
            self.optimizer = SimpleNamespace(state_dict=lambda: state)
        try:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        finally:
            self.optimizer = before


class Trainer(Shared, _Trainer):  # type: ignore[misc]
    """``transformers.Trainer``, which knows ``zero.Optimizer``; see :class:`Shared`."""
