"""What a run measured while it trained, read from wherever it was written.

    our run folder          metrics.jsonl (see train/log.py) and run.json
    a JSONL file            one object per line with a `step`
    a CSV file              a step column, value columns, if there are any also tokens and seconds
    a TensorBoard folder    the scalars of its event files; seconds are wall-clock times since the first

A value that is missing at a step (an empty cell, null) was not measured there; anything else that is not a finite
number is an error when that value is asked for, so that damage in a column nobody compares stops nothing.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftline.errors import DataError
from draftline.train.log import whole_lines
from draftline.train.run_folder import CONFIG_FILE, IDENTITY_FILE, METRICS_FILE, RunFolder

Axis = Literal["step", "tokens", "seconds"]
AXES: tuple[Axis, ...] = ("step", "tokens", "seconds")
"""What two runs can be held against each other at the same amount of."""

FloatArray = NDArray[np.float64]

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


class Cell(NamedTuple):
    """One measurement as it was found: which line, how far the run was, and what is written there."""

    line: int
    step: float
    tokens: float | None
    seconds: float | None
    value: Any

    def place(self, axis: Axis) -> float | None:
        """How far the run was."""
        return {"step": self.step, "tokens": self.tokens, "seconds": self.seconds}[axis]


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
        cells: measurements by name of the value, in the order of the file.
        identity: content of run.json, empty for a log of another program.
        file: where the lines are that errors count.
        notes: what a reader should know about the file: a torn line, a run that is not at its end.
    """

    path: Path
    cells: Mapping[str, Sequence[Cell]]
    identity: Mapping[str, Any]
    file: Path
    notes: tuple[str, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Values that were measured at least once."""
        return tuple(name for name, cells in self.cells.items() if any(_written(cell.value) for cell in cells))

    @property
    def tokens_per_second(self) -> float | None:
        """Over the whole run; None if it does not record both."""
        cells = (cell for cells in self.cells.values() for cell in cells)
        last = max(cells, key=lambda cell: cell.step)
        return last.tokens / last.seconds if last.tokens and last.seconds else None

    def span(self, name: str) -> tuple[float, float]:
        """First and last step at which a value was measured."""
        steps = [cell.step for cell in self.cells[name] if _written(cell.value)]
        return min(steps), max(steps)

    def series(self, name: str) -> Series:
        """One value over the run, in the order of the steps; of two measurements at one step the later one counts.

        Raises:
            DataError: something there is no finite number.
        """
        by_step = {cell.step: (cell, self._number(name, cell)) for cell in self.cells[name] if _written(cell.value)}
        ordered = [by_step[step] for step in sorted(by_step)]
        axes: dict[Axis, FloatArray] = {}
        for axis in AXES:
            places = [cell.place(axis) for cell, _ in ordered]
            if None not in places and np.all(np.diff(np.array(places, dtype=np.float64)) >= 0):
                axes[axis] = np.array(places, dtype=np.float64)
        return Series(axes, np.array([value for _, value in ordered]))

    def _number(self, name: str, cell: Cell) -> float:
        place = f"line {cell.line}" if self.file.is_file() else f"step {cell.step:g}"
        return _number(cell.value, f"{self.file} {place}: {name}")


def read_trajectory(path: Path) -> Trajectory:
    """Read a run folder, a JSONL or CSV file or a TensorBoard folder.

    Raises:
        DataError: there is nothing of that kind, or it is empty or damaged.
        CheckpointError: run.json is damaged.
    """
    if path.is_file():
        return _read_jsonl(path, {}) if path.suffix == ".jsonl" else _read_csv(path)
    if not path.exists():
        raise DataError(f"{path} does not exist: name a run folder, a CSV file or a TensorBoard folder")
    if (path / METRICS_FILE).exists():
        return _read_run(path)
    if any(path.glob(EVENT_FILES)):
        return _read_events(path)
    raise DataError(f"{path} is not a run: {_what_is_missing(path)}")


def _what_is_missing(folder: Path) -> str:
    if (folder / CONFIG_FILE).exists():
        return f"it has settings but no {METRICS_FILE} yet; compare again after its first logged step"
    below = sorted({str(found.parent.relative_to(folder)) for found in folder.rglob(EVENT_FILES)})
    if below:
        return f"its TensorBoard logs are in {', '.join(below[:4])}; name one of them"
    return f"it has neither {METRICS_FILE} nor TensorBoard event files; name the folder that `draftline train` wrote"


def _read_run(folder: Path) -> Trajectory:
    identity = RunFolder(folder).identity
    log = _read_jsonl(folder / METRICS_FILE, identity)
    planned = identity.get("data", {}).get("steps")
    reached = int(max(cell.step for cells in log.cells.values() for cell in cells))
    unfinished = isinstance(planned, int) and reached < planned
    ending = (f"{folder} is at step {reached:,} of {planned:,}: compared as far as it goes",) if unfinished else ()
    unknown = () if identity else (f"{folder} has no {IDENTITY_FILE}: its settings and data are not compared",)
    return Trajectory(folder, log.cells, identity, log.file, (*log.notes, *ending, *unknown))


def _read_jsonl(path: Path, identity: Mapping[str, Any]) -> Trajectory:
    records = enumerate((record for _, record in whole_lines(path)), 1)
    rows = [(number, _with_axes(path, number, record, {axis: axis for axis in AXES})) for number, record in records]
    with path.open("rb") as file:
        lines = sum(1 for _ in file)
    if not rows and lines:
        raise DataError(f"{path} line 1 is torn or no JSON object with a step: there is nothing to compare")
    if not rows:
        raise DataError(f"{path} is empty: compare again after the run has logged its first step")
    torn = f"{path} line {len(rows) + 1} is torn: {lines - len(rows)} line(s) from there on are left out"
    notes = [*([torn] if len(rows) < lines else []), *_disorder(path, rows)]
    return Trajectory(path, _cells(rows), identity, path, tuple(notes))


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
        row: dict[str, Any] = dict(zip(header, cells, strict=False))
        if any(cell.strip() for cell in cells):
            rows.append((number, _with_axes(path, number, row, axes)))
    if not rows:
        raise DataError(f"{path} has a header but no line: nothing was measured")
    return Trajectory(path, _cells(rows), {}, path, tuple(_disorder(path, rows)))


def _disorder(path: Path, rows: Sequence[tuple[int, Mapping[str, Any]]]) -> list[str]:
    """What is said of lines that go back to an earlier step, as a log does to which a continued run was appended."""
    steps = [row["step"] for _, row in rows]
    back = [number for (number, _), before, step in zip(rows[1:], steps, steps[1:], strict=False) if step < before]
    if not back:
        return []
    return [f"{path} goes back to an earlier step in line {back[0]}: of two values at one step the later line counts"]


def _with_axes(path: Path, number: int, row: dict[str, Any], axes: Mapping[Axis, str]) -> dict[str, Any]:
    """The row with its positions as numbers, under our names."""
    places: dict[str, float | None] = {}
    for axis, name in axes.items():
        cell = row.pop(name, None)
        if axis == "step" or _written(cell):
            places[axis] = _number(cell, f"{path} line {number}: {name}")
    return {**row, **places}


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
    cells = {
        own_name(tag): [Cell(n, step, None, time - first, value) for n, (step, time, value) in enumerate(measured, 1)]
        for tag, measured in found.items()
    }
    return Trajectory(folder, cells, {}, folder)


def own_name(tag: str) -> str:
    """Our name of a scalar that `draftline train` writes to TensorBoard under this tag."""
    return tag.replace("heldout/", "heldout_", 1).removeprefix("train/")


def _cells(rows: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[str, list[Cell]]:
    """Columns from lines; a list becomes one column per entry, `name/1` for the second."""
    cells: dict[str, list[Cell]] = {}
    for number, row in rows:
        place = (number, float(row["step"]), row.get("tokens"), row.get("seconds"))
        for name, value in row.items():
            listed = isinstance(value, list)
            entries = [(f"{name}/{k}", entry) for k, entry in enumerate(value)] if listed else [(name, value)]
            for column, entry in entries:
                if column not in AXES:
                    cells.setdefault(column, []).append(Cell(*place, entry))
    return cells


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(f"{path} cannot be read ({reason}): name a run folder, a CSV file or a JSONL file") from error


def _written(value: Any) -> bool:
    return value is not None and not (isinstance(value, str) and not value.strip())


def _number(value: Any, where: str) -> float:
    """A finite number, or a `DataError` that says where there is none."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} is {value!r}, which is not a number: fix or delete the line") from error
    if not math.isfinite(number):
        raise DataError(f"{where} is {value}: the run diverged there or measured nothing; cut the file before it")
    return number
