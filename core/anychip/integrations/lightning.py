"""Lightning with ``zero.Optimizer`` on several ranks: ``Trainer(strategy=ZeroStrategy())``.

Lightning's DDP strategy, whose processes and reductions of metrics serve as they are, without DDP:
the optimizer that ``configure_optimizers`` returns reduces gradients and clips.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from anychip.integrations.sharing import refuse, shared_of, whole_state
from anychip.train.data.extra import require

# The distribution ``lightning`` has a copy of its own, whose classes are others.
_name = "lightning.pytorch" if "lightning.pytorch" in sys.modules else "pytorch_lightning"
_lightning = require(_name, "anychip.integrations.lightning", extra="lightning")
_DDPStrategy: Any = _lightning.strategies.DDPStrategy


class _Called(nn.Module):
    """A module behind one that calls it: Lightning makes the step its forward then, with hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.module(*args, **options)


class ZeroStrategy(_DDPStrategy):  # type: ignore[misc]
    """Data parallel training by an optimizer of ours, at any stage; options are DDPStrategy's.

    Raises:
        UnsupportedError: what cannot work, when ``fit`` begins.
    """

    strategy_name = "anychip_zero"
    _lightning_module: Any

    def configure_ddp(self) -> None:
        """No DDP. Weights of stage 3 are whole while the module runs that has them."""
        self.model = _Called(self.lightning_module)

    def setup_optimizers(self, trainer: Any) -> None:
        """As Lightning's, of ``configure_optimizers``."""
        super().setup_optimizers(trainer)
        if self.world_size == 1:
            return
        self._check(self._opt)
        self.precision_plugin.clip_grad_by_norm = _clip_by_norm

    @property
    def _opt(self) -> Any:
        found = [shared_of(optimizer) for optimizer in self.optimizers]
        return found[0] if len(found) == 1 else None

    def _check(self, opt: Any) -> None:
        kinds, module = [type(each).__name__ for each in self.optimizers], self.lightning_module
        cut: Any = opt.sharded if opt is not None and opt.stage == 3 else None
        refuse("ZeroStrategy", {
            f"configure_optimizers gave {', '.join(kinds) or 'none'}, and nobody would reduce the "
            "gradients: return one zero.Optimizer(self, rule, chip.communicator()), or take "
            "strategy='ddp'": opt is None or opt.comm.world_size != self.world_size,
            "precision='16-mixed' scales the loss, and looks for overflows on one rank alone: "
            "precision='bf16-mixed' needs no scale": bool(
                getattr(self.precision_plugin, "scaler", None) or (opt and opt.scaler)
            ),
            "stage 3 begins and ends with the LightningModule, and has been given another module: "
            "zero.Optimizer(self, ...)": cut is not None and cut.module is not module,
            "torch.compile of the whole module sees weights come and go in stage 3: compile its "
            "blocks, block.compile(), or take stage 2": bool(cut and module._compiler_ctx),
        })  # fmt: skip

    def backward(self, closure_loss: Tensor, *args: Any, **options: Any) -> Any:
        """As Lightning's; gradients are sent while it computes."""
        if self._opt is None:
            return super().backward(closure_loss, *args, **options)
        with self._opt.reducing():
            return super().backward(closure_loss, *args, **options)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """As Lightning's: gradients stay on this rank, and add up."""
        with self._opt.no_sync() if self._opt is not None else super().block_backward_sync():
            yield

    def optimizer_state(self, optimizer: Any) -> Any:
        """Of all ranks, on rank 0, which writes it; a collective call."""
        opt = shared_of(optimizer)
        return super().optimizer_state(optimizer) if opt is None else opt.state_dict(to_rank=0)

    def lightning_module_state_dict(self) -> Any:
        """Whole tensors; in stage 3 a collective call, and rank 0 has them."""
        found = whole_state(self._opt, self.lightning_module)
        return super().lightning_module_state_dict() if found is None else found

    def teardown(self) -> None:
        """As Lightning's, which moves the module to the host, where no rank has whole weights."""
        module = self._lightning_module
        if self._opt is not None and self._opt.stage == 3:
            self._lightning_module = None
        try:
            super().teardown()
        finally:
            self._lightning_module = module


def _clip_by_norm(optimizer: Any, clip_val: float) -> None:
    opt = shared_of(optimizer)
    assert opt is not None
    opt.clip_grad_norm_(clip_val)
