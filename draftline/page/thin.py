"""Long curves drawn with few points: what a screen cannot show is summed up, never left out.

A curve with more values than a page has columns is cut into columns of equal width along x. Each column keeps the mean
of its values, and the lowest and the highest, which are drawn as a band: no spike is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

COLUMNS = 480
"""About the width of a chart in pixels, on a page with two of them side by side."""


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


def running_mean(y: FloatArray, window: int) -> FloatArray:
    """Mean of the `window` values around each one; of fewer at both ends, as many before as behind.

    Values that are not finite make the mean around them not finite.
    """
    sums = np.concatenate([[0.0], np.cumsum(y)])
    place = np.arange(len(y))
    reach = np.minimum(window // 2, np.minimum(place, len(y) - 1 - place))
    means: FloatArray = (sums[place + reach + 1] - sums[place - reach]) / (2 * reach + 1)
    return means
