"""Which curves a run has, and that they show what was logged."""

from __future__ import annotations

import json
from pathlib import Path

from draftline.report import curves
from draftline.train.run_folder import RunFolder
from tests.report.synthetic_run import write_run


def test_curves_are_the_logged_values(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lines=100)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    charts = {chart.title: chart for chart in curves.learning(RunFolder.open(folder).metrics)}
    training, heldout = charts["Loss"].curves
    assert training.y.tolist() == [line["loss"] for line in lines]
    assert heldout.x.tolist() == [50, 100]
    assert heldout.y.tolist() == [lines[49]["heldout_loss"], lines[99]["heldout_loss"]]
    assert (charts["Accuracy"].scale, charts["Gradient norm"].scale) == ("linear", "log")
    head, rows = curves.heldout_table(RunFolder.open(folder).metrics)
    assert head[:3] == ["step", "loss", "accuracy"]
    assert [row[0] for row in rows] == ["50", "100"]
    assert rows[1][2] == f"{lines[99]['heldout_accuracy']:.3f}"
    assert len(rows[0]) == len(head) == 1 + 5 + 7


def test_slots_are_in_order_and_held_out_ones_need_two_evaluations(tmp_path: Path) -> None:
    metrics = RunFolder.open(write_run(tmp_path / "run", lines=100)).metrics
    charts = curves.positions(metrics)
    assert [chart.unit for chart in charts] == ["held out", "held out", "training", "training"]
    assert [curve.name for curve in charts[0].curves] == [f"slot {k}" for k in range(1, 8)]
    assert charts[2].note == "Running means of 3 values."
    one = RunFolder.open(write_run(tmp_path / "one", lines=50)).metrics
    assert [chart.unit for chart in curves.positions(one)] == ["training", "training"]


def test_a_queue_that_was_never_used_is_not_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lines=10)
    assert [chart.title for chart in curves.queue(RunFolder.open(folder).speed)] == ["Queue depth", "Queue size"]
    lines = [json.loads(line) for line in (folder / "speed.jsonl").read_text().splitlines()]
    (folder / "speed.jsonl").write_text("".join(json.dumps({**line, "queue_rows": 0}) + "\n" for line in lines))
    assert curves.queue(RunFolder.open(folder).speed) == []


def test_a_run_without_a_line_has_charts_without_lines(tmp_path: Path) -> None:
    run = RunFolder.open(write_run(tmp_path / "run", lines=0, total=5))
    charts = [*curves.learning(run.metrics), *curves.positions(run.metrics), *curves.speed(run.speed)]
    assert len(charts) == 10
    assert not any(chart.lines for chart in charts)
    assert curves.heldout_table(run.metrics)[1] == []
