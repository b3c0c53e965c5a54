"""permute and unpermute: the order, the same bits by any threads, one graph, and refusals."""

import torch
from torch import Tensor

import anychip
from anychip import ops
from tests.unit.dispatch.calls import bits

NAMES = ("permute", "unpermute")


def routed(tokens: int, choices: int, experts: int, hidden: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator)
    return x, torch.randint(-1, experts + 1, (tokens, choices), generator=generator)


def test_rows_of_an_expert_are_in_one_order_however_tokens_were_spread(pin: str) -> None:
    """Two exchanges' worth: rows of all ranks, in the order in which each rank had them."""
    x, indices = routed(40, 2, 5)
    whole, _, ends = ops.permute(x, indices, num_experts=5)
    token = torch.arange(40)
    for ranks in (2, 3):
        own = [token[rank::ranks] for rank in range(ranks)]
        parts = [ops.permute(x[t], indices[t], num_experts=5) for t in own]
        received = torch.cat([y for y, *_ in parts])
        expert, key = (torch.full((80,), -1) for _ in range(2))
        for start, t, (y, row_map, offsets) in zip(
            [0, *torch.tensor([len(y) for y, *_ in parts]).cumsum(0)], own, parts, strict=False
        ):
            key[start + row_map] = t[:, None].expand_as(row_map)
            number = torch.bucketize(torch.arange(len(y)), offsets, right=True)
            expert[start : start + len(y)] = torch.where(number < 5, number, -1)
        # Room for rows that did not come, and how many did, on the device.
        room = torch.nn.functional.pad(received, (0, 0, 0, 7), value=torch.nan)
        expert, key = (torch.nn.functional.pad(t, (0, 7)) for t in (expert, key))
        got, _, offsets = ops.permute(room, expert[:, None], key, torch.tensor(80), num_experts=5)
        inside = int(ends[-1])
        assert bits(offsets) == bits(ends)
        assert bits(got[:inside]) == bits(whole[:inside])


def test_results_have_the_same_bits_for_every_number_of_threads(pin: str) -> None:
    x, indices = routed(700, 4, 9, hidden=130)
    found, before = [], torch.get_num_threads()
    for number in (1, 2):
        torch.set_num_threads(number)
        leaf = x.clone().requires_grad_()
        y, row_map, offsets = ops.permute(leaf, indices, num_experts=9)
        found.append(bits([y, row_map, offsets, torch.autograd.grad(y.square().sum(), leaf)]))
    torch.set_num_threads(before)
    assert found[0] == found[1]


def test_compiled_call_does_not_look_at_the_indices() -> None:
    """One graph serves every routing: the experts' numbers of rows are values, not shapes."""

    def both(x: Tensor, indices: Tensor) -> Tensor:
        y, row_map, _ = ops.permute(x, indices, num_experts=3)
        return ops.unpermute(y, row_map)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    with anychip.policy(pin={"permute": "reference", "unpermute": "reference"}):
        for seed in range(3):
            x, indices = routed(8, 2, 3)
            indices = indices.roll(seed, 0)
            torch.testing.assert_close(compiled(x, indices), 2 * x)
