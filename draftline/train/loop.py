"""The drafter's half of the pipeline. Start reading here.

    rows --> step --> count --> evaluate? --> log? --> save? --> rows ...

What a step does is in `step.py`; where rows come from is the engine's matter; `run.py` puts the parts together.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from draftline.data.sampler import Deal
from draftline.errors import Interrupted, StorageError, UpdateError
from draftline.records import PackedBatch
from draftline.train.checkpoint import TrainState
from draftline.train.log import Record, StepLog
from draftline.train.step import Drafter


@dataclass
class DrafterTrainLoop:
    """Takes rows, on the drafter's device and from `state.next_row` on, until the last of `total_steps` steps.

    `deal` says how many of a step's rows are here and not on other ranks. `evaluate` gives figures on held-out data,
    none if nothing is held out; `heldout` keeps the last. The checkpoint with the highest `streak` is the best. `save`
    makes a state survive the process, with all ranks; `rescue` without the others, where one has failed.
    """

    drafter: Drafter
    rows: Iterator[PackedBatch]
    deal: Deal
    total_steps: int
    state: TrainState
    log: StepLog
    evaluate: Callable[[], Record]
    save: Callable[[TrainState], None]
    rescue: Callable[[TrainState], None]
    stop_requested: Callable[[], bool]
    heldout: Record = field(default_factory=dict)

    def run(self) -> None:
        """Train to the end. Whatever fails, rows, a step or a line: the state after the last whole step was saved.

        Raises:
            Interrupted: the user asked to stop (Ctrl-C, SIGTERM); the step was finished and the state saved.
            UpdateError: the optimiser failed half-way; what was saved last is the newest sound state.
        """
        state, config = self.state, self.drafter.config.train
        started = time.perf_counter() - state.seconds
        try:
            while state.step < self.total_steps:
                batches = [next(self.rows) for _ in range(self.deal.rows_of_step(state.step))]
                result = self.drafter.step(batches) if batches else self.drafter.idle(state.step)
                state.count(result.metrics, next_row=self.deal.first_row(state.step + 1))
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
        except (Interrupted, UpdateError):
            raise
        except Exception:  # the last whole step is sound; saving it must not hide what failed first
            with contextlib.suppress(StorageError):
                self.rescue(state)
            raise

    def _due(self, every: int) -> bool:
        ends = (self.total_steps, *self.drafter.seams)
        return self.state.step % every == 0 or self.state.step in ends
