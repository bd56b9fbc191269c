"""The drafter's half of the pipeline. Start reading here.

    rows --> step --> count --> evaluate? --> log? --> save? --> rows ...

What a step does is in `step.py`; where rows come from is the engine's matter; `run.py` puts the parts together.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from draftline.errors import Interrupted, StorageError, UpdateError
from draftline.records import PackedBatch
from draftline.train.checkpoint import TrainState
from draftline.train.log import Record, RunLog
from draftline.train.step import Drafter


@dataclass
class DrafterTrainLoop:
    """Takes rows until the last step, and between steps logs, evaluates and saves.

    Attributes:
        drafter: moved by the rows of one optimiser step at a time.
        rows: packed rows on the drafter's device, from `state.next_row` on.
        total_steps: optimiser steps of the whole run.
        state: where the run stands; the loop updates it.
        log: writes lines and shows progress.
        evaluate: figures of the drafter on held-out data, none if nothing is held out; the checkpoint with the
            highest `streak` is the best.
        save: makes the present state survive the process.
        stop_requested: whether the user has asked to stop (Ctrl-C, SIGTERM).
        heldout: figures of the last evaluation.
    """

    drafter: Drafter
    rows: Iterator[PackedBatch]
    total_steps: int
    state: TrainState
    log: RunLog
    evaluate: Callable[[], Record]
    save: Callable[[TrainState], None]
    stop_requested: Callable[[], bool]
    heldout: Record = field(default_factory=dict)

    def run(self) -> None:
        """Train to the end.

        Raises:
            Interrupted: the user asked to stop; the step was finished and the state saved.
            UpdateError: the optimiser failed half-way; what was saved last is the newest sound state.
            Exception: whatever else fails, rows, a step, an evaluation or a line: the state after the last complete
                step is sound and was saved.
        """
        state, config = self.state, self.drafter.config.train
        started = time.perf_counter() - state.seconds
        with self._saving_what_is_sound():
            while state.step < self.total_steps:
                batches = self._next_rows()
                result = self.drafter.step(batches)
                state.count(result.metrics, next_row=batches[-1].sequence_number + 1)
                state.seconds = time.perf_counter() - started
                self.log.advance(state)
                heldout = self.evaluate() if self._due(config.eval_every) else {}
                self.heldout = heldout or self.heldout
                improved = "streak" in heldout and state.note_streak(heldout["streak"])
                if heldout or self._due(config.log_every):
                    self.log.write(state, result, heldout)
                if improved or self._due(config.save_every):
                    self.save(state)
                if self.stop_requested() and state.step < self.total_steps:
                    self.save(state)
                    done = f"stopped after step {state.step} of {self.total_steps}, saved"
                    raise Interrupted(f"{done}: continue with --resume")

    @contextlib.contextmanager
    def _saving_what_is_sound(self) -> Iterator[None]:
        try:
            yield
        except (Interrupted, UpdateError):
            raise
        except Exception:
            with contextlib.suppress(StorageError):  # must not hide what failed first
                self.save(self.state)
            raise

    def _due(self, every: int) -> bool:
        return self.state.step % every == 0 or self.state.step == self.total_steps

    def _next_rows(self) -> list[PackedBatch]:
        """All rows of the next optimiser step."""
        batches: list[PackedBatch] = []
        while not batches or not batches[-1].last_of_step:
            batches.append(next(self.rows))
        return batches
