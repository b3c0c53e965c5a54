"""Wrong backends that the questions on graphs have to find, in the chapter device."""

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from tests.meta.asynchronous import Deferring, Stream
from tests.meta.recording import HostGraph, RecordingBackend, Tape
from tests.meta.wrong import Wrong, with_method, wrong_parts
from tests.meta.wrong_streams import ours_at_once


class ReplaysOnce(HostGraph):
    """The second replay finds the work done."""

    def run(self) -> None:
        super().run()
        self.pieces = []


class DropsWhileOneWaits(HostGraph):
    """A replay that waits already is taken for the next one as well."""

    waits = False

    def replay(self) -> None:
        if not self.waits:
            self.waits = True
            super().replay()

    def run(self) -> None:
        super().run()
        self.waits = False


class CallsAnew(HostGraph):
    """Not recorded at all: the function is called again, and gives other tensors."""

    def replay(self) -> None:
        self.result = self.work()


class KeepsABlock(HostGraph):
    """Room for the launch is taken at each replay, and never given back."""

    def replay(self) -> None:
        self.backend.__dict__.setdefault("rooms", []).append(self.backend.memory.allocate(4096))
        super().replay()


class ForgetsTheLast(HostGraph):
    """The last piece is still on its way when the recording ends."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pieces = self.pieces[:-1]


class InputsAsTheyWere(Deferring):
    """Inputs are copied into the graph with the values of the recording."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self.own: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not func._schema.is_mutable:
            args = tree_map(self.kept, args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def kept(self, value: Any) -> Any:
        foreign = isinstance(value, Tensor) and _storage(value) not in self.own
        return value.clone() if foreign else value

    def room(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        made = super().room(func, args, kwargs)
        self.own |= {_storage(tensor) for tensor in (made if isinstance(made, tuple) else [made])}
        return made


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class OnePool(Deferring):
    """Every graph takes its rooms from the beginning of one pool."""

    rooms: dict[tuple[Any, ...], Tensor] = {}  # noqa: RUF012

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self.numbers = itertools.count()

    def room(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        def pooled(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            key = (next(self.numbers), value.shape, value.stride(), value.dtype)
            return self.rooms.setdefault(key, value)

        return tree_map(pooled, super().room(func, args, kwargs))


wrong = partial(wrong_parts, RecordingBackend, chapter="device")

CATALOGUE: tuple[Wrong, ...] = (
    wrong("replay-does-nothing", "a quiet no-op", "graphs/replay",
          graph_type=with_method(HostGraph, "run", lambda *_: None)),
    wrong("replay-only-once", "stale state", "graphs/replay", graph_type=ReplaysOnce),
    wrong("replay-calls-anew", "result that is not written in place", "graphs/replay",
          graph_type=CallsAnew),
    wrong("recording-runs", "a query with a side effect", "recording",
          tape_type=with_method(Tape, "add", lambda _, right, call: (right(call), call()))),
    wrong("recording-lacks-the-last", "dropped tail", "graphs/replay", graph_type=ForgetsTheLast),
    wrong("inputs-as-they-were", "stale copy", "graphs/replay", recorder_type=InputsAsTheyWere),
    wrong("kernels-are-not-recorded", "kernel on another stream", "graphs/replay",
          recorder_type=with_method(Deferring, "defer", ours_at_once)),
    wrong("one-pool-of-all-graphs", "workspace shared", "graphs/apart", recorder_type=OnePool),
    wrong("block-per-replay", "leak", "graphs/memory", graph_type=KeepsABlock),
    wrong("replay-while-one-waits-is-none", "stale state", "graphs/among",
          graph_type=DropsWhileOneWaits),
    wrong("replay-on-its-own-stream", "kernel on another stream", "graphs/among",
          graph_type=with_method(HostGraph, "replay",
                                 lambda graph, _: graph.backend.stream().add(graph.run))),
)  # fmt: skip
