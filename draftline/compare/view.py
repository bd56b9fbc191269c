"""How a comparison is shown: tables for a terminal, a page, pictures."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import hexdigits

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from draftline.compare.curves import Curve, Estimate
from draftline.compare.groups import Comparison, Pair, SamePlace, Sooner
from draftline.compare.trajectory import AXES, Axis
from draftline.errors import DataError
from draftline.page.chart import Chart, ChartCurve, hue, number
from draftline.page.frame import render
from draftline.progress import table
from draftline.train.log import FloatArray

COMPARISON_SECTIONS = [
    ("curves", "Curves"),
    ("place", "At the same place"),
    ("value", "At the same value"),
    ("differences", "Differences"),
    ("runs", "Runs"),
]

GRID = 60
"""Points at which the runs of a group are averaged for drawing."""

BETWEEN: dict[Axis, str] = {"step": "steps", "tokens": "tokens", "seconds": "seconds"}


def as_text(comparison: Comparison) -> RenderableType:
    """Everything for a terminal, readable without colour."""
    parts: list[RenderableType] = []
    for pair in comparison.pairs:
        style = {"better": "bold green", "worse": "bold red"}.get(str(pair.verdict), "bold")
        parts.append(Text(f"{pair.candidate} against {pair.baseline}: {pair.words}", style))
        parts.append(Text(pair.reason))
        parts += [table(title, head, rows) for title, head, rows in pair_tables(pair, AXES[:1]) if rows]
        parts += _other_axes(pair)
    if comparison.differences:
        parts.append(table("What differs", ["area", "what", *comparison.groups], _difference_rows(comparison)))
    return Group(*parts, *(Text(f"Note: {note}.") for note in comparison.notes))


def _other_axes(pair: Pair) -> list[Text]:
    """One line each for tokens and seconds."""
    if pair.metric is None:
        return []
    lines = []
    for axis, along in pair.metrics[pair.metric].axes.items():
        last, sooner = along.same_place[-1], along.headline
        if axis != "step":
            ending = "" if sooner is None else f"; {sooner_words(sooner)} times sooner at {number(sooner.level)}"
            lines.append(Text(f"After {last.place:,.0f} {BETWEEN[axis]}: ratio {with_interval(last.ratio)}{ending}"))
    return lines


def as_page(comparison: Comparison) -> str:
    """Everything as one page that needs nothing else."""
    context = {
        "comparison": comparison,
        "pairs": [(pair, _cards(pair), list(pair_tables(pair))) for pair in comparison.pairs],
        "charts": [_chart(comparison, metric, axis) for metric, axis in _panels(comparison)],
        "head": ["what", *comparison.groups],
        "differences": [(area, [row[1:] for row in rows]) for area, rows in _by_area(comparison)],
        "runs": [[name, ", ".join(map(str, paths))] for name, paths in comparison.groups.items()],
    }
    title = f"{comparison.pairs[0].baseline} against {', '.join(pair.candidate for pair in comparison.pairs)}"
    return render("compare.html", title=title, sections=COMPARISON_SECTIONS, context=context)


def as_pictures(comparison: Comparison, place: Path) -> dict[Path, bytes]:
    """The curves as PNG files: all in `place` if it ends in .png, else one per value and axis in that folder.

    Raises:
        DataError: nothing was compared that could be drawn.
    """
    charts = {panel: _chart(comparison, *panel) for panel in _panels(comparison)}
    if not charts:
        raise DataError("there is no curve to draw: leave --png out, or choose a value with --metric")
    if place.suffix.lower() == ".png":
        return {place: _picture(list(charts.values()))}
    names = {f"{metric.replace('/', '-')}-by-{axis}.png": chart for (metric, axis), chart in charts.items()}
    return {place / name: _picture([chart]) for name, chart in names.items()}


def pair_tables(pair: Pair, axes: Sequence[Axis] = AXES) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, head and rows: every value at the last common step, then the verdict's value at several, then levels."""
    names = [pair.baseline, pair.candidate]
    last = [[metric, *_same_row(found.axes["step"].same_place[-1])[1:]] for metric, found in pair.metrics.items()]
    if pair.tokens_per_second is not None:
        speed = pair.tokens_per_second
        last.append(["tokens per second", number(speed.baseline), number(speed.candidate), with_interval(speed.ratio)])
    yield "At the last common step", ["value", *names, "ratio (95 %)"], last
    if pair.metric is None:
        return
    found = pair.metrics[pair.metric]
    shown = {axis: found.axes[axis] for axis in axes if axis in found.axes}
    for axis, along in shown.items():
        rows = [_same_row(entry) for entry in along.same_place]
        yield f"{pair.metric} at the same {BETWEEN[axis]}", [BETWEEN[axis], *names, "ratio (95 %)"], rows
    for axis, along in shown.items():
        rows = [[number(entry.level), *_sooner_cells(entry, pair)] for entry in along.sooner]
        head = [
            found.metric,
            *(f"{BETWEEN[axis]} of {name}" for name in names),
            f"times sooner {pair.candidate} (95 %)",
        ]
        yield f"{BETWEEN[axis].capitalize()} to the same {pair.metric}", head, rows


def with_interval(estimate: Estimate | None, digits: int = 3) -> str:
    """A ratio with its interval."""
    if estimate is None:
        return "–"
    value = f"{estimate.value:.{digits}f}"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} ({estimate.low:.{digits}f} to {estimate.high:.{digits}f})"


