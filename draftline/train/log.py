"""The lines of a run: written while it runs, read back as columns, and shown to whoever watches.

A line of metrics.jsonl averages over all steps since the line before. After a resume, lines later than the checkpoint
are cut off, a torn last one included, and TensorBoard is told to forget what it has of those steps. Does not import
torch when it is loaded: programs that only read lines start at once.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftline.config import LossConfig
from draftline.errors import CheckpointError
from draftline.storage import reason_of, storage_errors, without_nan, write_bytes

if TYPE_CHECKING:
    from draftline.draft.loss import StepMetrics
    from draftline.train.checkpoint import TrainState
    from draftline.train.run_folder import RunFolder
    from draftline.train.step import StepResult
    from draftline.train.trackers import Trackers
    from draftline.transfer.stage import PipelineStatistics

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
        **({"lost_mass": metrics.lost_mass / max(1, metrics.slots)} if loss.top_k is not None else {}),
    }


class StepLog(Protocol):
    """What is told of each step; see `RunLog`."""

    def advance(self, state: TrainState) -> None: ...

    def write(self, state: TrainState, result: StepResult, heldout: Record) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class SilentLog:
    """Of the ranks that write nothing."""

    def advance(self, _state: TrainState) -> None:
        """Nobody watches."""

    def write(self, state: TrainState, _result: StepResult, _heldout: Record) -> None:
        """Begin the next window where the rank that writes does."""
        state.take_window()

    def sync(self) -> None:
        """There is nothing to bring to the disk."""

    def close(self) -> None:
        """Nothing was opened."""


class RunLog:
    """Writes what was learned and how fast, sends the scalars of both to trackers, and feeds the display.

    Args:
        run: its folder.
        state: where the run stands; later lines are cut off.
        learning_rate: rate of an update, by its number from 0.
        loss: settings, for the denominator of the logged loss.
        statistics: snapshot of the engine.
        display: what the user sees.
        trackers: where the scalars go as well.
    """

    def __init__(
        self,
        *,
        run: RunFolder,
        state: TrainState,
        learning_rate: Callable[[int], float],
        loss: LossConfig,
        statistics: Callable[[], PipelineStatistics],
        display: Display,
        trackers: Trackers,
    ) -> None:
        self._learning_rate = learning_rate
        self._loss = loss
        self._display = display
        self._metrics, self._speed = run.continue_lines(state.step, state.logged_step)
        self._seams = run.seams
        self._trackers = trackers
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
            **metrics_record(state.window, self._loss),
            "learning_rate": self._learning_rate(state.step - 1),
            "grad_norm": result.grad_norm,
            **({"extension": number} if (number := bisect_left(self._seams, state.step)) else {}),
            **{f"heldout_{name}": value for name, value in heldout.items()},
        }
        speed = self._meter.read(state)
        self._metrics.write(record)
        state.take_window()  # not before: were the disk full, the next line would average over these steps as well
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
            stack.callback(self._trackers.close)
            stack.callback(self._speed.close)
            stack.callback(self._metrics.close)

    def _write_scalars(self, record: Record, speed: Record) -> None:
        named = {_tag(name): value for name, value in record.items() if name != "step"}
        named |= {f"speed/{name}": value for name, value in speed.items()}
        scalars: dict[str, float] = {}
        for tag, value in named.items():
            for place, number in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if number is not None and math.isfinite(number):
                    scalars[tag if place is None else f"{tag}/{place}"] = number
        self._trackers.log(scalars, record["step"])


class SpeedMeter:
    """Rates between two lines, from snapshots of the engine and the clock.

    Args:
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
    for half in ("target", "drafter"):
        if rate := speed[f"{half}_tokens_per_second"]:  # a target that has captured everything has none
            words.append(f"{half} {rate:,.0f} tokens/s")
    if speed["queue_rows"]:
        words.append(f"queued {speed['queue_rows']:,} row(s), {speed['queue_bytes'] / 1e6:,.0f} MB")
    return "  ".join(words)


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


