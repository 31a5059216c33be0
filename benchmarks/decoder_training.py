"""A trained decoder of Llama's kind that goes on training: its parameters, steps and held-out loss."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from saobp.runs.machine import machine
from saobp.storage.manifest import file_checksum
from saobp.training.head_records import strengths_of
from saobp.transformers.apply import apply
from saobp.transformers.layer_refinement import named_refinements, strength_parameters

METHODS = {
    "plain": None,
    "learned": "high:learned",
    "strengths": "high:learned",
    "temperatures": "temperature",
}
"""What :func:`saobp.apply` gives to the model."""
ALONE = ("strengths", "temperatures")
"""Methods that train numbers per head with all weights frozen."""
LENGTH, EVALUATION_BATCH = 512, 32
RATE, HEAD_RATE, WARMUP = 1e-4, 5e-3, 0.05
PROGRESS_SECONDS = 10.0
LONGEST_WAIT = 300.0
"""Seconds that a timed process waits for the others."""


class Continuation:
    """A trained model that goes on training by one of the methods, with so many blocks of tokens a step.

    Weights, their gradients and the stream of residuals are float32, products bfloat16. Casting all weights
    and gradients once a step moves 1.6 GB for SmolLM2-135M, little beside 32,768 tokens, so there is no
    second copy of the weights. No step waits for the GPU.
    """

    def __init__(
        self, model_dir: str, tokens_dir: Path, corpus: str, method: str, seed: int, batch: int
    ) -> None:
        from transformers import AutoModelForCausalLM

        from saobp.training.checkpoints import load_model

        self.began = time.monotonic()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.name, self.batch = f"{corpus}-{method}-{seed}", batch
        self.facts = {
            "corpus": corpus, "method": method, "seed": seed, "batch": batch, "length": LENGTH,
            "machine": machine(self.device),
        }  # fmt: skip
        self.model: Any = load_model(model_dir, AutoModelForCausalLM).to(self.device)
        self.checksum = file_checksum(tokens_dir / f"{corpus}-train.npy")
        parts = ("held-out", "train")
        self.held, self.train = (_blocks(tokens_dir / f"{corpus}-{part}.npy", self.device) for part in parts)
        if batch > len(self.train):
            raise ValueError(f"{corpus} has {len(self.train)} training blocks, fewer than a batch of {batch}")
        self.before = held_out_loss(self.model, self.held)
        refinement = METHODS[method]
        if refinement is not None:
            apply(self.model, refinement)
        per_head = strength_parameters(self.model)
        apart = {id(one) for one in per_head}
        weights = [one for one in self.model.parameters() if id(one) not in apart]
        if method in ALONE:
            for one in weights:
                one.requires_grad_(False)
            weights = []
        groups = [{"params": weights, "lr": RATE}, {"params": per_head, "lr": HEAD_RATE}]
        self.trained = [*weights, *per_head]
        self.optimiser = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=self.device == "cuda",
        )
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))
        self.order, self.loss = order.to(self.device), next_token_loss

    def compile(self) -> None:
        """Compile the layers, which share one graph, and the loss with last norm and output layer.

        The whole model as one graph would compile thirty layers in place of one.
        """
        for layer in self.model.model.layers:
            layer.compile(dynamic=False)
        self.loss = torch.compile(next_token_loss, dynamic=False)

    def step(self, number: int) -> Tensor:
        """One step of training; returns its loss."""
        ids = self.train[self.order[number * self.batch : (number + 1) * self.batch]]
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.loss(self.model, layer_states(self.model, ids), ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return loss.detach()

    def whole(self, steps: int) -> dict[str, Any]:
        """Train, with a linear warm-up and decay, and measure the loss on held-out text again."""
        steps = min(steps, len(self.train) // self.batch)
        warm = max(1, round(WARMUP * steps))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimiser, lambda step: min((step + 1) / warm, (steps - step) / max(1, steps - warm))
        )
        losses: list[Tensor] = []
        progress = Progress(self.name, self.batch * LENGTH)
        self.model.train()
        for number in range(steps):
            losses.append(self.step(number))
            schedule.step()
            progress.show(number + 1, losses[-1])
        return {
            **self.facts,
            "steps": steps,
            "tokens": steps * self.batch * LENGTH,
            "before": self.before,
            "after": held_out_loss(self.model, self.held),
            "held_out_tokens": self.held.numel(),
            "losses": [round(float(loss), 4) for loss in losses[:: max(1, steps // 50)]],
            **numbers_per_head(self.model),
            "training_tokens_sha256": self.checksum,
            "seconds": round(time.monotonic() - self.began, 1),
            "peak_gib": peak_gib(self.device),
        }

    def timed(self, folder: Path, processes: int, warm: int = 10, steps: int = 30) -> dict[str, Any]:
        """Tokens a second and peak memory while so many processes train."""
        self.model.train()
        for number in range(warm):
            loss = self.step(number)
        loss.item()
        (folder / f"{self.facts['method']}.ready").touch()
        began = time.monotonic()
        while len([*folder.glob("*.ready")]) < processes:
            if time.monotonic() - began > LONGEST_WAIT:
                raise TimeoutError(f"of {processes} processes some were not ready after {LONGEST_WAIT:.0f} s")
            time.sleep(0.05)
        began = time.monotonic()
        for number in range(warm, warm + steps):
            loss = self.step(number)
        loss.item()
        seconds = (time.monotonic() - began) / steps
        return {
            "tokens_per_second": round(self.batch * LENGTH / seconds),
            "step_seconds": seconds,
            "peak_gib": peak_gib(self.device),
        }


class Progress:
    """A line every few seconds; only then the host waits for the GPU."""

    def __init__(self, name: str, tokens: int) -> None:
        self.name, self.tokens = name, tokens
        self.shown, self.steps = time.monotonic(), 0

    def show(self, steps: int, loss: Tensor) -> None:
        if time.monotonic() - self.shown < PROGRESS_SECONDS:
            return
        value, now = loss.item(), time.monotonic()
        pace = (steps - self.steps) * self.tokens / (now - self.shown)
        print(
            f"{self.name}: step {steps}, {steps * self.tokens:,} tokens, loss {value:.4f}, "
            f"{pace:,.0f} tokens/s",
            flush=True,
        )
        self.shown, self.steps = now, steps


def layer_states(model: Any, ids: Tensor) -> Tensor:
    """Output of the last layer ``[rows, length, width]``, before the last norm, for full rows of tokens.

    The model's own forward asks the GPU whether rows are packed, which would make the host wait at each step.
    """
    inner = model.model
    states = inner.embed_tokens(ids)
    positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    rotations = inner.rotary_emb(states, position_ids=positions)
    for layer in inner.layers:
        states = layer(states, attention_mask=None, position_ids=positions, position_embeddings=rotations)
    return states


def next_token_loss(model: Any, states: Tensor, ids: Tensor) -> Tensor:
    """Mean loss in nats from the last layer's states ``[rows, length, width]``."""
    states = model.model.norm(states)
    logits = functional.linear(states[:, :-1], model.lm_head.weight).float()
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def held_out_loss(model: Any, blocks: Tensor) -> float:
    """Mean loss in nats per predicted token, by the model's own forward."""
    model.eval()
    total = 0.0
    eager = torch.compiler.set_stance("force_eager")  # compiling for a few batches would take longer
    with eager, torch.no_grad(), torch.autocast(blocks.device.type, torch.bfloat16):
        for ids in blocks.split(EVALUATION_BATCH):
            total += float(model(ids, labels=ids, use_cache=False).loss) * len(ids)
    return total / len(blocks)


def numbers_per_head(model: Any) -> dict[str, Any]:
    """Trained numbers of heads by layer: ``strengths``, or ``log_scales`` b where scores are times e^b."""
    layers = [own for _, own in named_refinements(model)]
    if layers and layers[0].refinement.variants == ("temperature",):
        return {"log_scales": [own.variants["temperature"].head_bias.tolist() for own in layers]}
    return {"strengths": strengths_of(model)}


def peak_gib(device: str) -> float | None:
    return round(torch.cuda.max_memory_allocated() / 2**30, 1) if device == "cuda" else None


def _blocks(path: Path, device: str) -> Tensor:
    row = np.load(path)
    count = len(row) // LENGTH
    return torch.from_numpy(row[: count * LENGTH].astype(np.int64)).view(count, LENGTH).to(device)
