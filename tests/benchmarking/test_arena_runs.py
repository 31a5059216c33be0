"""The runs of the arena's plan: recorded recipes, and an order that survives kills."""

from __future__ import annotations

import json
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers.trainer_callback import CallbackHandler
from typer.testing import CliRunner

from saobp.cli import app
from saobp.lab.arena_records import method_of, settings_of
from saobp.lab.step_times import LATER as FIELDS
from saobp.lab.step_times import SHARED, StepTimes
from saobp.refinement import Refinement
from saobp.runs.folder import RunError
from saobp.testing.scripts import ROOT, load_script
from saobp.testing.tiny_training import prose, small_recipe

runs = load_script("benchmarks/arena_runs.py")
plan = runs.sys.modules["arena_plan"]
RECORDS: list[dict[str, Any]] = json.loads((ROOT / "results" / "arena" / "runs.json").read_text())
LATER = time.time() + 100_000
FORMS = ("original", "learned")


def losses_with(best_setting: str, best_rate: float | None = None) -> dict[Any, float | None]:
    """As if tuning had chosen these."""
    losses: dict[Any, float | None] = {
        run: 3.0 if run.setting == best_setting else 3.1 for run in plan.setting_runs()
    }
    if best_rate is not None:
        losses |= {run: 3.0 if run.rate == best_rate else 3.1 for run in plan.rate_runs(best_setting)}
    return losses


def times_of(setting: str, *, learned: float = 1.0, key_bias: float = 1.0) -> StepTimes:
    """As if steps with learned strengths, or a key bias, took so many times as long as Original's."""
    recipe = plan.Run("none", 51, setting).recipe.to_dict()
    ratios = {"none": 1.0, "high:learned": learned, "high-key-bias:learned": key_bias}
    seconds = {form: [ratio] * 3 for form, ratio in ratios.items()}
    return StepTimes("time.json", {name: recipe[name] for name in (*SHARED, *FIELDS)}, seconds, {})


MUON_TIMES = times_of("muon-falling", learned=1.031, key_bias=1.012)
RUNS = {run.name: run for run in plan.planned_runs(losses_with("muon-falling", 2e-3), MUON_TIMES)}
AS_BEFORE = {run.name: run for run in plan.planned_runs(losses_with(plan.RECORDED, 2.8e-3))}


def test_the_plan_names_settings_methods_and_seeds() -> None:
    seven = (ROOT / "results" / "arena" / "plan.md").read_text().split("# Round seven")[1]
    for setting in plan.SETTINGS:
        assert f"`{setting}`" in seven
    for rate in plan.SMALL_RATES:
        assert f"{1000 * rate:g}e-3" in seven
    for form in (*plan.COMPARED[1:], *plan.RIVALS):
        assert f"`{form}`" in seven
        assert str(Refinement.of(form)) == form
    for form in plan.AT_EQUAL_TIME:
        assert f"`{form}` less Original trained for longer" in seven
    for seeds in (plan.MANY_SEEDS, plan.PAIR_SEEDS, plan.RIVAL_SEEDS):
        assert f"{seeds[0]} to {seeds[-1]}" in seven


def test_runs_come_in_the_order_of_the_plan_and_the_comparison_has_seeds_of_its_own() -> None:
    names = list(RUNS)
    assert names[0] == "modernbert-mini-masked-30-to-15-original-42"
    assert names[3] == "modernbert-mini-muon-falling-128-rows-original-42"
    compared, rest = names[15:95], names[95:]
    assert compared[1::8] == [f"modernbert-mini-muon-falling-learned-{seed}" for seed in range(51, 61)]
    assert compared[3:5] == [f"modernbert-mini-muon-falling-original-{n}-percent-longer-51" for n in (2, 4)]
    assert compared[7] == "modernbert-mini-muon-falling-high-key-bias-learned-qk-norm-51"
    assert not {RUNS[name].seed for name in compared} & {one["recipe"]["seed"] for one in RECORDS}
    assert rest[0] == "modernbert-small-muon-falling-rate-0.0028-original-42"
    assert rest[8:10] == [f"modernbert-small-muon-falling-rate-0.002-{form}-31" for form in FORMS]
    assert rest[18:20] == [f"modernbert-mini-muon-falling-books-{form}-31" for form in FORMS]
    assert rest[28] == "modernbert-medium-muon-falling-rate-0.0014-original-31"
    assert rest[32:] == [
        f"modernbert-mini-muon-falling-{rival}-{seed}" for seed in range(51, 59) for rival in plan.RIVALS
    ]


