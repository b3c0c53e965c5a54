"""Attention of modules that ask torch or transformers for it, by the operators.

A forward that calls ``torch.nn.functional.scaled_dot_product_attention`` itself runs under a
function mode that takes this one call. One that asks ``ALL_ATTENTION_FUNCTIONS`` of transformers
finds ours under that name, which hands out our function in the place of sdpa's and everything else
as it is; configs, masks and the interface are not touched. transformers is never imported.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from anychip import ops
from anychip.fusion import masks
from anychip.fusion.fused import (
    FLOATS,
    HOST,
    Args,
    Call,
    Forward,
    Fusion,
    Named,
    autocast_is_on,
    call_operator,
    label_of,
    own_class,
    own_code,
    place,
)
from anychip.fusion.probe import difference, undisturbed
from anychip.fusion.rope import Rope, tables_among, version_of

SDPA, INTERFACE = "scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS"
REPLACES = "sdpa"
"""The implementation, by transformers' name for it, that masks and meaning are taken from."""
Asks = Literal["torch", "transformers"]


@dataclass(frozen=True)
class Attention(Fusion):
    """An attention whose products, or whose rope function, or both, are operators.

    Attributes:
        asks: whom it asks for its scaled dot products, when the operator computes them.
        rope: its rope function, when the operator stands for it.
    """

    asks: Asks | None = None
    rope: Rope | None = None

    kind, operator = "attention", "attention"
    unless = "masks of no sequences, causal with fewer queries than keys, other dtypes"

    @property
    def count(self) -> int:
        return (self.asks is not None) + (self.rope is not None)

    def rewritten(self, forward: Forward) -> Forward:
        """The forward with other functions in the place of its file's."""
        ours = {} if self.rope is None else self.rope.put_into(forward)
        if self.asks == "transformers":
            ours[INTERFACE] = f"anychip_{INTERFACE}"
            own = forward.__globals__
            own[ours[INTERFACE]] = _Interface(own[INTERFACE])
        return _renamed(forward, ours)

    def run(self, module: Any, forward: Forward, args: Args, kwargs: Named) -> Any:
        before = place.owner, place.tables, place.version
        tables = () if self.rope is None else tables_among(args, kwargs)
        place.owner, place.tables, place.version = id(module), tables, version_of(tables)
        try:
            with _Rerouted() if self.asks == "torch" else contextlib.nullcontext():
                return type(module).anychip_rewritten(module, *args, **kwargs)
        finally:
            place.owner, place.tables, place.version = before


def _renamed(forward: Forward, ours: Mapping[str, str]) -> Forward:
    """A function with the same globals in which some names are others."""
    if not ours:
        return forward
    assert isinstance(forward, FunctionType)
    names = tuple(ours.get(name, name) for name in forward.__code__.co_names)
    own, code = forward, forward.__code__.replace(co_names=names)
    made = FunctionType(code, own.__globals__, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__, made.__module__ = forward.__kwdefaults__, forward.__module__
    made.__qualname__ = forward.__qualname__
    return made


class _Rerouted(TorchFunctionMode):
    """Within it torch's attention is ours. What it calls itself is outside of it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Named | None = None
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
    **rest: Any,
) -> Tensor:
    """torch's function of the same arguments, (B, H, S, D), by an operator where it can."""
    made: Tensor | str = "batch or heads of query and key differ"
    one_head = key.dim() == 4 and key.shape[:2] == (query.shape[0], 1)
    if rest.get("enable_gqa") or one_head or query.shape[:-2] == key.shape[:-2]:
        given: Any = {"causal": is_causal, "scale": rest.get("scale"), "dropout": dropout_p}
        made = attention(call_operator, query, key, value, attn_mask, **given, pads=False)
    if isinstance(made, Tensor):
        return made.transpose(1, 2)
    own_code("attention", f"torch.nn.functional.{SDPA}", made, place.owner)
    return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **rest)


class _Interface:
    """Transformers' functions of attention, with ours for that of sdpa."""

    def __init__(self, original: Any) -> None:
        self._original = original
        sdpa = original[REPLACES]
        self._label = label_of(sdpa)  # compiled code could not make it
        self._meant = frozenset({*inspect.signature(sdpa).parameters, "softcap"})

    def get_interface(self, name: str, default: Any) -> Any:
        return self._ours(name, self._original.get_interface(name, default))

    def __getitem__(self, name: str) -> Any:
        return self._ours(name, self._original[name])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def _ours(self, name: str, found: Any) -> Any:
        ours = functools.partial(attend_as_sdpa, found, self._label, self._meant)
        return ours if name == REPLACES else found


