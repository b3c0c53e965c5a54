"""``zero.Optimizer``: an update rule applied to a model, alone or (later) sharded over ranks.

Partitioning (ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054) splits optimizer states (stage 1),
gradients (2) and parameters (3) over the ranks. This version runs on one rank, where the partition
of stages 1 and 2 is the whole and nothing differs from stage 0.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anychip.contract import Communicator, UnsupportedError
from anychip.train.optim import Group, Rule, Update
from anychip.train.precision import Policy


class StepResult(NamedTuple):
    """What one step did.

    Attributes:
        grad_norm: 0-dim float32 on the device, before clipping; None when no rule measured it.
        lr: learning rate that was applied.
        loss_scale: 1.0 without loss scaling.
        skipped: the update was left out because a gradient was not finite.
    """

    grad_norm: Tensor | None
    lr: float
    loss_scale: float
    skipped: bool


class Optimizer(torch.optim.Optimizer):
    """Applies a rule to parameters.

    Args:
        model: a module (its parameters that require gradients), parameters, or torch's parameter
            groups, whose ``weight_decay`` and ``lr_scale`` are honoured.
        rule: see :mod:`anychip.train.optim`.
        comm: the ranks among which states are partitioned.
        stage: 0 to 2.
        precision: the policy under which the loss is computed.

    Raises:
        ValueError: no parameter requires gradients, or a stage outside 0 to 3.
        UnsupportedError: stage 3, or more than one rank.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Tensor] | Iterable[dict[str, Any]],
        rule: Rule,
        comm: Communicator,
        *,
        stage: int = 0,
        precision: Policy | None = None,
    ) -> None:
        _check_stage(stage, comm)
        if not rule.writes:
            raise ValueError("the rule writes no parameter; chain one that does, like optim.adamw")
        self.rule, self.comm, self.stage, self.precision = rule, comm, stage, precision
        self.num_steps = 0
        super().__init__(_trainable(model), {})

    def _init_state(self, params: list[Tensor]) -> None:
        """State of parameters that are new here, with one step count for all of them."""
        fresh = [p for p in params if p not in self.state]
        if not fresh:
            return
        step = torch.zeros((), dtype=torch.float32, device=fresh[0].device)
        for param in fresh:
            self.state[param] = {"step": step, **self.rule.init(param)}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's.

        Raises:
            ValueError: a parameter that is frozen, or an option that the rule does not have.
            UnsupportedError: a 16-bit parameter, whose small updates would be rounded away.
        """
        params = param_group["params"]
        param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
        _check_options(set(param_group) - {"params"}, self.rule.options)
        for param in param_group["params"]:
            _check_parameter(param)
        super().add_param_group(param_group)
        self._init_state(self.param_groups[-1]["params"])

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of a loss to ``.grad``. May be called several times before a step.

        To accumulate over micro-batches, divide each loss by their number.
        """
        loss.backward()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        """Updates every parameter that has a gradient, in place.

        Args:
            closure: not taken; a rule makes one pass.

        Raises:
            RuntimeError: no parameter has a gradient.
        """
        if closure is not None:
            raise ValueError("step: no closure expected; call backward() before step()")
        groups = [part for group in self.param_groups for part in self._parts(group)]
        if not groups:
            raise RuntimeError("step: no parameter has a gradient; call backward() first")
        update = Update(groups=groups, count=self.num_steps)
        self.rule.update(update)
        self.num_steps += 1
        return StepResult(update.norm, update.lr, 1.0, False)

    def _parts(self, group: dict[str, Any]) -> list[Group]:
        """A parameter group, split where step counts differ.

        All parameters of a group share one step count until one of them misses a gradient: from
        then on it has a count of its own, as in torch, since bias correction depends on it.
        """
        parts: dict[int, list[Tensor]] = {}
        for param in group["params"]:
            parts.setdefault(id(self.state[param]["step"]), []).append(param)
        found = []
        for params in parts.values():
            present = [p for p in params if p.grad is not None]
            absent = [p for p in params if p.grad is None]
            if not present:
                continue
            if absent:
                step = self.state[absent[0]]["step"].clone()
                for param in absent:
                    self.state[param]["step"] = step
            found.append(self._part(present, group))
        return found

    def _part(self, params: list[Tensor], group: dict[str, Any]) -> Group:
        states = [self.state[p] for p in params]
        names = [name for name in states[0] if name != "step"]
        return Group(
            params=params,
            grads=[p.grad for p in params if p.grad is not None],
            state={name: [state[name] for state in states] for name in names},
            step=states[0]["step"],
            options={k: v for k, v in group.items() if k != "params"},
        )

    def state_dict(self) -> dict[str, Any]:
        """torch's form, and ``num_steps``."""
        return {**super().state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies a state into this one's tensors, which keep their dtype and place in memory.

        Raises:
            ValueError: the groups or shapes are not those of this optimizer. Nothing is changed.
        """
        saved = [p for group in state_dict["param_groups"] for p in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        sizes = [len(g["params"]) for g in state_dict["param_groups"]]
        mine = [len(g["params"]) for g in self.param_groups]
        if sizes != mine:
            raise ValueError(f"optimizer state: groups of {mine} parameters expected, got {sizes}")
        for number, (key, param) in enumerate(zip(saved, params, strict=True)):
            self._check_entry(number, state_dict["state"].get(key, {}), self.state[param])
        for group, other in zip(self.param_groups, state_dict["param_groups"], strict=True):
            steps: dict[float, Tensor] = {}
            with torch.no_grad():
                for key, param in zip(other["params"], group["params"], strict=True):
                    self._load_entry(state_dict["state"][key], self.state[param], steps)
            group.update({k: copy.deepcopy(v) for k, v in other.items() if k != "params"})
        self.num_steps = int(state_dict["num_steps"])

    @staticmethod
    def _check_entry(number: int, saved: dict[str, Tensor], mine: dict[str, Tensor]) -> None:
        wanted = {name: tuple(t.shape) for name, t in mine.items()}
        got = {name: tuple(t.shape) for name, t in saved.items()}
        if wanted != got:
            raise ValueError(
                f"optimizer state of parameter {number}: shapes {wanted} expected, got {got}"
            )

    @staticmethod
    def _load_entry(
        saved: dict[str, Tensor], mine: dict[str, Tensor], steps: dict[float, Tensor]
    ) -> None:
        for name, tensor in saved.items():
            if name != "step":
                mine[name].copy_(tensor)
        # Parameters of a group that had counted together go on counting together.
        count = float(saved["step"])
        if count not in steps:
            steps[count] = torch.full_like(mine["step"], count)
        mine["step"] = steps[count]


def _trainable(
    model: nn.Module | Iterable[Tensor] | Iterable[dict[str, Any]],
) -> list[Any]:
    if isinstance(model, nn.Module):
        found: list[Any] = [p for p in model.parameters() if p.requires_grad]
        if not found:
            raise ValueError(f"{type(model).__name__} has no parameter that requires gradients")
        return found
    return list(model)


def _check_options(given: set[str], known: frozenset[str]) -> None:
    for name in sorted(given - known):
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(known))}"
        raise ValueError(f"parameter group: the rule has no option {name!r}; {hint}")


def _check_parameter(param: Tensor) -> None:
    if not param.requires_grad:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} does not require gradients; leave frozen "
            "parameters out of the groups"
        )
    if param.dtype != torch.float32:
        raise UnsupportedError(
            f"a parameter of shape {tuple(param.shape)} is {param.dtype}; this version updates "
            "float32 parameters. Keep the model in float32 and compute under precision.policy()"
        )


def _check_stage(stage: int, comm: Communicator) -> None:
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage!r}")
    if stage == 3:
        raise UnsupportedError("ZeRO stage 3 is not part of this version; use stage 0, 1 or 2")
    if comm.world_size > 1:
        raise UnsupportedError(
            f"zero.Optimizer: {comm.world_size} ranks, and this version runs on one rank only"
        )
