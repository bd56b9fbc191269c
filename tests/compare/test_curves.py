"""Curves, levels and intervals, against plain formulas and scipy's own tests."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from draftline.compare.curves import POINTS, Curve, ratio_of_places, ratio_of_reaches, ratio_of_values
from draftline.compare.trajectory import Series

STEPS = np.arange(10.0, 101.0, 10.0)


def curve(values: list[float] | np.ndarray, rising: bool = True) -> Curve:
    numbers = np.asarray(values, dtype=np.float64)
    return Curve.of(Series({"step": np.arange(1.0, len(numbers) + 1) * 10}, numbers), rising)


def test_many_lines_become_means_on_the_same_line() -> None:
    steps = np.arange(1.0, 1001.0)
    thin = Curve.of(Series({"step": steps, "seconds": steps / 2}, 3 * steps + 1), rising=True)
    assert len(thin.values) == POINTS
    assert thin.values == pytest.approx(3 * thin.axes["step"] + 1)
    assert thin.axes["seconds"] == pytest.approx(thin.axes["step"] / 2)


def test_few_lines_stay_what_they_are() -> None:
    assert curve([0.1, 0.2, 0.15]).values.tolist() == [0.1, 0.2, 0.15]
    assert curve([0.1, 0.2, 0.15]).at("step", 25) == pytest.approx(0.175)


@pytest.mark.parametrize("rising", [True, False])
def test_a_level_is_reached_where_the_straight_line_crosses_it(rising: bool) -> None:
    sign = 1 if rising else -1
    line = curve([5 + sign * k for k in range(5)], rising)
    reach = line.reach("step", 5 + sign * 1.25)
    assert (reach.state, reach.place) == ("reached", pytest.approx(22.5))
    assert line.reach("step", 5 - sign).state == "before"
    assert line.reach("step", 5).state == "reached"
    never = line.reach("step", 5 + sign * 4.1)
    assert (never.state, never.place) == ("never", 50)


def test_one_lucky_measurement_is_not_reaching() -> None:
    lucky = curve([0.1, 0.3, 0.12, 0.14, 0.2, 0.31])
    assert lucky.reach("step", 0.25).place > 50


def test_the_interval_of_places_is_that_of_welch() -> None:
    slow, fast = [2400.0, 2210.0, 2555.0], [475.0, 520.0, 430.0, 460.0]
    estimate = ratio_of_places(slow, fast)
    expected = stats.ttest_ind(np.log(slow), np.log(fast), equal_var=False).confidence_interval(0.95)
    assert estimate.basis == "seeds"
    assert estimate.value == pytest.approx(np.exp(np.mean(np.log(slow)) - np.mean(np.log(fast))))
    assert np.log([estimate.low, estimate.high]) == pytest.approx([expected.low, expected.high])


def test_the_interval_of_values_covers_in_nineteen_of_twenty() -> None:
    rng, covered, trials = np.random.default_rng(1), 0, 600
    for _ in range(trials):
        before = [curve([0.30 * (1 + 0.04 * rng.standard_normal())]) for _ in range(3)]
        after = [curve([0.45 * (1 + 0.02 * rng.standard_normal())]) for _ in range(3)]
        estimate = ratio_of_values(after, before, "step", 10)
        covered += estimate.low <= 1.5 <= estimate.high
    assert stats.binomtest(covered, trials, 0.95).pvalue > 0.001 or covered / trials > 0.95
    assert covered < trials


def test_a_single_run_beside_a_group_borrows_its_spread() -> None:
    group, single = [0.30, 0.31, 0.29], 0.60
    estimate = ratio_of_values([curve([single])], [curve([value]) for value in group], "step", 10)
    relative = np.std(group, ddof=1) / np.mean(group)
    half = stats.t.ppf(0.975, 2) * 2 * relative * np.sqrt(1 + 1 / 3)
    assert estimate.basis == "seeds of one side"
    assert (estimate.low, estimate.high) == pytest.approx((2 - half, 2 + half))


def test_scatter_of_single_runs_is_recovered() -> None:
    rng, found = np.random.default_rng(2), []
    places = np.arange(22)
    for _ in range(100):
        found.append(curve((0.2 + 0.002 * places) * (1 + 0.015 * rng.standard_normal(22))).scatter[0])
    assert np.median(found) == pytest.approx(0.015**2, rel=0.15)


def test_single_runs_get_an_interval_from_their_scatter_and_too_short_ones_none() -> None:
    rng = np.random.default_rng(3)
    slow, fast = (curve(STEPS / pace + 0.02 * rng.standard_normal(10)) for pace in (100, 50))
    value = ratio_of_values([fast], [slow], "step", 60)
    assert value.basis == "scatter"
    assert 1 < value.low < value.value < value.high
    place = ratio_of_reaches([slow], [fast], "step", 0.8)
    assert place.basis == "scatter"
    assert place.low < 2 < place.high
    assert place.low > 1.5
    short = ratio_of_values([curve([0.2, 0.3])], [curve([0.1, 0.2])], "step", 20)
    assert (short.low, short.high, short.basis) == (None, None, "nothing")


def test_a_group_at_zero_has_a_ratio_too() -> None:
    estimate = ratio_of_values([curve([v]) for v in (0, 0.01, 0)], [curve([v]) for v in (0.5, 0.52, 0.48)], "step", 10)
    assert estimate.low == 0.0
    assert estimate.high < 0.1
