"""Which heads of a saved model collapse, and what a refinement would do to them.

python examples/diagnose_saved_model.py FOLDER     a saved model; without one, a small new model is made
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModel, BertConfig, BertModel

import saobp


def new_model(folder: Path) -> Path:
    shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=1000, **shape)).save_pretrained(folder)
    return folder


def table(model: torch.nn.Module, ids: torch.Tensor) -> dict[tuple[str, int], tuple[str, float]]:
    """Verdict and GTD of every head on some tokens."""
    with saobp.probe(model) as health, torch.no_grad():
        model(input_ids=ids)
    return {(head.layer, head.head): (head.verdict, head.values["gtd"]) for head in health.heads()}


def main() -> None:
    torch.manual_seed(0)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else new_model(Path("runs/example/new"))
    model = AutoModel.from_pretrained(folder).eval()
    ids = torch.randint(10, model.config.vocab_size, (4, 64))  # put real text here

    plain = table(model, ids)
    refined = table(saobp.apply(model, "high:1"), ids)
    print(f"{'layer':24} head  {'as trained':18} refined by high:1")
    for (layer, head), (verdict, gtd) in plain.items():
        after, gtd_after = refined[layer, head]
        print(f"{layer:24} {head:4}  {verdict:10} {gtd:7.3f} {after:10} {gtd_after:7.3f}")


if __name__ == "__main__":
    main()
