"""`draftline report`: one page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftline.errors import ConfigError
from draftline.outputs import keep_apart, new_page, write_file


def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, also of a run that goes on.")],
    out: Annotated[
        Path | None, typer.Option("--out", callback=new_page, help="Page to write; default RUN/report.html.")
    ] = None,
    evaluation: Annotated[
        list[Path] | None, typer.Option("--evaluation", help="JSON of `evaluate` for this run's drafter.")
    ] = None,
    audit_json: Annotated[
        Path | None, typer.Option("--audit", help="JSON of `audit`; default what `train` wrote.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Serve the page on 127.0.0.1 while the run goes on.")] = False,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="With --watch; default a free one.")] = None,
) -> None:
    """Show a run on one HTML page: curves, speed, answers, audit, data, settings."""
    from draftline.report.document import report_page
    from draftline.report.watch import serve_page

    if watch and out is not None:
        raise ConfigError(f"--watch serves the page and writes no {out}: leave out one of the two")
    if port is not None and not watch:
        raise ConfigError(f"--port {port} is for --watch only: add it, or leave out --port")
    if watch:
        serve_page(folder, evaluation or (), audit_json, port or 0)
        return
    path = out or folder / "report.html"
    keep_apart([path], [*(evaluation or []), audit_json])
    write_file(path, report_page(folder, evaluation or (), audit_json))
    print(path)
