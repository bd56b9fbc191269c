"""Charts: values in, SVG paths and ticks out; `parts.html` draws them.

A plot is an SVG of 1000 by 1000 units, stretched to whatever size the page gives it; lines keep their width. Ticks and
names are HTML around it, so they keep their size on a phone. What a chart shows is also told in words and in a table.

A long curve is drawn with few points: what a screen cannot show is summed up, never left out. A curve with more values
than a page has columns is cut into columns of equal width along x. Each column keeps the mean of its values, and the
lowest and the highest, which are drawn as a band: no spike is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

COLUMNS = 480
"""About the width of a chart in pixels, on a page with two of them side by side."""

UNITS = 1000
"""Width and height of a plot in its own units."""

MEANS = 40
"""The running mean of a noisy curve is over this part of its values."""

_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
_WANTED_TICKS = 5


def hue(index: int) -> str:
    """Colour number `index` of those that differ in kind; there are eight, then they repeat."""
    return f"var(--hue-{index % 8})"


def shade(share: float) -> str:
    """Colour at `share` 0..1 of an ordered scale, violet to green, with enough contrast for a line."""
    return f"oklch(calc(var(--shade-from) + {share:.3f} * var(--shade-by)) 0.14 {300 - 190 * share:.0f})"


@dataclass(frozen=True)
class Tick:
    """A value beside an axis.

    Attributes:
        place: 0..1 along the axis.
    """

    place: float
    text: str


@dataclass(frozen=True)
class ChartAxis:
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
    def around(low: float, high: float) -> ChartAxis:
        """Linear, with round ends that enclose both values."""
        if high <= low:  # one value: a round place on either side, and nothing below zero for it
            low, high = (low - abs(low) * 0.1 if low else 0.0), (high + abs(high) * 0.1 if high else 1.0)
        step = _round_step((high - low) / _WANTED_TICKS)
        return ChartAxis(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step)

    @staticmethod
    def logarithmic(low: float, high: float) -> ChartAxis:
        """Logarithmic, with a little room around both values, which are positive."""
        room = max((high / low) ** 0.03, 1.02)
        return ChartAxis(low / room, high * room, log=True)

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


@dataclass(frozen=True)
class Thinned:
    """A curve as it is drawn.

    Attributes:
        x: [n] mean position of each column, increasing.
        y: [n] mean of its values.
        low: [n] lowest value, or lower edge of a given band.
        high: [n] highest value, or upper edge of a given band.
        values: how many values there were.
    """

    x: FloatArray
    y: FloatArray
    low: FloatArray
    high: FloatArray
    values: int

    @property
    def summed_up(self) -> bool:
        """Whether a column stands for more than one value."""
        return self.values > len(self.x)


def thin(
    x: FloatArray, y: FloatArray, band: tuple[FloatArray, FloatArray] | None = None, columns: int = COLUMNS
) -> Thinned:
    """At most `columns` points for a curve; every point where there are no more than that.

    Values that are not finite are left out. `band` gives each value an interval of its own.
    """
    low, high = (y, y) if band is None else band
    keep = np.isfinite(x) & np.isfinite(y) & np.isfinite(low) & np.isfinite(high)
    order = np.argsort(x[keep], kind="stable")
    x, y, low, high = (part[keep][order] for part in (x, y, low, high))
    if len(x) <= columns:
        return Thinned(x, y, low, high, len(x))
    span = x[-1] - x[0]
    column = np.minimum((x - x[0]) / span * columns, columns - 1).astype(np.int64) if span else np.zeros(len(x), int)
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    counts = np.diff(starts, append=len(x))
    return Thinned(
        x=np.add.reduceat(x, starts) / counts,
        y=np.add.reduceat(y, starts) / counts,
        low=np.minimum.reduceat(low, starts),
        high=np.maximum.reduceat(high, starts),
        values=len(x),
    )


def mean_window(values: int) -> int:
    """Values that a running mean of so many averages: an odd number, 1 where there are too few."""
    return 1 + 2 * (values // MEANS // 2)


def running_mean(y: FloatArray, window: int) -> FloatArray:
    """Mean of the `window` values around each one; of fewer at both ends, as many before as behind.

    Values that are not finite make the mean around them not finite.
    """
    sums = np.concatenate([[0.0], np.cumsum(y)])
    place = np.arange(len(y))
    reach = np.minimum(window // 2, np.minimum(place, len(y) - 1 - place))
    means: FloatArray = (sums[place + reach + 1] - sums[place - reach]) / (2 * reach + 1)
    return means


@dataclass(frozen=True)
class ChartCurve:
    """One line of a chart.

    Attributes:
        x: [n] positions.
        y: [n] values; those that are not finite are left out.
        color: from `hue` or `shade`.
        band: [n] lower and upper edge of an interval around each value.
        noisy: draw the values thin, and their running mean bold.
        marks: draw a dot at each value.
    """

    name: str
    x: FloatArray
    y: FloatArray
    color: str
    band: tuple[FloatArray, FloatArray] | None = None
    noisy: bool = False
    marks: bool = False

    @cached_property
    def drawn(self) -> Thinned:
        """The points that are drawn."""
        return thin(self.x, self.y, self.band)

    @cached_property
    def window(self) -> int:
        """Values that the running mean averages; 1 where none is drawn."""
        return mean_window(self.drawn.values) if self.noisy else 1

    @cached_property
    def mean(self) -> Thinned | None:
        """The running mean of a noisy curve that is long enough for one."""
        if self.window == 1:
            return None
        keep = np.isfinite(self.x) & np.isfinite(self.y)
        return thin(self.x[keep], running_mean(self.y[keep], self.window))

    @property
    def figures(self) -> list[str]:
        """A row of numbers: name, first, last, lowest and highest value with their positions."""
        keep = np.isfinite(self.x) & np.isfinite(self.y)
        x, y = self.x[keep], self.y[keep]
        places = (0, len(y) - 1, int(y.argmin()), int(y.argmax()))
        return [self.name, *(f"{number(y[i])} at {number(x[i])}" for i in places)]


@dataclass(frozen=True)
class Line:
    """A curve as SVG path data, each empty where it is not drawn."""

    name: str
    color: str
    values: str
    mean: str
    band: str
    dots: str


@dataclass(frozen=True)
class Chart:
    """Curves over one x axis.

    Attributes:
        title: what is measured.
        curves: those without any finite value are left out.
        unit: of y.
        x_name: what x is.
        scale: of y; a logarithmic one needs values above 0.
        from_zero: whether a linear y axis begins at 0.
        note: a sentence under the chart.
    """

    title: str
    curves: Sequence[ChartCurve]
    unit: str = ""
    x_name: str = "step"
    scale: Literal["linear", "log"] = "linear"
    from_zero: bool = True
    note: str = ""

    FIGURES = ("curve", "first", "last", "lowest", "highest")
    """Head of the table of `figures`."""

    @cached_property
    def visible(self) -> list[ChartCurve]:
        """Curves that have something to show."""
        return [curve for curve in self.curves if len(curve.drawn.x)]

    @cached_property
    def x_axis(self) -> ChartAxis:
        """From the first to the last position of any curve."""
        ends = [float(end) for curve in self.visible for end in (curve.drawn.x[0], curve.drawn.x[-1])]
        low, high = min(ends, default=0.0), max(ends, default=1.0)
        return ChartAxis(low, high) if high > low else ChartAxis(low - 1, high + 1)

    @cached_property
    def y_axis(self) -> ChartAxis:
        """Round ends around all that is drawn."""
        if not self.visible:
            return ChartAxis(0.0, 1.0)
        low = min(float(curve.drawn.low.min()) for curve in self.visible)
        high = max(float(curve.drawn.high.max()) for curve in self.visible)
        if self.scale == "log" and low > 0:
            return ChartAxis.logarithmic(low, high)
        return ChartAxis.around(min(low, 0.0) if self.from_zero else low, high)

    @property
    def key(self) -> list[tuple[str, str]]:
        """Name and colour of each curve that is drawn."""
        return [(curve.name, curve.color) for curve in self.visible]

    @property
    def figures(self) -> list[list[str]]:
        """Rows for `FIGURES`."""
        return [curve.figures for curve in self.visible]

    @cached_property
    def lines(self) -> list[Line]:
        """What is drawn, in the order of the curves."""
        return [self._line(curve) for curve in self.visible]

    @property
    def explanation(self) -> str:
        """What of the drawing is not one dot per value: said under the chart."""
        said = [self.note] if self.note else []
        windows = sorted({curve.window for curve in self.visible if curve.mean is not None})
        if windows:
            said.append(f"Bold: running mean of {' or '.join(map(str, windows))} values.")
        most = max((curve.drawn.values for curve in self.visible if curve.drawn.summed_up), default=0)
        if most:
            said.append(
                f"{most:,} values in {max(len(curve.drawn.x) for curve in self.visible)} columns: the thin line is the "
                "mean of each column, the band its lowest to its highest value."
            )
        return " ".join(said)

    @property
    def words(self) -> str:
        """The chart told to those who do not see it."""
        told = "; ".join(f"{c.name}: first {c.figures[1]}, last {c.figures[2]}" for c in self.visible)
        return f"{self.title} by {self.x_name}. {told or 'no value yet'}."

    def _line(self, curve: ChartCurve) -> Line:
        drawn, mean = curve.drawn, curve.mean
        x, y = self.x_axis.places(drawn.x), self.y_axis.places(drawn.y)
        banded = curve.band is not None or drawn.summed_up
        points = _points(x, y)
        marked = curve.marks or len(points) == 1
        return Line(
            name=curve.name,
            color=curve.color,
            values=_path(points),
            mean="" if mean is None else _path(_points(self.x_axis.places(mean.x), self.y_axis.places(mean.y))),
            band=_area(x, self.y_axis.places(drawn.low), self.y_axis.places(drawn.high)) if banded else "",
            dots="".join(f"M{point}h0" for point in points) if marked and not drawn.summed_up else "",
        )


@dataclass(frozen=True)
class Bar:
    """A bar in the plot's units, with the words for it."""

    x: float
    y: float
    width: float
    height: float
    words: str


