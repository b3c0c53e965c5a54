"""A decoder of Hugging Face transformers, from a directory: to be trained whole, or by adapters.

transformers builds the model from ``config.json`` and loads the weights, from safetensors only; no
code runs that comes with the directory, and nothing is fetched. The adapters are PEFT's. The
modules keep their names, so that a checkpoint has the names of transformers. A stage of a pipeline
is run by the library's own code too (:mod:`.pretrained_part`).

Source of the adapters: Hu et al. 2021, arXiv:2106.09685.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anychip import ops
from anychip.contract import AnychipError, UnsupportedError
from anychip.train import files
from anychip.train.data.extra import require
from anychip.train.data.packing import unmarked
from anychip.train.models.decoder import Decoder, Layers, LossReduction
from anychip.train.models.pretrained_part import Part, experts_on_paper, gives_tuples, parts_of

EXTRA = "hf"
_BUILDING = threading.Lock()
"""The library patches its own classes while it builds: two threads would leave the patch there."""
Fuse = Callable[[nn.Module], object]
"""Puts our operators into a model, as ``anychip.fuse`` does."""


class PretrainedError(AnychipError, ValueError):
    """A directory has no model that can be trained here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainedConfig:
    """A model of a directory that transformers reads, which says all of its sizes.

    Attributes:
        path: the directory, with config.json, a tokenizer, and weights in safetensors; without
            weights training begins from scratch. To give it is to choose this kind.
        context: tokens of a sequence in training.
        fuse: the model's norms, activations, rotary positions and attention are anychip's.
        lora_rank: of adapters beside linear layers, which alone are trained; 0: all weights are.
        lora_alpha: adapters count lora_alpha / lora_rank times.
        lora_targets: names of the layers that have adapters; none: all linear ones but the head.
    """

    path: str = ""
    context: int = 512
    fuse: bool = True
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.context < 1 or self.lora_rank < 0:
            name, least = ("context", 1) if self.context < 1 else ("lora_rank", 0)
            raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not self.lora_alpha > 0.0:
            raise ValueError(f"lora_alpha must be greater than 0, got {self.lora_alpha}")
        if self.lora_targets and not self.lora_rank:
            raise ValueError(
                f"lora_targets = {list(self.lora_targets)} needs adapters: set lora_rank as well"
            )

    @property
    def vocab_size(self) -> int:
        """Tokens that there are, as config.json says."""
        return int(described(self.path).get_text_config().vocab_size)

    @property
    def width(self) -> int:
        """Of a token's vector."""
        return int(described(self.path).get_text_config().hidden_size)

    @property
    def family(self) -> str:
        """What transformers calls such models."""
        return str(described(self.path).model_type)


