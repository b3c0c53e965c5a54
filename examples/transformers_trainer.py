"""transformers' Trainer with anychip's optimizer, on any number of ranks and at any ZeRO stage.

    python examples/transformers_trainer.py [DIRECTORY]
    ANYCHIP_BACKEND=cpu torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py

What is anychip's: the import of ``Trainer``, and ``optimizer_cls_and_kwargs``, with the learning
rate. Its schedule, weight decay, clipping, accumulation, precision, checkpoints are the Trainer's.
"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import anychip
from anychip.integrations.transformers import Trainer
from anychip.train import data, optim, zero

STEPS, CONTEXT = 20, 64


def main(out: str = "runs/transformers_trainer") -> list[float]:
    """Trains, and returns the losses."""
    args = TrainingArguments(
        out, max_steps=STEPS, per_device_train_batch_size=8, warmup_steps=5,
        lr_scheduler_type="cosine", gradient_accumulation_steps=2, max_grad_norm=1.0, use_cpu=True,
        weight_decay=0.1, logging_steps=5, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    chip = anychip.use()
    torch.manual_seed(0)
    sizes = {"vocab_size": data.VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    text = torch.frombuffer(bytearray(data.python_documentation()), dtype=torch.uint8)[:50_000]
    rows = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT).long()
    how = {"rule": optim.adamw(1e-2), "comm": chip.communicator(), "stage": 3, "module": model}
    trainer = Trainer(
        model, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        optimizer_cls_and_kwargs=(zero.Optimizer, how),
    )  # fmt: skip
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    main(*sys.argv[1:])
