"""Logs of runs that never were, with known curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

STEPS = np.arange(50, 1001, 50)


def learning_curve(rng: np.random.Generator, *, top: float = 0.3, pace: float = 300.0) -> np.ndarray:
    """Accuracy at `STEPS`; what seeds change is the height (2 %) and the pace (5 %), measured with 0.5 % noise."""
    height, speed = top * (1 + 0.02 * rng.standard_normal()), pace * (1 + 0.05 * rng.standard_normal())
    return height * (1 - np.exp(-STEPS / speed)) * (1 + 0.005 * rng.standard_normal(len(STEPS)))


def write_csv(path: Path, values: Sequence[float] | np.ndarray, steps: Sequence[float] | np.ndarray = STEPS) -> Path:
    """A CSV file with a step and an accuracy."""
    lines = [f"{step},{float(value)!r}" for step, value in zip(steps, values, strict=True)]
    path.write_text("step,accuracy\n" + "\n".join(lines) + "\n")
    return path


def write_run(folder: Path, records: Sequence[Mapping[str, Any]], identity: Mapping[str, Any] | None = None) -> Path:
    """A run folder as `draftline train` leaves it, as far as a comparison reads it."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "run.json").write_text(json.dumps(identity or {}))
    return folder


def heldout_records(accuracy: Sequence[float] | np.ndarray, *, rate: float = 200.0) -> list[dict[str, Any]]:
    """Lines of a run that was evaluated at `STEPS`, 100 tokens a step, `rate` tokens a second."""
    return [
        {
            "step": int(step),
            "tokens": int(step) * 100,
            "seconds": int(step) * 100 / rate,
            "loss": 3 - value,
            "heldout_accuracy": float(value),
            "heldout_streak": 4 * float(value),
            "heldout_loss": 3 - float(value),
            "heldout_accuracy_by_position": [None, float(value) + 0.1, float(value) - 0.01],
            "heldout_teacher_forced_acceptance_length": 1 + 2 * float(value),
        }
        for step, value in zip(STEPS, accuracy, strict=True)
    ]
