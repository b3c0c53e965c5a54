"""How does a model take a document? Filters that ask one, of a run or of a directory.

The model is a small one on the host: of a run at its checkpoint, or of transformers. It sees the
first ``context`` tokens of a document, alone.

Source: perplexity, as CCNet has it (Wenzek et al. 2019, arXiv:1911.00359); the loss of an answer
with its instruction over that without, Li et al. 2023, "From Quantity to Quality" (IFD,
arXiv:2308.12032).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import anychip
from anychip.contract import HOST
from anychip.runtime import on_host
from anychip.train import asking, data, models
from anychip.train.data.packing import NO_TARGET
from anychip.train.models.pretrained import described
from anychip.train.preparing.filters import Bounds, text_of
from anychip.train.preparing.work import open_tokenizer
from anychip.train.run import whole_model


class _Judge:
    """A model that gives losses.

    Raises:
        OSError, ValueError: there is none in the directory.
        MissingExtraError: its library is not installed.
    """

    def __init__(self, path: str, context: int) -> None:
        chip = anychip.use(HOST)
        self.model: models.Decoder
        self.tokenizer: data.Tokenizer
        if (Path(path) / "config.toml").exists():
            settings = asking.without_held_out(asking.settings_of(Path(path)))
            run = asking.trained(Path(path), settings, chip)
            self.model, self.tokenizer = whole_model(run), run.loader.tokenizer
        else:
            about = described(path).get_text_config()
            context = min(context, getattr(about, "max_position_embeddings", None) or context)
            self.model = models.build(models.PretrainedConfig(path=path, context=context))
            self.tokenizer = open_tokenizer(path)
        self.model.eval()
        self.context = min(context, self.model.config.context)

    @torch.no_grad()
    def loss(self, tokens: Tensor, is_told: Tensor | None = None) -> float | None:
        """Mean over the tokens (N,) int64 but the first, or over those of them that are told."""
        tokens = tokens[: self.context + 1]
        targets = tokens[1:].clone()
        if is_told is not None:
            targets.masked_fill_(~is_told[1 : len(tokens)], data.IGNORED_TARGET)
        if not bool((on_host(targets) != data.IGNORED_TARGET).any()):
            return None
        return float(on_host(self.model(tokens[None, :-1], targets[None])))

    def of_messages(self) -> Any:
        """The tokenizer of transformers, with its template."""
        config = self.model.config
        if not isinstance(config, models.PretrainedConfig):
            raise ValueError("a model of transformers expected, whose tokenizer has a template")
        return models.load_tokenizer(config.path)


class Perplexity(Bounds):
    """By how well a model predicts the text: exp of its mean loss per token.

    Args:
        model: directory of a run of ``anychip train``, or of a model of transformers.
        context: so many tokens are asked about, at most.
    """

    def __init__(
        self, model: str, least: float = 0.0, most: float = math.inf, context: int = 512
    ) -> None:
        super().__init__(least, most)
        self._judge = _Judge(model, context)

    def measure(self, documents: Sequence[Any]) -> list[Any]:
        rows = self._judge.tokenizer.encode([text_of(document) for document in documents])
        losses = [self._judge.loss(row.to(torch.int64)) for row in rows]
        # JSON has no word for what is more than a float.
        return [None if loss is None else math.exp(min(loss, 709.0)) for loss in losses]


class Weakness(Bounds):
    """By how much of an answer's loss is left when the model is shown the instruction: of messages.

    The mean loss of the assistant's tokens behind what they answer, over that of the same tokens
    alone. Near 0 the model can do it already; above 1 the instruction does not help, and the answer
    may not be one.

    Args:
        model: directory of a model of transformers with a template, or of a run of it.
        context: so many tokens are asked about, at most; an answer behind them has no measure.
    """

    def __init__(
        self, model: str, least: float = 0.0, most: float = 1.0, context: int = 512
    ) -> None:
        super().__init__(least, most)
        self._judge = _Judge(model, context)
        self._tokenizer = self._judge.of_messages()

    def measure(self, documents: Sequence[Any]) -> list[Any]:
        return [self._ratio(document) for document in documents]

    def _ratio(self, document: Any) -> float | None:
        if isinstance(document, str):
            raise ValueError("the filter weakness is for messages: --field messages")
        row = data.tokenize_messages([("a conversation", document)], self._tokenizer)
        tokens, is_told = (row & (NO_TARGET - 1)).to(torch.int64), (row & NO_TARGET) == 0
        shown, alone = self._judge.loss(tokens, is_told), self._judge.loss(tokens[is_told])
        return shown / alone if shown is not None and alone else None
