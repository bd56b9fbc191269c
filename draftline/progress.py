"""Progress bars on stderr for work that is counted; nothing where stderr is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function to be called with the number done and the number of all."""
    with _bar(MofNCompleteColumn()) as bar:
        task = bar.add_task(what, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield report


@contextmanager
def reading(what: str) -> Iterator[Callable[[int, int | None, int, int], None]]:
    """Give a function to be called with bytes read, bytes of all if known, rows read and tokens written."""
    with _bar(DownloadColumn(), TextColumn("{task.fields[rows]:,} rows, {task.fields[tokens]:,} tokens")) as bar:
        task = bar.add_task(what, total=None, rows=0, tokens=0)

        def report(done: int, total: int | None, rows: int, tokens: int) -> None:
            bar.update(task, completed=done, total=total, rows=rows, tokens=tokens)

        yield report


def _bar(*counts: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), *counts, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
