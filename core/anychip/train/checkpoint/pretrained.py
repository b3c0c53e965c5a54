"""Weights as Hugging Face transformers has them: safetensors in parts, an index, and config.json.

Our GPT is its GPT-2, whose linear layers are transposed there, and our Llama its Llama; the names
are the same. A model of transformers that was trained here has its own names already. transformers
is imported only to save one as it does; else nothing larger than one tensor is held.

Source: transformers 5, ``modeling_utils.py`` and ``pytorch_utils.py`` (``Conv1D``).
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anychip.contract import Communicator
from anychip.runtime import on_host
from anychip.train import files
from anychip.train.checkpoint import foreign, reading
from anychip.train.checkpoint.folder import CheckpointError
from anychip.train.checkpoint.holders import Held, Stateful
from anychip.train.checkpoint.manifest import StoredTensor
from anychip.train.checkpoint.names import Names, of_model
from anychip.train.checkpoint.parts import DTYPES, Part
from anychip.train.checkpoint.writing import header_of
from anychip.train.models import GPTConfig, LlamaConfig, Pretrained, copy_description

PART_NBYTES = 4 << 30
INDEX = "model.safetensors.index.json"
_ONE = "model.safetensors"
_TRANSPOSED = re.compile(r".*\.(c_attn|c_proj|c_fc)\.weight")
"""Of the linear layers of GPT-2, which have their weights as (in, out)."""
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_NO_WEIGHTS = re.compile(r".*(\.attn\.(masked_)?bias|\.rotary_emb\.inv_freq)")
"""Constants that older versions have saved."""


def config_of(config: GPTConfig | LlamaConfig) -> dict[str, Any]:
    """What transformers has in config.json for a model of ours."""
    if isinstance(config, GPTConfig):
        found = {
            "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"],
            "n_embd": config.width, "n_layer": config.layers, "n_head": config.heads,
            "n_positions": config.context, "activation_function": "gelu_new",
            "layer_norm_epsilon": nn.LayerNorm(1).eps, "tie_word_embeddings": True,
            "resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": 0.0,
        }  # fmt: skip
    else:
        found = {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"],
            "hidden_size": config.width, "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads,
            "intermediate_size": config.mlp_width, "max_position_embeddings": config.context,
            "rms_norm_eps": config.norm_eps, "hidden_act": "silu", "tie_word_embeddings": False,
            "rope_theta": config.rope_base, "attention_bias": False, "mlp_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        }  # fmt: skip
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return {**found, "vocab_size": config.vocab_size, **tokens}


def export(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    config: GPTConfig | LlamaConfig | Mapping[str, Any],
    part_nbytes: int = PART_NBYTES,
    averaged: bool = False,
) -> list[Path]:
    """Writes the weights of a checkpoint for ``AutoModelForCausalLM.from_pretrained(out)``.

    Args:
        directory: that was given to :func:`~anychip.train.checkpoint.save`.
        out: is made, whole or not at all; may be there when it is empty.
        config: of our model; or the ``to_dict()`` of that of a model of transformers.
        part_nbytes: of a file of tensors at most, unless one tensor is larger.
        averaged: the averages of the weights, as :func:`~anychip.train.checkpoint.resume` has it.

    Returns:
        The files.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged or of version 2, or has no averages.
        FileExistsError: ``out`` has something in it.
    """
    path, target = Path(directory) / "checkpoint", Path(out)
    with _fresh(target) as fresh, ExitStack() as stack:
        reader = reading.open_files(path, None, stack, averaged=averaged)
        names = _first_names(path, reader)
        _write_parts(fresh, reader, names, isinstance(config, GPTConfig), part_nbytes)
        found = dict(config) if isinstance(config, Mapping) else config_of(config)
        dtypes = {reader.manifest.tensors[name].dtype for name in names}
        if len(dtypes) == 1:
            found["dtype"] = str(dtypes.pop()).removeprefix("torch.")
        files.write(fresh / "config.json", json.dumps(found, indent=2, default=str) + "\n")
    return sorted(target.iterdir())


def export_trained(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    model: Pretrained,
    description: Path,
    part_nbytes: int = PART_NBYTES,
    adapters: bool = False,
    averaged: bool = False,
) -> list[Path]:
    """Writes a model of transformers that was trained here, by its own way of saving.

    Unlike :func:`export` it holds the whole model, and its tensors have the names of the files that
    transformers writes, where those are not the names of its parameters.

    Args:
        directory, out, part_nbytes, averaged: as :func:`export` has them.
        model: on the host; its weights become those of the checkpoint, with adapters merged.
        description: directory with what is copied: tokenizer and template.
        adapters: write these alone, as PEFT loads them.

    Raises:
        CheckpointError, FileExistsError: as :func:`export`.
    """
    target = Path(out)
    with _fresh(target) as fresh:
        _read_into(Path(directory) / "checkpoint", model, averaged=averaged)
        if adapters:
            model.save_adapters(fresh)
        else:
            model.save(fresh, part_nbytes=part_nbytes)
        copy_description(description, fresh, but={"config.json"})
    return sorted(target.iterdir())


@torch.no_grad()
def _read_into(path: Path, model: nn.Module, *, averaged: bool) -> None:
    """The weights of a checkpoint into a whole model on the host."""
    with ExitStack() as stack:
        reader = reading.open_files(path, None, stack, averaged=averaged)
        mine = {of_model(name): value for name, value in model.state_dict(keep_vars=True).items()}
        for name in _first_names(path, reader):
            stored, value = reader.manifest.tensors[name], mine.pop(name, None)
            if value is None or tuple(value.shape) != stored.shape:
                raise CheckpointError(f"{path} is of another model: it has {name} {stored.shape}")
            part = Part(name=name, shape=stored.shape, dtype=stored.dtype, values=value)
            reader.verify(part)
            value.copy_(reader.read(part).view(stored.shape))


@contextmanager
def _fresh(target: Path) -> Iterator[Path]:
    """A folder that gets a name when the block ends, and is gone when it fails."""
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty; nothing was written; name another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f"{target.name}.{secrets.token_hex(8)}{files.PARTIAL}")
    fresh.mkdir()
    try:
        yield fresh
        fresh.rename(target)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _first_names(path: Path, reader: reading.Reader) -> list[str]:
    """Of the model's tensors; of those that are tied the one that the file calls them by.

    Raises:
        CheckpointError: there are none.
    """
    written, tensors = set(reader.names()), reader.manifest.tensors
    mine = [name for name in tensors if name.startswith(of_model(""))]
    found = [name for name in mine if name in written or not tensors[name].stored]
    if not found:
        raise CheckpointError(f"{path} has no tensors in boxes; load it, and save it anew")
    return found


class _Entry(NamedTuple):
    """A tensor of a part: its name in the checkpoint, and as it is written."""

    name: str
    stored: StoredTensor
    is_transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[::-1] if self.is_transposed else self.stored.shape

    @property
    def nbytes(self) -> int:
        return self.stored.dtype.itemsize * torch.Size(self.stored.shape).numel()


def _write_parts(
    folder: Path, reader: reading.Reader, names: Sequence[str], is_gpt: bool, part_nbytes: int
) -> None:
    tensors = reader.manifest.tensors
    entries = [_Entry(n, tensors[n], is_gpt and bool(_TRANSPOSED.fullmatch(n))) for n in names]
    parts = [*_in_parts(entries, part_nbytes)]
    where: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors" if len(parts) > 1 else _ONE
        with (folder / file).open("xb") as content:
            short = [(e.name.removeprefix(of_model("")), e.stored.dtype, e.shape) for e in part]
            content.write(header_of(short))
            for entry in part:
                content.write(_bytes(reader, entry))
            files.sync(content)
        where |= {name: file for name, _, _ in short}
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(e.nbytes for e in entries)}, "weight_map": where}
        files.write(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _in_parts(entries: Sequence[_Entry], most: int) -> Iterator[list[_Entry]]:
    part: list[_Entry] = []
    for entry in entries:
        if part and sum(e.nbytes for e in part) + entry.nbytes > most:
            yield part
            part = []
        part.append(entry)
    yield part


def _bytes(reader: reading.Reader, entry: _Entry) -> memoryview:
    values = torch.empty(entry.stored.shape, device="meta")
    part = Part(name=entry.name, shape=entry.stored.shape, dtype=entry.stored.dtype, values=values)
    reader.verify(part)
    found = reader.read(part).view(entry.stored.shape)
    found = found.t().contiguous() if entry.is_transposed else found
    return on_host(found.reshape(-1).view(torch.uint8)).numpy().data


def load(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Stateful,
    names: Names | None = None,
    comm: Communicator | None = None,
) -> None:
    """Loads weights that transformers has saved: into a model of ours, or into one of its own.

    With several ranks a collective call. Each rank reads what it holds, but whole tensors where
    they are transposed. The optimizer begins anew.

    Args:
        directory: with config.json, and model.safetensors or parts with an index.
        model, optimizer, names, comm: as :func:`~anychip.train.checkpoint.save` has them.

    Raises:
        CheckpointError: the weights are not there, or of another model. Nothing was changed, unless
            a file could not be read to its end.
    """
    path = Path(directory)
    foreign.load(
        path, lambda held: _Source(path, held), model=model, optimizer=optimizer, names=names,
        comm=comm, weights_only=True,
    )  # fmt: skip


class _Place(NamedTuple):
    """Where a tensor is."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class _Source:
    """A directory of transformers'."""

    def __init__(self, path: Path, held: Held) -> None:
        self.path, self._held = path, held
        try:
            config = json.loads((path / "config.json").read_bytes())
            single = [_ONE] if (path / _ONE).exists() else []
            index = {} if single else json.loads((path / INDEX).read_bytes())
            named = single or sorted(set(index["weight_map"].values()))
            self._places = {n: p for file in named for n, p in _places(path / Path(file).name)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} cannot be read as transformers saves a model: {error}"
            ) from error
        self._has_conv1d = config.get("model_type") == "gpt2"
        mine = getattr(held.model, "config", None)
        if isinstance(mine, (GPTConfig, LlamaConfig)):
            self._compare(config_of(mine), config)

    def _compare(self, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
        """Some of what a model computes no shape of a weight tells."""
        theirs = {**theirs, **(theirs.get("rope_parameters") or theirs.get("rope_scaling") or {})}
        for name, value in {**mine, "rope_type": "default"}.items():
            is_told = value is not None and not name.endswith("_pdrop") and name in theirs
            told = (value, theirs.get(name))
            if is_told and name not in ("architectures", "rope_parameters") and told[0] != told[1]:
                raise CheckpointError(
                    f"{self.path} is of another model: {name} is {told[0]} in this model and "
                    f"{told[1]} in config.json; nothing was changed"
                )

    def _there(self, name: str) -> str | None:
        """What a tensor is called, with or without the name of the model below the head."""
        plain = name.removeprefix(of_model(""))
        return next((n for n in (plain, plain.partition(".")[2]) if n in self._places), None)

    def _is_transposed(self, name: str) -> bool:
        if not self._has_conv1d or not _TRANSPOSED.fullmatch(name):
            return False
        owner = name.removeprefix(of_model("")).rpartition(".")[0]
        return isinstance(self._held.model.get_submodule(owner), nn.Linear)

    def find(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        there = self._there(name)
        if there is None:
            return None
        place = self._places[there]
        return place.dtype, place.shape[::-1] if self._is_transposed(name) else place.shape

    def others(self, known: Collection[str]) -> list[str]:
        mine = {self._there(name) for name in known}
        return [n for n in self._places if n not in mine and not _NO_WEIGHTS.fullmatch(n)]

    def read(self, name: str, part: Part) -> Tensor:
        place = self._places[self._there(name) or ""]
        numel = part.values.numel()
        if self._is_transposed(name):
            whole = _read(place, 0, torch.Size(place.shape).numel()).view(place.shape)
            return whole.t().reshape(-1)[part.offset : part.offset + numel]
        return _read(place, part.offset, numel)


def _places(file: Path) -> Iterator[tuple[str, _Place]]:
    """What a file has; raises ValueError, OSError or KeyError when it is none of safetensors."""
    with file.open("rb") as content:  # links lead into transformers' cache
        nbytes, end = int.from_bytes(content.read(8), "little"), os.fstat(content.fileno()).st_size
        if nbytes + 8 > end:
            raise ValueError(f"{file.name} is no file of safetensors")
        for name, about in json.loads(content.read(nbytes)).items():
            if name == "__metadata__":
                continue
            dtype, shape = _BY_NAME[about["dtype"]], tuple(map(int, about["shape"]))
            begin, stop = (8 + nbytes + int(offset) for offset in about["data_offsets"])
            if stop - begin != torch.Size(shape).numel() * dtype.itemsize or stop > end:
                raise ValueError(f"{file.name}: {name} is not within it")
            yield name, _Place(file, dtype, shape, begin)


def _read(place: _Place, first: int, numel: int) -> Tensor:
    content = bytearray(numel * place.dtype.itemsize)
    with place.file.open("rb") as file:
        file.seek(place.offset + first * place.dtype.itemsize)
        if file.readinto(content) != len(content):
            raise CheckpointError(f"{place.file} ends too early")
    return reading.as_tensor(content, place.dtype)