@pytest.mark.parametrize(
    ("ratios", "further"),
    [
        ({"learned": 0.999, "key_bias": 0.98}, []),
        ({"learned": 1.0, "key_bias": 1.0001}, [1]),
        ({"learned": 1.0312, "key_bias": 1.02}, [2, 4]),
        ({"learned": 1.02, "key_bias": 1.02}, [2]),
    ],
)
def test_plain_attention_gets_the_steps_that_fit_into_the_time_of_a_form(
    ratios: dict[str, float], further: list[int]
) -> None:
    assert plan.further_steps("muon-falling", times_of("muon-falling", **ratios)) == further
    longer = [run.longer for run in plan.compared_runs(51, "muon-falling", further) if run.longer]
    assert longer == further


def test_times_of_another_recipe_plan_no_runs_at_equal_time() -> None:
    for setting in ("muon-falling-128-rows", plan.RECORDED):
        assert plan.further_steps(setting, MUON_TIMES) == []
    assert plan.further_steps("muon-falling", None) == []
    runs.check_times(MUON_TIMES, "muon-falling")
    with pytest.raises(ValueError, match=r"time\.json has times of another recipe than the chosen setting"):
        runs.check_times(MUON_TIMES, plan.RECORDED)


def test_times_that_do_not_fit_the_choice_are_named_in_the_log(tmp_path: Path) -> None:
    queue = runs.Queue(tmp_path, LATER, made={run.name: 3.0 for run in plan.setting_runs()}, times=MUON_TIMES)
    runs.note_choice(queue, next(plan.setting_runs()))
    log = (tmp_path / "log.txt").read_text()
    assert f"chosen setting: {plan.RECORDED}" in log
    assert "time.json is of another recipe: runs at equal time wait for its times" in log


def test_what_waits_for_a_choice_is_not_planned_before_it() -> None:
    nothing = list(plan.planned_runs({}))
    assert nothing == list(plan.setting_runs())
    chosen = losses_with("muon-falling-half")
    without_rate = list(plan.planned_runs(chosen))
    assert {run.setting for run in without_rate[15:]} == {"muon-falling-half"}
    assert {(run.size, run.form) for run in without_rate if run.size != "mini"} == {("small", "none")}
    assert not plan.is_tuned({})
    assert not plan.is_tuned(chosen)
    assert plan.is_tuned(losses_with("muon-falling-half", 1e-3))


@pytest.mark.parametrize("form", plan.COMPARED)
def test_at_the_recipe_of_before_runs_may_be_pooled_with_recorded_ones(form: str) -> None:
    """Of the same recipe but for the seed."""
    recipe = {"kind": "pretrain", **plan.Run(form, 51, plan.RECORDED).recipe.to_dict()}
    partners = [one for one in RECORDS if one["recipe"]["seed"] == 11 and method_of(one["recipe"]) == form]
    assert any(len(settings_of([one, {**one, "recipe": recipe}])) == 1 for one in partners)


def test_recorded_runs_of_the_first_setting_have_its_names_and_recipe() -> None:
    recorded = {one["run"]: one for one in RECORDS}
    for seed in plan.SETTING_SEEDS:
        run = plan.Run("none", seed, plan.RECORDED)
        recipe = {"kind": "pretrain", **run.recipe.to_dict()}
        assert len(settings_of([recorded[run.name], {**recorded[run.name], "recipe": recipe}])) == 1


