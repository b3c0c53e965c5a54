"""What the way of tokens to their experts may be called with."""

import torch

from anychip.conformance.calls import Arguments, Draw
from anychip.conformance.choices import Choices
from anychip.conformance.oracles.drawn_lists import SPECIAL


def index_dtype(choose: Choices, factor: str) -> torch.dtype:
    """One of those that an index may have."""
    return choose.of(factor, torch.int64, torch.int32)


def routed(choose: Choices) -> tuple[int, int, int]:
    """Tokens, choices of each, and how wide they are."""
    choices = choose.number("choices", (2,), (1,), (3, 5), (8, 4, 6), (16, 10, 33, 64, 100))
    room = choose.room(choices)
    return room.size("tokens", none=True), choices, room.size("width", none=True)


def permute(choose: Choices, draw: Draw) -> Arguments:
    tokens, choices, width = routed(choose)
    experts = choose.size("experts", 1001)
    kind = choose.of("experts chosen", "any", "some of none", "one", "the last", "ascending")
    outside = int(kind == "some of none")
    indices = draw.integers(experts + 2 * outside, tokens, choices) - outside
    indices.view(-1)[indices.numel() // 2 :][:outside] = -1
    if kind == "ascending":
        indices = indices.flatten().sort().values.view(tokens, choices)
    elif kind != "any" and not outside:
        indices = torch.full_like(indices, experts - 1 if kind == "the last" else experts // 2)
    x = choose.values("x", draw, tokens, width, more=SPECIAL)
    kinds = {"none": None, "equal": 1, "any": 9, "far apart": 9}
    kind = choose.of("key", *kinds)
    keys, key = kinds[kind], None
    if keys is not None:
        key = (draw.integers(keys, tokens) - keys // 2).to(index_dtype(choose, "dtype of key"))
        key *= 1 if kind != "far apart" else 2**40 if key.dtype == torch.int64 else 2**20
    counts = {"all": None, "none": 0, "one": 1, "half": tokens // 2, "more": tokens + 1}
    count = counts[choose.of("count", *counts)]
    given = None if count is None else torch.tensor(count)
    indices = indices.to(index_dtype(choose, "dtype of indices"))
    if outside and indices.numel() > 2:
        ends = torch.iinfo(indices.dtype)
        indices.view(-1)[[0, -1]] = torch.tensor([ends.max, ends.min], dtype=indices.dtype)
    return (x, indices, key, given), {"num_experts": experts}
