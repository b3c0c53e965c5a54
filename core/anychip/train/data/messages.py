"""Which tokens is a conversation made of, and which of them did the assistant write?

A line is an object with a list of messages, ``{"role": ..., "content": ...}``. The model's own
template makes text of it, in transformers' sandbox. What the template marks as generated is the
assistant's; of a template without such marks, what each answer adds to the text before it.
"""

import hashlib
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anychip.train.data.packing import BEGINS, NO_TARGET

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_Rendered = tuple[str, list[tuple[int, int]]]


def tokenize_messages(conversations: Iterable[tuple[str, Any]], tokenizer: Any) -> Tensor:
    """Conversations as one row of tokens, with marks.

    Args:
        conversations: messages, behind where they stand.
        tokenizer: a fast one of transformers, with a chat template.

    Returns:
        (N,) int32 on the host: see :data:`~anychip.train.data.packing.NO_TARGET`.

    Raises:
        ValueError: there is none; it has no message of the assistant, or is refused by the
            template; the template changes what stands before an answer.
    """
    if not tokenizer.chat_template:
        raise ValueError("the model's tokenizer has no chat template, which messages need")
    has_marks = _GENERATION.search(str(tokenizer.chat_template)) is not None
    rows = []
    for where, messages in conversations:
        _check(where, messages)
        ids, is_told = (_told if has_marks else _compared)(where, messages, tokenizer)
        if not is_told.any():
            raise ValueError(f"{where}: the assistant says nothing in this conversation")
        row = np.where(is_told, ids, ids | NO_TARGET)
        row[0] |= BEGINS | NO_TARGET
        rows.append(row.astype(np.int32))
    if not rows:
        raise ValueError("the data has no conversation")
    return torch.from_numpy(np.concatenate(rows))


def describe_template(tokenizer: Any) -> str:
    """Equal for two templates that are alike."""
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16]


def _check(where: str, messages: Any) -> None:
    is_list = isinstance(messages, list) and bool(messages)
    if not is_list or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError(
            f'{where}: a list of messages expected, {{"role": ..., "content": ...}}, got '
            f"{str(messages)[:60]!r}"
        )


def _told(where: str, messages: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Tokens, and which of them the template says are generated."""
    found = _attempt(
        where, tokenizer, messages, tokenize=True, return_dict=True,
        return_assistant_tokens_mask=True,
    )  # fmt: skip
    return np.array(found["input_ids"]), np.array(found["assistant_masks"], dtype=bool)


def _compared(where: str, messages: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Tokens, and which of them begin in an answer."""
    text, answers = _rendered(where, messages, tokenizer)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = np.array([start for start, _ in found["offset_mapping"]])
    is_told = np.zeros(len(starts), dtype=bool)
    for start, stop in answers:
        is_told |= (start <= starts) & (starts < stop)
    return np.array(found["input_ids"]), is_told


def _rendered(where: str, messages: Any, tokenizer: Any) -> _Rendered:
    """The text, and where in it the assistant's answers are, with the token that ends them."""
    text, answers = _attempt(where, tokenizer, messages, tokenize=False), []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _attempt(
            where, tokenizer, messages[:number], tokenize=False, add_generation_prompt=True
        )
        until = _attempt(where, tokenizer, messages[: number + 1], tokenize=False)
        if not (until.startswith(before) and text.startswith(until)):
            raise ValueError(
                f"{where}: the chat template changes what stands before an answer, so that it does "
                "not tell which tokens are the assistant's; mark them in it by {% generation %}"
            )
        answers.append((len(before), len(_without_break(until, tokenizer.eos_token))))
    return text, answers


def _without_break(text: str, end: str | None) -> str:
    """Without what a template writes after the token that ends an answer."""
    short = text.rstrip()
    return short if end and short.endswith(end) else text


def _attempt(where: str, tokenizer: Any, messages: Any, **how: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, **how)
    except Exception as error:  # a template raises what it likes
        text = str(error).partition("\n")[0]
        raise ValueError(f"{where}: the chat template refuses it: {text}") from error
