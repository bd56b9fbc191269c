"""Places, ticks and paths against values computed by hand; what a thinned curve still shows of all its values."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.page.chart import Bars, Chart, ChartAxis, ChartCurve, hue, number, running_mean, short, thin


def curve(*values: float, **style: bool) -> ChartCurve:
    return ChartCurve("curve", np.arange(1.0, len(values) + 1), np.array(values), hue(0), **style)


@given(st.floats(-1e3, 1e3), st.floats(1e-6, 1e9))
def test_a_linear_axis_encloses_both_values_with_a_few_round_ticks(low: float, span: float) -> None:
    axis = ChartAxis.around(low, low + span)
    assert axis.low <= low + 1e-6 * span
    assert low + span <= axis.high + 1e-6 * span
    assert 2 <= len(axis.ticks) <= 8
    assert all(-1e-6 <= tick.place <= 1 + 1e-6 for tick in axis.ticks)


@given(st.floats(1e-8, 1e8), st.floats(1.0, 1e8))
def test_a_logarithmic_axis_gives_equal_ratios_equal_distances(low: float, ratio: float) -> None:
    axis = ChartAxis.logarithmic(low, low * ratio)
    first, middle, last = axis.places(np.array([low, low * ratio**0.5, low * ratio]))
    assert first >= 0
    assert last <= 1
    assert middle - first == pytest.approx(last - middle, abs=1e-6)
    assert 1 <= len(axis.ticks) <= 9


def test_ticks_are_the_numbers_that_one_would_write() -> None:
    assert [tick.text for tick in ChartAxis.around(0.0, 0.43).ticks] == ["0", "0.1", "0.2", "0.3", "0.4", "0.5"]
    assert [tick.text for tick in ChartAxis.around(0.0, 0.0).ticks] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert [tick.text for tick in ChartAxis.logarithmic(3.0, 20_000.0).ticks] == ["10", "100", "1000", "10k"]
    assert [short(value) for value in (1e4, 2.5e6, 3e9, 0.001)] == ["10k", "2.5M", "3G", "0.001"]
    assert [number(value) for value in (1571.0, 0.29911, 12.345, 3.0, float("nan"))] == [
        "1,571",
        "0.299",
        "12.3",
        "3",
        "–",
    ]


def test_paths_go_from_the_lower_left_to_the_upper_right() -> None:
    chart = Chart("t", [curve(0.0, 1.0, 2.0)])
    assert chart.lines[0].values == "M0.0,1000.0L500.0,500.0L1000.0,0.0"
    assert (chart.lines[0].mean, chart.lines[0].band, chart.lines[0].dots) == ("", "", "")


def test_a_long_noisy_curve_has_a_band_and_a_mean_and_the_chart_says_so() -> None:
    values = np.random.default_rng(0).normal(5, 1, 5000)
    chart = Chart("t", [curve(*values, noisy=True)])
    line = chart.lines[0]
    assert line.band.endswith("Z")
    assert 400 < len(re.findall(",", line.values)) <= 480
    assert line.mean
    assert "running mean of 125 values" in chart.explanation
    assert "5,000 values in 480 columns" in chart.explanation


def test_one_value_is_a_dot_and_no_value_is_no_line() -> None:
    assert Chart("t", [curve(3.0)]).lines[0].dots.endswith("h0")
    empty = Chart("t", [curve(float("nan"))])
    assert empty.lines == []
    assert empty.words == "t by step. no value yet."


def test_words_and_figures_tell_what_the_curve_shows() -> None:
    chart = Chart("Loss", [curve(4.0, 1.0, 2.0)])
    assert chart.words == "Loss by step. curve: first 4 at 1, last 2 at 3."
    assert chart.figures == [["curve", "4 at 1", "2 at 3", "1 at 2", "4 at 1"]]


def test_bars_stand_side_by_side_on_the_ground() -> None:
    bars = Bars("t", ["a", "b"], [("one", hue(0), [1.0, None]), ("two", hue(1), [0.5, 0.25])], x_name="slot")
    (_, _, first), (_, _, second) = bars.drawn
    assert [round(bar.height / 1000 * bars.y_axis.high, 3) for bar in (*first, *second)] == [1.0, 0.5, 0.25]
    assert all(bar.y + bar.height == pytest.approx(1000, abs=0.2) for bar in (*first, *second))
    assert first[0].x + first[0].width <= second[0].x < second[0].x + second[0].width <= 500 <= second[1].x
    assert bars.rows == [["one", "1", "–"], ["two", "0.500", "0.250"]]
    assert second[1].words == "slot b, two: 0.250"


VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200)


@given(VALUES, st.integers(1, 20), st.randoms(use_true_random=False))
def test_columns_hold_mean_lowest_and_highest_of_their_values(
    values: list[float], columns: int, random: object
) -> None:
    x = sorted(float(i + random.random()) for i in range(len(values)))  # type: ignore[attr-defined]
    thinned = thin(np.array(x), np.array(values), columns=columns)
    if len(values) <= columns:
        assert thinned.y.tolist() == thinned.low.tolist() == thinned.high.tolist() == values
        assert not thinned.summed_up
        return
    cells: dict[int, list[int]] = {}
    for i, place in enumerate(x):
        cells.setdefault(min(int((place - x[0]) / (x[-1] - x[0]) * columns), columns - 1), []).append(i)
    kept = [cells[cell] for cell in sorted(cells)]
    assert thinned.low.tolist() == [min(values[i] for i in cell) for cell in kept]
    assert thinned.high.tolist() == [max(values[i] for i in cell) for cell in kept]
    assert thinned.y == pytest.approx([sum(values[i] for i in cell) / len(cell) for cell in kept], abs=1e-6)
    assert thinned.x == pytest.approx([sum(x[i] for i in cell) / len(cell) for cell in kept])
    assert thinned.summed_up
    assert thinned.values == len(values)


def test_a_single_spike_among_many_values_is_seen() -> None:
    y = np.ones(100_000)
    y[54_321] = 7.0
    thinned = thin(np.arange(100_000.0), y)
    assert len(thinned.x) <= 480
    assert thinned.high.max() == 7.0


def test_values_that_are_no_numbers_are_left_out_and_steps_put_in_order() -> None:
    thinned = thin(np.array([3.0, 1.0, 2.0, 4.0]), np.array([30.0, 10.0, math.nan, math.inf]))
    assert (thinned.x.tolist(), thinned.y.tolist(), thinned.values) == ([1.0, 3.0], [10.0, 30.0], 2)
    assert len(thin(np.zeros(0), np.zeros(0)).x) == 0
    assert len(thin(np.full(1000, 5.0), np.arange(1000.0)).x) == 1


def test_bands_are_widened_by_those_of_all_values_of_a_column() -> None:
    y = np.arange(10.0)
    thinned = thin(y, y, band=(y - 1, y + 2), columns=2)
    assert (thinned.low.tolist(), thinned.high.tolist()) == ([-1.0, 4.0], [6.0, 11.0])


@given(VALUES, st.sampled_from([1, 3, 7, 31]))
def test_running_mean_is_the_mean_of_what_lies_around(values: list[float], window: int) -> None:
    means = running_mean(np.array(values), window)
    for i in range(len(values)):
        reach = min(window // 2, i, len(values) - 1 - i)
        around = values[i - reach : i + reach + 1]
        assert means[i] == pytest.approx(sum(around) / len(around), abs=1e-6)
