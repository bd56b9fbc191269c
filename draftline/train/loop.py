"""The drafter's half of the pipeline. Start reading here.

    rows --> step --> count --> evaluate? --> log? --> save? --> rows ...

What a step does is in `step.py`; where rows come from is the engine's matter; `run.py` puts the parts together.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from draftline.config import TrainConfig
from draftline.errors import Interrupted, StorageError, UpdateError
from draftline.records import PackedBatch
from draftline.train.checkpoint import TrainState
from draftline.train.log import Record, RunLog
from draftline.train.step import StepResult


@dataclass(frozen=True)
class LoopParts:
    """What the loop calls.

    Attributes:
        step: moves the drafter by the rows of one optimiser step.
        evaluate: figures of the drafter on held-out data, none if nothing is held out; the checkpoint with the
            highest `streak` is the best.
        save: makes the present state survive the process.
        stop_requested: whether the user has asked to stop (Ctrl-C, SIGTERM).
        log: writes lines and shows progress.
    """

    step: Callable[[Sequence[PackedBatch]], StepResult]
    evaluate: Callable[[], Record]
    save: Callable[[TrainState], None]
    stop_requested: Callable[[], bool]
    log: RunLog


class DrafterTrainLoop:
    """Takes rows until the last step, and between steps logs, evaluates and saves.

    Arguments:
        rows: packed rows on the drafter's device, from `state.next_row` on.
        parts: what is done with them.
        config: how often something is written.
        total_steps: optimiser steps of the whole run.
        state: where the run stands; the loop updates it.
    """

    def __init__(
        self,
        *,
        rows: Iterator[PackedBatch],
        parts: LoopParts,
        config: TrainConfig,
        total_steps: int,
        state: TrainState,
    ) -> None:
        self.rows, self.parts, self.config, self.total_steps, self.state = rows, parts, config, total_steps, state

    def run(self) -> None:
        """Train to the end.

        Raises:
            Interrupted: the user asked to stop; the step was finished and the state saved.
            UpdateError: the optimiser failed half-way; what was saved last is the newest sound state.
            Exception: whatever else fails, rows, a step, an evaluation or a line: the state after the last complete
                step is sound and was saved.
        """
        try:
            self._steps()
        except (Interrupted, UpdateError):
            raise
        except Exception:
            with contextlib.suppress(StorageError):  # must not hide what failed first
                self.parts.save(self.state)
            raise

    def _steps(self) -> None:
        state, parts = self.state, self.parts
        started = time.perf_counter() - state.seconds
        while state.step < self.total_steps:
            batches = self._next_rows()
            result = parts.step(batches)
            state.count(result.metrics, next_row=batches[-1].sequence_number + 1)
            state.seconds = time.perf_counter() - started
            parts.log.advance(state)
            heldout = parts.evaluate() if self._due(self.config.eval_every) else {}
            improved = "streak" in heldout and state.is_best(heldout["streak"])
            if heldout or self._due(self.config.log_every):
                parts.log.write(state, result, heldout)
            if improved or self._due(self.config.save_every):
                parts.save(state)
            if parts.stop_requested() and state.step < self.total_steps:
                parts.save(state)
                raise Interrupted(
                    f"stopped after step {state.step} of {self.total_steps}, saved: continue with --resume"
                )

    def _due(self, every: int) -> bool:
        return self.state.step % every == 0 or self.state.step == self.total_steps

    def _next_rows(self) -> list[PackedBatch]:
        """All rows of the next optimiser step."""
        batches: list[PackedBatch] = []
        while not batches or not batches[-1].last_of_step:
            batches.append(next(self.rows))
        return batches
