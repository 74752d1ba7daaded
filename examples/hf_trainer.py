"""Trains a GPT-2 whose parts are on three workers with the Trainer of Hugging Face.

The model and the Trainer are those of one process: only the line with ``bh.nn.split`` is new. The model is a small one
with random weights, so nothing is downloaded. ``--check`` trains once more without that line, and compares the weights.
It needs the extra: ``pip install backhaul[frameworks]``.

    python examples/hf_trainer.py
    python examples/hf_trainer.py --steps 20 --check
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import backhaul as bh

TOKENS, LENGTH, BATCH = 64, 16, 8
PLACES = {"transformer.h.0": "w1", "transformer.h.1": "w2", "transformer.ln_f": "w2"}


def make_data(sequences: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count in steps of their own."""
    draw = torch.Generator().manual_seed(2)
    start, step = torch.randint(TOKENS, (2, sequences, 1), generator=draw)
    tokens = (start + step * torch.arange(LENGTH)) % TOKENS
    return [{"input_ids": each, "labels": each} for each in tokens]


def train(steps: int, places: dict[str, str] | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a model. Returns the losses, and the weights of the saved model."""
    set_seed(0)
    config = GPT2Config(
        vocab_size=TOKENS,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=3,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    if places is not None:
        model = bh.nn.split(model, places)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            learning_rate=3e-3,
            weight_decay=0.01,
            warmup_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=make_data(BATCH * steps))
        trainer.train()
        trainer.save_model()
        weights = load_file(Path(folder) / "model.safetensors")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], weights


def run(steps: int, check: bool) -> dict[str, Any] | None:
    """Runs on every worker. The trainer trains; the others serve it."""
    if bh.get_worker_info().name != "trainer":
        return None
    losses, weights = train(steps, PLACES)
    difference = None
    if check:
        _, wanted = train(steps, None)
        difference = max(float((weights[name] - value).abs().max()) for name, value in wanted.items())
    return {"losses": losses, "difference": difference}


def main() -> None:
    """Start the workers, train, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="training steps (default 100)")
    parser.add_argument("--check", action="store_true", help="compare the weights with those of one process")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("at least 1 step")
    workers = ["trainer", "w1", "w2"]
    arguments = options.steps, options.check
    result = bh.launch(run, workers, args=arguments, start_method="forkserver", torchrun_variables=False)[0]
    print(f"loss of the first step {result['losses'][0]:.3f}, of the last {result['losses'][-1]:.3f}")
    if result["difference"] is not None:
        print(f"largest difference of a weight to one process: {result['difference']:.1e}")


if __name__ == "__main__":
    main()
