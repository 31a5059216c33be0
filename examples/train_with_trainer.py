"""Trainer with learned strengths: apply before training, and give them a rate of their own.

python examples/train_with_trainer.py --steps 100
"""

from __future__ import annotations

import torch
from texts import masked, rows, steps
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

import saobp

SETTINGS = {
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 16,
    "logging_steps": 20,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
}


def main() -> None:
    torch.manual_seed(0)
    ids, vocabulary = rows()
    shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertForMaskedLM(BertConfig(vocab_size=vocabulary, **shape))
    saobp.apply(model, "high:learned")  # strengths start at 0: so far nothing has changed

    trainer = Trainer(
        model,
        TrainingArguments("runs/example", max_steps=steps(), **SETTINGS),
        train_dataset=[{"input_ids": line} for line in ids],
        data_collator=lambda lines: masked(torch.stack([line["input_ids"] for line in lines])),
    )
    saobp.transformers.separate_strengths(trainer.create_optimizer(), model, rate=1e-2)
    trainer.train()

    for name, parameter in model.named_parameters():
        if "saobp" in name:
            print(name, [round(strength, 3) for strength in parameter.tolist()])
    model.save_pretrained("runs/example/model")
    again = saobp.load("runs/example/model", BertForMaskedLM)
    print("saved and loaded:", again.config.saobp)


if __name__ == "__main__":
    main()
