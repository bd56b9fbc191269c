"""How far a run has come: everything that changes from step to step besides weights and optimiser."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypedDict

import torch
from torch import Tensor

from draftline.records import StepMetrics

MetricsJson = dict[str, float | int | list[float]]
"""The fields of `StepMetrics`, tables as lists; floats survive JSON exactly."""


class TrainStateJson(TypedDict):
    """What a checkpoint's `state.json` says about the progress of its run."""

    step: int
    next_row: int
    tokens: int
    seconds: float
    best_step: int | None
    best_streak: float | None
    window: MetricsJson


@dataclass
class TrainState:
    """Progress of a run.

    Attributes:
        window: metrics summed since the last line of `metrics.jsonl`. Kept in checkpoints, so that the first line
            after a resume averages over the same steps as in the uninterrupted run.
        step: optimiser steps done.
        next_row: sequence number of the row that comes next.
        tokens: row positions seen, padding excluded because there is none.
        seconds: wall-clock time of the run, earlier sessions included.
        best_step: step of the best checkpoint so far, none before the first evaluation.
        best_streak: its held-out streak.
    """

    window: StepMetrics
    step: int = 0
    next_row: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    best_streak: float | None = None

    def count(self, metrics: StepMetrics, next_row: int) -> None:
        """Account for one optimiser step."""
        self.step += 1
        self.next_row = next_row
        self.tokens += metrics.tokens
        self.window = self.window + metrics

    def take_window(self) -> StepMetrics:
        """The metrics since the last call, and an empty window from now on."""
        window = self.window
        self.window = StepMetrics.zero(len(window.slots_P))
        return window

    def is_best(self, heldout_streak: float) -> bool:
        """Note a held-out streak; true if it is the best so far. NaN (nothing was held out) never is."""
        if not heldout_streak > (float("-inf") if self.best_streak is None else self.best_streak):
            return False
        self.best_step, self.best_streak = self.step, heldout_streak
        return True

    def to_json(self) -> TrainStateJson:
        return {
            "step": self.step,
            "next_row": self.next_row,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "best_step": self.best_step,
            "best_streak": self.best_streak,
            "window": _metrics_to_json(self.window),
        }

    @staticmethod
    def from_json(tree: TrainStateJson) -> TrainState:
        return TrainState(
            window=_metrics_from_json(tree["window"]),
            step=tree["step"],
            next_row=tree["next_row"],
            tokens=tree["tokens"],
            seconds=tree["seconds"],
            best_step=tree["best_step"],
            best_streak=tree["best_streak"],
        )


def _metrics_to_json(metrics: StepMetrics) -> MetricsJson:
    values = {field.name: getattr(metrics, field.name) for field in fields(StepMetrics)}
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}


def _metrics_from_json(tree: MetricsJson) -> StepMetrics:
    values = {
        name: torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value
        for name, value in tree.items()
    }
    return StepMetrics(**values)  # type: ignore[arg-type]  # names and types are those written by _metrics_to_json
