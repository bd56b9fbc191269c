"""A thinned curve hides nothing: every value is in the band of its column, and the means are means."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.page.thin import running_mean, thin

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
