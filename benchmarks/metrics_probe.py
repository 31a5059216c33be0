"""Cost of the probe in a training run: seconds per step with and without it.

    python benchmarks/metrics_probe.py --steps 60                         BERT-mini on a CPU, a minute or two
    python benchmarks/metrics_probe.py --device cuda --steps 400 --batch 256

The overhead is stated for the given --every, from the extra time of a measured step.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import BertConfig, BertForMaskedLM

import saobp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--texts", type=int, default=16, help="texts of a batch that are measured")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=8192, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    model = BertForMaskedLM(config).to(options.device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 8192, (options.batch, options.length), device=options.device)

    def step() -> float:
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        loss.item()
        return time.perf_counter() - start

    for _ in range(3):
        step()
    plain, measured = [], []
    with saobp.probe(model, every=2, texts=options.texts) as health:
        step()
        health.reset()
        step()
        for number in range(options.steps):
            (measured if number % 2 == 0 else plain).append(step())
    usual, probed = statistics.median(plain), statistics.median(measured)
    share = (probed - usual) / (options.every * usual)
    print(f"{options.device}, {torch.get_num_threads()} threads, batch {options.batch} x {options.length}")
    print(f"step {1e3 * usual:.1f} ms, measured step {1e3 * probed:.1f} ms")
    print(f"overhead at every {options.every}th step {100 * share:.2f} %")


if __name__ == "__main__":
    main()
