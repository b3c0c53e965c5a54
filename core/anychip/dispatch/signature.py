"""What the dispatcher knows of an operator's schema, and how a call is put into its order."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anychip.contract import ContractError, OperatorSpec
from anychip.dispatch.indexes import Index, indexes_of

Args = tuple[Any, ...]
Attrs = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Signature:
    """A parsed schema.

    Attributes:
        name: the operator's name, for messages.
        positional: names of the tensor arguments, in order.
        defaults: positional arguments that may be left out, with their values.
        attrs: keyword-only arguments with their defaults; a required one is not in here.
        required_attrs: keyword-only arguments without a default.
        attr_names: all keyword-only arguments, in the schema's order.
        written: indices of the positional arguments that the operator writes.
        num_outputs: tensors that a user gets back.
        arguments: the schema's text for every argument, attributes last, without defaults and
            alias marks.
        lists, optional: for every positional argument, whether it is a list, and may be None.
        indexes: what the numbers of integer arguments count, by argument.
        attr_types: the Python type that each attribute usually has; None for no single one.
    """

    name: str
    positional: tuple[str, ...]
    defaults: Mapping[str, Any]
    attrs: Mapping[str, Any]
    required_attrs: tuple[str, ...]
    attr_names: tuple[str, ...]
    written: tuple[int, ...]
    num_outputs: int
    arguments: tuple[str, ...]
    lists: tuple[bool, ...]
    optional: tuple[bool, ...]
    indexes: Mapping[str, Index]
    attr_types: Mapping[str, type | None]

    @classmethod
    def parse(cls, spec: OperatorSpec) -> Signature:
        """Reads ``spec.signature``.

        Raises:
            RuntimeError: from torch, when it is not a schema.
            ContractError: an argument that is no tensor, and not keyword-only; ``indexes`` of none.
        """
        schema = torch._C.parse_schema(f"{spec.namespace}::{spec.name}{spec.signature}")
        tensors = [a for a in schema.arguments if not a.kwarg_only]
        attributes = [a for a in schema.arguments if a.kwarg_only]
        types = [_type_text(a) for a in tensors]
        for argument, text in zip(tensors, types, strict=True):
            if not text.startswith("Tensor"):
                raise ContractError(
                    f"operator {spec.name!r}: {argument.name} is {text}; what is no tensor must be "
                    "keyword-only, after '*' in the signature"
                )
        return cls(
            name=spec.name, positional=tuple(a.name for a in tensors),
            defaults={a.name: a.default_value for a in tensors if a.has_default_value()},
            attrs={a.name: a.default_value for a in attributes if a.has_default_value()},
            required_attrs=tuple(a.name for a in attributes if not a.has_default_value()),
            attr_names=tuple(a.name for a in attributes),
            written=tuple(
                i for i, a in enumerate(tensors) if a.alias_info and a.alias_info.is_write
            ),
            num_outputs=len(schema.returns),
            arguments=tuple(f"{_type_text(a)} {a.name}" for a in (*tensors, *attributes)),
            lists=tuple("[]" in text for text in types),
            optional=tuple(text.endswith("?") for text in types),
            indexes=indexes_of(spec, [a.name for a in tensors]),
            attr_types={a.name: _USUAL.get(_type_text(a).rstrip("?")) for a in attributes},
        )  # fmt: skip

    def bind(self, args: Args, kwargs: Mapping[str, Any]) -> tuple[Args, Attrs]:
        """Positional arguments in the schema's order, and every attribute.

        An argument may stand for several: its ``as_arguments(name)`` are they, by name.

        Raises:
            TypeError: an argument that is missing, unknown or given twice, with the nearest name.
        """
        given = [arg for arg in (*args, *kwargs.values()) if arg is not None]
        if any(hasattr(type(arg), "as_arguments") for arg in given):  # torch 2.11 traces no other
            args, kwargs = self._apart(args, kwargs)
        if len(args) > len(self.positional):
            raise TypeError(
                f"{self.name}() takes {len(self.positional)} positional arguments "
                f"({', '.join(self.positional)}), got {len(args)}; the others are keyword-only"
            )
        values = dict(zip(self.positional, args, strict=False))
        attrs: Attrs = dict(self.attrs)
        for key, value in kwargs.items():
            if key in values:
                raise TypeError(f"{self.name}() got {key!r} twice")
            if key in self.positional:
                values[key] = value
            elif key in self.attrs or key in self.required_attrs:
                attrs[key] = value
            else:
                raise TypeError(self._unknown(key))
        missing = [n for n in self.positional if n not in values and n not in self.defaults]
        missing += [n for n in self.required_attrs if n not in attrs]
        if missing:
            raise TypeError(f"{self.name}() is missing {', '.join(map(repr, missing))}")
        return tuple(values.get(n, self.defaults.get(n)) for n in self.positional), attrs

    def _apart(self, args: Args, kwargs: Mapping[str, Any]) -> tuple[Args, dict[str, Any]]:
        """Arguments none of which stands for several; those that have a name by it."""
        found: dict[str, Any] = {}
        rest = list(args)
        for name in self.positional:
            if rest and name not in found:
                found |= _as_arguments(name, rest.pop(0))
        for key, value in kwargs.items():
            given = _as_arguments(key, value)
            if twice := found.keys() & given.keys():
                raise TypeError(f"{self.name}() got {min(twice)!r} twice")
            found |= given
        return tuple(rest), found

    def check_attributes(self, attrs: Mapping[str, Any]) -> None:
        """Raises TypeError for an attribute that is not of the schema's type.

        torch.library does so on its own; the short cut would hand anything to a row.
        """
        for name, value in attrs.items():
            if type(value) is self.attr_types[name]:
                continue
            kind = self.arguments[len(self.positional) + self.attr_names.index(name)].split()[0]
            if not _is_of(value, kind) and not _is_traced(value):
                raise TypeError(
                    f"{self.name}(): {name} must be {_kind_text(kind)}, got {value!r} "
                    f"({type(value).__name__})"
                )

    def may_be_none(self, name: str) -> bool:
        """Whether this is a positional argument that may be left out."""
        return name in self.positional and self.optional[self.positional.index(name)]

    def check_kinds(self, args: Sequence[Any]) -> None:
        """Raises TypeError for a positional argument that is not what the schema says."""
        for place, arg in enumerate(args):
            if arg is None and self.optional[place]:
                continue
            wrong, label = arg, self.positional[place]
            if self.lists[place] and isinstance(arg, (list, tuple)):
                strangers = [i for i, a in enumerate(arg) if not _is_tensor(a)]
                if not strangers:
                    continue
                wrong, label = arg[strangers[0]], f"{label}[{strangers[0]}]"
            elif not self.lists[place] and _is_tensor(arg):
                continue
            wanted = "a list of tensors" if wrong is arg and self.lists[place] else "a tensor"
            raise TypeError(f"{self.name}(): {label} must be {wanted}, got {type(wrong).__name__}")

    def _unknown(self, key: str) -> str:
        known = (*self.positional, *self.attr_names)
        near = difflib.get_close_matches(key, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(known)}"
        return f"{self.name}() got an unknown argument {key!r}{hint}"

    def results(self, value: Any) -> Sequence[Any]:
        """What a row returned, as a sequence: outputs, then residuals."""
        if value is None:
            return ()
        return (value,) if isinstance(value, Tensor) else value


def _as_arguments(name: str, value: Any) -> dict[str, Any]:
    return value.as_arguments(name) if hasattr(type(value), "as_arguments") else {name: value}


_USUAL: Mapping[str, type] = {
    "float": float, "int": int, "bool": bool, "str": str, "ScalarType": torch.dtype,
}  # fmt: skip
# Less than torch.library takes, which converts: a bool is no number here, and a tensor is not read.
_ACCEPTED: Mapping[str, tuple[type, ...]] = {
    "float": (numbers.Real, torch.SymFloat, torch.SymInt), "int": (numbers.Integral, torch.SymInt),
    "bool": (bool, torch.SymBool), "str": (str,), "ScalarType": (torch.dtype,),
}  # fmt: skip


def _is_of(value: Any, kind: str) -> bool:
    """Whether a value may stand for a schema's type; True for types that are not looked at."""
    if kind.endswith("?"):
        return value is None or _is_of(value, kind[:-1])
    if kind.endswith("]"):
        single, count = kind[:-1].split("[")
        if not isinstance(value, (list, tuple)):
            # One number stands for as many as the schema says, as for torch.library.
            return bool(count) and _fits(type(value), single)
        return all(_fits(t, single) for t in set(map(type, value)))
    return _fits(type(value), kind)