def _same_row(entry: SamePlace) -> list[str]:
    return [f"{entry.place:,.0f}", number(entry.baseline), number(entry.candidate), with_interval(entry.ratio)]


def _sooner_cells(entry: Sooner, pair: Pair) -> list[str]:
    places = ((pair.baseline, entry.baseline), (pair.candidate, entry.candidate))
    shown = [f"over {place:,.0f}" if name in entry.never else f"{place:,.0f}" for name, place in places]
    return [*shown, sooner_words(entry)]


def sooner_words(entry: Sooner) -> str:
    """How many times sooner, with its interval or as a bound."""
    return with_interval(entry.times, 2) if entry.bound == "exactly" else f"{entry.bound} {entry.times.value:.2f}"


def _cards(pair: Pair) -> list[tuple[str, str, str]]:
    """Key numbers of a pair: name, value, remark."""
    cards = []
    if pair.metric is not None and pair.ratio is not None:
        cards.append((f"{pair.metric}, ratio at the same step", f"{pair.ratio.value:.3f}", _range(pair.ratio)))
    sooner = pair.steps_to_same_accuracy
    if sooner is not None:
        bound = "" if sooner.bound == "exactly" else f"{sooner.bound} "
        words = f"{bound}{sooner.times.value:.2f} times"
        remark = f"{number(sooner.level)}; {_range(sooner.times)}" if sooner.times.low else number(sooner.level)
        cards.append(("steps to the same value: sooner", words, f"at {remark}"))
    if pair.streak_ratio is not None:
        cards.append(("streak, ratio at the same step", f"{pair.streak_ratio.value:.3f}", _range(pair.streak_ratio)))
    if pair.tokens_per_second is not None:
        speed = pair.tokens_per_second.ratio
        cards.append(("training speed, ratio of tokens per second", f"{speed.value:.2f}", _range(speed)))
    return cards


def _range(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f"95 %: {estimate.low:.3f} to {estimate.high:.3f}"


def _difference_rows(comparison: Comparison) -> list[list[str]]:
    return [
        [
            item.area,
            item.key.removeprefix("config."),
            *(", ".join(map(_short, values)) or "–" for values in item.values),
        ]
        for item in comparison.differences
    ]


def _short(value: str) -> str:
    """A value without quotes, a hash by its first digits."""
    bare = value.strip('"')
    return f"{bare[:12]}…" if len(bare) >= 32 and all(sign in hexdigits + "-+" for sign in bare[:32]) else bare


def _by_area(comparison: Comparison) -> list[tuple[str, list[list[str]]]]:
    rows = _difference_rows(comparison)
    return [(area, [row for row in rows if row[0] == area]) for area in dict.fromkeys(row[0] for row in rows)]


def _panels(comparison: Comparison) -> list[tuple[str, Axis]]:
    """What is drawn: the value of the verdict along every axis, the others along the steps."""
    panels: list[tuple[str, Axis]] = []
    for place, (metric, groups) in enumerate(comparison.curves.items()):
        curves = [curve for group in groups.values() for curve in group]
        axes = AXES if place == 0 else AXES[:1]
        panels += [(metric, axis) for axis in axes if all(axis in curve.axes for curve in curves)]
    return panels


def _chart(comparison: Comparison, metric: str, axis: Axis) -> Chart:
    lines = []
    for place, (name, curves) in enumerate(comparison.curves[metric].items()):
        x, y, low, high = _mean_curve(curves, axis)
        band = (low, high) if len(curves) > 1 else None
        lines.append(ChartCurve(name, x, y, hue(place), band=band, marks=len(curves) == 1))
    several = any(len(curves) > 1 for curves in comparison.curves[metric].values())
    note = "Lines: means of the runs of a group; bands: lowest to highest run." if several else ""
    return Chart(metric, lines, x_name=BETWEEN[axis], from_zero=False, note=note)


def _mean_curve(curves: Sequence[Curve], axis: Axis) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Positions, mean, lowest and highest value over the stretch that all runs of a group have."""
    if len(curves) == 1:
        return curves[0].axes[axis], curves[0].values, curves[0].values, curves[0].values
    start, end = max(curve.axes[axis][0] for curve in curves), min(curve.axes[axis][-1] for curve in curves)
    x = np.linspace(start, max(start, end), GRID)
    values = np.array([np.interp(x, curve.axes[axis], curve.values) for curve in curves])
    return x, values.mean(axis=0), values.min(axis=0), values.max(axis=0)


def _picture(charts: Sequence[Chart]) -> bytes:
    """The charts of the page as one PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(charts))
    rows = math.ceil(len(charts) / columns)
    figure = Figure(figsize=(5 * columns, 3.4 * rows), layout="constrained")
    plots = figure.subplots(rows, columns, squeeze=False).flatten()
    for plot in plots[len(charts) :]:
        plot.set_visible(False)
    for plot, chart in zip(plots, charts, strict=False):
        for place, line in enumerate(chart.curves):
            plot.plot(line.x, line.y, color=f"C{place}", marker="." if line.marks else None, label=line.name)
            if line.band is not None:
                plot.fill_between(line.x, *line.band, color=f"C{place}", alpha=0.2, linewidth=0)
        plot.set(title=chart.title, xlabel=chart.x_name)
        plot.legend(frameon=False)
    content = io.BytesIO()
    FigureCanvasAgg(figure).print_png(content)
    return content.getvalue()
