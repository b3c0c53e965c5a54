"""Which small changes of a program's text stand for a mistake?

mutmut's mutators first, over libcst's trees; then what numerical code gets wrong and mutmut does
not know: dtypes, dims, names of reductions, calls and terms that are missing, bounds of slices.
Left out of mutmut's are those after which nothing runs at all (``a = None``) and those on names of
methods of strings, of which there are none here.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import libcst as cst
import libcst.matchers as m
from mutmut.mutation import mutators

Kind = Literal[
    "arithmetic", "comparison", "logic", "constant", "index", "dim", "dtype", "function",
    "argument", "missing call",
]  # fmt: skip
Place = Literal["index", "dim", "constant"]
"""What a number is: part of a subscript, a dim of a tensor, or any other."""

DIM_FUNCTIONS = frozenset(
    "sum mean amax amin max min argmax argmin all any softmax log_softmax logsumexp unsqueeze "
    "squeeze flatten unflatten transpose cat stack cumsum flip gather scatter scatter_ argsort "
    "sort topk chunk split size dim repeat_interleave expand permute index_select index_add_ "
    "movedim roll diff narrow select".split()
)

SWAPS: Mapping[str, str] = {
    "sum": "mean", "mean": "sum", "amax": "amin", "amin": "amax", "max": "min", "min": "max",
    "maximum": "minimum", "minimum": "maximum", "clamp_min": "clamp_max", "clamp_max": "clamp_min",
    "clamp_min_": "clamp_max_", "all": "any", "any": "all", "rsqrt": "sqrt", "sqrt": "square",
    "square": "abs", "abs": "square", "exp": "exp2", "log": "log2", "log1p": "log", "expm1": "exp",
    "logsumexp": "amax", "sin": "cos", "cos": "sin", "erf": "tanh", "tanh": "sigmoid",
    "sigmoid": "tanh", "sign": "abs", "round": "floor", "floor": "ceil", "ceil": "floor",
    "triu": "tril", "tril": "triu", "triu_": "tril_", "cumsum": "cumprod", "zeros": "ones",
    "ones": "zeros", "zeros_like": "ones_like", "ones_like": "zeros_like", "new_zeros": "new_empty",
    "isnan": "isinf", "isinf": "isnan", "isfinite": "isnan", "add_": "sub_", "sub_": "add_",
    "mul_": "div_", "div_": "mul_", "add": "sub", "sub": "add", "mul": "div", "div": "mul",
    "logical_and": "logical_or", "logical_or": "logical_and", "argmax": "argmin", "ge": "gt",
    "gt": "ge", "lt": "le", "le": "lt",
}  # fmt: skip
"""A function to the one that is written in its place by mistake."""

NARROWER: Mapping[str, str] = {
    "float64": "float32", "float32": "bfloat16", "int64": "int32", "int32": "int16",
    "int16": "int8", "uint8": "int8", "int8": "uint8",
}  # fmt: skip
NARROWER_CASTS: Mapping[str, str] = {
    "double": "float", "float": "bfloat16", "long": "int", "int": "short",
}  # fmt: skip
SYMMETRIC = m.Name("min") | m.Name("max") | m.Attribute(attr=m.Name(m.MatchRegex("add|mul")))
MODULES = frozenset("torch math np functional nn _aten aten ops operators specs philox".split())
"""Names before a dot that are no tensors: what they call computes from its arguments."""


@dataclass(frozen=True, slots=True)
class Operator:
    """A mutation operator.

    Attributes:
        name: ``mutmut.number``; ours have no prefix.
        kind: the class of mistake; None: it is that of the place of the number.
        nodes: the type of node that it changes.
        change: gives the nodes that may stand in its place.
    """

    name: str
    kind: Kind | None
    nodes: type[Any]
    change: Callable[[Any], Iterable[cst.CSTNode]]


def _enclosed(node: cst.BaseExpression) -> cst.BaseExpression:
    """In parentheses, so that what stands around it does not take it apart."""
    if node.lpar or isinstance(node, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)):
        return node
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def _plain_string(node: cst.SimpleString) -> Iterable[cst.CSTNode]:
    # mutmut's further ones change the case of letters, which comes to the same.
    yield from list(mutators.operator_string(node))[:1]


def _number_less(node: cst.BaseNumber) -> Iterable[cst.CSTNode]:
    value = node.evaluated_value  # type: ignore[attr-defined]
    if isinstance(node, cst.Integer):
        if value > 0:
            yield node.with_changes(value=repr(value - 1))
    elif isinstance(node, cst.Float):
        yield node.with_changes(value=repr(value * 0.99) if value else "1e-3")


def _term_dropped(node: cst.BinaryOperation) -> Iterable[cst.CSTNode]:
    yield _enclosed(node.left)
    if isinstance(node.operator, (cst.Add, cst.Multiply, cst.BitAnd, cst.BitOr)):
        yield _enclosed(node.right)


def _minus_dropped(node: cst.UnaryOperation) -> Iterable[cst.CSTNode]:
    if isinstance(node.operator, cst.Minus) and not isinstance(node.expression, cst.BaseNumber):
        yield _enclosed(node.expression)


def _narrower_dtype(node: cst.Attribute) -> Iterable[cst.CSTNode]:
    if m.matches(node.value, m.Name("torch")) and node.attr.value in NARROWER:
        yield node.with_changes(attr=cst.Name(NARROWER[node.attr.value]))


def _narrower_cast(node: cst.Call) -> Iterable[cst.CSTNode]:
    if isinstance(node.func, cst.Attribute) and not node.args:
        other = NARROWER_CASTS.get(node.func.attr.value)
        if other is not None:
            yield node.with_changes(func=node.func.with_changes(attr=cst.Name(other)))


def _other_function(node: cst.Call) -> Iterable[cst.CSTNode]:
    if isinstance(node.func, cst.Attribute):
        other = SWAPS.get(node.func.attr.value)
        if other is not None:
            yield node.with_changes(func=node.func.with_changes(attr=cst.Name(other)))
    elif isinstance(node.func, cst.Name) and node.func.value in ("min", "max", "all", "any"):
        yield node.with_changes(func=cst.Name(SWAPS[node.func.value]))


def _call_missing(node: cst.Call) -> Iterable[cst.CSTNode]:
    func = node.func
    if isinstance(func, cst.Attribute) and not _is_module(func.value):
        yield _enclosed(func.value)
    elif node.args and not node.args[0].star and node.args[0].keyword is None:
        yield _enclosed(node.args[0].value)


def _is_module(node: cst.BaseExpression) -> bool:
    if isinstance(node, cst.Attribute):
        return node.attr.value in MODULES
    return isinstance(node, cst.Name) and (node.value in MODULES or "kernels" in node.value)


def _statement_missing(node: cst.Expr) -> Iterable[cst.CSTNode]:
    if isinstance(node.value, cst.Call):
        yield cst.Pass()


def _arguments_swapped(node: cst.Call) -> Iterable[cst.CSTNode]:
    pair = node.args[:2]
    if m.matches(node.func, SYMMETRIC):
        return
    if len(pair) == 2 and all(arg.keyword is None and not arg.star for arg in pair):
        first, second = pair
        swapped = [first.with_changes(value=second.value), second.with_changes(value=first.value)]
        yield node.with_changes(args=[*swapped, *node.args[2:]])


def _bound_dropped(node: cst.Slice) -> Iterable[cst.CSTNode]:
    for bound in ("lower", "upper", "step"):
        if getattr(node, bound) is not None:
            yield node.with_changes(**{bound: None})


def _never_and_always(node: cst.BaseExpression) -> Iterable[cst.CSTNode]:
    yield cst.UnaryOperation(cst.Not(), _parenthesised(node))
    yield cst.Name("False")
    yield cst.Name("True")


def _parenthesised(node: cst.BaseExpression) -> cst.BaseExpression:
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


CONDITION = Operator("condition", "logic", cst.BaseExpression, _never_and_always)
"""Of the test of an ``if`` or a ``while`` alone."""

OPERATORS: tuple[Operator, ...] = (
    Operator("mutmut.swap_op", "arithmetic", cst.BinaryOperation, mutators.operator_swap_op),
    Operator("mutmut.swap_op", "arithmetic", cst.UnaryOperation, mutators.operator_swap_op),
    Operator("mutmut.swap_op", "arithmetic", cst.AugAssign, mutators.operator_swap_op),
    Operator("mutmut.augmented", "arithmetic", cst.AugAssign,
             mutators.operator_augmented_assignment),
    Operator("term_dropped", "arithmetic", cst.BinaryOperation, _term_dropped),
    Operator("minus_dropped", "arithmetic", cst.UnaryOperation, _minus_dropped),
    Operator("mutmut.swap_op", "comparison", cst.ComparisonTarget, mutators.operator_swap_op),
    Operator("mutmut.keywords", "comparison", cst.BaseCompOp, mutators.operator_keywords),
    Operator("mutmut.swap_op", "logic", cst.BooleanOperation, mutators.operator_swap_op),
    Operator("mutmut.unary_dropped", "logic", cst.UnaryOperation,
             mutators.operator_remove_unary_ops),
    Operator("mutmut.if_exp", "logic", cst.IfExp, mutators.operator_if_exp),
    Operator("mutmut.name", "logic", cst.Name, mutators.operator_name),
    Operator("mutmut.string", "constant", cst.SimpleString, _plain_string),
    Operator("mutmut.number", None, cst.BaseNumber, mutators.operator_number),
    Operator("number_less", None, cst.BaseNumber, _number_less),
    Operator("bound_dropped", "index", cst.Slice, _bound_dropped),
    Operator("narrower_dtype", "dtype", cst.Attribute, _narrower_dtype),
    Operator("narrower_cast", "dtype", cst.Call, _narrower_cast),
    Operator("other_function", "function", cst.Call, _other_function),
    Operator("mutmut.argument", "argument", cst.Call, mutators.operator_arg_removal),
    Operator("arguments_swapped", "argument", cst.Call, _arguments_swapped),
    Operator("call_missing", "missing call", cst.Call, _call_missing),
    Operator("statement_missing", "missing call", cst.Expr, _statement_missing),
)  # fmt: skip
