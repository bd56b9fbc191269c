"""Charts of a run: what was learned, slot by slot, and who waited for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from draftline.page.chart import Chart, ChartCurve, hue, mean_window, number, running_mean, shade
from draftline.train.log import Column, Columns

TRAINING_HUE, HELDOUT_HUE = hue(0), hue(1)

WIDE = 8.0
"""A positive figure whose highest value is this many times its lowest is drawn on a logarithmic axis."""

HELDOUT_FIGURES = {
    "heldout_loss": "loss",
    "heldout_accuracy": "accuracy",
    "heldout_data_accuracy": "accuracy against the data",
    "heldout_streak": "streak",
    "heldout_teacher_forced_acceptance_length": "acceptance length, teacher-forced",
}


def learning(metrics: Columns, seams: Sequence[int] = ()) -> list[Chart]:
    """Loss, accuracy and streak in training and held out, the teacher-forced acceptance length, and the optimiser.

    Args:
        seams: steps after which the run was extended.
    """
    where = " and ".join(f"{step:,}" for step in seams)
    return [
        _pair(metrics, "loss", "Loss", "cross entropy, weighted by slot"),
        _pair(metrics, "accuracy", "Accuracy", "share of slots equal to the target's own token"),
        _pair(metrics, "streak", "Streak", "right slots in a row, random anchors, without bonus"),
        Chart(
            "Teacher-forced acceptance length",
            [_heldout(metrics["heldout_teacher_forced_acceptance_length"])],
            unit="with bonus",
            from_zero=False,
            note="A walk over the target's own held-out answers; decoding should give the same number.",
        ),
        replace(
            _single(metrics["learning_rate"], "Learning rate"),
            note=f"The run was extended after step {where}." if seams else "",
        ),
        _single(metrics["grad_norm"], "Gradient norm", "before clipping", noisy=True),
    ]


def positions(metrics: Columns) -> list[Chart]:
    """Accuracy of each slot over the run; conditional: given that all slots before it were right."""
    charts = []
    for prefix, where in (("heldout_", "held out"), ("", "training")):
        if where == "held out" and len(metrics["heldout_loss"]) < 2:
            continue  # a single evaluation is not a course; its numbers are in the table
        plain = metrics.places(f"{prefix}accuracy_by_position")
        conditional = metrics.places(f"{prefix}conditional_accuracy_by_position")
        for title, columns in (
            ("Accuracy by slot", plain),
            ("Accuracy by slot, if all slots before are right", conditional),
        ):
            curves, note = _slots(columns, smooth=where == "training")
            charts.append(Chart(title, curves, unit=where, note=note))
    return charts


def speed(lines: Columns) -> list[Chart]:
    """Rates of the two stages and what they waited for."""
    target, drafter = lines["target_tokens_per_second"], lines["drafter_tokens_per_second"]
    moving = Column(target.steps[target.values > 0], target.values[target.values > 0])
    return [
        Chart(
            "Rate of the stages",
            [_curve("target", moving, hue(0), noisy=True), _curve("drafter", drafter, hue(1), noisy=True)],
            unit="tokens per second of their own work",
            scale=_scale(moving, drafter),
            note="The slower stage limits the run. Where the target had nothing to do its rate is left out.",
        ),
        Chart(
            "Waiting",
            [
                _curve("target, for room in the queue", lines["target_wait_share"], hue(0), noisy=True),
                _curve("drafter, for rows", lines["drafter_wait_share"], hue(1), noisy=True),
            ],
            unit="share of the time",
        ),
    ]


def queue(lines: Columns) -> list[Chart]:
    """What lay between the stages; nothing if nothing ever did, as in mode `inline`."""
    if not lines["queue_rows"].values.any():
        return []
    return [
        Chart("Queue depth", [_curve("rows", lines["queue_rows"], hue(2))], unit="packed rows"),
        Chart("Queue size", [_curve("size", _scaled(lines["queue_bytes"], 1e-6), hue(2))], unit="MB"),
    ]


def heldout_table(metrics: Columns) -> tuple[list[str], list[list[str]]]:
    """Head and rows of all held-out evaluations."""
    slots = metrics.places("heldout_accuracy_by_position")
    figures = {name: metrics[key] for key, name in HELDOUT_FIGURES.items()}
    figures |= {f"slot {place}": column for place, column in slots.items()}
    at = {name: dict(zip(c.steps.tolist(), c.values.tolist(), strict=True)) for name, c in figures.items()}
    steps = metrics["heldout_loss"].steps.tolist()
    return (
        ["step", *figures],
        [[number(step), *(number(at[name].get(step, float("nan"))) for name in figures)] for step in steps],
    )


def _pair(metrics: Columns, name: str, title: str, unit: str) -> Chart:
    training, heldout = metrics[name], metrics[f"heldout_{name}"]
    curves = [_curve("training", training, TRAINING_HUE, noisy=True), _heldout(heldout)]
    return Chart(title, curves, unit=unit, scale=_scale(training) if name == "loss" else "linear")


def _heldout(column: Column) -> ChartCurve:
    return ChartCurve("held out", column.steps, column.values, HELDOUT_HUE, marks=True)


def _single(column: Column, title: str, unit: str = "", noisy: bool = False) -> Chart:
    scale = _scale(column) if noisy else "linear"
    return Chart(title, [_curve(title.lower(), column, TRAINING_HUE, noisy=noisy)], unit=unit, scale=scale)


def _slots(columns: Mapping[int, Column], smooth: bool) -> tuple[list[ChartCurve], str]:
    """One curve per slot, coloured in their order, and what must be said of it."""
    last = max(len(columns) - 1, 1)
    window = mean_window(max(map(len, columns.values()), default=0)) if smooth else 1
    curves = [
        ChartCurve(f"slot {place}", c.steps, running_mean(c.values, window), shade(i / last), marks=not smooth)
        for i, (place, c) in enumerate(sorted(columns.items()))
    ]
    return curves, f"Running means of {window} values." if window > 1 else ""


def _curve(name: str, column: Column, color: str, noisy: bool = False) -> ChartCurve:
    return ChartCurve(name, column.steps, column.values, color, noisy=noisy)


def _scaled(column: Column, factor: float) -> Column:
    return Column(column.steps, column.values * factor)


def _scale(*columns: Column) -> Literal["linear", "log"]:
    values = [value for column in columns if len(column) for value in (column.values.min(), column.values.max())]
    return "log" if values and min(values) > 0 and max(values) > WIDE * min(values) else "linear"
