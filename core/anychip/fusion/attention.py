"""Attention of modules that call ``torch.nn.functional.scaled_dot_product_attention`` themselves.

Their forward runs under a function mode that takes this one call; all others go on as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from anychip import ops
from anychip.fusion.fused import FLOATS, HOST, Fusion, autocast_is_on, own_code

LABEL = "torch.nn.functional.scaled_dot_product_attention"
SEEDS = 2**63 - 1
UNLESS = "masks, causal with fewer queries than keys, other dtypes"


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
    why = None if attn_mask is None else "a mask"
    if why is None and not enable_gqa and query.shape[:-2] != key.shape[:-2]:
        why = "batch or heads of query and key differ"
    why = why or refusal(query, key, value, causal=is_causal, dropout=dropout_p)
    if why is None:
        return attention(query, key, value, causal=is_causal, scale=scale, dropout=dropout_p)
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
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None, dropout: float
) -> Tensor:
    """``ops.attention`` of (B, H, S, D); the result too, contiguous as (B, S, H, D).

    With dropout it is ``ops.attention_dropout``, with a seed from the host's generator.
    """
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if not dropout:
        return ops.attention(q, k, v, causal=causal, scale=scale).transpose(1, 2)
    y = ops.attention_dropout(q, k, v, drawn(query), p=dropout, causal=causal, scale=scale)
    return y.transpose(1, 2)


def drawn(like: Tensor) -> Tensor:
    """int64[2] on a tensor's device: a seed for one call, and the offset 0.

    One draw of torch's default generator of the host, whatever the device: after the same
    ``torch.manual_seed`` the masks are the same on every chip, and a checkpointed layer that runs
    again with the generator's state of then has the mask of then.
    """
    seed = torch.randint(SEEDS, (1,), dtype=torch.int64, device=HOST)
    return nn.functional.pad(seed, (0, 1)).to(like.device)


def refusal(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, dropout: float
) -> str | None:
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
    return None if 0.0 <= dropout <= 1.0 else f"dropout {dropout}"


def calls(module: nn.Module, name: str) -> bool:
    """Whether a module's own forward names a function; an attribute of the module does not count.

    A superclass's forward that it calls is not looked into.
    """
    return not hasattr(module, name) and name in _named(type(module).forward)


def mentions(module: nn.Module, name: str) -> bool:
    """As :func:`calls`, in the methods of its class that the forward calls as well."""
    kind = type(module)
    methods = [vars(kind).get(called) for called in _named(kind.forward)]
    named = _named(kind.forward).union(*map(_named, methods))
    return not hasattr(module, name) and name in named


def _named(function: Any) -> set[str]:
    """Names in a function's code; none when it has no code of Python."""
    if not callable(function):
        return set()
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return _names(code) if isinstance(code, CodeType) else set()


def _names(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names}.union(*(_names(one) for one in inner))
