"""The table of the zoo, printed at the end of `pytest -s tests/zoo`, with `-n` too."""

from __future__ import annotations

import pytest

COLUMNS = ("fault", "kind", "expected", "seconds", "found")
"""What a test of the zoo records of itself, see `test_zoo.audited`."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line per planted fault, where output is not captured."""
    if terminalreporter.config.option.capture != "no":
        return
    outcomes = [*terminalreporter.stats.get("passed", []), *terminalreporter.stats.get("failed", [])]
    recorded = [dict(outcome.user_properties) for outcome in outcomes if outcome.when == "call"]
    rows = [COLUMNS, *(tuple(row[name] for name in COLUMNS) for row in recorded if row.keys() >= set(COLUMNS))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows if len(rows) > 1 else []:
        line = "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True))
        terminalreporter.write_line(line.rstrip())