@pytest.mark.parametrize(
    "name", [*list(RUNS)[:27:3], *(name for name in RUNS if name.endswith(("learned-31", "longer-51")))]
)
def test_a_record_names_the_command_that_makes_the_run_again(name: str) -> None:
    done = CliRunner().invoke(app, [*RUNS[name].command[1:], "--dry-run"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == json.loads(json.dumps(RUNS[name].recipe.to_dict()))


@pytest.mark.parametrize("name", RUNS)
def test_every_run_has_as_many_tokens_and_numbers_per_head_learn_at_one_rate(name: str) -> None:
    recipe = RUNS[name].recipe
    assert recipe.tokens == 98_304_000 * (100 + RUNS[name].longer) // 100
    assert recipe.learning_rate * recipe.strength_rate == pytest.approx(0.01)
    assert recipe.size == name.split("-")[1]


def test_settings_differ_from_the_recipe_in_what_they_name() -> None:
    def fields(setting: str, **options: Any) -> dict[str, Any]:
        return plan.Run("none", 31, setting, **options).recipe.to_dict()

    usual = fields(plan.RECORDED)
    for setting, changes in plan.SETTINGS.items():
        steps = changes.get("steps", 3000)
        intervals = {"evaluation_steps": steps, "checkpoint_steps": steps // 5}
        assert fields(setting) == {**usual, **changes, **intervals}
    assert fields("muon-falling", corpus=plan.BOOKS) == {**fields("muon-falling"), "corpus": plan.BOOKS}
    longer = fields("muon-falling-128-rows", longer=4)
    steps = {"steps": 6240, "log_steps": 12, "evaluation_steps": 6240, "checkpoint_steps": 1248}
    assert longer == {**fields("muon-falling-128-rows"), **steps}
    small = fields("muon-falling", size="small", rate=1e-3)
    assert small["learning_rate"] == 1e-3
    assert small["optimizer"] == "muon"
    medium = [run.recipe.learning_rate for run in AS_BEFORE.values() if run.size == "medium"]
    assert medium == pytest.approx([2e-3] * 4)  # that of the recipe modern, as small's


def test_what_has_the_lowest_mean_is_chosen_once_all_have_ended() -> None:
    equal = dict.fromkeys(plan.setting_runs(), 3.0)
    assert plan.chosen_setting(equal) == plan.RECORDED  # the first in the plan
    losses = losses_with("muon-falling-half")
    assert plan.chosen_setting(losses) == "muon-falling-half"
    losses[plan.Run("none", 9, "muon-falling-half")] = 3.5
    losses[plan.Run("none", 9, "muon-falling")] = 3.0
    assert plan.chosen_setting(losses) == "muon-falling"
    losses[plan.Run("none", 16, "muon-falling")] = None  # it failed
    losses[plan.Run("none", 42, "muon-falling-averaged")] = float("nan")
    losses[plan.Run("none", 42, "muon-falling-128-rows")] = 3.09
    assert plan.chosen_setting(losses) == "muon-falling-128-rows"
    del losses[plan.Run("none", 42, "muon-falling-averaged")]
    assert plan.chosen_setting(losses) is None
    losses = losses_with("muon-falling", 1.4e-3)
    assert plan.chosen_rate("muon-falling", losses) == 1.4e-3
    assert plan.chosen_rate("muon-falling-half", losses) is None


def finish(queue: Any, run: Any, loss: float) -> None:
    folder = queue.folder(run)
    folder.mkdir(parents=True)
    recipe = {"kind": "pretrain", **run.recipe.to_dict()}
    for name, content in (
        ("recipe", recipe),
        ("record", {"status": "finished"}),
        ("result", {"eval_loss": loss}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_processes_share_the_runs_and_those_of_the_choice_follow_it(tmp_path: Path) -> None:
    queue, other = (runs.Queue(tmp_path, LATER) for _ in range(2))
    tuning = [(queue, other)[number % 2].claim() for number in range(15)]
    assert tuning == list(plan.setting_runs())
    assert other.claim() is None  # all that is left waits for the choice
    assert not other.is_empty()
    for run in tuning:
        finish(queue, run, 3.0 if run.setting == "muon-falling" else 3.1)
    assert other.claim() == plan.Run("none", 51, "muon-falling")
    while (run := queue.claim()) is not None:
        if run.size == "small" and run.rate == 2e-3:
            finish(queue, run, 3.0)
        elif run.size == "small":
            finish(queue, run, 3.1)
    assert plan.Run("none", 35, "muon-falling", "small", 2e-3).name in queue.held
    assert queue.is_empty()


def test_nothing_is_left_if_every_setting_fails(tmp_path: Path) -> None:
    queue = runs.Queue(tmp_path, LATER)
    for run in iter(queue.claim, None):
        (queue.claim_of(run) / runs.FAILED).touch()
    assert queue.is_empty()


def test_a_second_call_goes_on_where_a_killed_one_was(tmp_path: Path) -> None:
    queue = runs.Queue(tmp_path, LATER)
    first, second = (queue.claim() for _ in range(2))
    finish(queue, first, 3.1)
    queue.folder(second).mkdir(parents=True)
    again = runs.Queue(tmp_path, LATER)
    assert again.is_running(second)
    queue.held.clear()  # killed while it ran
    assert not again.is_running(second)
    assert again.claim() == second


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: an illegal memory access was encountered",
        "Triton Error [CUDA]: unspecified launch failure",
        "CUDA driver error: unspecified launch failure",
        "CUDA out of memory. Tried to allocate 20.00 MiB.",
    ],
)
def test_an_error_of_cuda_ends_a_run_once_and_it_goes_on_from_its_checkpoint(
    words: str, miniature: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, out = miniature
    first = next(plan.setting_runs())
    whole = runs.train(first, runs.Queue(out.with_name("whole"), LATER), str(tokens))
    step = CallbackHandler.on_step_end

    def fault(self: Any, args: Any, state: Any, control: Any) -> Any:
        if state.global_step == 3:
            raise RuntimeError(words)
        return step(self, args, state, control)

    def new_process(*_: Any) -> None:
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(runs.os, "execve", new_process)
        patched.setattr(CallbackHandler, "on_step_end", fault)
        with pytest.raises(InterruptedError):
            runs.work(runs.Queue(out, LATER), str(tokens))
    assert (
        (out / "log.txt").read_text().splitlines()[0].split(" ", 1)[1].startswith(f"lost {first.name}: Run")
    )
    queue = runs.Queue(out, LATER)
    assert queue.claim() == first
    numbers = queue.claim_of(first) / "numbers.jsonl"
    numbers.write_text('{"step": 1}\n{"step": 3}\n{"step": ')  # as a kill may leave them
    assert runs.train(first, queue, str(tokens)) == whole
    assert (queue.folder(first) / numbers.name).read_text() == '{"step": 1}\n'
    steps = [json.loads(line) for line in (queue.folder(first) / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in steps if "loss" in one] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "problem",
    [
        RunError("the model could not be written to one/model, because the disk is full"),
        OSError(28, "No space left on device", "metrics.jsonl"),
        RuntimeError("InductorError: OSError: [Errno 28] No space left on device"),
    ],
)
def test_a_full_disk_stops_a_process_and_its_run_is_made_later(
    problem: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> float:
        raise problem

    monkeypatch.setattr(runs, "has_gpu", lambda _: True)
    monkeypatch.setattr(runs, "train", full)
    queue = runs.Queue(tmp_path, LATER)
    with pytest.raises(SystemExit, match="call again"):
        runs.work(queue, "tokens")
    first, second, *_ = plan.setting_runs()
    assert list(queue.held) == [first.name]
    assert f"stopped at {first.name}: " in (tmp_path / "log.txt").read_text()
    queue.held.clear()  # as its process has ended
    assert [queue.claim(), queue.claim()] == [first, second]


def test_looking_whether_a_run_is_made_hides_it_from_no_other_process(tmp_path: Path) -> None:
    queue, looked = runs.Queue(tmp_path, LATER), threading.Event()
    first = queue.claim()
    queue.held.clear()  # killed

    class Slow(runs.Queue):  # type: ignore[misc, name-defined]
        def is_running(self, run: Any) -> bool:
            lock = runs.try_lock(self.claim_of(run) / runs.LOCK) if run == first else None
            if lock is not None:
                looked.set()
                time.sleep(0.2)
                lock.release()
            return False

    looking = threading.Thread(target=Slow(tmp_path, 0.0).claim)
    looking.start()
    assert looked.wait(10)
    assert queue.claim() == first
    looking.join()


def test_records_from_elsewhere_count_as_runs_that_are_made(tmp_path: Path) -> None:
    queue, (first, second, *_) = runs.Queue(tmp_path, LATER), plan.setting_runs()
    finish(queue, first, 3.1)  # unpacked, without the claim
    assert queue.claim() == second


def test_runs_in_the_recorded_list_count_as_made(tmp_path: Path) -> None:
    made = runs.recorded_losses(ROOT / "results" / "arena" / "runs.json")
    queue = runs.Queue(tmp_path, LATER, made=made)
    recorded = plan.Run("none", 16, plan.RECORDED)
    assert queue.is_done(recorded)
    assert queue.loss(recorded) == made[recorded.name]
    claimed = [run.name for run in iter(queue.claim, None)]
    assert len(claimed) == 12  # of four settings and three seeds each
    assert made.keys().isdisjoint(claimed)


def test_no_run_starts_that_would_end_too_late(tmp_path: Path) -> None:
    queue = runs.Queue(tmp_path, time.time() + 100, typical=150)
    assert queue.claim() is None
    queue.typical = 50
    assert queue.claim() is not None


def test_fewer_runs_side_by_side_end_sooner(tmp_path: Path) -> None:
    queue = runs.Queue(tmp_path, time.time() + 100, typical=150, jobs=10)
    claimed = [queue.claim() for _ in range(8)]
    assert sum(run is not None for run in claimed) == 6  # a seventh would make all of them too late
    finish(queue, claimed[0], 3.0)
    assert queue.claim() is not None


def call(monkeypatch: pytest.MonkeyPatch, *options: object) -> object:
    """The exit code of the script."""
    monkeypatch.setattr(runs.sys, "argv", ["arena_runs.py", *map(str, options)])
    with pytest.raises(SystemExit) as ended:
        runs.main()
    return ended.value.code


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "nowhere"], "no token store of it in nowhere"),
        (["--made", "nowhere.json"], "nowhere.json"),
        (["--made", "short.json"], "a record in short.json (one) has no kind, command"),
        (["--made", "others.json"], "was trained on other texts than those in tokens"),
        (["--pack", "nowhere/pack.tar.xz"], "nowhere/"),
        (["--times", "nowhere.json"], "nowhere.json"),
        (["--times", "plain.json"], "plain.json has no times of high-key-bias:learned"),
        ([], "name the folder of token stores by --tokens"),
        (["--jobs", "0"], "--jobs must be at least 1, not 0"),
    ],
)
def test_a_wrong_path_is_refused_in_a_sentence_before_anything_starts(
    options: list[str],
    words: str,
    miniature: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokens, out = miniature
    monkeypatch.chdir(tokens.parent)
    if "--pack" in options:
        out.mkdir()
    if "nowhere" in options:  # nor is the text there, from which tokens could be made
        (tokens.parent / "text.txt").unlink()
    if options and "--tokens" not in options:
        options = [*options, "--tokens", "tokens"]
    other = {**RECORDS[0], "run": next(plan.setting_runs()).name}
    Path("others.json").write_text(json.dumps([other]))
    Path("short.json").write_text(json.dumps([{"run": "one"}]))
    times = MUON_TIMES.setting | {"seconds": {"none": [1.0], "high:learned": [1.0]}, "environment": {}}
    Path("plain.json").write_text(json.dumps(times))
    assert call(monkeypatch, *options, "--out", out) == 2
    assert words in capsys.readouterr().err
    assert not list(out.glob("*"))


def test_without_a_gpu_nothing_is_started_and_no_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert call(monkeypatch, "--tokens", tmp_path, "--out", tmp_path) == 2
    assert "torch sees no GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no longer"):
        runs.work(runs.Queue(tmp_path, LATER), "tokens")
    assert not list(tmp_path.glob("*"))


def test_workers_are_tied_to_their_parent_and_a_killed_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, stat\n"
        "print(os.environ['SAOBP_END_WITH_INPUT'], stat.S_ISFIFO(os.fstat(0).st_mode), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setattr(runs, "__file__", str(script))
    monkeypatch.setattr(runs, "check", lambda *_: None)
    ended = call(monkeypatch, "--tokens", "tokens", "--out", tmp_path / "out", "--jobs", 1)
    assert ended == f"ended early, see {tmp_path / 'out' / 'log.txt'} and worker-0.log"
    assert (tmp_path / "out" / "worker-0.log").read_text() == "1 True\n"


def test_a_worker_ends_with_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(runs, "end_with_parent", lambda: done.append("watched"))
    monkeypatch.setattr(runs, "work", lambda *_: done.append("worked"))
    monkeypatch.setattr(runs.sys, "argv", ["", "--worker", "--tokens", "tokens", "--out", str(tmp_path)])
    runs.main()
    assert done == ["watched", "worked"]


def test_a_pack_stays_until_the_next_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, file = tmp_path / "out", tmp_path / "pack.tar.xz"
    (out / "runs" / "one").mkdir(parents=True)
    log = out / "runs" / "one" / "metrics.jsonl"
    log.write_text("first\n")
    runs.pack(out, file)
    before, read = file.read_bytes(), Path.read_bytes

    def killed(_: Path) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "read_bytes", killed)
    with pytest.raises(KeyboardInterrupt):
        runs.pack(out, file)
    assert read(file) == before

    def shortened(path: Path) -> bytes:  # after its size was taken
        path.write_text("new\n")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", shortened)
    runs.pack(out, file)
    monkeypatch.undo()
    with tarfile.open(file) as archive:
        (content,) = (archive.extractfile(entry) for entry in archive)
        assert content is not None
        assert content.read() == b"new\n"


