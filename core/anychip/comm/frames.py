"""What goes over the side channel? Frames of one size, made by who knows the job's secret.

A connection begins with 32 random bytes from each end. They and the secret give a key for each
direction, so that a frame of another connection, or of the other end, is worth nothing here. A
frame ends with its HMAC, which is checked before anything else of it is read; frames of a kind
are numbered, so that none can be sent again. Without a secret anybody can make the keys: frames
then keep out who speaks something else, and nobody more.

Layout, big-endian; csrc/comm/heartbeat.cpp writes it too: magic 4, kind 1, zero 3, sender u32,
number u64, ticks u64, count u16, length u16, ranks 32 x u32, text 832, HMAC-SHA256 32.
"""

import hashlib
import hmac
import struct
from collections.abc import Container
from typing import NamedTuple

NBYTES, NONCE_NBYTES = 1024, 32
_MAC_NBYTES, _MAX_RANKS = 32, 32
_BODY = struct.Struct("!4sB3xIQQHH32I832s")
_MAGIC = b"ACh1"

HELLO, BEAT, FAILURE, BYE, QUESTION = range(1, 6)
"""Kinds: this is the sender; it is alive; what ended the job; ranks that have closed; what every
rank is asked."""


class Frame(NamedTuple):
    """One message of a rank.

    Attributes:
        sender: its rank in the world.
        ticks: of a BEAT, the turns that its listening thread has made; of a HELLO, by what the
            limit of its silence is to be multiplied.
        ranks: at most 32 of those that a FAILURE or BYE is about.
    """

    kind: int
    sender: int
    ticks: int = 0
    ranks: tuple[int, ...] = ()
    text: str = ""


class Keys(NamedTuple):
    """Of a connection: one key for each direction."""

    outgoing: bytes
    incoming: bytes


def keys(secret: bytes, nonces: tuple[bytes, bytes], *, is_rank_0: bool) -> Keys:
    """The keys of a connection.

    Args:
        nonces: of rank 0, and of the rank that has called it.
    """
    made = [
        hmac.digest(secret, b"anychip side channel, " + end + b"".join(nonces), hashlib.sha256)
        for end in (b"rank 0", b"caller")
    ]
    return Keys(*made) if is_rank_0 else Keys(*reversed(made))


def body(frame: Frame, number: int) -> bytes:
    """A frame but for its HMAC; what is too long is cut off."""
    text = frame.text.encode()[:832].decode(errors="ignore").encode()
    ranks = frame.ranks[:_MAX_RANKS]
    padded = (*ranks, *[0] * (_MAX_RANKS - len(ranks)))
    head = (_MAGIC, frame.kind, frame.sender, number, frame.ticks, len(ranks), len(text))
    return _BODY.pack(*head, *padded, text)


def seal(key: bytes, content: bytes) -> bytes:
    """A frame as it is sent."""
    return content + hmac.digest(key, content, hashlib.sha256)


class Reader:
    """The frames that arrive on one connection, in pieces of any size; holds less than one frame.

    Args:
        key: of the direction in which they come.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._unread = key, b""
        self._numbers: dict[bool, int] = {}

    @property
    def wanted(self) -> int:
        """Bytes that are missing to the end of a frame."""
        return NBYTES - len(self._unread)

    def feed(self, data: bytes, senders: Container[int]) -> Frame | None:
        """The frame that these bytes, at most ``wanted``, make whole; None: not yet.

        Raises:
            ValueError: they are no frame of this connection, or of none of ``senders``.
        """
        self._unread += data
        if self.wanted:
            return None
        content, mac = self._unread[:-_MAC_NBYTES], self._unread[-_MAC_NBYTES:]
        self._unread = b""
        if not hmac.compare_digest(hmac.digest(self._key, content, hashlib.sha256), mac):
            raise ValueError("it was not made with the key of this connection")
        magic, kind, sender, number, ticks, count, length, *rest = _BODY.unpack(content)
        is_beat = kind == BEAT
        # Beats are made by a thread of their own, and have numbers of their own.
        expected = self._numbers.get(is_beat, 0)
        self._numbers[is_beat] = expected + 1
        if (magic, number) != (_MAGIC, expected) or sender not in senders or count > _MAX_RANKS:
            raise ValueError(f"kind {kind}, number {number} (expected {expected}) of rank {sender}")
        text = rest[_MAX_RANKS][:length].decode(errors="replace")
        return Frame(kind, sender, ticks, tuple(rest[:count]), text)
