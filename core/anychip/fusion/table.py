"""What ``anychip.fuse`` looks for among a model's modules, and what may stand for it: one table.

A layer is known by its class, by a name in its line of inheritance, or by the names of its
children. Attention and rope have no class of their own in plain torch, and are functions in
transformers: they are known by what a forward calls. What a row proposes is only tried: the probe
decides. ``LAYERS`` is a list, for rows of your own:
``LAYERS.append(Lookalike("^MyNorm$", layers.norms))``.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torch import nn

from anychip.fusion.layers import GatedMLP, Gelu, Linear, norms
from anychip.fusion.loss import TorchLoss
from anychip.fusion.stand_ins import StandIn, own_class
from anychip.fusion.swaps import calls


class Lookalike(NamedTuple):
    """A layer, and what may stand for it.

    Attributes:
        classes: a pattern that its class's name, or that of one it inherits from, contains.
        proposals: what it may compute; the likeliest first.
        linear: children that it has, of this kind.
    """

    classes: str
    proposals: Callable[[nn.Module], Iterable[StandIn]]
    linear: tuple[str, ...] = ()


def _gated(*names: str) -> Lookalike:
    return Lookalike("", lambda _: [GatedMLP(*names)], names)


LAYERS = [
    Lookalike("LayerNorm|R[Mm][Ss]Norm", norms),
    Lookalike("(?i)gelu", lambda _: [Gelu("none"), Gelu("tanh")]),
    Lookalike("^Linear$", lambda _: [Linear()]),
    Lookalike("^CrossEntropyLoss$", lambda _: [TorchLoss()]),
    # gate, up and down of an MLP, by their names: its class has as many names as there are models.
    *(_gated("gate_proj", "up_proj", "down_proj"), _gated("proj_up_gate", "proj_up", "proj_down")),
    *(_gated("w1", "w3", "w2"), _gated("w3", "w1", "w2")),
]
_FUNCTIONALS = (
    *("layer_norm", "rms_norm", "gelu", "softmax", "Softmax", "cross_entropy"),
    "multi_head_attention_forward",
)


def proposals(module: nn.Module) -> Iterator[StandIn]:
    """What may stand for a layer, over all rows that know it."""
    names = [kind.__name__ for kind in own_class(module).__mro__]
    for classes, found, linear in LAYERS:
        known = any(re.search(classes, name) for name in names)
        if known and all(isinstance(module._modules.get(name), nn.Linear) for name in linear):
            yield from found(module)


def nothing(module: nn.Module) -> str | None:
    """Why no row knows a module; None for a container, of which nothing was expected."""
    of_torch = type(module).__module__.startswith("torch.nn.")
    for name in () if of_torch else _FUNCTIONALS:
        if calls(module, name, deeply=True):
            return f"it calls {name} itself"
    if isinstance(module, nn.MultiheadAttention):
        return "its attention is inside one function of torch"
    if module._modules or type(module).__module__ == nn.Sequential.__module__:
        return None
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return "it has no weight, or is over several dims"
    return "no norm, activation, attention or loss that an operator computes"
