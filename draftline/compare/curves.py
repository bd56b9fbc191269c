"""Curves of one value over a run, and the ratio of two groups of runs with its uncertainty.

**Curve.** A log of many noisy lines is averaged in stretches of equal numbers of lines, so that at most `POINTS` points
remain, each at the mean position of its lines; between points the curve is straight. For "when was this level first
reached" the curve is made monotone by isotonic regression (the least-squares fit that never falls back), because the
first of many noisy measurements above a level would come too early.

**Uncertainty.** Where both groups have several runs, what counts is how runs that differ in nothing but the seed
differ: the ratio of the two means, with Welch's degrees of freedom (variances of the groups may differ; groups of three
are common, so normal quantiles would be much too narrow). Values are averages over many slots and may be 0, so their
ratio is taken on the linear scale, its variance by the delta method; positions (steps to a level) are positive and vary
by factors, so theirs is a difference of logarithms. A single run beside a group borrows the group's relative variance.
With one run a side there is nothing but the relative scatter of the measurements around their own curve, from second
differences (after Gasser, Sroka, Jennen-Steinmetz 1986): it says nothing about another seed. For positions it is
carried over by drawing the curve again and again with that scatter added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.special import stdtrit

from draftline.compare.trajectory import Axis, Series
from draftline.train.log import FloatArray

POINTS = 25
"""Most points of a curve."""

DRAWS = 200
"""Curves drawn for an interval of a position."""

NORMAL_MEDIAN = 0.6745
"""Median of the absolute value of a standard normal variable."""

CONFIDENCE = 0.95
"""Of every interval, two-sided."""

Basis = Literal["seeds", "seeds of one side", "scatter", "nothing"]
"""What an interval was made from: runs on both sides, on one, the measurements of single runs, or too few of them."""


@dataclass(frozen=True)
class Estimate:
    """A ratio and its 95 % interval.

    Attributes:
        value: the ratio.
        low, high: the interval; None if there is nothing to make it from.
        basis: what it was made from.
    """

    value: float
    low: float | None = None
    high: float | None = None
    basis: Basis = "nothing"


@dataclass(frozen=True)
class Reach:
    """Where a curve first reaches a level.

    Attributes:
        place: position on the axis; the first measurement if the level was reached by then, the last if never.
        state: which of these it is.
    """

    place: float
    state: Literal["reached", "before", "never"]


@dataclass(frozen=True)
class Curve:
    """One value of one run, thinned.

    Attributes:
        axes: [n] positions of the points.
        values: [n] means of the measurements around each point.
        rising: whether higher is better.
    """

    axes: dict[Axis, FloatArray]
    values: FloatArray
    rising: bool

    @staticmethod
    def of(series: Series, rising: bool) -> Curve:
        """Average a series into at most `POINTS` points."""
        pieces = np.array_split(np.arange(len(series.values)), min(POINTS, len(series.values)))
        axes = {axis: np.array([places[piece].mean() for piece in pieces]) for axis, places in series.axes.items()}
        return Curve(axes, np.array([series.values[piece].mean() for piece in pieces]), rising)

    @cached_property
    def monotone(self) -> FloatArray:
        """[n] the values, never falling back."""
        return _monotone(self.values, self.rising)

    def at(self, axis: Axis, place: float) -> float:
        """The value at a position between the first point and the last."""
        return float(np.interp(place, self.axes[axis], self.values))

    def reach(self, axis: Axis, level: float) -> Reach:
        """Where the monotone curve first comes up (or down) to a level."""
        return self._reach(self.monotone, axis, level)

    def _reach(self, monotone: FloatArray, axis: Axis, level: float) -> Reach:
        sign, places = (1.0 if self.rising else -1.0), self.axes[axis]
        heights, wanted = sign * monotone, sign * level
        after = int(np.searchsorted(heights, wanted, side="left"))
        if after == len(heights):
            return Reach(float(places[-1]), "never")
        if after == 0:
            return Reach(float(places[0]), "reached" if heights[0] == wanted else "before")
        share = (wanted - heights[after - 1]) / (heights[after] - heights[after - 1])
        return Reach(float(places[after - 1] + share * (places[after] - places[after - 1])), "reached")

    @cached_property
    def _drawn(self) -> list[FloatArray] | None:
        """Monotone curves that might have been measured if the scatter had fallen otherwise."""
        if self.scatter is None:
            return None
        noise = np.random.default_rng(0).standard_normal((DRAWS, len(self.values)))
        return [_monotone(self.values * (1 + math.sqrt(self.scatter[0]) * row), self.rising) for row in noise]

    def drawn_places(self, axis: Axis, level: float) -> FloatArray | None:
        """[DRAWS] where such curves first reach a level; None if the scatter is not known."""
        if self._drawn is None:
            return None
        return np.array([self._reach(drawn, axis, level).place for drawn in self._drawn])

    @cached_property
    def scatter(self) -> tuple[float, float] | None:
        """Relative variance of one point around its curve with its degrees of freedom; None with too few points.

        From the median deviation from the line through both neighbours, so that the steep bend of a curve's beginning
        does not count; a bend everywhere counts as scatter, which is then too much rather than too little. That the
        deviations are correlated and a median is used leaves about a quarter of the degrees of freedom. Points at 0
        have no relative deviation and are left out; a curve of nothing else does not scatter.
        """
        places, values = self.axes["step"], self.values
        if len(values) < 5:
            return None
        if not values.any():
            return 0.0, (len(values) - 2) / 4
        share = (places[2:] - places[1:-1]) / (places[2:] - places[:-2])
        deviations = (values[1:-1] - share * values[:-2] - (1 - share) * values[2:]) / np.sqrt(
            1 + share**2 + (1 - share) ** 2
        )
        known = values[1:-1] != 0
        if known.sum() < 3:
            return None
        typical = np.median(np.abs(deviations[known] / values[1:-1][known])) / NORMAL_MEDIAN
        return float(typical**2), max(1.0, float(known.sum()) / 4)


def _monotone(values: FloatArray, rising: bool) -> FloatArray:
    fitted: FloatArray = isotonic_regression(values, increasing=rising).x
    return fitted


@dataclass(frozen=True)
class _Mean:
    """Mean of a group, the variance of that mean, and the degrees of freedom behind the variance."""

    value: float
    variance: float
    freedom: float


def ratio_of_values(curves: Sequence[Curve], baseline: Sequence[Curve], axis: Axis, place: float) -> Estimate:
    """Mean value of some curves over that of the baseline's, at the same position; the baseline's must be positive."""
    top = [curve.at(axis, place) for curve in curves]
    bottom = [curve.at(axis, place) for curve in baseline]
    ratio = float(np.mean(top) / np.mean(bottom))
    basis, means = _means(top, bottom, curves, baseline)
    if means is None:
        return Estimate(ratio)
    over, under = means
    parts = (over.variance, ratio**2 * under.variance)
    half = _half_width(parts, (over.freedom, under.freedom), basis) / under.value
    return Estimate(ratio, max(0.0, ratio - half), ratio + half, basis)


def ratio_of_reaches(over: Sequence[Curve], under: Sequence[Curve], axis: Axis, level: float) -> Estimate:
    """Geometric mean of the positions where some curves first reach a level over that of others."""
    estimate = ratio_of_places(*([curve.reach(axis, level).place for curve in side] for side in (over, under)))
    if estimate.low is not None:
        return estimate
    drawn = over[0].drawn_places(axis, level), under[0].drawn_places(axis, level)
    if drawn[0] is None or drawn[1] is None:
        return estimate
    tails = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn[0] / drawn[1][::-1], [tails, 1 - tails])  # reversed: the two must not move together
    return Estimate(estimate.value, float(low), float(high), "scatter")


def ratio_of_places(over: Sequence[float], under: Sequence[float]) -> Estimate:
    """Geometric mean of some positions over that of others, for example steps to the same accuracy."""
    top, bottom = ([math.log(place) for place in places] for places in (over, under))
    difference = float(np.mean(top) - np.mean(bottom))
    if max(len(top), len(bottom)) == 1:
        return Estimate(math.exp(difference))
    basis, means = _groups(top, bottom, relative=False)
    half = _half_width((means[0].variance, means[1].variance), (means[0].freedom, means[1].freedom), basis)
    return Estimate(math.exp(difference), math.exp(difference - half), math.exp(difference + half), basis)


def _means(
    top: Sequence[float], bottom: Sequence[float], curves: Sequence[Curve], baseline: Sequence[Curve]
) -> tuple[Basis, tuple[_Mean, _Mean] | None]:
    if max(len(top), len(bottom)) > 1:
        return _groups(top, bottom, relative=True)
    scatters = [side[0].scatter or (math.nan, math.nan) for side in (curves, baseline)]
    if any(math.isnan(variance) for variance, _ in scatters):
        return "nothing", None
    over, under = (
        _Mean(side[0], variance * side[0] ** 2, freedom)
        for side, (variance, freedom) in zip((top, bottom), scatters, strict=True)
    )
    return "scatter", (over, under)


def _groups(top: Sequence[float], bottom: Sequence[float], relative: bool) -> tuple[Basis, tuple[_Mean, _Mean]]:
    """Means of two groups, of which one at most is a single run; it borrows the (relative) variance of the other."""
    if len(top) > 1 and len(bottom) > 1:
        return "seeds", (_mean(top), _mean(bottom))
    known = _mean(top if len(top) > 1 else bottom)
    count = max(len(top), len(bottom))
    single = (top if len(top) == 1 else bottom)[0]
    scale = (single / known.value) ** 2 if relative and known.value else 1.0
    lent = _Mean(single, known.variance * count * scale, known.freedom)
    return "seeds of one side", (known, lent) if len(top) > 1 else (lent, known)


def _mean(values: Sequence[float]) -> _Mean:
    return _Mean(float(np.mean(values)), float(np.var(values, ddof=1)) / len(values), len(values) - 1)


def _half_width(variances: tuple[float, float], freedoms: tuple[float, float], basis: Basis) -> float:
    """Student's quantile times the standard error of a difference (Welch, Satterthwaite).

    Where one side's variance is the other's, the two say the same thing, and there are not more degrees of freedom.
    """
    total = sum(variances)
    if total == 0:
        return 0.0
    if basis == "seeds of one side":
        freedom = freedoms[0]
    else:
        freedom = total**2 / sum(variance**2 / free for variance, free in zip(variances, freedoms, strict=True))
    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(total)
