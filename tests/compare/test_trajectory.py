"""Logs in all forms that are read, and what is said about those that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from draftline.compare import compare_groups
from draftline.compare.trajectory import read_trajectory
from draftline.errors import CheckpointError, DataError
from draftline.options import CompareSettings
from tests.compare.synthetic_runs import STEPS, heldout_records, write_run

ACCURACY = STEPS / 2000


def test_a_run_folder(tmp_path: Path) -> None:
    run = read_trajectory(write_run(tmp_path / "run", heldout_records(ACCURACY)))
    series = run.series("heldout_accuracy")
    assert series.values == pytest.approx(ACCURACY)
    assert series.axes["tokens"] == pytest.approx(STEPS * 100)
    assert series.axes["seconds"] == pytest.approx(STEPS / 2)
    assert run.series("heldout_accuracy_by_position/1").values == pytest.approx(ACCURACY + 0.1)
    assert "heldout_accuracy_by_position/0" not in run.names
    assert run.tokens_per_second == pytest.approx(200)


def test_lines_without_a_value_are_not_measurements(tmp_path: Path) -> None:
    records = heldout_records(ACCURACY)
    records[3]["heldout_accuracy"] = None
    del records[5]["heldout_accuracy"]
    run = read_trajectory(write_run(tmp_path / "run", records))
    assert run.series("heldout_accuracy").axes["step"].tolist() == np.delete(STEPS, [3, 5]).tolist()


@pytest.mark.parametrize(
    ("header", "lines", "axes"),
    [
        ("step,accuracy", ["1,0.5", "2,0.6"], {"step"}),
        ("Wall time,Step,accuracy", ["9.5,1,0.5", "9.9,2,0.6"], {"step"}),
        ("accuracy,_runtime,iteration,tokens", ["0.5,3,1,10", "0.6,4,2,20"], {"step", "tokens", "seconds"}),
        ("step,loss,accuracy", ["1,3,", "1,,0.5", "2,nan,0.6"], {"step"}),
        ("\ufeffstep, accuracy", ["2,0.6", "", "1,0.4", "1,0.5"], {"step"}),
        ("step;accuracy;tokens", ["1;0.5;10", "2;0.6;20"], {"step", "tokens"}),
        ("step\taccuracy", ["1\t0.5", "2\t0.6"], {"step"}),
        ("step | accuracy", ["1 | 0.5", "2 | 0.6"], {"step"}),
    ],
)
def test_csv_files(tmp_path: Path, header: str, lines: list[str], axes: set[str]) -> None:
    path = tmp_path / "log.csv"
    path.write_text("\n".join([header, *lines]), encoding="utf-8")
    series = read_trajectory(path).series("accuracy")
    assert series.axes["step"].tolist() == [1, 2]
    assert series.values.tolist() == [0.5, 0.6]
    assert set(series.axes) == axes


def test_a_tensorboard_folder(tmp_path: Path) -> None:
    with SummaryWriter(tmp_path / "logs") as writer:
        for step in (1, 2, 3):
            writer.add_scalar("heldout/accuracy", step / 10, step, walltime=100 + step)
            writer.add_scalar("eval/score", step, step, walltime=100 + step)
            writer.add_text("remark", "words", step)
    run = read_trajectory(tmp_path / "logs")
    assert set(run.names) == {"heldout_accuracy", "eval/score"}
    series = run.series("heldout_accuracy")
    assert series.values == pytest.approx([0.1, 0.2, 0.3])
    assert series.axes["seconds"].tolist() == [0, 1, 2]
    with SummaryWriter(tmp_path / "nan") as writer:
        writer.add_scalar("loss", float("nan"), 700)
    with pytest.raises(DataError, match=r"nan step 700: loss is nan"):
        read_trajectory(tmp_path / "nan").series("loss")
    with pytest.raises(DataError, match="logs are in logs, nan; name one"):
        read_trajectory(tmp_path)


def test_all_forms_of_one_run_are_equal(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", heldout_records(ACCURACY))
    lines = [f"{step},{value}" for step, value in zip(STEPS, ACCURACY, strict=True)]
    (tmp_path / "log.csv").write_text("step,top1\n" + "\n".join(lines))
    with SummaryWriter(tmp_path / "board") as writer:
        for step, value in zip(STEPS, ACCURACY, strict=True):
            writer.add_scalar("valid/acc", value, step)
    paths = [run, run / "metrics.jsonl", tmp_path / "log.csv", tmp_path / "board"]
    names = ["heldout_accuracy", "top1", "valid/acc"]
    comparison = compare_groups({path.name: [path] for path in paths}, CompareSettings(metric=tuple(names)))
    assert [pair.verdict for pair in comparison.pairs] == ["same"] * 3
    assert [pair.ratio.value for pair in comparison.pairs] == pytest.approx([1] * 3)


def test_a_torn_line_is_left_out_and_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", heldout_records(ACCURACY))
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[:-30])
    found = read_trajectory(run)
    assert len(found.series("heldout_accuracy").values) == len(STEPS) - 1
    assert f"line {len(STEPS)} is torn: 1 line(s)" in found.notes[0]


def test_a_run_that_still_goes_on_says_how_far_it_is(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", heldout_records(ACCURACY), {"data": {"steps": 1571}})
    assert "is at step 1,000 of 1,571" in read_trajectory(run).notes[0]


def test_lines_out_of_order_are_said(tmp_path: Path) -> None:
    for name, text in (("a.csv", "step,x\n1,1\n2,2\n1,3\n"), ("a.jsonl", '{"step": 2, "x": 1}\n{"step": 1, "x": 3}\n')):
        (tmp_path / name).write_text(text)
        run = read_trajectory(tmp_path / name)
        assert "goes back to an earlier step in line" in run.notes[0]
        assert run.series("x").values[0] == 3


def test_damage_is_placed_in_the_file_that_has_it(tmp_path: Path) -> None:
    records = heldout_records(ACCURACY)
    records[2]["heldout_accuracy"] = "high"
    run = write_run(tmp_path / "run", records)
    with pytest.raises(DataError, match=r"run/metrics\.jsonl line 3: heldout_accuracy is 'high'"):
        read_trajectory(run).series("heldout_accuracy")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("log.csv", "", "is empty"),
        ("log.csv", "\n \n", "is empty"),
        ("log.csv", "step,accuracy,accuracy\n1,0.5,0.6", "has two columns called 'accuracy'"),
        ("log.csv", "time,accuracy\n1,0.5", "no step column: its header is 'time,accuracy'"),
        ("log.csv", "step,accuracy\n", "nothing was measured"),
        ("log.csv", "step,accuracy\n1,0.5\nsoon,0.6", "line 3: step is 'soon', which is not a number"),
        ("log.csv", "step,accuracy\n1,0.5\n,0.6", "line 3: step is '', which is not a number"),
        ("log.csv", "step,accuracy\n1,0.5,7", "line 2 has 3 cells for 2 columns"),
        ("log.csv", "step,accuracy\n1,0.5\n2,good", "line 3: accuracy is 'good', which is not a number"),
        ("log.csv", "step,accuracy\n1,0.5\n2,nan", "line 3: accuracy is nan: the run diverged"),
        ("log.csv", "step,accuracy\n1,inf", "line 2: accuracy is inf"),
        ("log.jsonl", "", "is empty"),
        ("log.jsonl", '{"step": 1, "acc', "line 1 is torn"),
        ("log.jsonl", '{"step": 1, "accuracy": "high"}\n', "line 1: accuracy is 'high', which is not a number"),
        ("log.jsonl", '{"step": 1, "accuracy": 0.5, "tokens": "many"}\n', "line 1: tokens is 'many'"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        read_trajectory(path).series("accuracy")
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_trajectory(tmp_path / "nothing")
    with pytest.raises(DataError, match="is not a run"):
        read_trajectory(tmp_path)
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(DataError, match=r"no metrics\.jsonl yet"):
        read_trajectory(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(heldout_records(ACCURACY)[0]) + "\n")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"run\.json cannot be read"):
        read_trajectory(tmp_path)
    (tmp_path / "run.json").write_text('{"data": {"steps": "many"}}')
    assert read_trajectory(tmp_path).notes == ()
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        read_trajectory(tmp_path / "binary.csv")