@dataclass(frozen=True)
class Bars:
    """Groups of bars side by side over named categories.

    Attributes:
        title: what is measured.
        categories: names along x.
        groups: name, colour and one value per category; None where nothing was measured.
        x_name: what the categories are.
        note: a sentence under the chart.
    """

    title: str
    categories: Sequence[str]
    groups: Sequence[tuple[str, str, Sequence[float | None]]]
    x_name: str
    note: str = ""

    @cached_property
    def y_axis(self) -> ChartAxis:
        """From 0 to a round end."""
        highest = max((v for *_, values in self.groups for v in values if v is not None), default=1.0)
        return ChartAxis.around(0.0, highest)

    @property
    def x_ticks(self) -> list[Tick]:
        """Names under the middle of their bars."""
        count = len(self.categories)
        return [Tick((i + 0.5) / count, name) for i, name in enumerate(self.categories)]

    @property
    def key(self) -> list[tuple[str, str]]:
        """Name and colour of each group."""
        return [(name, color) for name, color, _ in self.groups]

    @property
    def drawn(self) -> list[tuple[str, str, list[Bar]]]:
        """Name, colour and bars of each group."""
        return [(name, color, self._bars(g, name, values)) for g, (name, color, values) in enumerate(self.groups)]

    @property
    def words(self) -> str:
        """The chart told to those who do not see it."""
        told = "; ".join(f"{name}: {' '.join(_shown(v) for v in values)}" for name, _, values in self.groups)
        return f"{self.title} by {self.x_name} {self.categories[0]} to {self.categories[-1]}. {told}."

    @property
    def rows(self) -> list[list[str]]:
        """The numbers, one row per group."""
        return [[name, *(_shown(value) for value in values)] for name, _, values in self.groups]

    def _bars(self, group: int, name: str, values: Sequence[float | None]) -> list[Bar]:
        cell = UNITS / len(self.categories)
        width = cell * 0.76 / len(self.groups)
        measured = [(i, value) for i, value in enumerate(values) if value is not None]
        heights = self.y_axis.places(np.array([value for _, value in measured], dtype=np.float64)) * UNITS
        return [
            Bar(
                x=round(cell * (i + 0.12) + width * group, 1),
                y=round(UNITS - float(height), 1),
                width=round(width * 0.94, 1),
                height=round(float(height), 1),
                words=f"{self.x_name} {self.categories[i]}, {name}: {number(value)}",
            )
            for (i, value), height in zip(measured, heights, strict=True)
        ]


def _shown(value: float | None) -> str:
    return "–" if value is None else number(value)


def _points(x: FloatArray, y: FloatArray) -> list[str]:
    """Places as `x,y` in the plot's units, from its upper left corner as SVG counts."""
    return [f"{a:.1f},{b:.1f}" for a, b in zip((x * UNITS).tolist(), ((1 - y) * UNITS).tolist(), strict=True)]


def _path(points: Sequence[str]) -> str:
    return "M" + "L".join(points)


def _area(x: FloatArray, low: FloatArray, high: FloatArray) -> str:
    return _path([*_points(x, high), *_points(x[::-1], low[::-1])]) + "Z"


def _round_step(step: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten; 0 for 0."""
    if step <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in _ROUND if m * power >= step * (1 - 1e-9))
