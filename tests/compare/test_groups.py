"""Verdicts on groups of runs with known curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.compare import compare_groups, name_groups
from draftline.compare.groups import Pair
from draftline.errors import ConfigError, DataError
from draftline.options import CompareSettings
from tests.compare.synthetic_runs import STEPS, heldout_records, learning_curve, write_csv, write_run

SMOOTH = 0.3 * (1 - np.exp(-STEPS / 300))
TWICE_AS_FAST = 0.3 * (1 - np.exp(-STEPS / 150))


def draw_groups(folder: Path, rng: np.random.Generator, **candidate: float) -> dict[str, list[Path]]:
    groups: dict[str, list[Path]] = {}
    for name, changes in (("before", {}), ("after", candidate)):
        groups[name] = [write_csv(folder / f"{name}-{k}.csv", learning_curve(rng, **changes)) for k in range(3)]
    return groups


@pytest.mark.parametrize(
    ("changes", "expected"), [({}, "same"), ({"top": 0.24}, "worse"), ({"top": 0.38, "pace": 200.0}, "better")]
)
def test_groups_of_three_are_judged_right_in_at_least_95_percent(
    tmp_path: Path, changes: dict[str, float], expected: str
) -> None:
    rng = np.random.default_rng(4)
    verdicts = [compare_groups(draw_groups(tmp_path, rng, **changes)).pairs[0].verdict for _ in range(40)]
    assert verdicts.count(expected) >= 38


def runs(folder: Path, after: np.ndarray = TWICE_AS_FAST, **identities: Any) -> dict[str, list[Path]]:
    return {
        "before": [write_run(folder / "a", heldout_records(SMOOTH), identities.get("before"))],
        "after": [write_run(folder / "b", heldout_records(after, rate=400), identities.get("after"))],
    }


def only_pair(groups: dict[str, list[Path]], **options: Any) -> Pair:
    return compare_groups(groups, CompareSettings(**options)).pairs[0]


def test_twice_as_fast_is_twice_as_soon(tmp_path: Path) -> None:
    pair = only_pair(runs(tmp_path))
    by_step = pair.metrics["heldout_accuracy"].axes["step"]
    exact = [entry for entry in by_step.sooner if entry.bound == "exactly"]
    assert [entry.times.value for entry in exact] == pytest.approx([2] * len(exact), rel=0.03)
    assert pair.steps_to_same_accuracy == exact[-1]
    assert exact[-1].baseline == pytest.approx(1000)
    assert pair.metrics["heldout_accuracy"].axes["seconds"].headline.times.value == pytest.approx(4, rel=0.03)
    assert pair.tokens_per_second.ratio.value == pytest.approx(2)
    last = by_step.same_place[-1]
    assert (last.place, last.baseline, last.candidate) == pytest.approx((1000, SMOOTH[-1], TWICE_AS_FAST[-1]))
    assert pair.streak_ratio.value == pytest.approx(TWICE_AS_FAST[-1] / SMOOTH[-1])


def test_what_one_side_never_reaches_is_a_bound(tmp_path: Path) -> None:
    pair = only_pair(runs(tmp_path, 2 * SMOOTH))
    best = pair.metrics["heldout_accuracy"].axes["step"].sooner[-1]
    assert (best.bound, best.never, best.times.low) == ("at least", ("before",), None)
    assert best.level == pytest.approx(2 * SMOOTH[-1])
    assert best.times.value == pytest.approx(1)
    assert pair.verdict == "better"


def test_where_curves_have_no_value_in_common_there_is_a_bound(tmp_path: Path) -> None:
    pair = only_pair(runs(tmp_path, SMOOTH + 1))
    first, best = pair.metrics["heldout_accuracy"].axes["step"].sooner
    assert (first.bound, first.times.value) == ("at least", pytest.approx(1000 / 50))
    assert (best.bound, best.times.value) == ("at least", pytest.approx(1))


def test_less_loss_is_better(tmp_path: Path) -> None:
    falling = {"a": write_csv(tmp_path / "a.csv", 3 - SMOOTH), "b": write_csv(tmp_path / "b.csv", 2 - SMOOTH)}
    groups = {name: [path] for name, path in falling.items()}
    assert only_pair(groups).verdict == "worse"
    assert only_pair(groups, lower_is_better=True, metric=["accuracy"]).verdict == "better"


def test_a_small_difference_that_is_sure_is_still_the_same(tmp_path: Path) -> None:
    groups = runs(tmp_path, SMOOTH * 1.015)
    pair = only_pair(groups)
    assert (pair.verdict, pair.decided, pair.words) == ("same", True, "same")
    assert "within the margin" in pair.reason
    assert only_pair(groups, margin=0.001).verdict == "better"


def test_a_wide_interval_is_said_to_be_wide(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    noisy = SMOOTH * (1 + 0.1 * rng.standard_normal(len(SMOOTH)))
    pair = only_pair(runs(tmp_path, noisy))
    assert (pair.verdict, pair.decided, pair.words) == ("same", False, "same, as far as these runs show")
    assert "nor excluded" in pair.reason
    assert "there is a difference" not in pair.reason


def test_a_difference_that_may_be_smaller_than_the_margin_is_told_from_none(tmp_path: Path) -> None:
    pair = only_pair(runs(tmp_path, SMOOTH * 1.03), margin=0.03)
    assert (pair.verdict, pair.decided) == ("same", False)
    assert "there is a difference" in pair.reason


def test_notes_say_what_the_number_of_runs_allows(tmp_path: Path) -> None:
    paths = [write_csv(tmp_path / f"{k}.csv", (1 + k / 100) * SMOOTH) for k in range(4)]
    assert "One run a side" in compare_groups({"a": paths[:1], "b": paths[1:2]}).notes[0]
    assert "borrows the spread" in compare_groups({"a": paths[:1], "b": paths[1:]}).notes[0]
    assert compare_groups({"a": paths[:2], "b": paths[2:]}).notes == ()


def test_several_groups_are_each_compared_with_the_first(tmp_path: Path) -> None:
    groups = {name: [write_csv(tmp_path / f"{name}.csv", top * SMOOTH)] for name, top in (("x", 1), ("y", 2), ("z", 3))}
    comparison = compare_groups(groups)
    assert [(pair.baseline, pair.candidate) for pair in comparison.pairs] == [("x", "y"), ("x", "z")]
    assert [pair.ratio.value for pair in comparison.pairs] == pytest.approx([2, 3])


@pytest.mark.parametrize("margin", [-0.1, 1.0])
def test_a_margin_that_is_no_share_is_refused(tmp_path: Path, margin: float) -> None:
    with pytest.raises(ConfigError, match="margin"):
        compare_groups(runs(tmp_path), CompareSettings(margin=margin))


def test_too_few_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two or more"):
        compare_groups({"a": [tmp_path]})
    with pytest.raises(ConfigError, match="no run"):
        compare_groups({"a": [tmp_path], "b": []})


@pytest.mark.parametrize("shift", [(-1, -0.5), (0, -0.5), (-0.5, 0)])
def test_a_ratio_of_values_below_zero_is_refused(tmp_path: Path, shift: tuple[float, float]) -> None:
    paths = [write_csv(tmp_path / f"{k}.csv", SMOOTH + by) for k, by in enumerate(shift)]
    with pytest.raises(DataError, match="more than 0 and nothing below"):
        compare_groups({"a": paths[:1], "b": paths[1:]})


@pytest.mark.parametrize("count", [1, 2, 4])
def test_without_an_interval_there_is_no_verdict(tmp_path: Path, count: int) -> None:
    paths = [write_csv(tmp_path / f"{k}.csv", (1 - 0.5 * k) * SMOOTH[-count:], STEPS[-count:]) for k in range(2)]
    pair = only_pair({"a": paths[:1], "b": paths[1:]})
    assert pair.verdict is None
    assert "is -50.0 %, but too few measurements" in pair.reason


def test_points_at_zero_do_not_hide_the_scatter(tmp_path: Path) -> None:
    late = np.where(STEPS > 300, SMOOTH, 0)
    for k, values in enumerate((SMOOTH, 0 * SMOOTH, late)):
        write_csv(tmp_path / f"{k}.csv", values)
    verdicts = {k: only_pair({"a": [tmp_path / "0.csv"], "b": [tmp_path / f"{k}.csv"]}).verdict for k in (1, 2)}
    assert verdicts == {1: "worse", 2: "same"}


def test_a_baseline_at_zero_is_refused(tmp_path: Path) -> None:
    groups = {"a": [write_csv(tmp_path / "a.csv", 0 * SMOOTH)], "b": [write_csv(tmp_path / "b.csv", SMOOTH)]}
    with pytest.raises(DataError, match="more than 0"):
        compare_groups(groups)


def test_words_become_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a-1", "a-2", "x=y"):
        (tmp_path / name).mkdir()
    assert name_groups(["a-*", "x=y", "n=a-1,b"], [], []) == {
        "a-*": [Path("a-1"), Path("a-2")],
        "x=y": [Path("x=y")],
        "n": [Path("a-1"), Path("b")],
    }
    assert name_groups([], ["a-*"], ["b"]) == {"A": [Path("a-1"), Path("a-2")], "B": [Path("b")]}
    with pytest.raises(ConfigError, match=r"named twice.* first=a-1/ second=a-1/"):
        name_groups(["a-1", "a-1/"], [], [])
    with pytest.raises(ConfigError, match=r"named twice.* first=b second=b"):
        name_groups(["n=a-1", "n=b"], [], [])
    for word in ("n=", "=a-1", "n=a-1,,b", ""):
        with pytest.raises(ConfigError, match="leaves out a name"):
            name_groups([word, "a-2"], [], [])
    with pytest.raises(ConfigError, match="has no name"):
        name_groups([], ["a-1"], [""])