class Display(Protocol):
    """What a person sees of a run."""

    def advance(self, step: int) -> None:
        """A step is done."""

    def show(self, text: str) -> None:
        """The latest figures."""

    def close(self) -> None:
        """The run has ended."""


class NoDisplay:
    """Nobody watches."""

    def advance(self, step: int) -> None:
        """A step is done."""

    def show(self, text: str) -> None:
        """The latest figures."""

    def close(self) -> None:
        """The run has ended."""


def open_display(step: int, total_steps: int) -> Display:
    """The display that fits stderr, for a run that stands at `step`."""
    return BarDisplay(step, total_steps) if sys.stderr.isatty() else LineDisplay(step, total_steps)


class BarDisplay:
    """A bar that stays in its place, with the latest figures under it."""

    def __init__(self, step: int, total_steps: int) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeRemainingColumn(),
            TextColumn("left  {task.description}"),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("", total=total_steps, completed=step)
        self._progress.start()

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def show(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def close(self) -> None:
        self._progress.stop()


class LineDisplay:
    """One line per line of `metrics.jsonl`."""

    def __init__(self, step: int, total_steps: int) -> None:
        self._step = self._first_step = step
        self._total_steps = total_steps
        self._started = time.monotonic()

    def advance(self, step: int) -> None:
        self._step = step

    def show(self, text: str) -> None:
        seconds_per_step = (time.monotonic() - self._started) / max(1, self._step - self._first_step)
        left = timedelta(seconds=round(seconds_per_step * (self._total_steps - self._step)))
        print(f"step {self._step}/{self._total_steps}  {text}  left {left}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Every line has been printed."""


class JsonLines:
    """A file with one JSON object per line, each with a `step`.

    Args:
        path: the file; lines of steps after `last_step`, and torn lines, are cut off.
        last_step: step from which the run continues, 0 at its start.
        logged_step: step of the last line that the run has written up to then, 0 if that is not known.

    Raises:
        CheckpointError: lines of steps up to `last_step` are torn or missing, and the file is there.
        StorageError: the file cannot be written.
    """

    def __init__(self, path: Path, last_step: int, logged_step: int = 0) -> None:
        self._path = path
        if path.exists():
            write_bytes(path, b"".join(_lines_to_keep(path, last_step, logged_step)))
        with storage_errors(path):
            self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line; it is readable by others at once."""
        with storage_errors(self._path):
            self._file.write(json.dumps(without_nan(dict(record))) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        with storage_errors(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with storage_errors(self._path):
            self._file.close()


FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Column:
    """One figure over the run: the steps at which it was measured, and its values, [n] each, all finite."""

    steps: FloatArray
    values: FloatArray

    def __len__(self) -> int:
        return len(self.steps)


NOTHING = Column(np.zeros(0), np.zeros(0))


class Cell(NamedTuple):
    """What one line says of one figure: `value` is a finite number, or whatever else is written there."""

    row: int
    value: Any


class _Entries(NamedTuple):
    """What lines say of one figure: rows and numbers as flat arrays, NaN where `odd` holds something else."""

    rows: array[int]
    values: array[float]
    odd: dict[int, Any]


class Columns:
    """Lines with a `step`, turned into columns: of a run, or of a log that another program wrote.

    A list becomes one column per place, `name/0`, `name/1`, ..; what is None was not measured.

    Args:
        records: number of a line in its file, and what it says; `step` is a number in each.
        lines: all lines of the file, those behind a torn one included.

    Attributes:
        numbers: [n] which line of the file a row is.
        steps: [n].
        lines: as given.
    """

    def __init__(self, records: Iterable[tuple[int, Mapping[str, Any]]], lines: int) -> None:
        self.lines = lines
        numbers, steps = array("q"), array("d")
        self._by_name: dict[str, _Entries] = {}
        for row, (number, record) in enumerate(records):
            numbers.append(number)
            steps.append(record["step"])
            for name, value in record.items():
                if isinstance(value, list):
                    for place, entry in enumerate(value):
                        self._add(f"{name}/{place}", row, entry)
                else:
                    self._add(name, row, value)
        self.numbers, self.steps = np.array(numbers), np.array(steps)

    def _add(self, name: str, row: int, value: Any) -> None:
        if value is None:
            return
        entries = self._by_name.get(name)
        if entries is None:
            entries = self._by_name[name] = _Entries(array("q"), array("d"), {})
        rows, values, odd = entries
        number = value if type(value) is float else _number(value)
        if not math.isfinite(number):
            odd[len(rows)], number = value, math.nan
        rows.append(row)
        values.append(number)

    @property
    def whole(self) -> int:
        """Lines that could be read."""
        return len(self.steps)

    @property
    def last_step(self) -> int:
        """Of the last line that could be read, 0 without any."""
        return int(self.steps[-1]) if len(self.steps) else 0

    @property
    def names(self) -> tuple[str, ...]:
        """Columns in which anything is written, in the order in which they first appear."""
        return tuple(self._by_name)

    def __getitem__(self, name: str) -> Column:
        """A column's finite numbers; empty if it was never measured."""
        entries = self._by_name.get(name)
        if entries is None:
            return NOTHING
        rows, values = np.array(entries.rows), np.array(entries.values)
        finite = np.isfinite(values)
        return Column(self.steps[rows[finite]], values[finite])

    def places(self, name: str) -> dict[int, Column]:
        """Columns of a list, by place; those without a number are left out."""
        parts = ((key, *key.rpartition("/")[::2]) for key in self._by_name)
        found = {int(place): self[key] for key, start, place in parts if start == name}
        return {place: column for place, column in found.items() if len(column)}

    def cells(self, name: str) -> Iterator[Cell]:
        """Everything that is written in a column, also what is not a number, line by line."""
        entries = self._by_name.get(name)
        if entries is not None:
            for place, (row, value) in enumerate(zip(entries.rows, entries.values, strict=True)):
                yield Cell(row, entries.odd.get(place, value))


def read_columns(path: Path) -> Columns:
    """All that a file of lines measured, up to the first torn line; nothing if there is no such file.

    Raises:
        CheckpointError: the file cannot be opened.
    """
    if not path.exists():
        return Columns((), 0)
    return Columns(enumerate((record for _, record in whole_lines(path)), 1), sum(1 for _ in _lines(path)))


def whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Lines with what they say, up to the first that is torn: cut off, no JSON, or without a step."""
    for line in _lines(path):
        record = _record(line)
        if record is None:
            return
        yield line, record


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({reason_of(error)}): restore it from a copy") from error


def _record(line: bytes) -> dict[str, Any] | None:
    """What a line says, None if it is torn."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = line.endswith(b"\n") and isinstance(record, dict)
    return record if whole and type(record.get("step")) is int and abs(record["step"]) < 2**53 else None


def _lines_to_keep(path: Path, last_step: int, logged_step: int) -> Iterator[bytes]:
    """Lines of steps up to `last_step`. What a crash tears comes after them; a tear before them is damage."""
    torn = reached = 0
    for number, line in enumerate(_lines(path), 1):
        record = _record(line)
        if record is None:
            torn = torn or number
        elif record["step"] <= last_step:
            if torn:
                raise CheckpointError(
                    f"{path} line {torn} is torn, and lines behind it belong to the run: restore the file from a copy, "
                    "or delete that line to continue without it"
                )
            reached = record["step"]
            yield line
    if reached < logged_step:
        raise CheckpointError(
            f"{path} is whole up to step {reached}, and the run has written lines up to step {logged_step}: restore it "
            "from a copy, or delete it to continue without its lines"
        )


def _number(value: Any) -> float:
    """A number as a float, NaN for anything else."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan
