"""What the loop does when, with fakes for everything it calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from draftline.config import RunConfig, TrainConfig
from draftline.data.sampler import Deal
from draftline.draft.loss import StepMetrics
from draftline.errors import Interrupted, PipelineError, StorageError, UpdateError
from draftline.records import PackedBatch
from draftline.train.checkpoint import TrainState
from draftline.train.log import Record
from draftline.train.loop import DrafterTrainLoop
from draftline.train.step import StepResult
from tests.transfer.rows import make_row

ROWS_PER_STEP = 2


class Recorder:
    """Stands for drafter, log and checkpoints, and notes what is asked of it."""

    def __init__(self, streaks: Sequence[float] = ()) -> None:
        self.config = RunConfig()
        self.seams: tuple[int, ...] = ()
        self.events: list[tuple[str, int]] = []
        self.step_now = 0
        self._streaks = iter(streaks)

    def step(self, batches: Sequence[PackedBatch]) -> StepResult:
        assert [batch.sequence_number for batch in batches] == [2 * self.step_now, 2 * self.step_now + 1]
        self.step_now += 1
        return StepResult(replace(StepMetrics.zero(4), tokens=10), grad_norm=1.0)

    def evaluate(self) -> Record:
        self.events.append(("evaluate", self.step_now))
        streak = next(self._streaks, None)
        return {} if streak is None else {"streak": streak}

    def save(self, state: TrainState) -> None:
        self.events.append(("save", state.step))

    def advance(self, state: TrainState) -> None:
        assert state.step == self.step_now

    def write(self, state: TrainState, _result: StepResult, heldout: Record) -> None:
        self.events.append(("evaluated line" if heldout else "line", state.step))

    def of(self, kind: str) -> list[int]:
        return [step for name, step in self.events if name == kind]


def rows(steps: int) -> Iterator[PackedBatch]:
    for number in range(ROWS_PER_STEP * steps):
        yield replace(
            make_row(number), step=number // ROWS_PER_STEP, last_of_step=number % ROWS_PER_STEP == ROWS_PER_STEP - 1
        )


def make_loop(
    recorder: Recorder,
    source: Iterator[PackedBatch],
    *,
    every: tuple[int, int, int],
    steps: int = 10,
    stop_requested: Callable[[], bool] = lambda: False,
) -> DrafterTrainLoop:
    log_every, eval_every, save_every = every
    recorder.config = RunConfig(train=TrainConfig(log_every=log_every, eval_every=eval_every, save_every=save_every))
    return DrafterTrainLoop(
        drafter=recorder,  # type: ignore[arg-type]
        rows=source,
        deal=Deal(ROWS_PER_STEP * steps, ROWS_PER_STEP),
        total_steps=steps,
        state=TrainState(StepMetrics.zero(4)),
        log=recorder,  # type: ignore[arg-type]
        evaluate=recorder.evaluate,
        save=recorder.save,
        rescue=recorder.save,
        stop_requested=stop_requested,
    )


def test_each_is_done_when_it_is_due_and_at_the_end() -> None:
    recorder = Recorder()
    loop = make_loop(recorder, rows(10), every=(3, 4, 6))
    loop.run()
    assert recorder.of("line") == [3, 6, 9, 10]
    assert recorder.of("evaluate") == [4, 8, 10]
    assert recorder.of("save") == [6, 10]
    assert (loop.state.step, loop.state.next_row, loop.state.tokens) == (10, 20, 100)


def test_the_end_of_a_run_that_was_extended_counts_as_its_end() -> None:
    recorder = Recorder()
    recorder.seams = (5,)
    make_loop(recorder, rows(10), every=(3, 4, 6)).run()
    assert recorder.of("line") == [3, 5, 6, 9, 10]
    assert recorder.of("evaluate") == [4, 5, 8, 10]
    assert recorder.of("save") == [5, 6, 10]


def test_an_evaluation_writes_a_line_and_an_improvement_a_checkpoint() -> None:
    recorder = Recorder(streaks=[0.5, 0.4, float("nan"), 0.6, 0.6])
    loop = make_loop(recorder, rows(10), every=(100, 2, 100))
    loop.run()
    assert recorder.of("evaluated line") == [2, 4, 6, 8, 10]
    assert recorder.of("save") == [2, 8, 10]
    assert (loop.state.best_step, loop.state.best_streak) == (8, 0.6)


def test_a_stop_finishes_the_step_and_saves() -> None:
    recorder = Recorder()
    loop = make_loop(recorder, rows(10), every=(100, 100, 100), stop_requested=lambda: recorder.step_now >= 4)
    with pytest.raises(Interrupted, match="after step 4 of 10"):
        loop.run()
    assert recorder.events == [("save", 4)]


def test_a_stop_at_the_last_step_is_the_end() -> None:
    recorder = Recorder()
    make_loop(recorder, rows(10), every=(100, 100, 100), stop_requested=lambda: recorder.step_now >= 10).run()
    assert recorder.of("save") == [10]


def broken(steps: int) -> Iterator[PackedBatch]:
    yield from rows(steps)
    yield replace(make_row(ROWS_PER_STEP * steps), last_of_step=False)
    raise OSError("the target is gone")


def test_rows_that_fail_save_the_state_of_the_last_whole_step() -> None:
    recorder = Recorder()
    with pytest.raises(OSError, match="gone"):
        make_loop(recorder, broken(3), every=(100, 100, 100)).run()
    assert recorder.events == [("save", 3)]


def test_a_full_disk_does_not_hide_why_rows_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: Recorder, _state: TrainState) -> None:
        raise StorageError("full")

    monkeypatch.setattr(Recorder, "save", refuse)
    with pytest.raises(OSError, match="gone"):
        make_loop(Recorder(), broken(3), every=(100, 100, 100)).run()


@pytest.mark.parametrize("what", ["step", "evaluate", "write"])
def test_whatever_fails_the_last_sound_state_is_saved(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    recorder = Recorder(streaks=[0.5] * 9)
    original = getattr(recorder, what)

    def fail_third(*words: object) -> object:
        if recorder.step_now == 3:
            raise PipelineError("not finite")
        return original(*words)

    monkeypatch.setattr(recorder, what, fail_third)
    with pytest.raises(PipelineError, match="not finite"):
        make_loop(recorder, rows(9), every=(1, 1, 100)).run()
    assert recorder.events[-1] == ("save", 3)


def test_an_update_that_fails_half_way_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()

    def fail(_batches: Sequence[PackedBatch]) -> StepResult:
        raise UpdateError("out of memory")

    monkeypatch.setattr(recorder, "step", fail)
    with pytest.raises(UpdateError):
        make_loop(recorder, rows(3), every=(1, 1, 1)).run()
    assert recorder.events == []
