"""The Trainer of Hugging Face, with a split GPT-2 and with the same GPT-2 in one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from .runs import Weights, assert_all_same, make_model, needs, run

pytestmark = needs("transformers")

PLACES = {"transformer.h.0": "w1", "transformer.h.1": "w2", "transformer.ln_f": "w2"}


def make_gpt(tied: bool) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 16, "n_layer": 3, "n_head": 2}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0, use_cache=False, tie_word_embeddings=tied)
    )


def train(places: dict[str, str] | None, folder: Path, tied: bool, resume: str | None = None) -> Weights:
    """Ten steps with checkpoints; those after a checkpoint if it is given."""
    from transformers import Trainer, TrainingArguments

    model = make_model(places, lambda: make_gpt(tied))
    arguments = TrainingArguments(
        str(folder),
        max_steps=6,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=1 if tied else 2,
        learning_rate=0.01,
        weight_decay=0.1,
        max_grad_norm=0.5,
        warmup_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    tokens = torch.randint(16, (48, 8), generator=torch.Generator().manual_seed(1))
    data: Any = [{"input_ids": each, "labels": each} for each in tokens]
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])
    trainer.train(resume_from_checkpoint=resume)
    return dict(model.state_dict())


def train_and_resume(folder: Path, tied: bool) -> list[Weights]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    wanted = train(None, folder / "plain", tied)
    return [
        train(PLACES, folder / "split", tied),
        train(PLACES, folder / "resumed", tied, str(folder / "split" / "checkpoint-3")),
        train(PLACES, folder / "from_plain", tied, str(folder / "plain" / "checkpoint-3")),
        wanted,
    ]


def test_trainer(tmp_path: Path) -> None:
    assert_all_same(run(train_and_resume, tmp_path, False))


def test_trainer_with_tied_embeddings(tmp_path: Path) -> None:
    assert_all_same(run(train_and_resume, tmp_path, True))