class Pretrained(Decoder):
    """A causal decoder of transformers, under its own names.

    Args:
        fuse: is applied to what was built, where the settings want it.
        reads_weights: where the directory has them; else they are as those of a fresh model.

    Attributes:
        packs: batches have marks where documents begin (:mod:`anychip.train.data.packing`), and no
            token sees another document.

    Raises:
        FileNotFoundError, PretrainedError: the directory is not there, or cannot be read.
        MissingExtraError: transformers, or for adapters peft, is not installed.
    """

    def __init__(
        self, config: PretrainedConfig, fuse: Fuse | None = None, *, reads_weights: bool = True
    ) -> None:
        super().__init__()
        self.config, self.packs = config, False
        net = _built(config, reads_weights)
        if fuse is not None and config.fuse:
            fuse(net)
        self.parts = parts_of(net)
        tuner = _add_adapters(net, config) if config.lora_rank else None
        # Not registered: the modules are this one's own, under the net's names.
        object.__setattr__(self, "_tuner", tuner)
        object.__setattr__(self, "net", net)
        self._modules = net._modules

    net: Any
    _tuner: Any
    _gives_tuples: bool | None = None

    @property
    def needs_tokens(self) -> bool:  # type: ignore[override]
        """Where conversations begin stands in them."""
        return self.packs

    def train(self, mode: bool = True) -> Pretrained:
        """As torch's."""
        self.net.training = mode
        return super().train(mode)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, reduction: LossReduction = "mean"
    ) -> Tensor:
        """As every decoder's."""
        given = self._described(tokens)
        if self.past is not None:
            places = torch.arange(self.read, self.end_of(tokens), device=tokens.device)
            given["position_ids"] = places.expand_as(tokens)
            given["past_key_values"] = self.past.library
        found = self.net(**given, use_cache=self.past is not None)
        if self.past is not None:
            self.past.library, self.past.length = found.past_key_values, self.end_of(tokens)
        return _loss(found.logits, targets, reduction)

    def _described(self, tokens: Tensor) -> dict[str, Tensor]:
        """What the library's forward is given of tokens (B, S)."""
        if not self.packs:
            return {"input_ids": tokens}
        plain, places = unmarked(tokens)
        return {"input_ids": plain, "position_ids": places}

    def blocks(self) -> list[nn.Module]:
        """As every decoder's; raises UnsupportedError where it is not known what they are."""
        if not self.parts.blocks:
            raise UnsupportedError(
                f"{type(self.net).__name__} cannot be cut into stages of a pipeline: one list of "
                "blocks with what is below and what is above it is expected in its "
                f"{self.net.base_model_prefix}; leave parallel.pipeline at 1, and share weights "
                "out by optimizer.stage=3"
            )
        if self._gives_tuples is None:
            self._gives_tuples = gives_tuples(self.net, self.parts)
        return super().blocks()

    @contextmanager
    def on_paper(self) -> Iterator[None]:
        """As every decoder's: no numbers are looked at, for experts or beginnings of documents."""
        config, packs = self.net.config, self.packs
        experts = config._experts_implementation
        interface: Any = require("transformers.integrations.moe", "experts", extra=EXTRA)
        interface.ALL_EXPERTS_FUNCTIONS.register(experts_on_paper.__name__, experts_on_paper)
        config._experts_implementation, self.packs = experts_on_paper.__name__, False
        try:
            yield
        finally:
            config._experts_implementation, self.packs = experts, packs

    def become_part(self, layers: Layers) -> None:
        """As every decoder's."""
        super().become_part(layers)
        # Whose weights are not needed here any more.
        part = Part(self.net, self._modules, self.parts, layers, tuples=bool(self._gives_tuples))
        object.__setattr__(self, "net", part)
        object.__setattr__(self, "_tuner", None)

    def run_part(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        *,
        tokens: Tensor | None = None,
        reduction: LossReduction = "mean",
    ) -> Tensor:
        """As every decoder's."""
        assert self.layers is not None, "a whole decoder is called"
        given = self._described(x if tokens is None else tokens)
        if not self.layers.begin:
            del given["input_ids"]
        found: Tensor = self.net(x, given)
        return _loss(found, targets, reduction) if self.layers.end else found

    def embed(self, tokens: Tensor) -> Tensor:
        """Not called: the library's own forward embeds."""
        raise NotImplementedError

    def logits(self, x_BSD: Tensor) -> Tensor:
        """Not called: the library's own forward has what follows the blocks."""
        raise NotImplementedError

    def save(self, folder: Path, *, part_nbytes: int) -> None:
        """Writes the weights as transformers loads them; adapters are merged, for good."""
        whole = self.net if self._tuner is None else self._tuner.merge_and_unload()
        whole.save_pretrained(folder, max_shard_size=part_nbytes)

    def save_adapters(self, folder: Path) -> None:
        """Writes the adapters alone, as PEFT loads them."""
        tensors = require("peft", "adapters", extra=EXTRA).get_peft_model_state_dict(self.net)
        named = {f"base_model.model.{name}": value for name, value in tensors.items()}
        write = require("safetensors.torch", "adapters", extra=EXTRA).save_file
        write(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        self.net.peft_config["default"].save_pretrained(folder)


def _loss(logits: Tensor, targets: Tensor | None, reduction: LossReduction) -> Tensor:
    return logits if targets is None else ops.cross_entropy(logits, targets, reduction=reduction)


@lru_cache(maxsize=4)
def described(path: str) -> Any:
    """What transformers makes of a directory's config.json; not to be changed.

    Raises:
        FileNotFoundError: there is none.
        PretrainedError: transformers does not know it, or knows it with foreign code only; the
            weights are quantized.
        MissingExtraError: transformers is not installed.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"model.path: {folder} has no config.json; a directory expected as transformers saves "
            "a model (nothing is downloaded)"
        )
    found = _read(folder, "AutoConfig", "config.json")
    if getattr(found, "quantization_config", None):
        raise PretrainedError(
            f"model.path: {folder} has quantized weights, which are not trained; take the model "
            "that they were made from"
        )
    # A file may name kernels here that would be fetched; what computes is not its to say.
    found._attn_implementation = found._experts_implementation = None
    return found


def _read(folder: Path, reader: str, what: str) -> Any:
    """What a reader of transformers makes of a directory: nothing is run that it has, or fetched.

    Raises:
        PretrainedError: it cannot be read.
        MissingExtraError: transformers is not installed.
    """
    library = require("transformers", f"model.path = {folder}", extra=EXTRA)
    try:
        return getattr(library, reader).from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except (ValueError, KeyError, TypeError, OSError) as error:
        text = str(error).strip().partition("\n")[0]
        raise PretrainedError(f"model.path: {folder}: {what} cannot be read: {text}") from None


def has_weights(folder: Path) -> bool:
    """Whether a directory has weights to begin with.

    Raises:
        PretrainedError: they are pickles, or adapters.
    """
    for name in ("adapter_config.json", "pytorch_model*.bin*"):
        if any(folder.glob(name)):
            what = "adapters, not a whole model: merge them first"
            if name.endswith("*"):
                what = "weights in pickles, which can hold code: save them as safetensors"
            if not any(folder.glob("model*.safetensors")) or name == "adapter_config.json":
                raise PretrainedError(f"model.path: {folder} has {what}")
    return any(folder.glob("model*.safetensors"))


def _built(config: PretrainedConfig, reads_weights: bool) -> Any:
    """The model of transformers, in float32, ready to be trained."""
    folder, about = Path(config.path), copy.deepcopy(described(config.path))
    most = getattr(about.get_text_config(), "max_position_embeddings", None)
    if most is not None and config.context > most:
        raise PretrainedError(
            f"model.context = {config.context} is more than the {most} positions that {folder} "
            f"has; set model.context={most} or less"
        )
    auto: Any = require("transformers", "a model", extra=EXTRA).AutoModelForCausalLM
    options = {"dtype": torch.float32, "trust_remote_code": False}
    begins = not has_weights(folder) or not reads_weights
    try:
        with _BUILDING:
            if begins:
                return auto.from_config(about, **options).train()
            net, told = auto.from_pretrained(
                folder, config=about, local_files_only=True, use_safetensors=True,
                output_loading_info=True, **options,
            )  # fmt: skip
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        text = str(error).strip().partition("\n")[0]
        raise PretrainedError(f"model.path: {folder} cannot be loaded: {text}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if wrong := sorted(map(str, told[kind])):
            raise PretrainedError(
                f"model.path: the weights in {folder} are not those of its config.json: "
                f"{kind.replace('_', ' ')} {', '.join(wrong[:3])}{' ...' * (len(wrong) > 3)}"
            )
    return net.train()


def _add_adapters(net: Any, config: PretrainedConfig) -> Any:
    """Puts adapters beside layers; all other weights are frozen. What can merge them."""
    peft = require("peft", f"model.lora_rank = {config.lora_rank}", extra=EXTRA)
    settings = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=list(config.lora_targets) or "all-linear",
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.path,
        # Layers of GPT-2 hold their weights as (in, out).
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in net.modules()),
    )
    try:
        tuner = peft.LoraModel(net, settings, "default")
    except ValueError as error:
        text = str(error).partition("\n")[0]
        raise PretrainedError(f"model.lora_targets: {text}") from None
    for module in net.modules():
        if type(module).__name__ == "ParamWrapper":
            module._activate_lora = partial(_adapted, module)
    return tuner


@contextmanager
def _adapted(wrapper: Any, adapters: list[str]) -> Iterator[None]:
    """Adds adapters to weights of experts, in the place of ``_activate_lora`` of PEFT's wrapper.

    That does it by parametrizations, which count as writing to the weights when they are taken off,
    and cannot be taken off weights without data.
    """
    weights, name = wrapper.get_base_layer()._parameters, wrapper.parameter_name
    weight = weights[name]
    weights[name] = sum(map(wrapper.get_delta_weight, adapters), start=weight)
    try:
        yield
    finally:
        weights[name] = weight


_DESCRIPTION = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
"""What a directory may have besides weights."""


def copy_description(folder: Path, out: Path, *, but: Collection[str] = ()) -> None:
    """Copies what a directory has besides weights."""
    out.mkdir(exist_ok=True)
    for name in _DESCRIPTION:
        if name not in but and (folder / name).is_file():
            files.write(out / name, (folder / name).read_bytes())


@lru_cache(maxsize=4)
def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model's directory, as transformers has it; not to be changed.

    Raises:
        PretrainedError: there is none that tokens can be made with here.
        MissingExtraError: transformers is not installed.
    """
    folder = Path(path)
    if not (folder / "tokenizer.json").is_file():
        raise PretrainedError(
            f"model.path: {folder} has no tokenizer.json; name a tokenizer's file, like "
            "data.tokenizer=FILE.json"
        )
    found = _read(folder, "AutoTokenizer", "its tokenizer")
    if not found.eos_token:
        raise PretrainedError(
            f"model.path: the tokenizer in {folder} has no eos_token, which ends a document"
        )
    return found
