"""Progress on stderr: a bar where a person watches, plain lines where stderr is a file or a pipe."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display(Protocol):
    """What a person sees of a run."""

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
