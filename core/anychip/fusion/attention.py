"""Attention of modules that ask torch or transformers for it, by the operators.

A forward that calls ``torch.nn.functional.scaled_dot_product_attention`` runs with ours in its
place. One that asks ``ALL_ATTENTION_FUNCTIONS`` of transformers gets ours in the place of its
function for sdpa, and everything else as it is; configs, masks and the interface are not touched.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as SDPA

from anychip import ops
from anychip.fusion import masks
from anychip.fusion.probe import HOST, Comparison, call, normal
from anychip.fusion.stand_ins import FLOATS, Forward, StandIn, autocast_is_on
from anychip.fusion.swaps import Renames, Reroutes, calls, can_be_renamed, served

INTERFACE, REPLACES = "ALL_ATTENTION_FUNCTIONS", "sdpa"
"""By transformers' names: its functions, and the one that masks and meaning are taken from."""
_MEANT = ("output_attentions", "softcap", "position_bias", "cache")
"""Arguments by name that change what transformers' sdpa computes."""
_UNLESS = "masks of no sequences, causal with fewer queries than keys, other dtypes"


def _for_torch(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    one_head = key.dim() == 4 and key.shape[:2] == (query.shape[0], 1)
    if not (kwargs.get("enable_gqa") or one_head or query.shape[:-2] == key.shape[:-2]):
        return "batch or heads of query and key differ"
    return _attention(query, key, value, *args, **kwargs, pads=False)


def _for_transformers(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **rest: Any,
) -> tuple[Tensor, None] | str:  # fmt: skip
    """Its sdpa, which is not run: that, and a mode around it, take as long as the operator's call.

    As in its flash attention, the result of a token that a causal mask hides from all is 0.
    """
    if told := [n for n in _MEANT if rest.get(n) is not None and rest[n] is not False]:
        return f"argument {', '.join(told)}"
    wanted = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(wanted) and attention_mask is None and query.shape[2] > 1
    made = _attention(query, key, value, attention_mask, dropout, causal, scaling, pads=True)
    if not isinstance(made, str):
        return made.transpose(1, 2), None
    window = rest.get("sliding_window")
    if made == "a mask" and window and key.shape[2] > window:
        made = f"a mask, of a window of {window}"
    return made


@dataclass(frozen=True)
class CallsTorch(Reroutes):
    """A forward that calls torch's attention."""

    kind, operator, unless = "attention", "attention", _UNLESS
    routes: ClassVar[dict[Any, Forward]] = {SDPA: served("attention", SDPA, _for_torch)}


@dataclass(frozen=True)
class AsksInterface(Renames):
    """A forward that asks transformers for the attention that its config names."""

    kind, operator, unless, name = "attention", "attention", _UNLESS, INTERFACE

    def subject(self, module: nn.Module) -> Any:
        return super().subject(module)[REPLACES]

    def comparisons(self, module: nn.Module) -> Iterator[Comparison]:
        theirs, groups, mask = self.subject(module), nn.Module(), torch.ones(5, 5, device=HOST)
        groups.num_key_value_groups = 2  # type: ignore[assignment]
        shapes = {"query": (2, 4, 5, 8), "key": (2, 2, 5, 8), "value": (2, 2, 5, 8)}
        args = {name: normal(*shape).requires_grad_() for name, shape in shapes.items()}
        ours: Any = _for_transformers
        for given in (None, mask.bool().tril()[None, None]):
            both = [
                lambda *qkv, function=function, given=given: function(groups, *qkv, given)[0]
                for function in (theirs, ours)
            ]
            yield Comparison(both[0], both[1], args, whole=True)

    def replacement(self, original: Any) -> Any:
        return _Interface(original)


class _Interface:
    """Transformers' functions of attention, with ours for that of sdpa."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self._ours = served("attention", original[REPLACES], _for_transformers)

    def get_interface(self, name: str, default: Any) -> Any:
        return self._ours if name == REPLACES else self._original.get_interface(name, default)

    def __getitem__(self, name: str) -> Any:
        return self._ours if name == REPLACES else self._original[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, pads: bool,
) -> Tensor | str:  # fmt: skip
    """torch's function of the same arguments, (B, H, S, D); or why no operator computes it.

    With dropout it is ``ops.attention_dropout``. Its seed is one draw of torch's default generator
    of the host, whatever the device: after the same ``torch.manual_seed`` the masks are the same on
    every chip, and a checkpointed layer that runs again has the mask of the first time.

    Args:
        pads: as of ``masks.pattern``.
    """
    if (why := _refusal(query, key, value, dropout_p)) is not None:
        return why
    found: masks.Pattern | str = masks.Pattern(is_causal)
    if attn_mask is not None:
        shape = (query.shape[0], query.shape[2], key.shape[2])
        # Both is torch's error.
        found = "a mask" if is_causal else masks.pattern(attn_mask, shape, pads=pads)
    elif is_causal and query.shape[2] != key.shape[2]:
        # torch aligns a causal mask to the first key, the operator to the last one.
        found = "causal with other keys than queries"
    if not isinstance(found, str) and dropout_p and found.tokens is not None:
        found = "a mask, and dropout"
    if isinstance(found, str):
        return found
    qkv = [t.transpose(1, 2) for t in (query, key, value)]
    attrs: dict[str, Any] = {"causal": found.causal, "scale": scale}
    if found.tokens is not None:
        made = _packed(qkv, found.tokens, found.cu_seqlens, attrs)
    elif dropout_p:
        drawn = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=HOST)
        state = nn.functional.pad(drawn, (0, 1)).to(query.device)  # and the offset 0
        made = call(ops.attention_dropout, *qkv, state, p=dropout_p, **attrs)
    else:
        made = call(ops.attention, *qkv, **attrs)
    return made.transpose(1, 2)


def _packed(qkv: list[Tensor], tokens: Tensor, cu_seqlens: Any, attrs: dict[str, Any]) -> Tensor:
    rows = [t.flatten(0, 1) for t in qkv]
    padded = len(tokens) < len(rows[0])
    if padded:
        rows = [t.index_select(0, tokens) for t in rows]
    made = call(ops.attention_varlen, *rows, cu_seqlens, cu_seqlens, **attrs)
    if padded:
        zeros = made.new_zeros((qkv[0].shape[0] * qkv[0].shape[1], *made.shape[1:]))
        made = zeros.index_copy(0, tokens, made)
    result: Tensor = made.reshape(qkv[0].shape)
    return result


def _refusal(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> str | None:
    """Why no operator can serve these (B, H, S, D) tensors; None when one can."""
    tensors = (query, key, value)
    if any(t.dim() != 4 or t.is_nested for t in tensors):
        return "not (batch, heads, seq, head_dim)"
    known = all(t.dtype in FLOATS for t in tensors)
    if not known or not (query.dtype == key.dtype == value.dtype or autocast_is_on(query)):
        return f"dtypes {', '.join(str(t.dtype) for t in tensors)}"
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        return "head_dims or lengths of key and value differ"
    if query.shape[0] != key.shape[0] or not key.shape[1] or query.shape[1] % key.shape[1]:
        return "batches differ, or heads do not divide"
    if not (key.shape[2] and key.shape[3]):
        return "an empty key"
    return None if 0.0 <= dropout <= 1.0 else f"dropout {dropout}"


def proposals(module: nn.Module, model: nn.Module) -> Iterator[StandIn | str]:
    """How a module's attention may be replaced, by whom its forward asks; or why it is not."""
    named = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if named is None or not calls(module, INTERFACE):
        yield from [CallsTorch()] if calls(module, SDPA.__name__) else []
    elif named == REPLACES:
        # Names of a forward in a decorator cannot be changed; what it calls in the end can.
        yield AsksInterface() if can_be_renamed(module) else CallsTorch()
    else:
        holders = [m for m in model.modules() if vars(m).get("config") is module.config]
        can = all(getattr(each, f"_supports_{REPLACES}", True) for each in holders)
        yield f"its attention is {named!r}" + (
            f"; only {REPLACES!r} is replaced: model.set_attn_implementation({REPLACES!r})"
            if can
            else f", and its model does not support {REPLACES!r}, which is the one that is replaced"
        )