def _fits(given: type, kind: str) -> bool:
    accepted = _ACCEPTED.get(kind)
    if accepted is None:
        return True
    return issubclass(given, accepted) and (kind == "bool" or given is not bool)


def _kind_text(kind: str) -> str:
    if kind.endswith("?"):
        return f"{_kind_text(kind[:-1])} or None"
    if kind.endswith("]"):
        single, count = kind[:-1].split("[")
        return f"{_kind_text(single)} or {count} of them" if count else f"a list of {single}"
    return f"a{'n' if kind == 'int' else ''} {kind.replace('ScalarType', 'torch.dtype')}"


def _is_tensor(arg: Any) -> bool:
    return isinstance(arg, Tensor) or _is_traced(arg)


def _is_traced(arg: Any) -> bool:
    """What stands for a value while a function is traced: it has torch's protocol, not the type."""
    return hasattr(type(arg), "__torch_function__") and not isinstance(arg, Tensor)


def _type_text(argument: Any) -> str:
    """The schema's type of an argument, like ``Tensor?``; without alias marks."""
    # Of a dtype torch's parser says that it is an int, unless it is asked what it read.
    is_dtype = "ScalarType" in str(argument.real_type)
    text = str(argument.real_type if is_dtype else argument.type)
    optional = text.startswith("Optional[")
    text = text[len("Optional[") : -1] if optional else text
    if text.startswith("List["):
        text = f"{text[len('List[') : -1]}[{argument.N or ''}]"
    return text + ("?" if optional else "")
