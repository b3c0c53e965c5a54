"""Is a frame of the side channel taken from its sender only, once, in order, and whole?"""

import socket
import threading

import pytest

from anychip.comm import frames
from anychip.comm.frames import BEAT, FAILURE, Frame
from anychip.comm.heartbeat import Heartbeat

NONCES = (b"0" * 32, b"1" * 32)
OURS, THEIRS = (frames.keys(b"of the job", NONCES, is_rank_0=end) for end in (True, False))
TOLD = Frame(FAILURE, 3, ranks=(1, 2), text="rank 1, rank 2: lost")


def sealed(number: int = 0, frame: Frame = TOLD, key: bytes = THEIRS.outgoing) -> bytes:
    return frames.seal(key, frames.body(frame, number))


@pytest.mark.parametrize("size", [1, 31, 1023, 1024])
def test_frames_arrive_in_pieces_of_any_size(size: int) -> None:
    reader, found = frames.Reader(OURS.incoming), []
    stream = sealed(0) + sealed(0, Frame(BEAT, 3, ticks=2**40)) + sealed(1)
    while stream:
        piece = stream[: min(size, reader.wanted)]
        stream = stream[len(piece) :]
        found.append(reader.feed(piece, {3}))
    assert [frame for frame in found if frame] == [TOLD, Frame(BEAT, 3, ticks=2**40), TOLD]


@pytest.mark.parametrize(
    ("stream", "why"),
    [(sealed(key=frames.keys(b"", NONCES, is_rank_0=False).outgoing), "key of this connection"),
     (sealed(key=frames.keys(b"of the job", NONCES[::-1], is_rank_0=False).outgoing), "key of"),
     (sealed(key=OURS.outgoing), "key of this connection"), (b"[" * 1024, "key of this connection"),
     (sealed()[:100] + b"\1" + sealed()[101:], "key of this connection"),
     (sealed() + sealed(), r"number 0 \(expected 1\)"), (sealed(1), r"number 1 \(expected 0\)"),
     (sealed(0, TOLD._replace(sender=4)), "of rank 4")],
    ids=["secret", "nonces", "mirrored", "noise", "changed", "again", "early", "another rank's"],
)  # fmt: skip
def test_frame_that_is_not_the_senders_next_is_refused(stream: bytes, why: str) -> None:
    reader = frames.Reader(OURS.incoming)
    if len(stream) > 1024:
        assert reader.feed(stream[:1024], {3}) == TOLD
    with pytest.raises(ValueError, match=why):
        reader.feed(stream[-1024:], {3})


def test_frame_of_too_much_is_cut_and_stays_a_frame() -> None:
    told = Frame(FAILURE, 3, ranks=tuple(range(40)), text="é" * 900)
    found = frames.Reader(OURS.incoming).feed(sealed(frame=told), {3})
    assert found == told._replace(ranks=tuple(range(32)), text="é" * 416)


def test_frames_that_several_threads_send_arrive_in_order() -> None:
    mine, theirs = socket.socketpair()
    heartbeat, reader, count = Heartbeat(3, 60.0), frames.Reader(OURS.incoming), 400
    heartbeat.add(mine.fileno(), THEIRS.outgoing)

    def send() -> None:
        for _ in range(count):
            heartbeat.send(mine.fileno(), TOLD)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    told = 0
    while told < count * len(threads):
        told += reader.feed(theirs.recv(reader.wanted), (3,)) == TOLD
    for thread in threads:
        thread.join()
    heartbeat.close()
    mine.close()
    theirs.close()
