"""The page's arithmetic against the library's, in Node: the same module that a browser runs."""

from __future__ import annotations

import numpy
import pytest
import torch
from browser import NO_NODE, PAGE_FOLDER, node_path, run_node

import saobp
from saobp import metrics
from saobp.metrics.diagnosis.loading import example_model
from saobp.metrics.health.verdicts import verdict
from saobp.propagation.beliefs import propagate
from saobp.propagation.factors import get_factor
from saobp.propagation.graph import FactorGraph
from saobp.report.explorer import decode_head, encode_head, explorer_data
from saobp.report.page import LIMITS
from saobp.testing.tiny_models import tiny_model

needs_node = pytest.mark.skipif(node_path() is None, reason=NO_NODE)

SETTINGS = [
    ("none", "none", 0.0, 1, 0.0),
    ("potts", "high", 0.2, 1, 0.0),
    ("potts", "high", 2.1, 3, 0.3),
    ("potts", "low", -0.7, 1, 0.0),
    ("potts", "low", -0.4, 2, 0.5),
    ("key-bias", "high-key-bias", 1.3, 2, 0.2),
    ("key-bias", "low-key-bias", -0.6, 1, 0.0),
    ("listing", "high-listing", 1.0, 2, 0.0),
    ("listing", "low-listing", -1.0, 1, 0.0),
    ("elemmul", "elemmul", 0.0, 2, 0.2),
    ("elemmul-prior", "elemmul-prior", 0.0, 1, 0.0),
]
REFINED = """
import { decodeHead } from "./scores.js";
import { priorOf, refine } from "./refinement.js";
import { finished, measuring, uniformMap, verdictOf } from "./statistics.js";
const answers = given.cases.map(({ head, length, setting, inOrder }) => {
  const logs = decodeHead(head, length);
  const rows = refine(priorOf(logs, length, inOrder), setting);
  const numbers = finished(measuring(rows, length, given.limits.beta));
  const uniform = uniformMap(logs, length, given.limits.beta);
  return { rows: Array.from(rows), ...numbers, uniform, verdict: verdictOf(numbers, uniform, given.limits) };
});
console.log(JSON.stringify(answers));
"""
STATISTICS = ("gtd", "indirect_entropy", "attention_entropy", "sink_mass")


def log_rows(length: int, kind: str, seed: int = 0, sharpness: float = 2.0) -> torch.Tensor:
    """Log probabilities ``[length, length]`` of a bidirectional, causal or windowed head."""
    generator = torch.Generator().manual_seed(seed)
    scores = sharpness * torch.randn(length, length, generator=generator, dtype=torch.float64)
    places = torch.arange(length)
    hidden = {
        "full": torch.zeros(length, length, dtype=torch.bool),
        "causal": places[None] > places[:, None],
        "window": (places[None] - places[:, None]).abs() > 2,
    }[kind]
    return scores.masked_fill(hidden, -torch.inf).log_softmax(-1)


def refined(
    logs: torch.Tensor, factor: str, strength: float, steps: int, damping: float, causal: bool
) -> torch.Tensor:
    """The library's rows for one head."""
    graph = FactorGraph(visible=logs.isfinite(), causal=causal)
    return propagate(
        logs,
        get_factor(factor),
        torch.tensor(abs(strength), dtype=torch.float64),
        graph,
        steps=steps,
        damping=damping,
    ).rows


@needs_node
@pytest.mark.parametrize("kind", ["full", "causal", "window"])
def test_rows_and_statistics_equal_the_librarys(kind: str) -> None:
    length = 21
    head = encode_head(log_rows(length, kind).numpy())
    logs = torch.from_numpy(decode_head(head, length).copy())
    cases = [
        {
            "head": head,
            "length": length,
            "inOrder": kind == "causal",
            "setting": {"factor": ours, "strength": strength, "steps": steps, "damping": damping},
        }
        for ours, _, strength, steps, damping in SETTINGS
    ]
    answers = run_node(REFINED, {"cases": cases, "limits": LIMITS})
    for answer, (_, factor, strength, steps, damping) in zip(answers, SETTINGS, strict=True):
        rows = refined(logs, factor, strength, steps, damping, kind == "causal")
        assert torch.tensor(answer["rows"], dtype=torch.float64).view(length, length) == pytest.approx(
            rows, abs=1e-9
        )
        for statistic in STATISTICS:
            expected = float(getattr(metrics, statistic)(rows))
            assert answer[statistic] == pytest.approx(expected, abs=1e-9), (factor, statistic)
        even = torch.where(logs.isfinite(), 1.0, 0.0).double()
        even /= even.sum(-1, keepdim=True)
        uniform = answer["uniform"]
        assert uniform["gtd"] == pytest.approx(float(metrics.gtd(even)), abs=1e-9)
        assert uniform["entropy"] == pytest.approx(float(metrics.attention_entropy(even)), abs=1e-9)
        assert uniform["sink"] == pytest.approx(float(metrics.sink_mass(even)), abs=1e-9)
        assert answer["verdict"] == verdict(
            answer["gtd"],
            entropy_share=answer["attention_entropy"] / uniform["entropy"],
            sink_mass=answer["sink_mass"],
            uniform_gtd=uniform["gtd"],
            uniform_sink=uniform["sink"],
        )


