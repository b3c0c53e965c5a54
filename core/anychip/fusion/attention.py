"""Attention of modules that call ``torch.nn.functional.scaled_dot_product_attention`` themselves.

Their forward runs under a function mode that takes this one call; all others go on as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from anychip import ops
from anychip.fusion.fused import FLOATS, Fusion, autocast_is_on, own_code

LABEL = "torch.nn.functional.scaled_dot_product_attention"
UNLESS = "masks, dropout, causal with fewer queries than keys, other dtypes"


@dataclass(frozen=True)
class Attention(Fusion):
    """A module whose scaled dot products ``ops.attention`` computes."""

    kind = "attention"
    unless = UNLESS

    @property
    def operator(self) -> str:
        return "attention"

    def run(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        with _Rerouted():
            return forward(module, *args, **kwargs)


class _Rerouted(TorchFunctionMode):
    """Within it torch's attention is ours. What it calls itself is outside of it."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is scaled_dot_product_attention:
            return attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function of the same arguments, (B, H, S, D), by ``ops.attention`` where it can."""
    why = "a mask" if attn_mask is not None else "dropout" if dropout_p else None
    if why is None and not enable_gqa and query.shape[:-2] != key.shape[:-2]:
        why = "batch or heads of query and key differ"
    why = why or refusal(query, key, value, causal=is_causal)
    if why is None:
        return attention(query, key, value, causal=is_causal, scale=scale)
    own_code("attention", LABEL, why)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None
) -> Tensor:
    """``ops.attention`` of (B, H, S, D); the result too, contiguous as (B, S, H, D)."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return ops.attention(q, k, v, causal=causal, scale=scale).transpose(1, 2)


def refusal(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> str | None:
    """Why the operator cannot serve these (B, H, S, D) tensors; None when it can."""
    tensors = (query, key, value)
    if any(t.dim() != 4 or t.is_nested for t in tensors):
        return "not (batch, heads, seq, head_dim)"
    if any(t.dtype not in FLOATS for t in tensors):
        return f"dtypes {', '.join(str(t.dtype) for t in tensors)}"
    if not (query.dtype == key.dtype == value.dtype or autocast_is_on(query)):
        return f"dtypes {', '.join(str(t.dtype) for t in tensors)}"
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        return "head_dims or lengths of key and value differ"
    if query.shape[0] != key.shape[0] or not key.shape[1] or query.shape[1] % key.shape[1]:
        return "batches differ, or heads do not divide"
    if not (key.shape[2] and key.shape[3]):
        return "an empty key"
    # torch aligns a causal mask to the first key, the operator to the last one.
    if causal and query.shape[2] != key.shape[2]:
        return "causal with other keys than queries"
    return None


def calls(module: nn.Module, name: str) -> bool:
    """Whether a module's own forward names a function; an attribute of the module does not count.

    A superclass's forward that it calls is not looked into.
    """
    function = inspect.unwrap(getattr(type(module).forward, "__func__", type(module).forward))
    code = getattr(function, "__code__", None)
    return isinstance(code, CodeType) and not hasattr(module, name) and name in _names(code)


def _names(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names}.union(*(_names(one) for one in inner))
