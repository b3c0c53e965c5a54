"""Door 1: every operator in ``torch.library``, for compilers, modes, subclasses and export.

A differentiable operator becomes three: ``name``, which decomposes into ``name_forward`` (outputs
and residuals) and takes ``name_backward`` as its gradient. An operator without a gradient is one.
Kernels are registered for all backends at once: which row runs is decided in :mod:`.kernel`, as in
door 2.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from anychip.contract import HOST, FallbackError, OperatorSpec, Row
from anychip.dispatch import deferral, promise, selection
from anychip.dispatch.agreement import Agreement
from anychip.dispatch.autograd import Gradient, pair_keep
from anychip.dispatch.kernel import Kernel, transformed
from anychip.dispatch.mutation import bump_versions, refuse_overlap, tensors_of
from anychip.dispatch.resolution import REFERENCE, Choice, reference_row
from anychip.dispatch.signature import Signature
from anychip.dispatch.tally import new_tally

_below_autograd = torch._C._dispatch_tls_is_dispatch_key_excluded
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_TAGS = (torch.Tag.pt2_compliant_tag,)
_libraries: dict[str, torch.library.Library] = {}
_accelerator = torch.accelerator.current_accelerator()
# Known from the start, since the first call may already be under autocast; a device type that is
# registered later is added when its backend is activated.
_autocast_types: list[str] = [HOST] + ([] if _accelerator is None else [_accelerator.type])
_defined: list[tuple[OperatorSpec, str]] = []


class Operator(Protocol):
    """What door 1 needs of an operator."""

    spec: OperatorSpec
    signature: Signature
    gradient: Gradient | None
    kernel: Kernel
    pairs: dict[Row, str]

    def outputs(self, results: Any) -> Any:
        """The outputs among what a row returned."""

    def take(self, *args: Any, **kwargs: Any) -> Any:
        """What door 2 gives, or NotImplemented."""


def _library(namespace: str) -> torch.library.Library:
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    return _libraries[namespace]


def define(operator: Operator) -> None:
    """Registers an operator; it is then ``torch.ops.<namespace>.<name>``."""
    spec, library = operator.spec, _library(operator.spec.namespace)
    library.define(spec.name + spec.signature, tags=_TAGS)
    if operator.gradient is None:
        library.impl(spec.name, _plain_kernel(operator), "CompositeExplicitAutograd")
        library.impl(spec.name, _without_gradient(operator), "Autograd")
        torch.library.register_fake(f"{spec.namespace}::{spec.name}", _fake(operator), lib=library)
        _remember(spec, spec.name)
        return
    composite = _composite(operator)
    library.impl(spec.name, composite, "CompositeImplicitAutograd")
    library.impl(spec.name, composite, "FuncTorchBatchedDecomposition")
    _remember(spec, spec.name)
    count = operator.signature.num_outputs + len(spec.residuals)
    kernel = Kernel(spec, "forward", operator.signature.positional, pairs=False)
    _define_forward(operator, spec.name, kernel.run, spec.fake, count)
    _define_backward(operator)


def door(spec: OperatorSpec, suffix: str = "") -> Callable[..., Any]:
    """The default overload of ``torch.ops.<namespace>.<name><suffix>``."""
    packet = getattr(getattr(torch.ops, spec.namespace), spec.name + suffix)
    overload: Callable[..., Any] = packet.default
    return overload


def _returns(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


# An operator without a gradient


def _plain_kernel(operator: Operator) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        bound, attrs = operator.signature.bind(args, kwargs)
        plain, key = operator.kernel.plain(bound)
        choice = operator.kernel.choose(key, plain, attrs)
        if operator.signature.written:
            return run_written(operator, choice, plain, attrs, given=bound)
        return promise.run(choice, plain, attrs)

    return kernel


def run_written(
    operator: Operator,
    choice: Choice,
    args: Sequence[Any],
    attrs: Mapping[str, Any],
    given: Sequence[Any] | None = None,
) -> None:
    """Runs an operator that writes, with the rules of in-place operators.

    Args:
        given: the arguments as the caller has them, if ``args`` are plain views of those.
    """
    written, given = operator.signature.written, args if given is None else given
    refuse_overlap(operator.spec.name, operator.signature.positional, given, written)
    try:
        with torch.no_grad():
            promise.run(choice, args, attrs)
    finally:
        # Also after an error: some of the tensors may have been written before it.
        bump_versions(tensors_of(given, written))


def _refuse_devices(operator: Operator, args: Sequence[Any]) -> None:
    """A tensor without data among tensors with data would otherwise give results without values."""
    if len({t.device for t in tensors_of(args, range(len(args)))}) > 1:
        operator.kernel.plan((operator, "devices"), args)  # raises, and names the arguments


def _without_gradient(operator: Operator) -> Callable[..., Any]:
    """For autograd: the results of an operator without a gradient do not require one."""
    spec = operator.spec

    def autograd(*args: Any, **kwargs: Any) -> Any:
        if transformed():
            tensors = tensors_of(args, range(len(args)))
            if any(t.requires_grad or unpack_dual(t).tangent is not None for t in tensors):
                raise RuntimeError(
                    f"{spec.name} has no gradient, and a function transform or forward-mode AD "
                    "differentiates through it; pass detached tensors"
                )
        with torch._C._AutoDispatchBelowAutograd():
            return door(spec)(*args, **kwargs)

    return autograd


def _fake(operator: Operator) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        bound, attrs = operator.signature.bind(args, kwargs)
        _refuse_devices(operator, bound)
        if operator.spec.check is not None:
            operator.spec.check(*bound, **attrs)
        return operator.spec.fake(*bound, **attrs)

    return fake


# An operator with a gradient


def _composite(operator: Operator) -> Callable[..., Any]:
    """``name``: outputs of ``name_forward``, or of a paired row's own operator."""
    spec = operator.spec

    def composite(*args: Any, **kwargs: Any) -> Any:
        # Below autograd nothing may be recorded, and the short cut would.
        found = NotImplemented if _below_autograd(_AUTOGRAD) else operator.take(*args, **kwargs)
        if found is not NotImplemented:
            return found
        bound, attrs = operator.signature.bind(args, kwargs)
        if spec.check is not None:
            spec.check(*bound, **attrs)
        if transformed():
            return operator.outputs(run_under_transform(spec, bound, attrs))
        sharded = _allow_sharding(operator, bound)
        pair = None if sharded else paired_row(operator, bound, attrs)
        suffix = "_forward" if pair is None else pair_suffix(operator, pair)
        flat = door(spec, suffix)(*bound, *(attrs[n] for n in operator.signature.attr_names))
        return operator.outputs(flat)

    return composite


