"""What a run measured while it trained, read from wherever it was written.

    our run folder          what its `RunFolder` reads
    a JSONL file            one object per line with a `step`
    a CSV file              a step column, value columns, if there are any also tokens and seconds
    a TensorBoard folder    the scalars of its event files; seconds are wall-clock times since the first

A value that is missing at a step (an empty cell, null) was not measured there; anything else that is not a finite
number is an error when that value is asked for, so that damage in a column nobody compares stops nothing.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draftline.errors import DataError
from draftline.train.log import Cell, Columns, FloatArray, read_columns
from draftline.train.run_folder import IDENTITY_FILE, METRICS_FILE, RunFolder

Axis = Literal["step", "tokens", "seconds"]
AXES: tuple[Axis, ...] = ("step", "tokens", "seconds")
"""What two runs can be held against each other at the same amount of."""

AXIS_NAMES: Mapping[str, Axis] = {
    "step": "step",
    "steps": "step",
    "global_step": "step",
    "iteration": "step",
    "iter": "step",
    "tokens": "tokens",
    "num_tokens": "tokens",
    "seconds": "seconds",
    "_runtime": "seconds",
    "relative time": "seconds",
}
"""Column names, in lower case, that say how far a run is; `Step` of TensorBoard's and W&B's exports among them."""

EVENT_FILES = "events.out.tfevents.*"

DELIMITERS = ",;\t|"
"""Between the cells of a CSV file: the one that its header has most of."""


@dataclass(frozen=True)
class Series:
    """One value of one run, checked.

    Attributes:
        axes: [n] positions on each axis that the source knows; `step` always, strictly increasing.
        values: [n], finite.
    """

    axes: Mapping[Axis, FloatArray]
    values: FloatArray


@dataclass(frozen=True)
class Trajectory:
    """All that a run measured.

    Attributes:
        path: what was named.
        log: measurements, in the order of the file.
        identity: content of run.json, empty for a log of another program.
        file: where the lines are that errors count.
        notes: what a reader should know about the file: a torn line, a run that is not at its end.
    """

    path: Path
    log: Columns
    identity: Mapping[str, Any]
    file: Path
    notes: tuple[str, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Values that were measured at least once."""
        return tuple(name for name in self.log.names if name not in AXES)

    @property
    def tokens_per_second(self) -> float | None:
        """Over the whole run; None if it does not record both."""
        last = int(np.argmax(self.log.steps))
        tokens, seconds = self.places["tokens"][last], self.places["seconds"][last]
        return float(tokens / seconds) if tokens > 0 and seconds > 0 else None

    @cached_property
    def places(self) -> Mapping[Axis, FloatArray]:
        """Per axis, [rows of the log] how far the run was in each, NaN where it does not say.

        Raises:
            DataError: something there is no finite number.
        """
        places: dict[Axis, FloatArray] = {axis: np.full(self.log.whole, np.nan) for axis in AXES}
        for axis, values in places.items():
            for cell in self.log.cells(axis):
                values[cell.row] = self._number(axis, cell)
        return places

    def span(self, name: str) -> tuple[float, float]:
        """First and last step at which a value was measured."""
        steps = self.log.steps[[cell.row for cell in self.log.cells(name)]]
        return float(steps.min()), float(steps.max())

    def series(self, name: str) -> Series:
        """One value over the run, in the order of the steps; of two measurements at one step the later one counts.

        Raises:
            DataError: something there is no finite number.
        """
        by_step = {self.log.steps[cell.row]: (cell.row, self._number(name, cell)) for cell in self.log.cells(name)}
        rows, values = zip(*(by_step[step] for step in sorted(by_step)), strict=True)
        axes: dict[Axis, FloatArray] = {}
        for axis, places in self.places.items():
            here = places[list(rows)]
            if not np.isnan(here).any() and np.all(np.diff(here) >= 0):
                axes[axis] = here
        return Series(axes, np.array(values))

    def _number(self, name: str, cell: Cell) -> float:
        line, step = self.log.numbers[cell.row], self.log.steps[cell.row]
        place = f"line {line}" if self.file.is_file() else f"step {step:g}"
        return _number(cell.value, f"{self.file} {place}: {name}")


def read_trajectory(path: Path) -> Trajectory:
    """Read a run folder, a JSONL or CSV file or a TensorBoard folder.

    Raises:
        DataError: there is nothing of that kind, or it is empty or damaged.
        CheckpointError: a file of a run folder is damaged.
    """
    if path.is_file():
        return _read_jsonl(path, read_columns(path)) if path.suffix == ".jsonl" else _read_csv(path)
    if not path.exists():
        raise DataError(f"{path} does not exist: name a run folder, a CSV file or a TensorBoard folder")
    run = RunFolder(path)
    if run.has_metrics:
        return _read_run(run)
    if any(path.glob(EVENT_FILES)):
        return _read_events(path)
    raise DataError(f"{path} is not a run: {_what_is_missing(run)}")


