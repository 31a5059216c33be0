"""Trainer runs, saves and resumes a refined model; learned strengths train without weight decay."""

import pytest
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import saobp
from saobp.testing.tiny_models import FAMILIES, tiny_batch, tiny_model
from saobp.transformers import separate_strengths, strength_parameters


class Sentences(Dataset):
    def __init__(self):
        self.batch = tiny_batch(batch=12, padding=2)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        ids, mask = self.batch["input_ids"][index], self.batch["attention_mask"][index]
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def trainer(model, folder, **options):
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        seed=3,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    return Trainer(model=model, args=arguments, train_dataset=Sentences())


def fresh(family, strength):
    return saobp.apply(tiny_model(family), f"high:{strength}")


@pytest.mark.parametrize(
    ("family", "strength"), [*((family, "learned") for family in FAMILIES), ("bert", "0.5"), ("llama", "0.5")]
)
def test_three_steps_and_a_resumed_run_give_the_same_numbers(family, strength, tmp_path):
    model = fresh(family, strength)
    start = {name: values.clone() for name, values in model.state_dict().items()}
    straight = trainer(model, tmp_path)
    straight.train()
    ends = model.state_dict()
    assert any(not torch.equal(ends[name], start[name]) for name in ends)
    assert all(p.abs().max() > 0 for p in strength_parameters(model))

    resumed = fresh(family, strength)
    trainer(resumed, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, values in resumed.state_dict().items():
        torch.testing.assert_close(values, ends[name], msg=name)

    loaded = saobp.load(tmp_path / "checkpoint-3", type(model)).eval()
    batch = tiny_batch()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, model.eval()(**batch).logits)


def test_learned_strengths_get_no_weight_decay(tmp_path):
    model = fresh("bert", "learned")
    optimizer = trainer(model, tmp_path).create_optimizer()
    strengths = {id(parameter) for parameter in strength_parameters(model)}
    found = {
        id(parameter): group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in strengths
    }
    assert found == dict.fromkeys(strengths, 0.0)


def test_learned_strengths_can_have_a_rate_of_their_own(tmp_path):
    model = fresh("llama", "learned")
    plain = trainer(tiny_model("llama"), tmp_path).create_optimizer()
    trained = trainer(model, tmp_path)
    separate_strengths(trained.create_optimizer(), model, rate=0.25)
    *others, own = trained.optimizer.param_groups
    assert [len(group["params"]) for group in others] == [
        len(group["params"]) for group in plain.param_groups
    ]
    assert (own["params"], own["lr"], own["weight_decay"]) == (strength_parameters(model), 0.25, 0.0)
    rates = []
    trained.add_callback(RatesSeen(rates))
    trained.train()
    assert rates == [(0.25 * share, 0.01 * share) for share in (1, 2 / 3, 1 / 3)]  # both by the schedule


class RatesSeen(TrainerCallback):
    """Learning rates of the last and the first group in every step."""

    def __init__(self, seen):
        self.seen = seen

    def on_step_begin(self, *_, optimizer=None, **others):  # noqa: ARG002
        self.seen.append((optimizer.param_groups[-1]["lr"], optimizer.param_groups[0]["lr"]))


def test_a_model_without_learned_strengths_keeps_its_groups(tmp_path):
    model = fresh("bert", "0.5")
    optimizer = trainer(model, tmp_path).create_optimizer()
    before = len(optimizer.param_groups)
    separate_strengths(optimizer, model)
    assert len(optimizer.param_groups) == before


@pytest.mark.parametrize("rate", ["fast", -0.01, float("nan"), True])
def test_wrong_rates_and_swapped_arguments_are_refused(rate):
    model = fresh("bert", "learned")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"rate must be a learning rate such as 0\.01, not "):
        separate_strengths(optimizer, model, rate=rate)
    with pytest.raises(TypeError, match=r"takes an optimiser and then the model, not Bert.* and SGD"):
        separate_strengths(model, optimizer)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_compiled_training_step_gives_the_same_gradients(family):
    model, batch = fresh(family, "learned"), tiny_batch()
    for parameter in strength_parameters(model):
        torch.nn.init.constant_(parameter, 0.3)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(**batch, labels=batch["input_ids"]).loss.backward()
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-3, msg=name)