def run_under_transform(spec: OperatorSpec, args: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """The reference under a functorch transform or forward-mode AD, which only it can take.

    Raises:
        FallbackError: the policy is strict.
    """
    if selection.current.policy.fallback == "strict":
        raise FallbackError(
            f"{spec.name}: a function transform is active, which only the reference can take, and "
            "the policy is strict"
        )
    row = reference_row(spec, "forward")
    new_tally(row, REFERENCE, fallback="a function transform is active").tick()
    return spec.forward(*args, **attrs)


def _define_forward(
    operator: Operator,
    base: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    count: int,
    row: Row | None = None,
) -> None:
    spec, signature, gradient = operator.spec, operator.signature, operator.gradient
    assert gradient is not None
    library, name = _library(spec.namespace), f"{base}_forward"
    library.define(f"{name}({', '.join(signature.arguments)}) -> {_returns(count)}", tags=_TAGS)
    arity, names = len(signature.positional), signature.attr_names

    def kernel(*flat: Any) -> Any:
        results = run(flat[:arity], dict(zip(names, flat[arity:], strict=True)))
        return results if isinstance(results, Tensor) else tuple(results)

    def fake_kernel(*flat: Any) -> Any:
        _refuse_devices(operator, flat[:arity])
        return fake(*flat[:arity], **dict(zip(names, flat[arity:], strict=True)))

    def setup(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        results = (output,) if isinstance(output, Tensor) else output
        ctx.attrs = dict(zip(names, inputs[arity:], strict=True))
        args = inputs[:arity]
        if row is None:
            ctx.save_for_backward(*gradient.keep(args, results))
        else:
            ctx.save_for_backward(*pair_keep(gradient, args, results), *args)
        ctx.dtypes = [None if r is None else r.dtype for r in results]

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        needs = gradient.needs(ctx.needs_input_grad)
        outputs, kept = _of_one_type(grads[: signature.num_outputs]), ctx.saved_tensors
        if deferral.active:
            found = deferral.backward(ctx, 0, gradient, row, outputs, kept, ctx.attrs, needs)
        else:
            found = gradient.backward(row, outputs, kept, ctx.attrs, needs)
        result: list[Any] = [None] * (arity + len(names))
        for place, value, need in zip(gradient.differentiable, found, needs, strict=True):
            result[place] = value if need else None
        return tuple(result)

    library.impl(name, kernel, "CompositeExplicitAutograd")
    full = f"{spec.namespace}::{name}"
    torch.library.register_fake(full, fake_kernel, lib=library)
    torch.library.register_autograd(full, backward, setup_context=setup, lib=library)
    _remember(spec, name)


def _define_backward(operator: Operator) -> None:
    spec, signature, gradient = operator.spec, operator.signature, operator.gradient
    assert gradient is not None
    library, name = _library(spec.namespace), f"{spec.name}_backward"
    tensors = [
        f"Tensor{'?' if signature.may_be_none(n) else ''} {n}" for n in gradient.kernel.names
    ]
    attributes = list(signature.arguments[len(signature.positional) :])
    arguments = ", ".join([*tensors, *attributes, "bool[] needs"])
    library.define(f"{name}({arguments}) -> {_returns(len(spec.differentiable))}", tags=_TAGS)
    arity, names = len(tensors), signature.attr_names
    agreement = Agreement(spec, signature, gradient.results, gradient.kernel.names)

    def split(flat: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        attrs = dict(zip(names, flat[arity:-1], strict=True))
        return flat[:arity], {**attrs, "needs": tuple(flat[-1])}

    def kernel(*flat: Any) -> Any:
        args, attrs = split(flat)
        agreement.check(args, flat[arity:-1], flat[-1])
        return _gradients(gradient.kernel.run(args, attrs), attrs["needs"], flat[0])

    def fake(*flat: Any) -> Any:
        assert spec.backward is not None
        args, attrs = split(flat)
        found = spec.backward(*args, **attrs)
        # Fresh and contiguous, whatever views the reference returns.
        fresh = [None if g is None else g.new_empty(g.shape) for g in found]
        return _gradients(fresh, attrs["needs"], flat[0])

    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{spec.namespace}::{name}", fake, lib=library)
    _remember(spec, name)


def _of_one_type(grads: Sequence[Any]) -> Sequence[Any]:
    """Gradients of outputs, all of them DTensors when one is.

    For an output that has no gradient, like a row number, autograd makes plain zeros of the whole
    output's shape, and an operator does not take both.
    """
    if len({type(grad) for grad in grads}) == 1:
        return grads
    from torch.distributed.tensor import DTensor, Replicate

    sharded = next((grad for grad in grads if isinstance(grad, DTensor)), None)
    if sharded is None:
        return grads
    mesh = sharded.device_mesh
    everywhere = [Replicate()] * mesh.ndim
    return [
        DTensor.from_local(grad, mesh, everywhere, run_check=False)
        if type(grad) is Tensor
        else grad
        for grad in grads
    ]


def _gradients(found: Sequence[Any], needs: Sequence[bool], like: Tensor) -> Any:
    """Gradients as results of a schema: it has no optional ones, so that None is empty."""
    listed = [
        g.contiguous() if need and g is not None else like.new_empty(0)
        for g, need in zip(found, needs, strict=True)
    ]
    return listed[0] if len(listed) == 1 else tuple(listed)


# Paired rows


def paired_row(operator: Operator, args: Sequence[Any], attrs: Mapping[str, Any]) -> Row | None:
    """The paired row that serves this call, if one is chosen; does not count it."""
    tensor = first_tensor(args)
    if tensor is None or not _has_pairs(operator.spec.name, tensor.device.type):
        return None
    # Not under a key of its own: what a compiler traces with has none.
    selection.current.plans.pop((operator, "pairs"), None)
    choice = operator.kernel.peek((operator, "pairs"), args, attrs)
    return choice.row if choice is not None and choice.row.paired else None


def _has_pairs(name: str, device_type: str) -> bool:
    """Whether any paired row exists; remembered with the plans, since door 1 asks on every call."""
    key = (name, device_type, "pairs")
    known: bool | None = selection.current.plans.get(key)
    if known is None:
        providers = selection.providers_for(device_type)
        known = any(row.paired for p in providers for row in p.table.rows(name, "forward"))
        selection.current.plans[key] = known
    return known


def first_tensor(args: Iterable[Any], *, floating: bool = False) -> Tensor | None:
    """The first tensor, or the first of a floating-point dtype; lists looked into."""
    for arg in args:
        if isinstance(arg, (list, tuple)):
            found = first_tensor(arg, floating=floating)
            if found is not None:
                return found
        elif isinstance(arg, Tensor) and (not floating or arg.is_floating_point()):
            return arg
    return None


def pair_suffix(operator: Operator, row: Row) -> str:
    """Suffix of the torch.library operator of a paired row, which is registered on first use."""
    known = operator.pairs
    if row not in known:
        assert row.paired is not None
        base = f"{operator.spec.name}_pair{len(known)}"
        known[row] = f"_pair{len(known)}_forward"

        def fake(*args: Any, **attrs: Any) -> tuple[Any, ...]:
            assert row.paired is not None
            outputs = operator.signature.results(operator.spec.fake(*args, **attrs))
            own = operator.signature.results(row.paired.fake_residuals(*args, **attrs))
            return (*outputs[: operator.signature.num_outputs], *own)

        count = operator.signature.num_outputs + row.paired.num_residuals
        _define_forward(operator, base, _pair_kernel(operator, row), fake, count, row)
        _define_pair_backward(operator, base, row)
    return known[row]


def _pair_kernel(operator: Operator, row: Row) -> Callable[..., Any]:
    kernel = operator.kernel

    def run(args: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        # The row was chosen for what a compiler traced; the real tensors may be laid out
        # otherwise, and another row's residuals would not fit. A copy is laid out as traced.
        for copy in (False, True):
            tried, key = kernel.plain([_copied(a) for a in args] if copy else args)
            if kernel.check is not None:
                kernel.check(*tried, **attrs)
            choice = kernel.peek(key, tried, attrs)
            if choice is not None and choice.row is row:
                choice.count()
                return promise.run(choice, tried, attrs)
        raise RuntimeError(
            f"{operator.spec.name}: {row.label} was chosen when this was traced, and does not take "
            "the tensors of this call; trace or compile again"
        )

    return run


def _copied(arg: Any) -> Any:
    return arg.clone(memory_format=torch.contiguous_format) if isinstance(arg, Tensor) else arg


def _define_pair_backward(operator: Operator, base: str, row: Row) -> None:
    """The backward of a paired row as an operator: what is traced must not reach the row."""
    spec, signature, gradient = operator.spec, operator.signature, operator.gradient
    assert gradient is not None
    assert row.paired is not None
    library, name = _library(spec.namespace), f"{base}_backward"
    num_own = len(gradient.given) + row.paired.num_residuals
    given = [f"Tensor grad{i}" for i in range(signature.num_outputs)]
    given += [f"Tensor? own{i}" for i in range(num_own)]
    arguments = ", ".join([*given, *signature.arguments, "bool[] needs"])
    library.define(f"{name}({arguments}) -> {_returns(len(spec.differentiable))}", tags=_TAGS)
    arity, names = len(signature.positional), signature.attr_names

    def kernel(*flat: Any) -> Any:
        tensors, key = gradient.kernel.plain(flat[: len(given)])
        attrs = dict(zip(names, flat[len(given) + arity : -1], strict=True))
        found = gradient.pair_backward(row, key, tensors, attrs, tuple(flat[-1]))
        return _gradients(found, flat[-1], flat[0])

    def fake(*flat: Any) -> Any:
        args, needs = flat[len(given) : len(given) + arity], flat[-1]
        wanted = zip(gradient.differentiable, needs, strict=True)
        fresh = [args[i].new_empty(args[i].shape) if need else None for i, need in wanted]
        return _gradients(fresh, needs, flat[0])

    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{spec.namespace}::{name}", fake, lib=library)
    _remember(spec, name)


# Autocast


def _remember(spec: OperatorSpec, name: str) -> None:
    _defined.append((spec, name))
    for device_type in _autocast_types:
        _register_autocast(spec, name, device_type)


def cover_autocast(device_type: str) -> None:
    """Gives every operator, now and later, its autocast rule on a device type."""
    if device_type not in _autocast_types and torch.amp.is_autocast_available(device_type):
        _autocast_types.append(device_type)
        for spec, name in _defined:
            _register_autocast(spec, name, device_type)


def _register_autocast(spec: OperatorSpec, name: str, device_type: str) -> None:
    key = "Autocast" + torch._C._dispatch_key_for_device(device_type)
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    overload = getattr(getattr(torch.ops, spec.namespace), name).default
    rule = spec.autocast if name == spec.name else "none"
    names = [a.name for a in torch._C.parse_schema(f"x::y{spec.signature}").arguments]

    def autocast(*args: Any, **kwargs: Any) -> Any:
        cast = cast_arguments(spec, rule, device_type, names, args)
        # Excluding the key also keeps autocast out of the reference's own torch calls.
        with torch._C._ExcludeDispatchKeyGuard(keyset):
            return overload(*cast, **kwargs)

    _library(spec.namespace).impl(name, autocast, key)


def cast_arguments(
    spec: OperatorSpec, rule: str, device_type: str, names: Sequence[str], args: Sequence[Any]
) -> Sequence[Any]:
    """The arguments under an autocast rule; fixed dtypes and other devices' tensors stay."""
    if rule == "none":
        return args

    def eligible(name: str, arg: Any) -> bool:
        return (
            isinstance(arg, Tensor)
            and arg.device.type == device_type
            and arg.is_floating_point()
            and arg.itemsize in (2, 4)  # as for torch, float64 stays; and 8-bit codes
            and name not in spec.fixed_dtypes
        )

    chosen = [eligible(n, a) for n, a in zip(names, args, strict=False)]
    if rule == "lower":
        dtype = torch.get_autocast_dtype(device_type)
    elif rule == "fp32":
        dtype = torch.float32
    else:
        dtype = torch.float32
        present = {a.dtype for a, ok in zip(args, chosen, strict=True) if ok}
        if len(present) == 1:
            dtype = present.pop()
    return [a.to(dtype) if ok else a for a, ok in zip(args, chosen, strict=True)]


def _allow_sharding(operator: Operator, args: Sequence[Any]) -> bool:
    """Registers the sharding rules when an argument is a DTensor; whether one is."""
    if not any(type(a).__name__ == "DTensor" for a in args):
        return False
    from anychip.dispatch.sharding import cover

    doors = (door(operator.spec, suffix) for suffix in ("_forward", "_backward"))
    cover(operator.spec, operator.signature.num_outputs, *doors)
    return True
