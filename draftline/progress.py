"""What a terminal shows: lines and bars on stderr while work goes on (bars only in a terminal), tables at its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table

OnProgress = Callable[[int, int], None]
"""Called with the number done and the number of all: turns, samples."""

OnReading = Callable[[int, int | None, int, int], None]
"""Called with bytes read, all bytes (None if unknown), rows read and tokens written."""


@contextmanager
def counting(what: str) -> Iterator[OnProgress]:
    """A bar of things done."""
    from rich.progress import MofNCompleteColumn

    with _bar(MofNCompleteColumn()) as bar:
        task = bar.add_task(what, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield report


@contextmanager
def reading(what: str) -> Iterator[OnReading]:
    """A bar of bytes read."""
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


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table that a narrow terminal shows whole: names to the left, figures to the right."""
    from rich.markup import escape
    from rich.table import Table

    shown = Table(title=escape(title), title_justify="left")
    for place, name in enumerate(head):
        whole = max(map(len, name.split()), default=0)  # no word of a heading is broken
        shown.add_column(escape(name), justify="right" if place else "left", overflow="fold", min_width=whole)
    for row in rows:
        shown.add_row(*map(escape, row))
    return shown


def say(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)
