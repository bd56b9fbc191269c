"""Runs in real processes that are killed at any moment, or asked to stop, and continued."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

import draftline.storage
from draftline.errors import Interrupted
from draftline.records import PackedBatch
from draftline.train.checkpoint import read_checkpoint
from draftline.train.log import JsonLines
from draftline.train.step import Drafter, StepResult
from tests.run.small_run import assert_same_run, read_lines, small_run

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.run.test_interruption"])

MUON = ("optim.name=muon", "optim.muon_learning_rate=0.02")
THREADS = ("pipeline.mode=threads", "pipeline.target_loops=2")


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_sync(count: int) -> None:
    """Between any two file operations of checkpoints, links and texts: die instead of the n-th sync."""
    left, original = count, draftline.storage._sync

    def sync(path: Path) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            kill_itself()
        original(path)

    draftline.storage._sync = sync


def die_at_step(step: int) -> None:
    """Inside an optimiser step: die when it has moved the weights."""
    original = Drafter.step

    def dying_step(self: Drafter, batches: Sequence[PackedBatch]) -> StepResult:
        result = original(self, batches)
        if batches[0].step == step:
            kill_itself()
        return result

    Drafter.step = dying_step  # type: ignore[method-assign]


def die_in_line(step: int) -> None:
    """In the middle of a line of `metrics.jsonl`."""
    original = JsonLines.write

    def torn_write(self: JsonLines, record: dict[str, object]) -> None:
        if record["step"] == step:
            self._file.write('{"step": ')
            self._file.flush()
            kill_itself()
        original(self, record)

    JsonLines.write = torn_write  # type: ignore[method-assign]


def body(out: Path, words: Sequence[str], resume: bool, prepare: Callable[[int], None] | None, moment: int) -> None:
    """What a process does; its output would disturb the test's."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    if prepare is not None:
        prepare(moment)
    try:
        small_run(out, *words, resume=resume)
    except Interrupted as error:
        os._exit(error.exit_status)


def start(
    out: Path,
    words: Sequence[str] = (),
    resume: bool = False,
    prepare: Callable[[int], None] | None = None,
    moment: int = 0,
) -> BaseProcess:
    process = PROCESSES.Process(target=body, args=(out, words, resume, prepare, moment))
    process.start()
    return process


def exit_status(process: BaseProcess) -> int | None:
    process.join(timeout=60)
    assert process.exitcode is not None, "the process hangs"
    return process.exitcode


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    assert exit_status(start(out)) == 0
    return out


@pytest.mark.parametrize(
    ("prepare", "moment"),
    [
        (die_at_step, 3),  # a pass has 11 to 13 rows, two to a step: within the first pass
        (die_at_step, 5),  # at the end of the first pass
        (die_at_step, 17),  # the last step
        (die_in_line, 9),
    ],
)
def test_killed_once_and_continued_is_the_whole_run(
    whole: Path, tmp_path: Path, prepare: Callable[[int], None], moment: int
) -> None:
    out = tmp_path / "run"
    assert exit_status(start(out, prepare=prepare, moment=moment)) == -signal.SIGKILL
    assert exit_status(start(out, resume=True)) == 0
    assert_same_run(whole, out)


def test_momentum_of_matrices_comes_back_bit_for_bit(tmp_path: Path) -> None:
    out, whole = tmp_path / "run", tmp_path / "whole"
    assert exit_status(start(whole, MUON)) == 0
    for moment in (4, 12):  # the checkpoint of step 5 is yet to come, that of step 10 is the last
        assert exit_status(start(out, MUON, resume=True, prepare=die_at_step, moment=moment)) == -signal.SIGKILL
    assert exit_status(start(out, MUON, resume=True)) == 0
    assert_same_run(whole, out)


def test_killed_between_all_file_operations(whole: Path, tmp_path: Path) -> None:
    """Each process dies a little later in its own life than the one before, so all kinds of operations are hit."""
    out, deaths = tmp_path / "run", 0
    for moment in range(2, 60, 4):
        status = exit_status(start(out, resume=True, prepare=die_at_sync, moment=moment))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        deaths += 1
        for folder in (out / "checkpoints").glob("step-*"):
            read_checkpoint(folder)
    assert deaths > 4
    assert_same_run(whole, out)


@pytest.mark.parametrize("words", [(), THREADS])
def test_killed_at_random_moments(whole: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    draw = random.Random(len(words))
    out = tmp_path / "run"
    for _ in range(3):
        process = start(out, words, resume=True)
        process.join(timeout=draw.uniform(0.2, 2.0))
        process.kill()
        process.join()
    assert exit_status(start(out, words, resume=True)) == 0
    assert_same_run(whole, out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("words", [(), THREADS])
def test_asked_to_stop_it_saves_and_says_so(
    whole: Path, tmp_path: Path, number: signal.Signals, words: tuple[str, ...]
) -> None:
    out = tmp_path / "run"
    process = start(out, (*words, "train.save_every=1000"))
    while not (out / "metrics.jsonl").exists() or not read_lines(out):
        assert process.is_alive()
        time.sleep(0.005)
    os.kill(process.pid or 0, number)
    assert exit_status(process) == 130
    stopped = read_checkpoint(out / "last").state.step
    assert 3 <= stopped < 18
    assert exit_status(start(out, words, resume=True)) == 0
    names = ("drafter", "optimizer")
    assert all(
        (whole / "last" / f"{n}.safetensors").read_bytes() == (out / "last" / f"{n}.safetensors").read_bytes()
        for n in names
    )
    assert read_lines(whole) == read_lines(out)
