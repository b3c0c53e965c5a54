"""Directories as transformers saves models, tiny, made on the spot; and a plain loop over one."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from tests.integration.fusion import families

END = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "The cat sat on the mat and looked at the rain. " * 12,
    "A train is late when it does not come in time; nobody knows where it is. " * 9,
]
CHATS = [
    [("user", "Where is the cat?"), ("assistant", "On the mat.")],
    [*(("system", "Be short."), ("user", "Is the train late?"), ("assistant", "It is.")),
     *(("user", "How late is the train, and why?"), ("assistant", "An hour; the rain."))],
] * 6  # fmt: skip
LR, DECAY, CLIP = 2e-3, 0.1, 1.0


def make(folder: Path, family: str) -> Path:
    """A directory with random weights, in parts, and a tokenizer with a chat template."""
    raw = tokenizers.Tokenizer(models.BPE())
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.pre_tokenizer, raw.decoder = alphabet, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|pad|>", "<|im_start|>", END],
        initial_alphabet=sorted(alphabet.alphabet()), show_progress=False,
    )  # fmt: skip
    raw.train_from_iterator(TEXTS, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=END, pad_token="<|pad|>", chat_template=TEMPLATE
    )
    torch.manual_seed(7)
    families.build(family, vocab_size=len(tokenizer)).save_pretrained(folder, max_shard_size="60KB")
    tokenizer.save_pretrained(folder)
    return folder


def texts(folder: Path) -> str:
    """A file of documents, one a line."""
    folder.mkdir(exist_ok=True)
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return str(file)


def chats(folder: Path) -> str:
    """A file of conversations."""
    folder.mkdir(exist_ok=True)
    file = folder / "chats.jsonl"
    talks = [[{"role": role, "content": text} for role, text in chat] for chat in CHATS]
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return str(file)


def text_tokens(folder: Path) -> Tensor:
    """The documents with the end of one between them, (N,) int32."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    first, second = (tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS)
    return torch.tensor([*first, tokenizer.token_to_id(END), *second], dtype=torch.int32)


def plain_losses(
    model: nn.Module, batches: Iterable[Sequence[Tensor]], steps: int, **given: Any
) -> list[float]:
    """Those of transformers' model and torch's AdamW; nothing of anychip is in it.

    Args:
        batches: input_ids, the target of each token or -100, and positions, if not counted on.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    found = []
    for _, (tokens, targets, *positions) in zip(range(steps), batches, strict=False):
        told = {"position_ids": positions[0]} if positions else {}
        logits = model(input_ids=tokens, use_cache=False, **told).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
