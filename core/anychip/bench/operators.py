"""The operators at training sizes: this backend's rows, the reference, torch, the bound.

torch's way is measured eagerly and, unless it is left out, compiled with the backend's compiler.
The bound is the bytes that the spec says a call must move, over the rate of a copy measured in the
same rounds. A call faster than its bound read from a cache.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import anychip.ops  # noqa: F401 - defines our operators
from anychip import runtime
from anychip.bench import channels, updates
from anychip.bench.case import Case, Make, added_cases
from anychip.bench.compiled import Compiler
from anychip.bench.report import Report, Timing
from anychip.bench.timing import Samples, Timed, Under, interleave
from anychip.contract import Backend, SampleMaker
from anychip.dispatch.operator import Operator, registered
from anychip.dispatch.tally import ProvenanceRow

_TOKENS, _HIDDEN, _VOCABULARY = 4096, 1024, 8192
_COPY_BYTES = 64 << 20
_BACKWARD = "forward + backward"
_NOTES = (
    "x bound: time over (bytes of the spec / rate of a copy in the same rounds)",
    "x torch, x compiled, x reference: their time over ours, above 1 is faster; compiled: torch's "
    "way under torch.compile",
    "served by: whose rows ours are; x displaced: the time of the rows that served otherwise",
)


def run(
    backend: Backend, *, rounds: int, progress: Callable[[int], None], names: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32, compiled: bool = True, reference: bool = True,
    window: float = 0.1, cases: Mapping[str, Make] | None = None, maker: SampleMaker | None = None,
    rotate_nbytes: int = 0,
) -> Report:  # fmt: skip
    """Times forward, and forward with backward where there is one.

    Args:
        names: operators; all when empty.
        dtype: of the floating-point arguments that the specs leave free.
        compiled: measure torch.compile of torch's way, too; it compiles before it is timed.
        reference: measure the reference, too.
        window: seconds that one candidate runs per round, about.
        cases: other sizes, by operator; what follows a blank in a name is for people.
        maker: of their tensors; it decides about dtype and device.
        rotate_nbytes: successive calls take other tensors, so many bytes in all, so that no call
            finds its own in a cache; the copy is of so many bytes too.

    Raises:
        ValueError: an operator that has no case here.
    """
    maker = maker or SampleMaker(backend.device(), dtype)
    known = {**_cases(), **added_cases()} if cases is None else cases
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no benchmark for {', '.join(unknown)}; there are {', '.join(known)}")
    compiler = Compiler(backend) if compiled else None
    wait = backend.synchronize
    timed = partial(interleave, rounds=rounds, window=window, synchronize=wait, progress=progress)
    rows: list[Timing] = []
    for name in names or tuple(known):
        turns = _turns(known[name], maker, rotate_nbytes)
        rows += _rows(backend, name, turns, compiler, reference, rotate_nbytes, timed)
    return Report(
        subject=f"operators, {str(dtype).removeprefix('torch.')}", backend=backend.name,
        device=backend.identity(), threads=torch.get_num_threads(), rows=rows,
        notes=(*_NOTES, *_slower(rows), *(compiler.notes if compiler else ())),
    )  # fmt: skip


def _rows(
    backend: Backend,
    name: str,
    turns: Sequence[Case],
    compiler: Compiler | None,
    reference: bool,
    rotate_nbytes: int,
    timed: Callable[[Mapping[str, Callable[[], object]]], Mapping[str, Samples]],
) -> Iterator[Timing]:
    """A row for the forward direction, and one for both where there is a gradient."""
    operator, copied = registered()[name.partition(" ")[0]], max(_COPY_BYTES, rotate_nbytes)
    for backward in [False] if operator.gradient is None else [False, True]:
        calls = _calls(backend, operator, turns, backward, compiler)
        if not reference:
            del calls["reference"]
        calls["copy"] = _copy(backend, copied)
        servers = _servers(backend, operator.spec.name, calls)
        yield _row(_row_name(name, backward), operator, turns[0], timed(calls), copied, servers)


def _servers(backend: Backend, name: str, calls: dict[str, Timed]) -> dict[str, Any]:
    """Whose rows serve ours, and whose did before a kernel pack's; adds the call of those."""
    ours = _served(name, calls["ours"])
    facts = {"served by": _names(ours)}
    packs = {row.provider for row in ours} - {backend.name, "reference"}
    if packs:
        without = Under(partial(runtime.policy, forbid={name: packs}), calls["ours"])
        others = _served(name, without)
        if any(row.kind != "reference" for row in others):
            calls["displaced"] = without
            facts["displaced"] = _names(others)
    return facts


