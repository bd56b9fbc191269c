"""What runs differ in, and what that forbids to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.compare import compare_groups
from draftline.compare.groups import Comparison
from draftline.errors import CheckpointError, DataError
from draftline.options import CompareSettings
from tests.compare.synthetic_runs import STEPS, heldout_records, write_csv, write_run

CURVE = 0.3 * (1 - np.exp(-STEPS / 300))


def identity(**changes: Any) -> dict[str, Any]:
    """A run.json, as far as a comparison reads it."""
    whole: dict[str, Any] = {
        "code": {"commit": "a" * 40, "diff_sha256": None},
        "versions": {"torch": "2.13.0"},
        "machine": {"system": "Linux", "devices": ["cpu"]},
        "target": "weights-1",
        "data": {"fingerprint": "f1", "steps": 1000},
        "config": {"loss": {"decay_gamma": None}, "train": {"seed": 0}},
        "drafter": {"block_size": 8, "vocab_size": 1024, "sample_from_anchor": False},
        "sessions": [{"started": "now", "cores": 2, "threads_per_loop": 1}],
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        whole[section] = {**whole[section], name: value} if name else value
    return whole


def compared(folder: Path, second: dict[str, Any], **options: Any) -> Comparison:
    first = write_run(folder / "a", heldout_records(CURVE), identity())
    other = write_run(folder / "b", heldout_records(2 * CURVE), second)
    return compare_groups({"a": [first], "b": [other]}, CompareSettings(**options))


def test_every_difference_is_listed_by_area(tmp_path: Path) -> None:
    config = {"loss": {"decay_gamma": 7.0}, "train": {"seed": 1}}
    second = identity(config=config, data__fingerprint="f2", machine__devices=["H200"], versions__torch="2.14.0")
    comparison = compared(tmp_path, second)
    assert [(item.area, item.key, item.values) for item in comparison.differences] == [
        ("configuration", "config.loss.decay_gamma", (("null",), ("7.0",))),
        ("configuration", "config.train.seed", (("0",), ("1",))),
        ("data", "data.fingerprint", (('"f1"',), ('"f2"',))),
        ("environment", "versions.torch", (('"2.13.0"',), ('"2.14.0"',))),
        ("environment", "machine.devices", (('["cpu"]',), ('["H200"]',))),
    ]
    said = " ".join(comparison.notes)
    assert "different held-out data" in said
    assert "different machines" in said


def heldout_notes(folder: Path, first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    groups = {
        name: [write_run(folder / name, heldout_records(CURVE), one)] for name, one in (("a", first), ("b", second))
    }
    return [note for note in compare_groups(groups).notes if "eld-out" in note]


def drawn(anchors: int, seed: int) -> dict[str, Any]:
    """Settings of a run, as far as its held-out anchors depend on them."""
    return {"train": {"num_anchors": anchors, "seed": seed}}


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"config": drawn(8, 0)}, {"config": drawn(9, 0)}, "train.num_anchors differs"),
        ({"config": drawn(8, 0)}, {"config": drawn(8, 1)}, "drew them by train.seed"),
        ({"config": drawn(8, 1)}, {"config": drawn(8, 1)}, None),
        (
            {"config": drawn(8, 1), "data__heldout_anchors_seed": 0},
            {"config": drawn(8, 2), "data__heldout_anchors_seed": 0},
            None,
        ),
        ({"config": drawn(8, 3), "data__heldout_anchors_seed": 0}, {"config": drawn(8, 3)}, "drew them by train.seed"),
        ({"data__fingerprint": "a+h"}, {"data__fingerprint": "b+h"}, None),
        ({"data__fingerprint": "a+h"}, {"data__fingerprint": "a+i"}, "different text"),
        ({"data__heldout_conversations": 40}, {"data__heldout_conversations": 20}, "different text"),
        (
            {"config": {"data": {"heldout_fraction": 0.1}}},
            {"config": {"data": {"heldout_fraction": 0.2}}},
            "different text",
        ),
    ],
)
def test_whether_heldout_values_answer_the_same_questions(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], said: str | None
) -> None:
    notes = heldout_notes(tmp_path, identity(**first), identity(**second))
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]


def test_a_run_without_an_identity_differs_in_nothing_that_is_known(tmp_path: Path) -> None:
    comparison = compared(tmp_path, {})
    assert comparison.differences == ()
    assert "has no run.json: its settings and data are not compared" in comparison.notes[0]


@pytest.mark.parametrize(
    "content", ["[]", "3", '{"data": []}', '{"config": null}', '{"sessions": {}}', '{"sessions": ["x"]}', "{"]
)
def test_a_damaged_identity_is_one_line(tmp_path: Path, content: str) -> None:
    run = write_run(tmp_path / "a", heldout_records(CURVE), identity())
    (run / "run.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"run\.json .* restore it") as caught:
        compare_groups({"a": [run], "b": [run]})
    assert "\n" not in str(caught.value)


def test_equal_runs_differ_in_nothing(tmp_path: Path) -> None:
    comparison = compared(tmp_path, identity())
    assert comparison.differences == ()
    assert [note[:12] for note in comparison.notes] == ["One run a si"]


def test_different_targets_leave_only_the_speed(tmp_path: Path) -> None:
    comparison = compared(tmp_path, identity(target="weights-2"))
    pair = comparison.pairs[0]
    assert (pair.verdict, pair.metric, dict(pair.metrics)) == (None, None, {})
    assert pair.tokens_per_second is not None
    assert "different targets" in comparison.notes[0]
    assert comparison.to_json()["pairs"][0]["verdict"] is None


def test_different_blocks_leave_acceptance_and_single_slots(tmp_path: Path) -> None:
    comparison = compared(tmp_path, identity(drafter__block_size=16))
    pair = comparison.pairs[0]
    assert pair.metric == "heldout_teacher_forced_acceptance_length"
    assert set(pair.metrics) == {pair.metric, *(f"heldout_accuracy_by_position/{k}" for k in (1, 2))}
    assert pair.verdict == "better"
    assert "different blocks (drafter.block_size)" in comparison.notes[0]


def test_a_named_metric_is_compared_in_spite_of_a_note(tmp_path: Path) -> None:
    comparison = compared(tmp_path, identity(target="weights-2"), metric=["heldout_accuracy"])
    assert comparison.pairs[0].verdict == "better"
    assert "different targets" in comparison.notes[0]


def test_groups_that_are_not_what_they_seem(tmp_path: Path) -> None:
    tree = {"loss": {"decay_gamma": 7.0}, "train": {"seed": 0}}
    group = [
        write_run(tmp_path / "a", heldout_records(CURVE), identity()),
        write_run(tmp_path / "b", heldout_records(1.01 * CURVE), identity(config=tree)),
    ]
    other = write_run(tmp_path / "c", heldout_records(CURVE), identity())
    said = " ".join(compare_groups({"x": group, "y": [other]}).notes)
    assert "Runs of x share a seed" in said
    assert "Runs of x differ among themselves in loss.decay_gamma" in said


def test_no_common_metric(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,score\n1,2\n")
    groups = {"a": [tmp_path / "a.csv"], "b": [write_csv(tmp_path / "b.csv", CURVE)]}
    with pytest.raises(DataError, match=r"no common metric: .*a\.csv has score, .*b\.csv has accuracy"):
        compare_groups(groups)
    with pytest.raises(DataError, match=r"b\.csv has no score: it has accuracy"):
        compare_groups(groups, CompareSettings(metric=("score",)))
    (tmp_path / "b.csv").write_text("step,score,other\n1,2,3\n")
    (tmp_path / "a.csv").write_text("step,score,other\n1,2,3\n")
    with pytest.raises(DataError, match="several common values, score, other"):
        compare_groups(groups)


def test_no_common_step(tmp_path: Path) -> None:
    a, b = (write_csv(tmp_path / f"{name}.csv", CURVE, STEPS + by) for name, by in (("a", 0), ("b", 2000)))
    with pytest.raises(DataError, match="at no common step"):
        compare_groups({"a": [a], "b": [b]})


def test_runs_evaluated_at_other_steps_are_compared_by_their_training(tmp_path: Path) -> None:
    late = [{"step": 5000, "heldout_accuracy": 0.5}]
    groups = []
    for name, more in (("a", []), ("b", late)):
        records = heldout_records(CURVE)
        for record in records:
            record["accuracy"] = record["heldout_accuracy"]
            if more:
                del record["heldout_accuracy"]
        groups.append(write_run(tmp_path / name, [*records, *more]))
    comparison = compare_groups({"a": [groups[0]], "b": [groups[1]]})
    assert comparison.pairs[0].metric == "accuracy"
    assert any("training values" in note for note in comparison.notes)
