"""Lines of a run read back: as far as they are whole, column by column."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftline.train.history import read_columns, whole_lines

LINES = [
    {"step": 1, "loss": 2.5, "by": [None, 0.5, 0.25]},
    {"step": 2, "loss": None, "by": [None, None, 0.125]},
    {"step": 3, "loss": 1.5, "heldout": 7, "name": "ä", "empty": []},
]


def test_columns_hold_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in LINES), encoding="utf-8")
    columns = read_columns(path)
    assert (columns.whole, columns.lines, columns.last_step) == (3, 3, 3)
    assert (columns["loss"].steps.tolist(), columns["loss"].values.tolist()) == ([1, 3], [2.5, 1.5])
    assert {place: column.values.tolist() for place, column in columns.places("by").items()} == {
        1: [0.5],
        2: [0.25, 0.125],
    }
    assert columns["heldout"].values.tolist() == [7]
    assert len(columns["name"]) == len(columns["no such"]) == 0


@given(st.integers(0, 200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_that_was_cut_anywhere_gives_its_whole_lines(tmp_path: Path, end: int) -> None:
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in LINES).encode()
    path = tmp_path / "cut.jsonl"
    path.write_bytes(content[:end])
    whole = content[:end].count(b"\n")
    assert [record for _, record in whole_lines(path)] == LINES[:whole]
    assert b"".join(line for line, _ in whole_lines(path)) == content[: content[:end].rfind(b"\n") + 1]
    assert read_columns(path).whole == whole


def test_what_is_no_line_of_a_step_ends_the_reading(tmp_path: Path) -> None:
    for damage in ('{"loss": 1}', "[1]", '{"step": "2"}', "nonsense", '"step"', ""):
        (tmp_path / "x").write_text('{"step": 1}\n' + damage + '\n{"step": 3}\n')
        columns = read_columns(tmp_path / "x")
        assert (columns.whole, columns.lines, columns.last_step) == (1, 3, 1)
    assert read_columns(tmp_path / "missing").lines == 0