def attend_as_sdpa(
    original: Callable[..., Any],
    label: str,
    meant: Collection[str],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """What transformers' sdpa computes: (B, H, S, D) in, (B, S, H, D) out, no weights.

    As in its flash attention, the result of a token that a causal mask hides from all is 0.

    Args:
        original: the function of sdpa, which serves what the operator cannot.
        label: its name.
        meant: arguments that mean something to it; it ignores the others.
    """
    wanted = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(wanted) and attention_mask is None and query.shape[2] > 1
    given: Any = {"causal": causal, "scale": scaling, "dropout": dropout}
    unknown = [name for name in rest if name in meant and rest[name] is not None]
    if rest.get("output_attentions") or unknown:
        made: Tensor | str = f"argument {', '.join(unknown) or 'output_attentions'}"
    else:
        made = attention(call_operator, query, key, value, attention_mask, **given, pads=True)
    if isinstance(made, Tensor):
        return made, None
    window = rest.get("sliding_window")
    if made == "a mask" and window and key.shape[2] > window:
        made = f"a mask, of a window of {window}"
    own_code("attention", label, made, id(module))
    rest.update(dropout=dropout, scaling=scaling, is_causal=is_causal)
    result: tuple[Tensor, None] = original(module, query, key, value, attention_mask, **rest)
    return result


def attention(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float | None,
    dropout: float,
    pads: bool,
) -> Tensor | str:
    """``ops.attention`` or ``ops.attention_varlen`` of (B, H, S, D); or why neither computes it.

    With dropout it is ``ops.attention_dropout``, with a seed from the host's generator.

    Args:
        mask, pads: as of ``masks.pattern``.

    Returns:
        (B, S, H, D), contiguous.
    """
    found: masks.Whole | masks.Packed | str = masks.Whole(causal)
    if (why := _refusal(query, key, value, dropout)) is not None:
        return why
    if mask is not None:
        # Both is torch's error.
        found = "a mask" if causal else masks.pattern(mask, query.shape[0], pads=pads)
    elif causal and query.shape[2] != key.shape[2]:
        # torch aligns a causal mask to the first key, the operator to the last one.
        found = "causal with other keys than queries"
    if isinstance(found, str):
        return found
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    attrs: dict[str, Any] = {"causal": found.causal, "scale": scale}
    if isinstance(found, masks.Packed):
        return "a mask, and dropout" if dropout else _packed(call, (q, k, v), found, attrs)
    if dropout:
        made: Tensor = call(ops.attention_dropout, (q, k, v, drawn(q)), {**attrs, "p": dropout})
    else:
        made = call(ops.attention, (q, k, v), attrs)
    return made


def _packed(call: Call, qkv: Args, packed: masks.Packed, attrs: Named) -> Tensor:
    tokens, shape = packed.tokens, qkv[0].shape
    whole = shape[0] * shape[1]
    rows = [t.flatten(0, 1) for t in qkv]
    if tokens.shape[0] < whole:
        rows = [t.index_select(0, tokens) for t in rows]
    y: Tensor = call(ops.attention_varlen, (*rows, packed.cu_seqlens), attrs)
    if tokens.shape[0] < whole:
        y = y.new_zeros((whole, *y.shape[1:])).index_copy(0, tokens, y)
    return y.reshape(shape)


def drawn(like: Tensor) -> Tensor:
    """int64[2] on a tensor's device: a seed for one call, and the offset 0.

    One draw of torch's default generator of the host, whatever the device: after the same
    ``torch.manual_seed`` the masks are the same on every chip, and a checkpointed layer that runs
    again with the generator's state of then has the mask of then.
    """
    seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=HOST)
    return nn.functional.pad(seed, (0, 1)).to(like.device)


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


def found(module: nn.Module) -> Asks | None:
    """Whom the forward of a module's class asks for its scaled dot products."""
    if _named_in_config(module) is not None and calls(module, INTERFACE):
        # Names of a forward in a decorator cannot be changed; what it calls in the end can.
        forward = own_class(module).forward
        plain = isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__")
        return "transformers" if plain else "torch"
    return "torch" if calls(module, SDPA) else None


def why_not_asked(module: nn.Module, model: nn.Module) -> str | None:
    """Why an attention of a transformers model stays as it is; None when nothing speaks for it."""
    named = _named_in_config(module)
    if named is None or not calls(module, INTERFACE):
        return None
    if named == REPLACES:
        interface = inspect.unwrap(own_class(module).forward).__globals__[INTERFACE]
        why = _difference(interface[REPLACES])
        return why and f"not attention: {why}"
    holders = [m for m in model.modules() if vars(m).get("config") is module.config]
    can = all(getattr(each, f"_supports_{REPLACES}", True) for each in holders)
    return f"its attention is {named!r}" + (
        f"; only {REPLACES!r} is replaced: model.set_attn_implementation({REPLACES!r})"
        if can
        else f", and its model does not support {REPLACES!r}, which is the one that is replaced"
    )


def _named_in_config(module: nn.Module) -> str | None:
    named: str | None = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return named


@functools.cache
def _difference(original: Callable[..., Any]) -> str | None:
    """What tells transformers' function of sdpa from ours."""
    module: Any = nn.Module()
    module.num_key_value_groups = 2
    options: Any = {"dtype": torch.float32, "device": HOST}
    given: Any = {"causal": True, "scale": None, "dropout": 0.0, "pads": True}
    with undisturbed():
        shapes = {"query": (2, 4, 5, 8), "key": (2, 2, 5, 8), "value": (2, 2, 5, 8)}
        return difference(
            lambda q, k, v: original(module, q, k, v, None, is_causal=True)[0],
            lambda call, q, k, v: attention(call, q, k, v, None, **given),
            {n: torch.randn(s, **options).requires_grad_() for n, s in shapes.items()},
            whole=True,
        )


def calls(module: nn.Module, name: str, *, deeply: bool = False) -> bool:
    """Whether the forward of a module's class names a function; no attribute of the module counts.

    A superclass's forward that it calls is not looked into.

    Args:
        deeply: looks into the methods of its class that the forward calls as well.
    """
    own = own_class(module)
    named = _names(own.forward)
    if deeply:
        named = named.union(*(_names(vars(own).get(called)) for called in named))
    return not hasattr(module, name) and name in named


def _names(function: Any) -> set[str]:
    """Names in a function's code; none when it has no code of Python."""
    code = function
    if callable(function):
        code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    if not isinstance(code, CodeType):
        return set()
    return {*code.co_names}.union(*map(_names, code.co_consts))
