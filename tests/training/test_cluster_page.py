"""The job script of docs/cluster.md as it is printed, with stand-ins for Slurm, on CPU processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from saobp.runs.folder import RunFolder
from saobp.testing.tiny_training import prose

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text("utf-8")
SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit=1
for node in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$node "$@" & started+=" $!"; done
for one in $started; do wait $one || failed=1; done
exit ${failed:-0}
"""
OPTIONS = (
    "--corpus prose.txt --recipe tiny --vocabulary 60 --steps 96 --held-out 0.1 --refinement high:learned "
    "--set checkpoint_steps=32"
)


def test_the_script_names_what_it_uses() -> None:
    script = job_script()
    for option in (
        "--num_machines",
        "--machine_rank",
        "--main_process_ip",
        "--main_process_port",
        "--resume",
    ):
        assert option in script
    exported = set(re.findall(r"export (\w+)=", script)) | {"TOKENIZERS_PARALLELISM", "TRITON_CACHE_DIR"}
    for name in re.findall(r"\$\{?([A-Z][A-Z_]+)", script):
        assert name in exported | {"TMPDIR", "RUN"} or name.startswith("SLURM_"), name


@pytest.mark.slow
def test_two_nodes_interrupted_and_submitted_again_learn_as_one_process(tmp_path: Path) -> None:
    (tmp_path / "prose.txt").write_text(prose(400))
    (tmp_path / "job.slurm").write_text(job_script())
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho 127.0.0.1\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
    }
    one, two = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "two")
    single = [sys.executable, "-m", "saobp", "pretrain", *OPTIONS.split(), "--out", "one"]
    subprocess.run(single, cwd=tmp_path, env=environment, check=True)

    slurm = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_NODELIST": "node[1-2]"}
    job = environment | slurm | {"RUN": f"{OPTIONS} --out two", "SLURM_JOB_ID": str(os.getpid())}
    first = subprocess.Popen(["bash", "job.slurm"], cwd=tmp_path, env=job, start_new_session=True)
    end = time.monotonic() + 300
    while two.last_good_checkpoint() is None and first.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert not two.is_finished
    again = job | {"SLURM_JOB_ID": str(os.getpid() + 1)}
    subprocess.run(["bash", "job.slurm"], cwd=tmp_path, env=again, check=True, timeout=300)
    assert two.record["environment"]["processes"] == 2
    assert two.result["loss"] == pytest.approx(one.result["loss"], rel=1e-4)
    assert two.result["eval_loss"] == pytest.approx(one.result["eval_loss"], rel=1e-4)


def job_script() -> str:
    found = re.search(r"^```bash\n(#!/bin/bash.*?)^```$", PAGE, re.M | re.S)
    assert found is not None
    return found[1]
