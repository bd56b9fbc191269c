"""`kill -9` of a target loop, of the driver, and while a shard is written: the same weights as without.

The quick suite kills a few; the slow one kills thirty times at random moments.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from draftline.engine.capture import fill_states
from draftline.engine.worker import WorkerTerms
from draftline.targets.loop import TargetForwardLoop
from draftline.transfer.store import SAMPLES_PER_FILL, StatesStore, loop_identity
from tests.engine.tiny_target import TARGET_LAYER_IDS, tiny_samples, tiny_target
from tests.run.small_run import assert_same_run, read_lines, small_run
from tests.run.test_interruption import PROCESSES, die_at_sync, exit_status, start

MODE = ("pipeline.mode=processes", "pipeline.target_loops=2")
LONG = ("train.epochs=150", "train.save_every=40", "train.eval_every=300", "train.log_every=20")
SAMPLES = tiny_samples(3 * SAMPLES_PER_FILL + 3)


def loops() -> list[int]:
    """Processes of target loops of this process."""
    return [child.pid or 0 for child in multiprocessing.active_children() if child.name.startswith("target-loop")]


def run_and_kill(out: Path, words: tuple[str, ...], kills: int, draw: random.Random) -> int:
    """Train while random loops are killed; how many were, each once rows had come since the one before."""
    done, killed = threading.Event(), 0

    def steps() -> int:
        return read_lines(out)[-1]["step"] if (out / "metrics.jsonl").exists() and read_lines(out) else 0

    def kill() -> None:
        nonlocal killed
        before = 0
        while killed < kills and not done.wait(draw.uniform(0.05, 0.4)):
            if steps() > before and (pids := loops()):
                before = steps()
                os.kill(draw.choice(pids), signal.SIGKILL)
                killed += 1

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        small_run(out, *words)
    finally:
        done.set()
        killer.join()
    return killed


def test_a_loop_that_is_killed_during_a_run_changes_nothing(tmp_path: Path) -> None:
    """Where the killed one had given its last row, nothing has to start again; `tests/engine` holds the line."""
    small_run(tmp_path / "whole")
    assert run_and_kill(tmp_path / "run", MODE, 2, random.Random(0)) >= 1
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    assert not loops()


def test_a_driver_that_is_killed_goes_on(tmp_path: Path) -> None:
    """Its loops end with it, and another process continues in whatever mode."""
    small_run(tmp_path / "whole")
    driver = start(tmp_path / "run", (*MODE, "train.save_every=2", "train.log_every=1"))
    while not (tmp_path / "run" / "metrics.jsonl").exists() or len(read_lines(tmp_path / "run")) < 3:
        assert driver.is_alive()
        time.sleep(0.01)
    driver.kill()
    driver.join()
    lines = read_lines(tmp_path / "run")
    small_run(tmp_path / "run", *MODE, "train.save_every=2", "train.log_every=1", resume=True)
    assert len(read_lines(tmp_path / "run")) >= len(lines)
    small_run(tmp_path / "whole lines", "train.save_every=2", "train.log_every=1")
    assert_same_run(tmp_path / "whole lines", tmp_path / "run")


def fill(folder: Path, moment: int) -> None:
    """Body of a process that captures, and dies at its n-th wait for the disk."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    if moment:
        die_at_sync(moment)
    loop = TargetForwardLoop(tiny_target(), TARGET_LAYER_IDS, "target_ids", 4096)
    store = StatesStore(folder, loop_identity(loop, "data"), np.array([len(s) for s in SAMPLES]), 1)
    terms = WorkerTerms(threads=1, device_type="cpu", patience=60.0, say=lambda _text: None)
    fill_states({store: SAMPLES}, loop, writers=1, repair=False, settings=terms)  # type: ignore[dict-item]


def filled(folder: Path, moments: list[int]) -> tuple[int, dict[str, bytes]]:
    """How many processes died, and what the last one left."""
    deaths = 0
    for moment in [*moments, 0]:
        process = PROCESSES.Process(target=fill, args=(folder, moment))
        process.start()
        status = exit_status(process)
        assert status in (0, -signal.SIGKILL)
        deaths += status != 0
    return deaths, {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def test_killed_while_shards_are_written_the_states_are_the_same(tmp_path: Path) -> None:
    deaths, found = filled(tmp_path / "killed", [1, 3, 5, 2])
    assert deaths >= 3
    assert found == filled(tmp_path / "whole", [])[1]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thirty_kills_at_random_moments(tmp_path: Path) -> None:
    draw = random.Random(1)
    small_run(tmp_path / "whole", *LONG)
    killed = run_and_kill(tmp_path / "loops", (*LONG, *MODE), 16, draw)
    assert_same_run(tmp_path / "whole", tmp_path / "loops")
    drivers, out = 0, tmp_path / "drivers"
    while drivers < 8:
        driver = start(out, (*LONG, *MODE), resume=True)
        before = len(read_lines(out)) if (out / "metrics.jsonl").exists() else 0
        wanted = before + draw.randint(1, 4)
        while driver.is_alive() and (not (out / "metrics.jsonl").exists() or len(read_lines(out)) < wanted):
            time.sleep(0.02)
        if not driver.is_alive():
            break
        time.sleep(draw.uniform(0, 0.3))
        driver.kill()
        driver.join()
        drivers += 1
    assert exit_status(start(out, LONG, resume=True)) == 0
    assert_same_run(tmp_path / "whole", out)
    states, deaths = filled(tmp_path / "once", [])[1], 0
    for number in range(4):
        died, found = filled(tmp_path / f"killed {number}", [draw.randint(1, 4) for _ in range(3)])
        assert found == states
        deaths += died
    print(f"killed: {killed} target loops, {drivers} drivers, {deaths} captures")
    assert killed + drivers + deaths >= 30
