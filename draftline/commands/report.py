"""`draftline report`: one page about a run."""

from __future__ import annotations

from draftline.errors import ConfigError
from draftline.options import ReportCommand
from draftline.storage import keep_apart, write_file


def report(options: ReportCommand) -> None:
    """Show a run on one HTML page: curves, speed, answers, audit, data, settings."""
    from draftline.report.document import report_page
    from draftline.report.watch import serve_page

    folder, evaluations, audit = options.folder, options.evaluation, options.audit
    if options.watch and options.out is not None:
        raise ConfigError(f"--watch serves the page and writes no {options.out}: leave out one of the two")
    if options.port is not None and not options.watch:
        raise ConfigError(f"--port {options.port} is for --watch only: add it, or leave out --port")
    if options.watch:
        serve_page(folder, evaluations, audit, options.port or 0)
        return
    path = options.out or folder / "report.html"
    keep_apart([path], [*evaluations, audit])
    write_file(path, report_page(folder, evaluations, audit))
    print(path)
