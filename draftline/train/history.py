"""Reads back what a run has written, also while it is still writing and after a crash. Does not import torch."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.errors import CheckpointError

FloatArray = NDArray[np.float64]

CONFIG_FILE = "config.yaml"
"""Written before the first step; a folder without it has no run."""

IDENTITY_FILE, METRICS_FILE, SPEED_FILE = "run.json", "metrics.jsonl", "speed.jsonl"

AUDIT_FILE = "audit.json"
"""What the audit said before the first step, as `draftline audit --json` writes it."""


@dataclass(frozen=True)
class Column:
    """One figure over the run: the steps at which it was measured, and its values, [n] each."""

    steps: FloatArray
    values: FloatArray

    def __len__(self) -> int:
        return len(self.steps)


NOTHING = Column(np.zeros(0), np.zeros(0))


@dataclass(frozen=True)
class Columns:
    """A file of lines with a `step`, turned into columns.

    Attributes:
        whole: lines that could be read.
        lines: all lines, those behind a torn one included.
        last_step: of the last line that could be read, 0 without any.
        by_name: a list of numbers becomes one column per place, `name/0`, `name/1`, ..; what is None was not measured.
    """

    whole: int
    lines: int
    last_step: int
    by_name: Mapping[str, Column]

    def __getitem__(self, name: str) -> Column:
        """A column, empty if it was never measured."""
        return self.by_name.get(name, NOTHING)

    def places(self, name: str) -> dict[int, Column]:
        """Columns of a list, by place."""
        found = {
            key.rpartition("/")[2]: column for key, column in self.by_name.items() if key.rpartition("/")[0] == name
        }
        return {int(place): column for place, column in found.items()}


_SECTIONS = ("code", "versions", "machine", "data", "config", "drafter")
"""Parts of run.json that hold values by name."""


def read_identity(folder: Path) -> dict[str, Any]:
    """What run.json says of a run; nothing if the run was stopped before it was written.

    Raises:
        CheckpointError: it cannot be read, or is built otherwise than `draftline train` does.
    """
    path = folder / IDENTITY_FILE
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path} cannot be read ({reason[:120]}): restore it from a copy, or delete it"
        ) from error
    whole = isinstance(content, dict) and isinstance(content.get("sessions", []), list)
    parts = [content.get(name, {}) for name in _SECTIONS] + content.get("sessions", []) if whole else [None]
    if not all(isinstance(part, dict) for part in parts):
        raise CheckpointError(f"{path} is not what `draftline train` writes: restore it from a copy, or delete it")
    return dict(content)


def whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Lines with what they say, up to the first that is torn: cut off, no JSON, or without a step."""
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                return
            if not line.endswith(b"\n") or not isinstance(record, dict) or not isinstance(record.get("step"), int):
                return
            yield line, record


def read_columns(path: Path) -> Columns:
    """All that a file of lines measured; nothing if there is no such file."""
    if not path.exists():
        return Columns(0, 0, 0, {})
    columns: dict[str, tuple[array[float], array[float]]] = {}
    whole = last_step = 0
    for _, record in whole_lines(path):
        whole += 1
        step = last_step = record["step"]
        for name, value in record.items():
            listed = enumerate(value) if isinstance(value, list) else ()
            for key, entry in [(f"{name}/{place}", entry) for place, entry in listed] or [(name, value)]:
                if isinstance(entry, int | float) and math.isfinite(entry):
                    steps, values = columns.setdefault(key, (array("d"), array("d")))
                    steps.append(step)
                    values.append(entry)
    with path.open("rb") as file:
        lines = sum(1 for _ in file)
    return Columns(
        whole, lines, last_step, {name: Column(np.array(s), np.array(v)) for name, (s, v) in columns.items()}
    )
