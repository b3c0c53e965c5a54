"""Is a decoder of any make cut by the parts that it states, and by nothing else?"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anychip.train.models.decoder import Decoder, Parts
from anychip.train.parallel import make_stage, merge, num_layers, one_f_one_b
from tests.unit.train.parallel.test_pipeline import pipelined, serial

VOCAB, WIDTH, LENGTH = 11, 4, 6
LAYERS = 4
"""The embedding, two blocks, and what is above them."""


class Angles(nn.Module):
    """What every block needs, and no stage owns: a buffer that is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.arange(WIDTH) / 8, persistent=False)

    def forward(self, length: int) -> Tensor:
        steps: Any = self.steps
        return torch.cos(torch.arange(length)[:, None] * steps)


class Step(nn.Module):
    """A block that is given something next to the vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        mixed: Tensor = self.mix(x * angles)
        return x + torch.tanh(mixed)


class Tiny(Decoder):
    """A decoder like none of ours: other names, other depths, a norm that has no parameters."""

    parts = Parts(below=("words",), blocks="trunk.inner.steps", above=("trunk.norm", "top.out"))

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.trunk = nn.Module()
        self.trunk.inner = nn.Module()
        self.trunk.inner.steps = nn.ModuleList(Step() for _ in range(LAYERS - 2))
        self.trunk.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.trunk.angles = Angles()
        self.top = nn.Module()
        self.top.out = nn.Linear(WIDTH, VOCAB)
        if tied:
            self.top.out.weight = self.words.weight

    def embed(self, tokens: Tensor) -> Tensor:
        return self.words(tokens)  # type: ignore[no-any-return]

    def run_block(self, block: nn.Module, x_BSD: Tensor) -> Tensor:
        trunk: Any = self.trunk
        return block(x_BSD, trunk.angles(x_BSD.shape[1]))  # type: ignore[no-any-return]

    def logits(self, x_BSD: Tensor) -> Tensor:
        trunk, top = self.trunk, self.top
        return top.out(trunk.norm(x_BSD))  # type: ignore[no-any-return,operator]


def tiny(*, tied: bool = False) -> Tiny:
    torch.manual_seed(1)
    return Tiny(tied=tied)


BATCHES = torch.randint(VOCAB, (5, 2, 4, LENGTH), generator=torch.Generator().manual_seed(3))
"""(steps, 2, rows, LENGTH): tokens and targets of five steps."""


def trained(model: Decoder, cut: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the merged state dict, of two stages with ``cut`` layers in the first."""
    parts = range(cut), range(cut, LAYERS)
    (losses, first), (again, last) = pipelined(model, one_f_one_b(2, 2), BATCHES, parts)
    assert losses == again
    return losses, merge([first, last])


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_decoder_of_another_make_on_two_stages_has_the_bits_of_the_whole(cut: int) -> None:
    model = tiny()
    losses, state = trained(model, cut)
    assert losses == serial(model, 2, BATCHES)
    assert state.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name


def test_tie_below_and_above_is_found_by_the_parameter_and_shares_nothing_after() -> None:
    model = tiny(tied=True)
    first, last = make_stage(model, range(2)), make_stage(model, range(2, LAYERS))
    assert first.tied[0] is model.words.weight
    assert torch.equal(last.tied[0], model.words.weight)
    assert last.tied[0] is not model.words.weight
    assert model.get_parameter("top.out.weight") is model.words.weight
    assert make_stage(tiny(), range(2)).tied == ()
    losses, state = trained(model, 2)
    assert torch.equal(state["words.weight"], state["top.out.weight"])
    # The two uses are added up in another order: each gradient differs by a few roundings.
    assert losses == pytest.approx(serial(model, 2, BATCHES), rel=1e-5)


def test_parameter_that_no_part_or_two_blocks_have_is_refused_by_its_name() -> None:
    model = tiny()
    model.trunk.inner.scale = nn.Parameter(torch.ones(1))  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"trunk\.inner\.scale of Tiny is in none of its parts"):
        make_stage(model, range(2))
    model = tiny()
    one, two = model.blocks()
    two.mix = one.mix
    with pytest.raises(ValueError, match=r"steps\.0\.mix\.weight and .*steps\.1\.mix\.weight are "):
        make_stage(model, range(num_layers(model)))
