"""How does a part of a decoder of transformers run? By the library's own forward, with stand-ins.

What a block needs besides vectors (masks, positions, which kind of attention is its turn) is made
in the body's forward, family by family. So that runs, in a copy of the body that has all blocks'
places: in those of other stages are stand-ins. What it makes of its input before the blocks is
dropped where the part begins above that, and the first block here is given what came from below.
"""

import copy
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from anychip.train.models.decoder import Layers, Parts


def parts_of(net: Any) -> Parts:
    """Where the parts of a causal decoder are; without names where that is not clear.

    A body registers what it has in the order of use: before its one list of blocks what is below.
    """
    name, count = net.base_model_prefix, net.config.get_text_config().num_hidden_layers
    children = dict(getattr(net, name, nn.Module()).named_children())
    lists = [
        key for key, child in children.items()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]  # fmt: skip
    if len(lists) != 1:
        return Parts((), "", ())
    place = [*children].index(lists[0])
    below, above = list[str](), list[str]()
    for number, (key, child) in enumerate(children.items()):
        has_weights = any(True for _ in child.parameters())
        if number < place and has_weights:
            below.append(f"{name}.{key}")
        # A norm may have no weights; angles of positions, for every block, are buffers.
        if number > place and (has_weights or not any(True for _ in child.buffers())):
            above.append(f"{name}.{key}")
    heads = (key for key, _ in net.named_children() if key != name)
    return Parts(tuple(below), f"{name}.{lists[0]}", (*above, *heads))


def gives_tuples(net: Any, parts: Parts) -> bool:
    """Whether blocks of a causal decoder hand on their vectors as the first of a tuple."""
    first = next(iter(net.get_submodule(parts.blocks)))
    found: list[bool] = []

    def end(_: nn.Module, __: Any, output: Any) -> None:
        found.append(isinstance(output, tuple))
        raise _Enough

    handle = first.register_forward_hook(end)
    token = torch.zeros(1, 1, dtype=torch.int64, device=next(first.parameters()).device)
    try:
        with suppress(_Enough), torch.no_grad(), torch.random.fork_rng([]):
            net(input_ids=token, use_cache=False)
    finally:
        handle.remove()
    return found[0]


class _Enough(Exception):
    """The first block has been run."""


class Part:
    """Some layers of a causal decoder, to be called in its place.

    Args:
        net: the whole one.
        modules: the net's, without those of other layers.
        tuples: as :func:`gives_tuples` says.
    """

    def __init__(
        self, net: Any, modules: Mapping[str, Any], parts: Parts, layers: Layers, *, tuples: bool
    ) -> None:
        prefix, _, blocks = parts.blocks.rpartition(".")
        self.layers, self.body, self.net = layers, copy.copy(modules[prefix]), copy.copy(net)
        row = copy.copy(self.body._modules[blocks])
        count = len(getattr(net, prefix)._modules[blocks])
        here = {number: row._modules.get(str(number)) for number in range(count)}
        row._modules = {str(n): block or _Passed(tuples) for n, block in here.items()}
        self.first = _First(row._modules[str(min(layers.blocks.start, count - 1))])
        if not layers.begin:
            row._modules[str(min(layers.blocks.start, count - 1))] = self.first
        stand_ins = {
            key: _Nothing() if isinstance(child, nn.Embedding) else nn.Identity()
            for key, child in getattr(net, prefix).named_children()
        }
        self.body._modules = {**stand_ins, **self.body._modules, blocks: row}
        self.net._modules = {**modules, prefix: self.body}

    def __call__(self, x: Tensor, given: dict[str, Tensor]) -> Tensor:
        """Logits (B, S, V) where the part ends with the head, else vectors (B, S, D).

        Args:
            x: vectors (B, S, D) from below; not looked at where ``given`` has tokens.
            given: what the library's forward is given besides.
        """
        more: dict[str, Any] = {**given, "use_cache": False}
        if not self.layers.begin:
            more["inputs_embeds"] = self.first.given = x
        if self.layers.end:
            return self.net(**more).logits  # type: ignore[no-any-return]
        return self.body(**more).last_hidden_state  # type: ignore[no-any-return]


class _Passed(nn.Module):
    """In the place of a block of another stage."""

    def __init__(self, tuples: bool) -> None:
        super().__init__()
        self.tuples = tuples

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor]:
        return (hidden_states,) if self.tuples else hidden_states


class _First(nn.Module):
    """The first block of a part, or what is in the place of the last one below its head.

    Attributes:
        given: what it takes for its input.
    """

    given: Tensor

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_states: Tensor, *rest: Any, **more: Any) -> Any:
        del hidden_states  # made of the tokens' stand-ins
        return self.block(self.__dict__.pop("given"), *rest, **more)


class _Nothing(nn.Module):
    """In the place of an embedding of another stage."""

    def forward(self, numbers: Tensor) -> Tensor:
        return torch.zeros(*numbers.shape, 1, device=numbers.device)


def experts_on_paper(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What experts keep and cost, wherever tokens go: all to the first one.

    As the library's grouped products, in which each token of each of its experts is a row.
    """

    def product(x: Tensor, name: str) -> Tensor:
        weight = getattr(experts, name)[0]
        bias = getattr(experts, f"{name}_bias")[0] if experts.has_bias else None
        return nn.functional.linear(x, weight.T if experts.is_transposed else weight, bias)

    x = hidden_states.repeat_interleave(top_k_index.size(-1), dim=0)
    if experts.has_gate:
        x = experts._apply_gate(product(x, "gate_up_proj"))
    else:
        x = experts.act_fn(product(x, "up_proj"))
    x = product(x, "down_proj")
    if experts.has_post_expert_norm:
        x = experts.post_expert_norm(x)
    x = x * top_k_weights.reshape(-1, 1)
    return x.view(*top_k_index.shape, -1).sum(dim=1).to(hidden_states.dtype)
