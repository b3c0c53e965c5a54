"""How many bytes do forwards keep for their backwards? Of storages that autograd really holds.

:class:`Saved` counts them while a pipeline runs; :func:`estimate_bytes` counts one microbatch of
each stage on tensors without data. Parameters, buffers and the batch are not counted: they are
there anyway.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from anychip.dispatch.deferral import deferring
from anychip.train.parallel.stage import Model, make_stage, on_paper

Place = tuple[int, int]
"""Stage and microbatch."""


class StageBytes(NamedTuple):
    """Of one microbatch in one stage.

    Attributes:
        saved: from its F on.
        kept: from its I until its W.
    """

    saved: int
    kept: int


class Saved:
    """What is kept of each microbatch in each stage, as it comes and goes.

    Args:
        owned: tensors whose memory is not counted.
    """

    def __init__(self, owned: Iterable[Tensor] = ()) -> None:
        self._owned = set(map(_storage, owned))
        self._uses: dict[tuple[Place, int], int] = {}
        self._nbytes: dict[tuple[Place, int], int] = {}
        self._kept: dict[Place, int] = {}

    @property
    def nbytes(self) -> int:
        """Of all storages that are kept now; of one that two microbatches keep, twice."""
        return sum(self._nbytes.values()) + sum(self._kept.values())

    @contextmanager
    def of(self, place: Place) -> Iterator[None]:
        """What a forward within it saves counts until autograd lets it go."""
        with saved_tensors_hooks(lambda t: self._pack(place, t), _unpack):
            yield

    def keep(self, place: Place, tensors: Sequence[Tensor]) -> None:
        """What an I leaves for its W; of no tensors: the W has been."""
        sizes = {_storage(t): t.untyped_storage().nbytes() for t in tensors}
        self._kept[place] = sum(n for key, n in sizes.items() if key not in self._owned)

    def _pack(self, place: Place, tensor: Tensor) -> Any:
        storage = _storage(tensor)
        if storage in self._owned:
            return tensor
        key = place, storage
        self._uses[key] = self._uses.get(key, 0) + 1
        self._nbytes[key] = tensor.untyped_storage().nbytes()
        return _Packed(tensor, lambda: self._let_go(key))

    def _let_go(self, key: tuple[Place, int]) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key], self._nbytes[key]


class _Packed:
    """A saved tensor; autograd has let it go when this ends."""

    def __init__(self, tensor: Tensor, ended: Callable[[], None]) -> None:
        self.tensor, self._ended = tensor, ended

    def __del__(self) -> None:
        self._ended()


def _unpack(packed: Any) -> Tensor:
    found: Tensor = packed.tensor if isinstance(packed, _Packed) else packed
    return found


def _storage(tensor: Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found


def estimate_bytes(
    model: Model,
    layers: Sequence[range],
    inputs: Tensor,
    targets: Tensor | None = None,
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[StageBytes]:
    """What each stage keeps of one microbatch, without computing or allocating.

    A kernel that keeps something else than its operator's reference makes a difference, which a
    pipeline that counts shows.

    Args:
        layers: of each stage.
        inputs, targets: of one microbatch; only shape, dtype and device are looked at. The model
            is taken to be there too.
    """
    found = []
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with on_paper(model), fake as mode, torch.enable_grad():
        x = mode.from_tensor(inputs)
        for number, part in enumerate(layers):
            stage = make_stage(model, part)
            arguments: tuple[Tensor, ...] = (x,)
            if number == len(layers) - 1 and targets is not None:
                arguments = (x, mode.from_tensor(targets))
            params = {n: _like(p, inputs.device) for n, p in stage.named_parameters()}
            buffers = {n: _like(b, inputs.device) for n, b in stage.named_buffers()}
            saved = Saved([*params.values(), *buffers.values(), *arguments[1:], *_tokens(x)])
            with saved.of((number, 0)), autocast():
                y = torch.func.functional_call(stage, {**params, **buffers}, arguments)
            nbytes = saved.nbytes
            wanted = [t for t in (x, *params.values()) if t.requires_grad]
            with deferring() as deferred:
                if y.requires_grad:
                    torch.autograd.grad(y, wanted, torch.ones_like(y), allow_unused=True)
            saved.keep((number, 0), deferred.tensors)
            found.append(StageBytes(nbytes, saved.nbytes))
            x = y.detach().requires_grad_(y.requires_grad)  # not above frozen weights alone
    return found


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _tokens(x: Tensor) -> list[Tensor]:
    """The first stage's input, which is the caller's."""
    return [] if x.is_floating_point() else [x]
