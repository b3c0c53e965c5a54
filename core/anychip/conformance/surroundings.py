"""The same questions from elsewhere: another thread, stream or device.

What a backend keeps for a thread, a stream or a device (a handle, a list of events) is there in
the place from which a suite happens to ask, and may be missing in the next one: a thread of
autograd or of a data loader, a stream for communication. So a chapter's questions are asked again
as they are, from each such place.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from anychip.conformance.case import Case, CheckFailedError, Context

T = TypeVar("T")


def in_thread(call: Callable[[], T]) -> T:
    """What a call returns in a new thread; its exception is raised here."""
    box: list[Any] = [None, None]
    threads = torch.get_num_threads()

    def run() -> None:
        torch.set_num_threads(threads)  # or products take the process's, and have other bits
        try:
            box[0] = call()
        except BaseException as error:  # handed over to the caller's thread below
            box[1] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if box[1] is not None:
        raise box[1]
    result: T = box[0]
    return result


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], object]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            ctx.call()
        return grads[0], None


def in_backward(device: torch.device, call: Callable[[], object]) -> None:
    """Makes a call within a backward pass, in autograd's own thread, as checkpointing does."""
    x = torch.ones(1, device=device, requires_grad=True)
    y = _InBackward.apply(x, call)  # type: ignore[no-untyped-call]
    y.sum().backward()


def on_stream(context: Context, call: Callable[[], T]) -> T:
    """What a call returns while a new stream is current."""
    with context.backend.use_stream(context.backend.stream()):
        return call()


def on_last_device(context: Context, call: Callable[[], T]) -> T | None:
    """What a call returns while the last device is current; where there is one, it is not made."""
    backend, last = context.backend, context.backend.device_count() - 1
    if not last:
        return None
    before = backend.current_device()
    backend.set_device(last)
    try:
        return call()
    finally:
        backend.set_device(before)


Place = Callable[[Context, Callable[[], None]], None]
PLACES: Mapping[str, tuple[str, str | None, Place]] = {
    "thread": ("in another thread", None, lambda context, call: in_thread(call)),
    "stream": ("while another stream is current", "streams", on_stream),
    "stream-in-thread": (
        "in another thread, while a stream of its own is current", "streams",
        lambda context, call: in_thread(partial(on_stream, context, call)),
    ),
    "device": ("on the last device", None, on_last_device),
    "device-in-thread": (
        "in another thread, on a stream of the last device", "streams",
        lambda context, call: in_thread(
            partial(on_last_device, context, partial(on_stream, context, call))
        ),
    ),
}  # fmt: skip
"""In words, what it needs of the backend, and how a call is made there."""


def again(chapter: str, cases: Iterable[Case], once: Collection[str]) -> Iterator[Case]:
    """A case per place, which asks there what the given ones ask.

    Args:
        once: ids of those that are not asked again.
    """
    asked = tuple(case for case in cases if case.id not in once)
    (needed, *others) = {case.capability for case in asked}
    for name, (words, capability, place) in PLACES.items():
        run = partial(ask_there, cases=asked, words=words, place=place)
        needs = capability or (None if others else needed)
        yield Case(id=f"{chapter}/again/{name}", run=run, capability=needs)


def ask_there(context: Context, *, cases: tuple[Case, ...], words: str, place: Place) -> None:
    """Every question is answered as it is here.

    Raises:
        CheckFailedError: the first that is not, named with the place.
    """
    has = {None, *context.backend.capabilities}
    for case in cases:
        if case.capability in has and (context.level == "full" or not case.full):
            there = replace(context)  # which finds out anew what device is current
            try:
                place(context, partial(case.run, there))
            except Exception as error:
                what = str(error) if isinstance(error, CheckFailedError) else repr(error)
                context.call = there.call
                raise CheckFailedError(f"{case.id}, asked {words}: {what}") from error
