"""Charts: values in, SVG paths and ticks out; `parts.html` draws them.

A plot is an SVG of 1000 by 1000 units, stretched to whatever size the page gives it; lines keep their width. Ticks and
names are HTML around it, so they keep their size on a phone. What a chart shows is also told in words and in a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from draftline.page.axis import Axis, Tick, number
from draftline.page.thin import FloatArray, Thinned, running_mean, thin

UNITS = 1000
"""Width and height of a plot in its own units."""

MEANS = 40
"""The running mean of a noisy curve is over this part of its values."""


def hue(index: int) -> str:
    """Colour number `index` of those that differ in kind; there are eight, then they repeat."""
    return f"var(--hue-{index % 8})"


def shade(share: float) -> str:
    """Colour at `share` 0..1 of an ordered scale, violet to green, with enough contrast for a line."""
    return f"oklch(calc(var(--shade-from) + {share:.3f} * var(--shade-by)) 0.14 {300 - 190 * share:.0f})"


@dataclass(frozen=True)
class Curve:
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
        return 1 + 2 * (self.drawn.values // MEANS // 2) if self.noisy else 1

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
    curves: Sequence[Curve]
    unit: str = ""
    x_name: str = "step"
    scale: Literal["linear", "log"] = "linear"
    from_zero: bool = True
    note: str = ""

    FIGURES = ("curve", "first", "last", "lowest", "highest")
    """Head of the table of `figures`."""

    @cached_property
    def visible(self) -> list[Curve]:
        """Curves that have something to show."""
        return [curve for curve in self.curves if len(curve.drawn.x)]

    @cached_property
    def x_axis(self) -> Axis:
        """From the first to the last position of any curve."""
        ends = [float(end) for curve in self.visible for end in (curve.drawn.x[0], curve.drawn.x[-1])]
        low, high = min(ends, default=0.0), max(ends, default=1.0)
        return Axis(low, high) if high > low else Axis(low - 1, high + 1)

    @cached_property
    def y_axis(self) -> Axis:
        """Round ends around all that is drawn."""
        if not self.visible:
            return Axis(0.0, 1.0)
        low = min(float(curve.drawn.low.min()) for curve in self.visible)
        high = max(float(curve.drawn.high.max()) for curve in self.visible)
        if self.scale == "log" and low > 0:
            return Axis.logarithmic(low, high)
        return Axis.around(min(low, 0.0) if self.from_zero else low, high)

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

    def _line(self, curve: Curve) -> Line:
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
    def y_axis(self) -> Axis:
        """From 0 to a round end."""
        return Axis.around(0.0, max((v for *_, values in self.groups for v in values if v is not None), default=1.0))

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
