"""What a run writes while it runs.

    metrics.jsonl   what was learned: the same, line by line, however often the run was interrupted (but for `seconds`)
    speed.jsonl     how fast, and who waited for whom: different each time
    tensorboard/    the scalars of both

A line of `metrics.jsonl` averages over all steps since the line before. After a resume, lines later than the
checkpoint are cut off, a torn last one included, and TensorBoard is told to forget what it has of those steps.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from draftline.config import LossConfig
from draftline.records import StepMetrics
from draftline.storage import storage_errors, without_nan, write_text
from draftline.train.display import Display
from draftline.train.history import METRICS_FILE, SPEED_FILE, whole_lines
from draftline.train.state import TrainState
from draftline.train.step import StepResult
from draftline.transfer.statistics import PipelineStatistics

Record = dict[str, Any]
"""One line: numbers, lists of numbers, and None where there is nothing to divide by."""


def metrics_record(metrics: StepMetrics, loss: LossConfig) -> Record:
    """Sums divided: the figures of training steps and of held-out rows alike."""
    denominator = metrics.slots if loss.denominator == "slots" else metrics.weight_sum
    return {
        "loss": metrics.loss_sum / denominator if denominator else math.nan,
        "accuracy": metrics.accuracy,
        "streak": metrics.streak,
        "data_accuracy": metrics.data_accuracy,
        "accuracy_by_position": metrics.accuracy_by_position,
        "conditional_accuracy_by_position": metrics.conditional_accuracy_by_position,
    }


class JsonLines:
    """A file with one JSON object per line, each with a `step`.

    Arguments:
        path: the file; lines of steps after `last_step`, and a torn last line, are cut off.
        last_step: step from which the run continues, 0 at its start.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self._path = path
        if path.exists():
            kept = [line for line, record in whole_lines(path) if record["step"] <= last_step]
            write_text(path, b"".join(kept).decode("utf-8"))
        with storage_errors(path):
            self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append one line; it is readable by others at once."""
        with storage_errors(self._path):
            self._file.write(json.dumps(without_nan(record)) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        with storage_errors(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with storage_errors(self._path):
            self._file.close()


class RunLog:
    """Writes the files above and feeds the display.

    Arguments:
        folder: run folder.
        state: where the run stands; later lines are cut off.
        learning_rate: rate of an update, by its number from 0.
        loss: settings, for the denominator of the logged loss.
        statistics: snapshot of the engine.
        display: what the user sees.
    """

    def __init__(
        self,
        *,
        folder: Path,
        state: TrainState,
        learning_rate: Callable[[int], float],
        loss: LossConfig,
        statistics: Callable[[], PipelineStatistics],
        display: Display,
    ) -> None:
        self._learning_rate = learning_rate
        self._loss = loss
        self._display = display
        self._metrics = JsonLines(folder / METRICS_FILE, state.step)
        self._speed = JsonLines(folder / SPEED_FILE, state.step)
        with storage_errors(folder / "tensorboard"):
            self._scalars = SummaryWriter(folder / "tensorboard", purge_step=state.step + 1)
        self._meter = SpeedMeter(statistics, state)

    def advance(self, state: TrainState) -> None:
        """Move the bar."""
        self._display.advance(state.step)

    def write(self, state: TrainState, result: StepResult, heldout: Record) -> None:
        """Write one line to each file; the metrics since the line before are consumed."""
        record = {
            "step": state.step,
            "tokens": state.tokens,
            "seconds": round(state.seconds, 3),
            **metrics_record(state.take_window(), self._loss),
            "learning_rate": self._learning_rate(state.step - 1),
            "grad_norm": result.grad_norm,
            **{f"heldout_{name}": value for name, value in heldout.items()},
        }
        speed = self._meter.read(state)
        self._metrics.write(record)
        self._speed.write({"step": state.step, "seconds": record["seconds"], **speed})
        self._write_scalars(record, speed)
        self._display.show(_sentence(record, speed))

    def sync(self) -> None:
        """Bring the lines to the disk before a checkpoint says that they are there."""
        self._metrics.sync()
        self._speed.sync()

    def close(self) -> None:
        """Close everything, also where one of the files refuses."""
        with ExitStack() as stack:
            stack.callback(self._display.close)
            stack.enter_context(storage_errors(Path(self._scalars.log_dir)))
            stack.callback(self._scalars.close)
            stack.callback(self._speed.close)
            stack.callback(self._metrics.close)

    def _write_scalars(self, record: Record, speed: Record) -> None:
        step = record["step"]
        named = {_tag(name): value for name, value in record.items() if name != "step"}
        named |= {f"speed/{name}": value for name, value in speed.items()}
        with storage_errors(Path(self._scalars.log_dir)):
            for tag, value in named.items():
                for place, number in enumerate(value) if isinstance(value, list) else [(None, value)]:
                    if number is not None and math.isfinite(number):
                        self._scalars.add_scalar(tag if place is None else f"{tag}/{place}", number, step)
            self._scalars.flush()


class SpeedMeter:
    """Rates between two lines, from snapshots of the engine and the clock.

    Arguments:
        statistics: snapshot of the engine.
        state: progress at the start of this session.
    """

    def __init__(self, statistics: Callable[[], PipelineStatistics], state: TrainState) -> None:
        self._statistics = statistics
        self._before = statistics()
        self._tokens = state.tokens
        self._clock = time.perf_counter()

    def read(self, state: TrainState) -> Record:
        """Rates since the last call.

        A rate is tokens per second of the stage's own work, waiting excluded: the slower one limits the run. A share
        is waiting time in elapsed time, per target loop. Evaluation and checkpoints count as the drafter's work.
        """
        now, after, before = time.perf_counter(), self._statistics(), self._before
        elapsed = now - self._clock
        drafter_wait = after.drafter_wait_seconds - before.drafter_wait_seconds
        target_wait = after.target_wait_seconds - before.target_wait_seconds
        target_busy = after.target_busy_seconds - before.target_busy_seconds
        record = {
            "target_tokens_per_second": after.target_loops
            * _rate(after.target_tokens - before.target_tokens, target_busy),
            "drafter_tokens_per_second": _rate(state.tokens - self._tokens, elapsed - drafter_wait),
            "target_wait_share": _rate(target_wait / after.target_loops, elapsed),
            "drafter_wait_share": _rate(drafter_wait, elapsed),
            "queue_rows": after.queue_rows,
            "queue_bytes": after.queue_bytes,
        }
        self._clock, self._before, self._tokens = now, after, state.tokens
        return record


def _tag(name: str) -> str:
    return f"heldout/{name.removeprefix('heldout_')}" if name.startswith("heldout_") else f"train/{name}"


def _sentence(record: Record, speed: Record) -> str:
    """The line for people."""
    words = [f"loss {record['loss']:.3f}", f"accuracy {record['accuracy']:.3f}", f"streak {record['streak']:.2f}"]
    if "heldout_streak" in record:
        words.append(f"held-out accuracy {record['heldout_accuracy']:.3f} streak {record['heldout_streak']:.2f}")
    words.append(f"target {speed['target_tokens_per_second']:,.0f} tok/s")
    words.append(f"drafter {speed['drafter_tokens_per_second']:,.0f} tok/s")
    if speed["queue_rows"]:
        words.append(f"queue {speed['queue_rows']} rows {speed['queue_bytes'] / 1e6:,.0f} MB")
    return "  ".join(words)


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
