"""Lines are cut back to a checkpoint and read back column by column; figures are the sums divided."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftline.config import LossConfig
from draftline.draft.loss import StepMetrics
from draftline.errors import StorageError
from draftline.storage import without_nan
from draftline.train.checkpoint import TrainState
from draftline.train.log import JsonLines, SpeedMeter, metrics_record, read_columns, whole_lines
from draftline.transfer.stage import PipelineStatistics


@pytest.mark.parametrize("torn", ["", '{"step": 4, "lo', '{"step": 4}', "\x00\x00", "[4]\n"])
def test_lines_after_the_checkpoint_and_a_torn_one_are_cut_off(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in range(1, 4)) + torn)
    lines = JsonLines(path, last_step=2)
    lines.write({"step": 3, "loss": float("nan"), "by_position": [float("inf"), 1.0]})
    lines.sync()
    lines.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": 0.5},
        {"step": 3, "loss": None, "by_position": [None, 1.0]},
    ]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        JsonLines(tmp_path / "missing" / "metrics.jsonl", last_step=0)


def metrics(rows: list[str], loss_sum: float, weight_sum: float) -> StepMetrics:
    """Blocks of three predicted slots, 1 where the slot is right."""
    right = torch.tensor([[False, *(bit == "1" for bit in row)] for row in rows])
    supervised = torch.tensor([[False, True, True, True]] * len(rows))
    return StepMetrics.of_blocks(
        correct_target_AP=right,
        correct_data_AP=right,
        supervised_AP=supervised,
        loss_sum=loss_sum,
        weight_sum=weight_sum,
        tokens=7,
    )


def test_figures_of_many_steps_are_those_of_one_large_step() -> None:
    """Splitting rows over micro-batches or steps must not change a mean: neither loss nor streak."""
    whole = metrics(["110", "100", "111", "000"], loss_sum=12.0, weight_sum=8.0)
    parts = metrics(["110", "100", "111"], 9.0, 6.0) + metrics(["000"], 3.0, 2.0)
    records = [without_nan(metrics_record(figures, LossConfig())) for figures in (whole, parts)]
    assert records[0] == records[1]
    record = metrics_record(parts, LossConfig())
    assert record["streak"] == 1.5
    assert record["accuracy_by_position"][1:] == [0.75, 0.5, 0.25]
    assert record["conditional_accuracy_by_position"][1:] == pytest.approx([0.75, 2 / 3, 0.5])
    assert record["loss"] == 12.0 / 12
    assert metrics_record(parts, LossConfig(denominator="weights"))["loss"] == 12.0 / 8


def test_speeds_are_differences_of_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 110.0, 115.0])
    monkeypatch.setattr("draftline.train.log.time.perf_counter", lambda: next(clock))
    snapshots = iter(
        [
            PipelineStatistics(target_loops=2),
            PipelineStatistics(2, 1000, 8.0, 12.0, 4.0, 3, 300),
            PipelineStatistics(2, 1000, 8.0, 12.0, 4.0, 0, 0),
        ]
    )
    state = TrainState(StepMetrics.zero(4), tokens=50)
    meter = SpeedMeter(lambda: next(snapshots), state)
    state.tokens = 650
    assert meter.read(state) == {
        "target_tokens_per_second": 250.0,
        "drafter_tokens_per_second": 100.0,
        "target_wait_share": 0.6,
        "drafter_wait_share": 0.4,
        "queue_rows": 3,
        "queue_bytes": 300,
    }
    assert meter.read(state)["target_tokens_per_second"] == 0.0


def test_a_full_disk_is_named_also_when_the_file_is_closed(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl", last_step=0)
    lines._file.close()
    lines._file = Path("/dev/full").open("w")  # noqa: SIM115
    for refused in (lambda: lines.write({"step": 1}), lines.close):
        with pytest.raises(StorageError, match="No space left"):
            refused()


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