def _served(name: str, call: Timed) -> list[ProvenanceRow]:
    """What served one call of an operator, forward first."""
    before = {replace(row, calls=0): row.calls for row in runtime.provenance().rows()}
    call()
    after = [row for row in runtime.provenance().rows() if row.operator == name]
    return [row for row in after if row.calls > before.get(replace(row, calls=0), 0)]


def _names(rows: Sequence[ProvenanceRow]) -> str:
    said = (r.provider if r.kind == "reference" else f"{r.provider} ({r.kind})" for r in rows)
    return " + ".join(dict.fromkeys(said))


def _slower(rows: Sequence[Timing]) -> Iterator[str]:
    """A sentence for each row that is slower than what it displaced."""
    for row in rows:
        ratio = row.facts.get("x displaced", 1.0)
        if ratio < 1:
            yield (
                f"{row.name}: {row.facts['served by']} takes {1 / ratio:.2g} times as long as "
                f"{row.facts['displaced']}, which it displaces; policy(forbid=...) leaves it out"
            )


def _turns(make: Make, maker: SampleMaker, nbytes: int) -> list[Case]:
    """A case, and further ones of its sizes until their tensors have so many bytes."""
    cases = [make(maker)]
    held = sum(t.nbytes for t in _tensors(cases[0].args))
    while held * len(cases) < nbytes:
        cases.append(make(maker))
    return cases


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in _tensors(part)]
    return [value] if isinstance(value, Tensor) else []


