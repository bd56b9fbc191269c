"""Target loops in processes: the rows of inline, whatever is killed, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from draftline.engine.inline import InlineEngine
from draftline.engine.process import intra_op_threads
from draftline.engine.processes import ProcessesEngine, RowJob
from draftline.engine.worker import MOST_RESTARTS, WorkerTerms, pickled
from draftline.errors import ConfigError, PipelineError, TargetError
from draftline.records import CapturedSample, PackedBatch, Sample
from draftline.targets.loop import TargetForwardLoop
from draftline.targets.model import Target
from draftline.transfer.pack import CaptureLoop
from tests.engine.test_engines import SAMPLES, assert_same_rows, capture_loop, plans, rows_of
from tests.engine.tiny_target import FailingLoop, tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def inline(target: Target) -> list[PackedBatch]:
    with intra_op_threads(1):
        return rows_of(InlineEngine(loop=capture_loop(target), samples=SAMPLES, plans=plans(0)))


class Deadly:
    """A target loop whose process dies, or hangs, at a row; a file says how often it may still do so."""

    def __init__(self, loop: TargetForwardLoop, row: int, lives: Path, hangs: bool = False) -> None:
        self._loop, self._left, self._lives, self._hangs = loop, row, lives, hangs

    def capture(self, samples: Sequence[Sample]) -> list[CapturedSample]:
        self._left -= 1
        lives = int(self._lives.read_text())
        if self._left < 0 < lives:
            self._lives.write_text(str(lives - 1))
            if self._hangs:
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGKILL)
        return self._loop.capture(samples)


def engine(
    loops: Sequence[CaptureLoop], first: int = 0, queue_bytes: int = 20_000, **settings: object
) -> ProcessesEngine:
    return ProcessesEngine(
        loops=loops,
        samples=SAMPLES,
        plans=plans(first),
        first_row=first,
        queue_bytes=queue_bytes,
        destination=torch.device("cpu"),
        worker=WorkerTerms(**{"threads": 1, "device_type": "cpu", "patience": 120.0, **settings}),  # type: ignore[arg-type]
    )


def is_gone(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(("loops", "first"), [(1, 0), (2, 5)])
def test_processes_give_the_rows_of_inline_bit_for_bit(
    target: Target, inline: list[PackedBatch], loops: int, first: int
) -> None:
    with engine([capture_loop(target) for _ in range(loops)], first) as running:
        rows, pids, statistics = rows_of(running), running.pids, running.statistics()
    assert_same_rows(inline[first:], rows)
    assert statistics.target_tokens == sum(row.input_ids.numel() for row in inline[first:])
    assert statistics.target_loops == loops
    assert statistics.target_busy_seconds > 0
    assert all(map(is_gone, pids))


def test_a_row_is_there_as_long_as_it_is_held_and_its_place_is_used_again(
    target: Target, inline: list[PackedBatch]
) -> None:
    addresses, held = set[int](), []
    with engine([capture_loop(target)], queue_bytes=1) as running:
        for number in range(len(inline)):
            row = running.get()
            assert row is not None
            addresses.add(row.hidden_states_packed.data_ptr())
            if number % 5 == 0:
                held.append(row.hidden_states_packed[0, 1:])  # a part of a row holds all of it
            del row
    assert all(torch.equal(part, inline[5 * i].hidden_states_packed[0, 1:]) for i, part in enumerate(held))
    assert len(addresses) < len(inline) - len(held)


def test_a_failing_loop_reaches_the_consumer_with_its_cause(target: Target) -> None:
    cause = TargetError("layer 2 is not finite")
    with engine([FailingLoop(capture_loop(target), 2, cause), capture_loop(target)]) as running:
        pids = running.pids
        with pytest.raises(PipelineError, match="TargetError: layer 2 is not finite") as caught:
            rows_of(running)
    assert isinstance(caught.value.__cause__, TargetError)
    assert "\n" not in str(caught.value)
    assert all(map(is_gone, pids))


def test_killed_loops_are_replaced_and_their_rows_done_again(
    target: Target, inline: list[PackedBatch], tmp_path: Path
) -> None:
    (tmp_path / "lives").write_text("2")
    said = list[str]()
    loops = [Deadly(capture_loop(target), 3, tmp_path / "lives"), capture_loop(target)]
    with engine(loops, say=said.append) as running:
        assert_same_rows(inline, rows_of(running))
    assert len(said) == 2
    assert all("target-loop-0 (process " in line and "was killed by SIGKILL" in line for line in said)


def test_a_loop_that_is_killed_again_and_again_is_one_line(target: Target, tmp_path: Path) -> None:
    (tmp_path / "lives").write_text("1000")
    said = list[str]()
    with (
        pytest.raises(PipelineError, match=r"was killed by SIGKILL, 4 times in a row.*--resume") as caught,
        engine([Deadly(capture_loop(target), 0, tmp_path / "lives")], say=said.append) as running,
    ):
        rows_of(running)
    assert "\n" not in str(caught.value)
    assert len(said) == MOST_RESTARTS


def test_a_loop_that_hangs_says_where_and_is_replaced(
    target: Target, inline: list[PackedBatch], tmp_path: Path
) -> None:
    (tmp_path / "lives").write_text("1")
    said = list[str]()
    loops = [Deadly(capture_loop(target), 4, tmp_path / "lives", hangs=True)]
    with engine(loops, say=said.append, patience=8.0, report=tmp_path) as running:
        assert_same_rows(inline, rows_of(running))
    assert [line for line in said if "gave nothing for 8 seconds" in line] == said
    assert len(said) == 1
    stacks = (tmp_path / "stacks.txt").read_text()
    assert "target-loop-0 (process " in stacks
    assert "in capture" in stacks, "where the loop hangs"
    assert "in answer" in stacks, "where this process waits for it"


def test_leaving_early_ends_loops_that_wait_or_work(target: Target) -> None:
    start = time.monotonic()
    with engine([capture_loop(target) for _ in range(2)], queue_bytes=1) as running:
        pids = running.pids
        assert running.get() is not None
    assert all(map(is_gone, pids))
    assert time.monotonic() - start < 60


def test_weights_are_in_memory_once(target: Target) -> None:
    job = RowJob(capture_loop(target), 0, False)
    first = pickled(job)
    addresses = [parameter.data_ptr() for parameter in target.model.parameters()]
    assert pickled(job) == first
    assert addresses == [parameter.data_ptr() for parameter in target.model.parameters()]
    with engine([capture_loop(target)]) as running, torch.no_grad():
        one = running.get()
        assert one is not None
        kept = target.final_norm.get_parameter("weight").clone()
        target.final_norm.get_parameter("weight").zero_()  # what the loop's process sees too
        last = rows_of(running)[-1]
        target.final_norm.get_parameter("weight").copy_(kept)
    assert one.target_ids is not None
    assert one.target_ids[one.target_ids >= 0].unique().numel() > 1
    assert last.target_ids is not None
    assert last.target_ids[last.target_ids >= 0].unique().tolist() == [0], "all logits are 0"


def test_a_target_that_cannot_be_handed_over_is_one_line() -> None:
    loop = capture_loop(tiny_target())
    loop.target.model.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"set pipeline\.mode=threads") as caught, engine([loop]):
        pass
    assert "\n" not in str(caught.value)


def test_tied_parameters_stay_tied() -> None:
    from draftline.engine.worker import _WEIGHTS, _Unpickler

    model = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
    model["two"].weight = model["one"].weight
    other = _Unpickler(pickled(model), _WEIGHTS.descriptor).load()
    assert other["one"].weight is other["two"].weight
    assert other["one"].weight.data_ptr() != model["one"].weight.data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def in_a_driver() -> None:
    """Body of a process that is killed while its loops work."""
    with engine([capture_loop(tiny_target()) for _ in range(2)], queue_bytes=1) as running:
        running.get()
        print(*running.pids, flush=True)
        time.sleep(600)


def test_loops_end_with_a_driver_that_is_killed_and_leave_no_memory() -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    words = [sys.executable, "-c", "from tests.engine.test_processes import in_a_driver; in_a_driver()"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(map(is_gone, pids))
        driver.kill()
    deadline = time.monotonic() + 60
    while not all(map(is_gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(is_gone, pids))
    assert {path.name for path in Path("/dev/shm").iterdir()} <= before
