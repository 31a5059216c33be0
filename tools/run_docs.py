"""Run every command of the documentation once, in miniature, and report which fail.

Commands stand in fenced or indented blocks, or in a line between backquotes. Each is run in a scratch folder
with small made-up texts and tasks, as a reader would run it, except that models are tiny, steps few and
scales ``smoke``.
What needs a GPU must refuse in a sentence; what needs the hub, or is a target of make, is listed as not run,
with the reason.

    python tools/run_docs.py                        # all pages: about 20 minutes on two busy cores
    python tools/run_docs.py docs/report.md         # some pages
    python tools/run_docs.py --list                 # what it would run
    python tools/run_docs.py --folder scratch       # keep what the commands write; a second time go on there
    python tools/run_docs.py --seconds 1200         # on a machine with much else to do

Not run here, because they need what this machine may lack:

- the hub: ``export google-bert/...`` (export.md), fine-tuning and evaluation without ``--data-dir``;
- an open port: ``transformers serve`` (serving.md);
- a GPU: ``bench`` but for ``cpu`` and ``pretraining --models bert-tiny``, which must refuse in a sentence;
  scripts of ``benchmarks/`` that time kernels; pretraining with compiled steps;
- a cluster: the job script of cluster.md, ``accelerate launch`` on several machines (one process here);
- models and texts of others: ``benchmarks/gallery.py`` (gallery.md);
- executorch: ``export --to executorch`` must name the missing package in a sentence;
- a long time: ``reproduce`` at scales other than smoke; of ``reproduce arena`` one seed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
START = re.compile(r"(timeout .*? )?(saobp|accelerate launch|python (-m )?\S+|make|pip|pytest)\b")
INLINE = re.compile(r"`((?:saobp|accelerate|python|make|pip|pytest) [^`]+)`")
TINY = "--recipe tiny --steps 4 --set batch_size=4 --set length=16"
CORPUS = "--corpus books.txt --vocabulary 400"


@dataclass(frozen=True)
class Command:
    """A command of a page: where it stands, its text, and how it is run; or why it is not."""

    page: str
    line: int
    text: str
    small: str = ""
    why_not: str = ""
    expected: tuple[int, ...] = (0,)


def commands_of(page: Path) -> Iterator[Command]:
    """The commands of one page, as they stand there."""
    fence: str | None = None
    whole = ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            fence = line[3:].strip() if fence is None else None
            continue
        is_block = (
            line.startswith("    ") if fence is None else fence in ("", "bash", "console", "sh", "shell")
        )
        if is_block:
            whole += line.strip().removeprefix("$ ")
            if whole.endswith("\\"):
                whole = whole[:-1]
                continue
            text, whole = re.sub(r"\s+#.*", "", whole).strip(), ""
            if START.match(text):
                yield Command(page.name, number, text)
        elif fence is None:
            for text in INLINE.findall(line):
                if len(text.split()) > 2 and START.match(text):
                    yield Command(page.name, number, text)


def adapted(command: Command, number: int) -> Command:
    """The command in miniature, or why it is not run."""
    text = re.sub(r"^timeout .*? (?=saobp)", "", command.text)
    if why_not := _why_not(text):
        return replace(command, why_not=why_not)
    if text.startswith("python "):
        script = text.replace("docs/images", "drawn")
        return replace(command, small=script + (" --out hub" if "build_hub_kernel" in script else ""))
    small = _in_miniature(text, number)
    if re.search("--to executorch|--harness", small):  # refused where the package is not installed
        return replace(command, small=small, expected=(0, 1))
    is_gpu = small.startswith("saobp bench ") and "cpu" not in small and "bert-tiny" not in small
    return replace(command, small=small, expected=(1,) if is_gpu else (0,))


def _why_not(text: str) -> str:
    """Why a command is not run here; empty where it is."""
    program = text.split()[0]
    if program in ("make", "pip", "pytest"):
        return "make, pip and pytest are run by the tests and the workflow"
    if "$" in text:
        return "stands in a job script, with its variables"
    if program == "python" and " serve " in text:
        return "a server of Transformers, which opens a port"
    if program == "python" and not re.search(r"draw_glossary|build_hub_kernel|dense_gap", text):
        return "a script of benchmarks or tests: some need a GPU, some the models of others"
    if re.search(r"\b(google-bert|openai-community)/", text) or "--dataset NAME" in text:
        return "needs the hub"
    return ""


def _in_miniature(text: str, number: int) -> str:
    """A command of saobp or accelerate with the prepared files, a tiny model and few steps."""
    words = text.split()
    text = re.sub(r"\[RUN \.\.\.\]", "", text)
    text = re.sub(r"\bRUN(?=/|\s|$)", "runs/high", text).replace("FOLDER", "runs/high/model")
    text = re.sub(r"\bMODEL\b", "runs/high/model", text)
    text = text.replace("FILE", "books.txt").replace("DATA", "data")
    if "--harness" in text:
        text = text.replace("runs/high/model", "runs/decoder/model")
    if "launch" in words[:2]:
        text = re.sub(
            r"--num_processes \d+", "--num_processes 1 --cpu", re.sub(r"--(multi_gpu|use_fsdp)", "", text)
        )
        text = re.sub(r"--fsdp_\S+ \S+", "", text)
    if "saobp pretrain" in text:
        text = _small_training(text, number)
    if words[:2] == ["saobp", "reproduce"] and "--list" not in text:
        text = re.sub(r"--(scale|recipe) \w+", "", text).replace("--data-dir data", "")
        text = re.sub(r"--(tokens|runs|jobs|seeds) \S+", "", text) + " --scale smoke"
        if "reproduce arena" in text:
            text += " --seeds 1 --jobs 2"
        elif "--plan" not in text and "tokens" not in text:
            text = re.sub(r"reproduce (all|tables|gtd,glue|pretraining)", "reproduce cost", text)
    if words[:2] == ["saobp", "finetune"]:
        text = re.sub(r"--limit \d+", "", text) + " --limit 8 --epochs 1 --no-keep-model"
        text = re.sub(r"--task (glue|all)\b", "--task rte,cola", re.sub(r"--jobs \d+", "--jobs 2", text))
    if text in ("saobp evaluate --json", "saobp diagnose --json"):
        text += " runs/high/model --data-dir data"
    if words[:2] == ["saobp", "evaluate"] and "--limit" not in text:
        text += " --limit 4 --positions 16"
    if words[:2] == ["saobp", "report"]:
        text += f" --out figures-{number}" if "--format" in text else f" --out page-{number}.html"
    if words[:2] == ["saobp", "diagnose"]:
        text += " --overwrite"
    if words[:2] == ["saobp", "explore"]:
        text += " --no-browser"
    if words[:3] == ["saobp", "bench", "cpu"]:
        text += " --quick --out benched"
    if "--models bert-tiny" in text:
        text += " --out benched"
    return text


def _small_training(text: str, number: int) -> str:
    """A tiny model and few steps, on the texts that the page names or on a made-up one."""
    text = re.sub(r"--size \w+", "", re.sub(r"--(recipe|steps) \S+", "", text))
    text = re.sub(r"stop_after=\d+", "stop_after=2", text)
    text = re.sub(r"--vocabulary \d+", "--vocabulary 400", text.replace("--corpus ...", ""))
    text = text.replace("...", "") + ("" if "--out" in text else f" --out runs/doc-{number}")
    if "--resume" in text:
        text = re.sub(r"--out \S+", "--out runs/resumed", text)
    if "--corpus" not in text:
        text = f"{text.replace('--vocabulary 400', '')} {CORPUS}"
    elif not re.search(r"--(data-dir|tokens|vocabulary)", text):
        text += " --data-dir data"
    return f"{text} {TINY}"


def prepare(folder: Path, environment: dict[str, str]) -> None:
    """Texts, tasks, tokenizers and two small runs, in the places that the pages name."""
    from saobp.data.tokenizers import BERT_FILE, SPECIAL
    from saobp.lab.synthetic_tasks import SYNTHETIC, write_rows, write_synthetic_data

    data = write_synthetic_data(folder / "data")
    words = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split()
    paragraphs = [" ".join(words[start : start + 40]) for start in range(0, len(words), 40)]
    (folder / "books.txt").write_text("\n\n".join(paragraphs * 4), encoding="utf-8")
    for name in ("wikipedia_en", "gutenberg_books", "imdb_reviews"):
        (data / name).symlink_to((data / SYNTHETIC).resolve(), target_is_directory=True)
    pair = {"sentence_good": "the cat is red .", "sentence_bad": "the cat are red .", "field": "syntax"}
    pairs = [{**pair, "UID": "agreement", "pairID": str(number)} for number in range(8)]
    write_rows(data / "blimp" / "test.parquet", pairs)
    (data / "tokenizers").mkdir(exist_ok=True)
    (folder / "drawn").mkdir(exist_ok=True)
    letters = [chr(code) for code in range(33, 127)]
    vocabulary = [*SPECIAL, *dict.fromkeys([*letters, *(f"##{letter}" for letter in letters)])]
    (data / "tokenizers" / BERT_FILE).write_text("\n".join(vocabulary) + "\n")
    page = (ROOT / "docs" / "factors.md").read_text(encoding="utf-8")
    (folder / "near_potts.py").write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
    for line in (
        f"saobp pretrain {TINY} {CORPUS} --out runs/plain",
        f"saobp pretrain {TINY} {CORPUS} --refinement high:0.2 --out runs/high",
        f"saobp pretrain {TINY} {CORPUS} --family gpt2 --refinement high:0.2 --out runs/decoder",
    ):
        _run(line, folder, environment)
    for name in ("learned", "readme"):
        shutil.copytree(folder / "runs" / "high", folder / "runs" / name)


def _run(
    line: str, folder: Path, environment: dict[str, str], seconds: float | None = None
) -> tuple[int, str]:
    """Exit code and output; the explorer's server is interrupted once it answers."""
    words = shlex.split(line)
    start = [sys.executable, "-m", "saobp"] if words[0] == "saobp" else [sys.executable]
    if words[0] == "accelerate":
        start = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
    if words[0] == "python":
        words = [str(ROOT / word) if word.endswith(".py") else word for word in words]
    child = subprocess.Popen(
        [*start, *words[1:]], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None
    try:
        if words[:2] == ["saobp", "explore"]:
            first = child.stdout.readline()
            child.send_signal(signal.SIGINT)
            return child.wait(seconds), first
        said, _ = child.communicate(timeout=seconds)
        return child.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return 124, f"it ran for more than {seconds:g} seconds"


def main(
    pages: Sequence[Path], *, only_list: bool, log: Path | None, folder: Path | None, seconds: float
) -> int:
    found = [
        adapted(one, number) for number, one in enumerate(one for page in pages for one in commands_of(page))
    ]
    if only_list:
        for one in found:
            print(f"{one.page}:{one.line}  {one.text}\n    {one.small or f'not run: {one.why_not}'}")
        return 0
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "COLUMNS": "110"}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored in background jobs
    ran = failed = 0
    with contextlib.nullcontext(folder) if folder else tempfile.TemporaryDirectory() as name:
        Path(name).mkdir(parents=True, exist_ok=True)
        if not Path(name, "runs/readme").exists():
            prepare(Path(name), environment)
        for one in found:
            if one.why_not:
                print(f"not run  {one.page}:{one.line}  {one.text}  ({one.why_not})", flush=True)
                continue
            made = re.search(r"(?:pretrain|export|build_hub_kernel.py) .*--out (\S+)", one.small)
            if made and "--resume" not in one.small:
                shutil.rmtree(Path(name, made[1]), ignore_errors=True)
            began = time.monotonic()
            code, said = _run(one.small, Path(name), environment, seconds)
            is_good = code in one.expected and "Traceback" not in said
            failed += not is_good
            mark = "ok     " if is_good else f"FAIL {code:<2}"
            print(
                f"{mark}  {time.monotonic() - began:5.1f} s  {one.page}:{one.line}  {one.small}", flush=True
            )
            ran += 1
            if log is not None:
                with log.open("a", encoding="utf-8") as file:
                    file.write(f"$ {one.small}\n{said}\n")
            if not is_good:
                print(said[-2000:], flush=True)
    print(f"{ran} commands run, {failed} failed, {len(found) - ran} not run")
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", type=Path, help="Markdown files; by default README.md and docs/")
    parser.add_argument("--list", action="store_true", help="print what would be run")
    parser.add_argument("--log", type=Path, help="file to add what the commands print to")
    parser.add_argument("--folder", type=Path, help="folder to run in, kept; by default a temporary one")
    parser.add_argument("--seconds", type=float, default=240, help="longest time for one command")
    given = parser.parse_args()
    chosen = given.pages or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    sys.exit(main(chosen, only_list=given.list, log=given.log, folder=given.folder, seconds=given.seconds))