def _copy(backend: Backend, nbytes: int) -> Callable[[], object]:
    source = torch.empty(nbytes // 4, device=backend.device())
    return partial(torch.empty_like(source).copy_, source)


def _in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def _calls(
    backend: Backend,
    operator: Operator[..., Any],
    turns: Sequence[Case],
    backward: bool,
    compiler: Compiler | None,
) -> dict[str, Callable[[], object]]:
    name, first = operator.spec.name, turns[0]

    def of(function: Callable[..., Any]) -> Timed:
        return _in_turn([_call(function, case, backward, operator) for case in turns])

    calls: dict[str, Timed] = {
        "ours": of(operator),
        "reference": Under(partial(runtime.policy, pin={name: "reference"}), of(operator)),
    }
    for peer, function in first.peers.items():
        calls[peer] = of(function)
    if first.eager is None:
        return calls
    calls["torch"] = of(first.eager)
    if compiler is not None:
        eager = first.eager
        made = compiler.compile(_row_name(name, backward), lambda compile: of(compile(eager)))
        if made is not None:
            calls["compiled"] = made
    return calls


def _row(
    name: str,
    operator: Operator[..., Any],
    case: Case,
    taken: Mapping[str, Samples],
    copied: int,
    servers: Mapping[str, Any],
) -> Timing:
    nbytes = _nbytes(operator, case, name.endswith(_BACKWARD))
    ours = taken["ours"]
    facts: dict[str, Any] = {
        "GB/s": nbytes / ours.median / 1e9,
        "x bound": ours.ratio(taken["copy"]) * 2 * copied / nbytes,
    }
    for peer in ("reference", "torch", "compiled", *case.peers, "displaced"):
        if peer in taken:
            facts[f"x {peer}"] = taken[peer].ratio(ours)
    facts |= servers
    return Timing(
        name=name, microseconds=ours.median * 1e6, best_microseconds=ours.best * 1e6, facts=facts
    )


def _row_name(name: str, backward: bool) -> str:
    return f"{name} {_BACKWARD if backward else 'forward'}"


def _nbytes(operator: Operator[..., Any], case: Case, backward: bool) -> int:
    spec = operator.spec
    total = spec.cost(*case.args, **case.attrs).nbytes
    if backward and spec.backward_cost is not None:
        total += spec.backward_cost(*case.args, **case.attrs).nbytes
    return total


def _call(
    function: Callable[..., Any], case: Case, backward: bool, operator: Operator[..., Any]
) -> Timed:
    """A closure that runs a case once; with a backward, through autograd with a given gradient."""
    if not backward:
        return partial(function, *case.args, **case.attrs)
    assert operator.gradient is not None
    args, leaves = list(case.args), []
    for place in operator.gradient.differentiable:
        if args[place] is not None:
            args[place] = args[place].detach().requires_grad_()
            leaves.append(args[place])
    grads = [torch.ones_like(y) for y in _differentiable(function(*args, **case.attrs))]

    def both() -> object:
        return torch.autograd.grad(_differentiable(function(*args, **case.attrs)), leaves, grads)

    return both


def _listed(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _differentiable(result: Any) -> tuple[Tensor, ...]:
    return tuple(y for y in _listed(result) if y.is_floating_point())


def _cases() -> dict[str, Callable[[SampleMaker], Case]]:
    return {**_elementwise_cases(), **_product_cases(), **channels.cases(), **updates.cases()}


def _elementwise_cases() -> dict[str, Callable[[SampleMaker], Case]]:
    """Activations, norms and what else takes each element or row by itself."""
    return {
        "rms_norm": _norm(bias=False), "layer_norm": _norm(bias=True),
        "dropout": lambda m: Case(
            args=(m.normal(_TOKENS, _HIDDEN), m.rng(1, 0)),
            attrs={"p": 0.1},
            eager=lambda x, rng, *, p: functional.dropout(x, p),
        ),
        "gelu": _element(functional.gelu, approximate="tanh"), "silu": _element(functional.silu),
        "relu": _element(functional.relu), "relu2": _element(lambda x: functional.relu(x).square()),
        "sigmoid": _element(torch.sigmoid), "tanh": _element(torch.tanh),
        "softplus": _element(functional.softplus, beta=1.0, threshold=20.0),
        "add_rms_norm": _norm(bias=False, residual=True),
        "add_layer_norm": _norm(bias=True, residual=True), "bias_dropout_add": _bias_dropout_add,
        "dropout_add_rms_norm": _norm(bias=False, residual=True, dropped=True),
        "dropout_add_layer_norm": _norm(bias=True, residual=True, dropped=True),
        "bias_gelu": lambda m: Case(
            args=(m.normal(_TOKENS, _HIDDEN), m.normal(_HIDDEN)),
            attrs={"approximate": "tanh"},
            eager=lambda x, bias, *, approximate: functional.gelu(
                x + bias, approximate=approximate
            ),
        ),
        "geglu": _element(
            lambda gate, up, **attrs: functional.gelu(gate, **attrs) * up, 2, approximate="tanh"
        ),
        "softmax": _softmax, "swiglu": _element(lambda gate, up: functional.silu(gate) * up, 2),
        "rope": _rope,
        "embedding": lambda m: Case(
            args=(m.integers(_VOCABULARY, _TOKENS), m.normal(_VOCABULARY, _HIDDEN)),
            attrs={},
            eager=functional.embedding,
        ),
        "l2_norm": lambda m: Case(
            args=([m.normal(_TOKENS, _HIDDEN)],), attrs={}, eager=torch.nn.utils.get_total_norm
        ),
        "adamw": updates.adamw,
    }  # fmt: skip


def _product_cases() -> dict[str, Callable[[SampleMaker], Case]]:
    """Products of matrices, attention and losses."""
    return {
        "attention": _attention, "attention_dropout": _attention_dropout,
        "attention_varlen": _attention_varlen,
        "linear": lambda m: Case(
            args=(m.normal(_TOKENS // 4, _HIDDEN), m.normal(_HIDDEN, _HIDDEN), m.normal(_HIDDEN)),
            attrs={},
            eager=functional.linear,
        ),
        "grouped_linear": _grouped_linear, "permute": _permute, "unpermute": _unpermute,
        "cross_entropy": lambda m: Case(
            args=(m.normal(_TOKENS // 4, _VOCABULARY), m.integers(_VOCABULARY, _TOKENS // 4)),
            attrs={},
            eager=functional.cross_entropy,
        ),
        "linear_cross_entropy": _linear_cross_entropy,
        "linear_cross_entropy_partials": _linear_cross_entropy_partials,
    }  # fmt: skip


def _element(eager: Callable[..., Any], count: int = 1, **attrs: Any) -> Make:
    """Of one tensor or two, element by element."""
    return lambda m: Case(
        args=tuple(m.normal(_TOKENS, _HIDDEN) for _ in range(count)), attrs=attrs, eager=eager
    )


def _norm(*, bias: bool, residual: bool = False, dropped: bool = False) -> Make:
    """rms_norm, or layer_norm with a bias; of a residual and x, of which some may be dropped."""

    def eager(x: Tensor, *rest: Tensor, eps: float, p: float = 0.0) -> Any:
        total = x if not residual else rest[0] + (functional.dropout(x, p) if dropped else x)
        weight, width = rest[residual], (x.shape[-1],)
        if bias:
            y = functional.layer_norm(total, width, weight, rest[-1], eps)
        else:
            y = functional.rms_norm(total, width, weight, eps)
        return (y, total) if residual else y

    def make(m: SampleMaker) -> Case:
        rows = [m.normal(_TOKENS, _HIDDEN) for _ in range(1 + residual)]
        args = [*rows, m.normal(_HIDDEN), *([m.rng(1, 0)] if dropped else [])]
        attrs = {"eps": 1e-5 if bias else 1e-6} | ({"p": 0.1} if dropped else {})
        return Case(args=(*args, *([m.normal(_HIDDEN)] if bias else [])), attrs=attrs, eager=eager)

    return make


def _bias_dropout_add(m: SampleMaker) -> Case:
    x, residual, bias = m.normal(_TOKENS, _HIDDEN), m.normal(_TOKENS, _HIDDEN), m.normal(_HIDDEN)
    return Case(
        args=(x, residual, m.rng(1, 0), bias),
        attrs={"p": 0.1},
        eager=lambda x, residual, _, bias, *, p: residual + functional.dropout(x + bias, p),
    )


def _softmax(m: SampleMaker) -> Case:
    length = 512
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)

    def eager(x: Tensor, mask: Any, bias: Any, *, scale: float, causal: bool) -> Tensor:
        return functional.softmax((x * scale).masked_fill(hidden.to(x.device), -torch.inf), -1)

    args = (m.normal(4, 4, length, length), None, None)
    return Case(args=args, attrs={"scale": 0.125, "causal": True}, eager=eager)


def _rope(m: SampleMaker) -> Case:
    heads, dim = _HIDDEN // 64, 64
    angles = m.normal(_TOKENS // 4, dim // 2, dtype=torch.float32)
    q, k = (m.normal(4, _TOKENS // 4, heads, dim) for _ in range(2))

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def eager(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos[:, None].to(q.dtype), sin[:, None].to(q.dtype)
        return turn(q, cos, sin), turn(k, cos, sin)

    return Case(args=(q, k, angles.cos(), angles.sin()), attrs={"interleaved": False}, eager=eager)


def _qkv(m: SampleMaker, *shape: int) -> tuple[Tensor, ...]:
    """Queries of all heads, keys and values of half as many."""
    heads, dim = _HIDDEN // 64, 64
    return m.normal(*shape, heads, dim), *(m.normal(*shape, heads // 2, dim) for _ in range(2))


def _torch_attention(q: Tensor, k: Tensor, v: Tensor, *, p: float = 0.0) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    y = functional.scaled_dot_product_attention(
        q, k, v, dropout_p=p, is_causal=True, enable_gqa=True
    )
    return y.transpose(1, 2)


def _attention(m: SampleMaker) -> Case:
    return Case(
        args=_qkv(m, 1, _TOKENS // 4),
        attrs={"causal": True, "scale": None},
        eager=lambda q, k, v, **_: _torch_attention(q, k, v),
    )


def _attention_dropout(m: SampleMaker) -> Case:
    return Case(
        args=(*_qkv(m, 1, _TOKENS // 4), m.rng(1, 0)),
        attrs={"causal": True, "p": 0.1, "scale": None},
        eager=lambda q, k, v, rng, *, p, **_: _torch_attention(q, k, v, p=p),
    )


def _attention_varlen(m: SampleMaker) -> Case:
    quarter = _TOKENS // 4
    ends = [0, quarter // 8, quarter // 2, quarter]

    def eager(q: Tensor, k: Tensor, v: Tensor, *_: Tensor, **__: object) -> Tensor:
        # torch has no packed attention outside of nested tensors: each sequence by itself.
        parts = zip(*(t[None].tensor_split(ends[1:-1], 1) for t in (q, k, v)), strict=True)
        return torch.cat([_torch_attention(*part)[0] for part in parts])

    args = (*_qkv(m, quarter), *[torch.tensor(ends, device=m.device)] * 2)
    return Case(args=args, attrs={"causal": True, "scale": None}, eager=eager)


def _grouped_linear(m: SampleMaker) -> Case:
    rows, inputs = _TOKENS // 4, _HIDDEN // 2
    x, weight = m.normal(rows, inputs), m.normal(8, _HIDDEN, inputs)
    # Uneven groups, one of them empty.
    ends = [rows * share // 16 for share in (1, 4, 4, 7, 8, 13, 15, 16)]

    def eager(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=offsets.int())

    return Case(args=(x, weight, torch.tensor(ends, device=m.device)), attrs={}, eager=eager)


_EXPERTS, _CHOICES = 8, 2


def _permute(m: SampleMaker) -> Case:
    def eager(x: Tensor, indices: Tensor, *_: None, num_experts: int) -> tuple[Tensor, ...]:
        order = torch.sort(indices.reshape(-1), stable=True).indices
        offsets = torch.bincount(indices.reshape(-1), minlength=num_experts).cumsum(0)
        return x[order // _CHOICES], order.argsort().view(indices.shape), offsets

    indices = m.integers(_EXPERTS, _TOKENS, _CHOICES)
    args = (m.normal(_TOKENS, _HIDDEN), indices)
    return Case(args=args, attrs={"num_experts": _EXPERTS}, eager=eager)


def _unpermute(m: SampleMaker) -> Case:
    row_map = m.normal(_TOKENS * _CHOICES, dtype=torch.float32).argsort().view(-1, _CHOICES)
    return Case(
        args=(m.normal(_TOKENS * _CHOICES, _HIDDEN), row_map, m.normal(_TOKENS, _CHOICES)),
        attrs={},
        eager=lambda x, row_map, weights: (x[row_map] * weights.unsqueeze(-1)).sum(1),
    )


def _linear_cross_entropy(m: SampleMaker) -> Case:
    rows, inputs = _TOKENS // 4, _HIDDEN // 2
    weight = m.normal(_VOCABULARY, inputs, scale=inputs**-0.5)
    return Case(
        args=(m.normal(rows, inputs), weight, m.integers(_VOCABULARY, rows), None),
        attrs={},
        eager=lambda x, weight, target, _: functional.cross_entropy(
            functional.linear(x, weight), target
        ),
    )


def _linear_cross_entropy_partials(m: SampleMaker) -> Case:
    def eager(
        x: Tensor, weight: Tensor, target: Tensor, bias: None, *, first: int
    ) -> tuple[Tensor, ...]:
        logits = functional.linear(x, weight).float()
        return logits.logsumexp(1), logits.gather(1, target.unsqueeze(1))[:, 0], logits.sum(1)

    return Case(args=_linear_cross_entropy(m).args, attrs={"first": 0}, eager=eager)
