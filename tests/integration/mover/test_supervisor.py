"""What the parent's side promises without a fleet: refusals, crash loops, and the end of a parent."""

import os
import signal
import subprocess
import sys
import time

import pytest
from tests.integration.mover.fleet import make

from weightsync_engine.mover.supervisor import (
    _SPARE_AFTER,
    MoverSupervisor,
    mover_environment,
    private_folder,
)

SCRIPT = """
import multiprocessing, pathlib, sys, time
from tests.integration.mover.fleet import make
from weightsync_engine.mover.supervisor import MoverSupervisor

def daemonic(folder):
    slab, manifest = make(2, 1)
    supervisor = MoverSupervisor("inference", 0, slab, manifest, pathlib.Path(folder), spare=False)
    while supervisor.pid is None:
        time.sleep(0.02)
    print(multiprocessing.current_process().pid, supervisor.pid, flush=True)
    time.sleep(600)

process = multiprocessing.get_context("fork").Process(target=daemonic, args=(sys.argv[1],), daemon=True)
process.start()
process.join()
"""


def wait(predicate, seconds, what):
    deadline = time.monotonic() + seconds
    while not predicate():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_the_mover_of_a_daemonic_process_leaves_when_that_is_killed(tmp_path):
    root = os.getcwd()
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    ) as script:
        parent, mover = map(int, script.stdout.readline().split())
        assert not gone(mover)
        os.kill(parent, signal.SIGKILL)
        wait(lambda: gone(mover), 20, "the mover leaves after its parent")
        script.wait(20)


def test_a_spare_takes_over_at_once_and_the_next_one_starts_when_that_is_mended(tmp_path):
    slab, manifest = make(0, 1)
    supervisor = MoverSupervisor("trainer", 0, slab, manifest, tmp_path / "run")
    try:
        assert supervisor.wait_ready(90) == ""
        first, spare = supervisor.pid, supervisor._spare.process.pid
        killed = time.monotonic()
        os.kill(first, signal.SIGKILL)
        wait(lambda: supervisor.pid == spare, 30, "the spare takes over")
        assert time.monotonic() - killed < _SPARE_AFTER
        wait(lambda: supervisor._spare is not None, 30, "the next spare")
        assert time.monotonic() - killed >= _SPARE_AFTER
    finally:
        supervisor.close()
        slab.close()


def test_a_mover_that_cannot_start_is_a_stated_problem_and_tried_again_with_pauses(tmp_path):
    slab, manifest = make(0, 1)
    supervisor = MoverSupervisor(
        "trainer", 0, slab, manifest, tmp_path / "run", env={"PYTHONHOME": "/nonexistent"}
    )
    try:
        wait(lambda: supervisor.problem is not None, 30, "a problem")
        first = supervisor.problem.message
        assert "exited with code 1" in first and supervisor.pid is None
        wait(lambda: supervisor.problem.message != first, 30, "another try")
        wait(lambda: supervisor._quick_deaths >= 3, 30, "a third try")
        assert supervisor._start_at - time.monotonic() < 31
    finally:
        supervisor.close()
        slab.close()


def test_what_cannot_work_is_refused_at_once(tmp_path):
    slab, manifest = make(0, 1)
    with pytest.raises(ValueError, match="role 'inference' with a TrainerManifest"):
        MoverSupervisor("inference", 0, slab, manifest, tmp_path)
    with pytest.raises(ValueError, match="shorter folder"):
        MoverSupervisor("trainer", 0, slab, manifest, tmp_path / ("x" * 100))
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    open_to_all.chmod(0o755)
    with pytest.raises(PermissionError, match="0700"):
        private_folder(open_to_all)
    slab.close()


def test_the_movers_environment_is_free_of_the_parents_process_group():
    base = {
        "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "r",
        "LD_PRELOAD": "lib", "OMP_NUM_THREADS": "16", "NCCL_DEBUG": "INFO", "PATH": "/bin",
    }  # fmt: skip
    assert mover_environment(base, {"MORE": "1"}) == {
        "NCCL_DEBUG": "INFO", "PATH": "/bin", "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1", "MORE": "1"
    }  # fmt: skip
    assert mover_environment({"RES_OPTIONS": "timeout:7"})["RES_OPTIONS"] == "timeout:7"