def _what_is_missing(run: RunFolder) -> str:
    if run.exists:
        return f"it has settings but no {METRICS_FILE} yet; compare again after its first logged step"
    below = sorted({str(found.parent.relative_to(run.path)) for found in run.path.rglob(EVENT_FILES)})
    if below:
        return f"its TensorBoard logs are in {', '.join(below[:4])}; name one of them"
    return f"it has neither {METRICS_FILE} nor TensorBoard event files; name the folder that `draftline train` wrote"


def _read_run(run: RunFolder) -> Trajectory:
    log, total = _read_jsonl(run.metrics_path, run.metrics), run.total_steps
    reached, notes = int(run.metrics.steps.max()), [*log.notes]
    if total is not None and reached < total:
        notes.append(f"{run.path} is at step {reached:,} of {total:,}: compared as far as it goes")
    if not run.identity:
        notes.append(f"{run.path} has no {IDENTITY_FILE}: its settings and data are not compared")
    return Trajectory(run.path, run.metrics, run.identity, log.file, tuple(notes))


def _read_jsonl(path: Path, log: Columns) -> Trajectory:
    if not log.whole and log.lines:
        raise DataError(f"{path} line 1 is torn or no JSON object with a step: there is nothing to compare")
    if not log.whole:
        raise DataError(f"{path} is empty: compare again after the run has logged its first step")
    torn = f"{path} line {log.whole + 1} is torn: {log.lines - log.whole} line(s) from there on are left out"
    return Trajectory(path, log, {}, path, (*([torn] if log.whole < log.lines else []), *_disorder(path, log)))


def _read_csv(path: Path) -> Trajectory:
    lines = _text(path).splitlines()
    if not any(line.strip() for line in lines):
        raise DataError(f"{path} is empty: give a log with a step column and values")
    table = csv.reader(lines, delimiter=max(DELIMITERS, key=lines[0].count))
    header = [name.strip() for name in next(table)]
    if twice := sorted({name for name in header if name and header.count(name) > 1}):
        raise DataError(f"{path} has two columns called {twice[0]!r}: rename one")
    axes = {AXIS_NAMES[name.lower()]: name for name in reversed(header) if name.lower() in AXIS_NAMES}
    if "step" not in axes:
        raise DataError(f"{path} has no step column: its header is {','.join(header)[:200]!r}; call one column step")
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, cells in enumerate(table, 2):
        if len(cells) > len(header):
            raise DataError(f"{path} line {number} has {len(cells)} cells for {len(header)} columns: fix the line")
        row: dict[str, Any] = {name: cell for name, cell in zip(header, cells, strict=False) if cell.strip()}
        if row:
            rows.append((number, _with_axes(path, number, row, axes)))
    if not rows:
        raise DataError(f"{path} has a header but no line: nothing was measured")
    log = Columns(rows, len(lines))
    return Trajectory(path, log, {}, path, tuple(_disorder(path, log)))


def _disorder(path: Path, log: Columns) -> list[str]:
    """What is said of lines that go back to an earlier step, as a log does to which a continued run was appended."""
    back = np.flatnonzero(np.diff(log.steps) < 0)
    if not len(back):
        return []
    line = log.numbers[back[0] + 1]
    return [f"{path} goes back to an earlier step in line {line}: of two values at one step the later line counts"]


def _with_axes(path: Path, number: int, row: dict[str, Any], axes: Mapping[Axis, str]) -> dict[str, Any]:
    """The row with its positions under our names; the step, which every row needs, as a number."""
    places: dict[str, Any] = {axis: row.pop(name) for axis, name in axes.items() if name in row}
    step = _number(places.pop("step", ""), f"{path} line {number}: {axes['step']}")
    return {**row, **places, "step": step}


def _read_events(folder: Path) -> Trajectory:
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
    from tensorboard.util import tensor_util

    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0, "tensors": 0}).Reload()
    found: dict[str, list[tuple[int, float, float]]] = {}
    for tag in events.Tags()["scalars"]:
        found[tag] = [(event.step, event.wall_time, event.value) for event in events.Scalars(tag)]
    for tag in events.Tags()["tensors"]:
        numbers = [(e.step, e.wall_time, tensor_util.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]
        if all(number.shape == () and number.dtype.kind == "f" for _, _, number in numbers):
            found[tag] = [(step, time, float(number)) for step, time, number in numbers]
    if not any(found.values()):
        raise DataError(f"{folder} has event files without a scalar: nothing to compare was logged")
    first = min(time for events_of_tag in found.values() for _, time, _ in events_of_tag)
    records = [
        {"step": float(step), "seconds": time - first, own_name(tag): value}
        for tag, measured in found.items()
        for step, time, value in measured
    ]
    return Trajectory(folder, Columns(enumerate(records, 1), len(records)), {}, folder)


def own_name(tag: str) -> str:
    """Our name of a scalar that `draftline train` writes to TensorBoard under this tag."""
    return tag.replace("heldout/", "heldout_", 1).removeprefix("train/")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(f"{path} cannot be read ({reason}): name a run folder, a CSV file or a JSONL file") from error


def _number(value: Any, where: str) -> float:
    """A finite number, or a `DataError` that says where there is none."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} is {value!r}, which is not a number: fix or delete the line") from error
    if not math.isfinite(number):
        raise DataError(f"{where} is {value}: the run diverged there or measured nothing; cut the file before it")
    return number