@needs_node
def test_of_scores_that_are_no_numbers_nothing_is_said() -> None:
    broken = log_rows(9, "full")
    broken[4] = float("nan")
    cases = [
        {
            "head": encode_head(broken.numpy()),
            "length": 9,
            "inOrder": False,
            "setting": {"factor": ours, "strength": strength, "steps": steps, "damping": damping},
        }
        for ours, _, strength, steps, damping in SETTINGS
    ]
    for answer in run_node(REFINED, {"cases": cases, "limits": LIMITS}):
        assert [answer[statistic] for statistic in STATISTICS] == [None] * 4
        assert answer["verdict"] == "undefined"


@needs_node
@pytest.mark.parametrize("family", ["bert", "gpt2", "mistral", "albert"])
def test_a_models_own_numbers_come_back_within_a_ten_thousandth(family: str) -> None:
    """From the model to the page and back: storage in 16 bits included."""
    model, tokenizer = tiny_model(family), example_model()[1]
    saobp.apply(model, "high:0.8,steps=2,damping=0.25")
    text = "one two three four five six seven eight nine ten"
    data = explorer_data(model, tokenizer, [text])
    setting = {"factor": "potts", "steps": 2, "damping": 0.25}
    length = len(data["sentences"][0]["tokens"])
    cases = [
        {"head": head, "length": length, "inOrder": in_order, "setting": {**setting, "strength": strength}}
        for heads, in_order, strengths in zip(
            data["sentences"][0]["scores"], data["in_order"], data["strengths"], strict=True
        )
        for head, strength in zip(heads, strengths, strict=True)
    ]
    answers = run_node(REFINED, {"cases": cases, "limits": LIMITS})
    with torch.no_grad(), saobp.probe(model) as health:
        model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False))
    for answer, head in zip(answers, health.heads(), strict=True):
        for statistic in STATISTICS:
            assert answer[statistic] == pytest.approx(head.values[statistic], abs=1e-4), statistic


@needs_node
def test_every_module_can_be_read_on_its_own() -> None:
    names = sorted(path.name for path in PAGE_FOLDER.glob("*.js") if path.name != "main.js")
    script = """
    const counts = {};
    for (const name of given) counts[name] = Object.keys(await import(`./${name}`)).length;
    console.log(JSON.stringify(counts));
    """
    counts = run_node(script, names)
    assert counts.pop("types.js") == 0
    assert all(count > 0 for count in counts.values()), counts
    assert all(len(path.read_text().splitlines()) < 400 for path in PAGE_FOLDER.iterdir())


@needs_node
def test_two_hop_paths_are_the_entries_of_the_square() -> None:
    rows = log_rows(9, "full").exp()
    script = """
    import { twoHops } from "./paths.js";
    const { direct, total, via } = twoHops(Float64Array.from(given.rows), 9, 7, 2);
    console.log(JSON.stringify({ direct, total, via: Array.from(via) }));
    """
    answer = run_node(script, {"rows": rows.flatten().tolist()})
    assert answer["direct"] == pytest.approx(float(rows[7, 2]))
    assert answer["total"] == pytest.approx(float((rows @ rows)[7, 2]))
    assert answer["via"] == pytest.approx((rows[7] * rows[:, 2]).tolist())


@pytest.mark.parametrize("kind", ["full", "causal", "window"])
def test_stored_scores_keep_probabilities_to_a_ten_thousandth(kind: str) -> None:
    for seed, sharpness in enumerate((0.1, 1.0, 3.0, 6.0)):
        logs = log_rows(40, kind, seed, sharpness).numpy()
        stored = encode_head(logs)
        back = decode_head(stored, 40)
        assert (numpy.isfinite(back) == numpy.isfinite(logs)).all()
        assert stored["triangle"] == (kind == "causal")
        assert numpy.abs(numpy.exp(back) - numpy.exp(logs)).max() < 1e-4
        seen = numpy.isfinite(logs)
        assert (numpy.abs(back[seen] - logs[seen]) <= 1e-3 * numpy.maximum(1, -logs[seen])).all()


def test_a_collapsed_head_keeps_its_gaps() -> None:
    """Two hundred nats between first and second choice still are two hundred: refinement may bridge them."""
    scores = torch.zeros(12, 12, dtype=torch.float64)
    scores[:, 0] = 200.0
    logs = scores.log_softmax(-1).numpy()
    back = decode_head(encode_head(logs), 12)
    assert back[:, 1:] == pytest.approx(logs[:, 1:], rel=1e-4)
    strong = refined(torch.from_numpy(back.copy()), "high", 16.0, 1, 0.0, False)
    assert strong == pytest.approx(refined(torch.from_numpy(logs), "high", 16.0, 1, 0.0, False), abs=1e-3)


OWN = """
import { ownSetting } from "./controls.js";
const own = (factor, more) => ownSetting(
  { refinement: { factor, steps: 1, damping: 0, ...more }, strengths: [[0.4, -0.2]] }, 0, 1);
const found = [own("high-key-bias", {}), own("high-key-bias", { message_stride: 4 }), own("sinkhorn", {})];
console.log(JSON.stringify(found));
"""


@needs_node
def test_a_models_own_refinement_is_taken_only_if_the_page_has_it() -> None:
    key_bias = {"factor": "key-bias", "strength": -0.2, "steps": 1, "damping": 0}
    assert run_node(OWN, {}) == [key_bias, None, None]
