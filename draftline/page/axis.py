"""Axes: where a value lies on a plot, which values are written beside it, and how a number is written."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from draftline.page.thin import FloatArray

_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
_WANTED_TICKS = 5


@dataclass(frozen=True)
class Tick:
    """A value beside an axis.

    Attributes:
        place: 0..1 along the axis.
    """

    place: float
    text: str


@dataclass(frozen=True)
class Axis:
    """One direction of a plot.

    Attributes:
        low: value at place 0.
        high: value at place 1.
        log: whether equal distances are equal ratios.
    """

    low: float
    high: float
    log: bool = False

    @staticmethod
    def around(low: float, high: float) -> Axis:
        """Linear, with round ends that enclose both values."""
        if high <= low:  # one value: a round place on either side, and nothing below zero for it
            low, high = (low - abs(low) * 0.1 if low else 0.0), (high + abs(high) * 0.1 if high else 1.0)
        step = _round_step((high - low) / _WANTED_TICKS)
        return Axis(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step)

    @staticmethod
    def logarithmic(low: float, high: float) -> Axis:
        """Logarithmic, with a little room around both values, which are positive."""
        room = max((high / low) ** 0.03, 1.02)
        return Axis(low / room, high * room, log=True)

    def places(self, values: FloatArray) -> FloatArray:
        """[n] values as places 0..1; on a logarithmic axis what is below its low end lies there."""
        if not self.log:
            places: FloatArray = (values - self.low) / (self.high - self.low or 1.0)
            return places
        ratio: FloatArray = np.log(np.maximum(values, self.low) / self.low) / math.log(self.high / self.low)
        return ratio

    @property
    def ticks(self) -> list[Tick]:
        """Round values between the ends."""
        values = np.array(self._logarithmic_ticks() if self.log else self._linear_ticks())
        return [Tick(float(p), short(float(v))) for p, v in zip(self.places(values), values, strict=True)]

    def _linear_ticks(self) -> list[float]:
        step = _round_step((self.high - self.low) / _WANTED_TICKS) or 1.0
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(i * step, 12) for i in range(first, last + 1)]

    def _logarithmic_ticks(self) -> list[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for leading in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
            values = [m * 10.0**d for d in decades for m in leading if self.low <= m * 10.0**d <= self.high]
            if len(values) >= 3:
                return values[:: math.ceil(len(values) / (_WANTED_TICKS + 2))]
        return [self.low, self.high]


def short(value: float) -> str:
    """A number for the side of an axis: 150k, 2.5M, 0.25."""
    for bound, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= bound:
            unit = 1e3 if letter == "k" else bound
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"


def number(value: float) -> str:
    """A number for a table, at three or four digits; a dash where nothing was measured."""
    if not math.isfinite(value):
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == int(value):
        return str(int(value))
    return f"{value:.3f}" if 0.01 <= abs(value) < 10 else f"{value:.3g}"


def _round_step(step: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten; 0 for 0."""
    if step <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in _ROUND if m * power >= step * (1 - 1e-9))