@pytest.fixture
def miniature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Tokens and output folder of a queue whose runs take a second: small models, few seeds."""
    text = tmp_path / "text.txt"
    text.write_text(prose(400))
    tokens = tmp_path / "tokens"
    options = ["--tokenizer", "train:60", "--out", str(tokens), "--processes", "1"]
    assert CliRunner().invoke(app, ["tokenize", str(text), *options]).exit_code == 0
    (tokens / "tokenizer-bert-60").rename(tokens / "tokenizer-bert")
    full = plan.Run.recipe.fget

    def small(run: Any) -> Any:
        made = full(run)
        names = ("learning_rate", "optimizer", "refinement", "seed")
        shared = {name: getattr(made, name) for name in names}
        return small_recipe(**shared, family="modernbert", health_texts=0, steps=4, corpus=str(text))

    monkeypatch.setattr(plan.Run, "recipe", property(small))
    for name, value in {
        "SETTINGS": {"adamw": {}, "muon": {"optimizer": "muon"}},
        "SETTING_SEEDS": (42,),
        "SMALL_RATES": (2e-3, 1e-3),
        "RATE_SEEDS": (42,),
        "MANY_SEEDS": (51,),
        "COMPARED": ("none", "high:learned+qk-norm"),
        "PAIR_SEEDS": (31,),
        "MEDIUM_SEEDS": (),
        "RIVALS": ("gate", "sinkhorn-3"),
        "RIVAL_SEEDS": (51,),
    }.items():
        monkeypatch.setattr(plan, name, value)
    return tokens, tmp_path / "out"


def test_the_whole_queue_in_miniature(miniature: tuple[Path, Path], tmp_path: Path) -> None:
    tokens, out = miniature
    for name in ("runs", "claims"):
        (out / name).mkdir(parents=True)
    runs.work(runs.Queue(out, LATER), str(tokens))
    lines = (out / "log.txt").read_text().splitlines()
    assert sum(", loss " in line for line in lines) == 12
    losses = runs.Queue(out, LATER).tuned()
    setting = plan.chosen_setting(losses)
    assert setting is not None
    rate = plan.chosen_rate(setting, losses)
    chosen = [line.partition(" chosen ")[2] for line in lines if ", loss " not in line]
    assert chosen == [f"setting: {setting}", f"rate of small: {rate}"]
    small, books = f"small-{setting}-rate-{rate}", f"mini-{setting}-books"
    names = [f"modernbert-{one}-{form}-31" for one in (small, books) for form in FORMS]
    compared = ("original", "learned-qk-norm", "gate", "sinkhorn-3")
    names += [f"modernbert-mini-{setting}-{form}-51" for form in compared]
    assert all((out / "runs" / name / "model").is_dir() for name in names)
    failed = next((out / "claims").iterdir()) / runs.FAILED
    failed.touch()
    runs.pack(out, tmp_path / "records.tar.xz")
    with tarfile.open(tmp_path / "records.tar.xz") as archive:
        archive.extractall(tmp_path / "back", filter="data")
    back = tmp_path / "back"
    assert not list(back.rglob("model"))
    assert (back / "log.txt").exists()
    assert [path.name for path in back.glob("claims/*/*")] == [failed.name]
    done = CliRunner().invoke(
        app, ["arena", str(back / "runs"), "--out", str(tmp_path / "results"), "--fresh", "31,51"]
    )
    assert done.exit_code == 0, done.output
    assert "fresh seeds 31, 51" in (tmp_path / "results" / "arena" / "README.md").read_text()
