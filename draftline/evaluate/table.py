"""The result of an evaluation as tables for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from draftline.evaluate.acceptance import describe_acceptance_length
from draftline.evaluate.breakdown import Part
from draftline.evaluate.interval import Interval
from draftline.evaluate.result import EvaluationResult

_INTERVAL = "95 % by prompt"


def result_table(result: EvaluationResult, draft_name: str) -> Group:
    """The result for people: what was measured, by position in the block, and in parts."""
    parts = [
        ("by file", result.by_file),
        ("by length of the output, tokens", result.by_output_length),
        ("by place in the output, tokens", result.by_output_position),
    ]
    tables = [_measured(result, draft_name), _by_position(result)]
    tables += [_parts(title, found) for title, found in parts if len(found) > 1]
    return Group(*tables, *(Text(f"warning: {warning}") for warning in result.warnings))


def _measured(result: EvaluationResult, draft_name: str) -> Table:
    title = f"{draft_name}: {describe_acceptance_length(result.acceptance_length)}"
    table = Table(title=escape(title), title_justify="left")
    table.add_column("measured", overflow="fold")
    table.add_column("value", justify="right", overflow="fold")
    table.add_column(_INTERVAL, justify="right", overflow="fold")
    counts, sampling = result.counts, result.settings.sampling
    undefined = f"not defined at temperature {sampling.temperature:g}"
    equal = undefined if math.isnan(result.greedy_equal) else f"{result.greedy_equal:.1%} of {result.prompts}"
    forced, forced_interval = result.teacher_forced_acceptance_length, result.teacher_forced_acceptance_length_interval
    rows = [
        ("acceptance length (with bonus)", _number(result.acceptance_length), result.acceptance_length_interval),
        ("mean over prompts (macro)", _number(result.acceptance_length_macro), result.acceptance_length_macro_interval),
        (
            "teacher-forced acceptance length",
            _number(forced) if sampling.greedy else undefined,
            forced_interval if sampling.greedy else None,
        ),
        ("outputs equal to plain greedy", equal, result.greedy_equal_interval if sampling.greedy else None),
        ("tokens per second with drafter", f"{result.tokens_per_second:.1f}", None),
        ("tokens per second without", f"{result.baseline_tokens_per_second:.1f}", None),
        ("speed-up", f"{result.speedup:.2f}", None),
        ("output tokens, target forwards", f"{counts.output_tokens:,}, {counts.target_forwards:,}", None),
        (
            "drafted, verified, accepted tokens",
            f"{counts.drafted_tokens:,}, {counts.verified_tokens:,}, {counts.accepted_tokens:,}",
            None,
        ),
    ]
    for name, value, interval in rows:
        table.add_row(name, value, "" if interval is None else _range(interval))
    table.add_row("decoding", sampling.describe(), "")
    for difference in result.differences:
        place = f"turn {difference.turn} differs from token {difference.token}"
        table.add_row(place, f"logit gap {difference.logit_gap:.2g}", "")
    return table


def _by_position(result: EvaluationResult) -> Table:
    """A row per drafted token of the block; `forwards` counts those in which it was the last one that stood."""
    table = Table(title=f"by position in the block (intervals: {_INTERVAL})", title_justify="left")
    for column in ("drafted\ntoken", "accepted", "95 %", "if all\nbefore", "95 %", "forwards"):
        table.add_column(column, justify="right", overflow="fold")
    table.add_row("none", "", "", "", "", f"{result.accepted_histogram[0]:,}")
    rows = zip(
        result.acceptance_rate_by_position,
        result.acceptance_rate_by_position_interval,
        result.conditional_acceptance_rate_by_position,
        result.conditional_acceptance_rate_by_position_interval,
        result.accepted_histogram[1:],
        strict=True,
    )
    for k, (rate, interval, conditional, conditional_interval, forwards) in enumerate(rows, start=1):
        table.add_row(
            str(k), _number(rate), _range(interval), _number(conditional), _range(conditional_interval), f"{forwards:,}"
        )
    return table


def _parts(title: str, parts: Sequence[Part]) -> Table:
    table = Table(title=f"acceptance length (with bonus) {title}", title_justify="left")
    for column in ("", "prompts", "forwards", "length", _INTERVAL):
        table.add_column(column, justify="right" if column else "left", overflow="fold")
    for part in parts:
        length, interval = _number(part.acceptance_length), _range(part.acceptance_length_interval)
        table.add_row(escape(part.name), f"{part.prompts:,}", f"{part.forwards:,}", length, interval)
    return table


def _number(value: float) -> str:
    """A dash where nothing was counted."""
    return "-" if math.isnan(value) else f"{value:.2f}"


def _range(interval: Interval) -> str:
    return f"{interval[0]:.2f} to {interval[1]:.2f}"
