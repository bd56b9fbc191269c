"""What is said on stderr while work goes on: lines, and bars for what is counted (none where it is not a terminal)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function to be called with the number done and the number of all."""
    from rich.progress import MofNCompleteColumn

    with _bar(MofNCompleteColumn()) as bar:
        task = bar.add_task(what, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield report


@contextmanager
def reading(what: str) -> Iterator[Callable[[int, int | None, int, int], None]]:
    """Give a function to be called with bytes read, bytes of all if known, rows read and tokens written."""
    from rich.progress import DownloadColumn, TextColumn

    with _bar(DownloadColumn(), TextColumn("{task.fields[rows]:,} rows, {task.fields[tokens]:,} tokens")) as bar:
        task = bar.add_task(what, total=None, rows=0, tokens=0)

        def report(done: int, total: int | None, rows: int, tokens: int) -> None:
            bar.update(task, completed=done, total=total, rows=rows, tokens=tokens)

        yield report


def _bar(*counts: ProgressColumn) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), *counts, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def say(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)
