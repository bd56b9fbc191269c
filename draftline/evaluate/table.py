"""The result of an evaluation as a table for people."""

from __future__ import annotations

from rich.table import Table

from draftline.evaluate.acceptance import describe_acceptance_length, describe_rates
from draftline.evaluate.result import EvaluationResult


def result_table(result: EvaluationResult, draft_name: str) -> Table:
    """The result for people."""
    table = Table(title=f"{draft_name}: {describe_acceptance_length(result.acceptance_length)}", title_justify="left")
    table.add_column("measured")
    table.add_column("value", justify="right")
    low, high = result.acceptance_length_interval
    by_position = describe_rates(result.acceptance_rate_by_position)
    conditional = describe_rates(result.conditional_acceptance_rate_by_position)
    table.add_row(describe_acceptance_length(result.acceptance_length), f"95 % by prompt: {low:.2f} to {high:.2f}")
    table.add_row("teacher-forced acceptance length", f"{result.teacher_forced_acceptance_length:.2f}")
    table.add_row("acceptance rate by position", by_position)
    table.add_row("the same, if all before stood", conditional)
    table.add_row("forwards with 0, 1, .. accepted", " ".join(map(str, result.accepted_histogram)))
    table.add_row("outputs equal to plain greedy", f"{result.greedy_equal:.1%} of {result.prompts}")
    table.add_row("tokens per second with drafter", f"{result.tokens_per_second:.1f}")
    table.add_row("tokens per second without", f"{result.baseline_tokens_per_second:.1f}")
    table.add_row("speed-up", f"{result.speedup:.2f}")
    for difference in result.differences:
        table.add_row(
            f"turn {difference.turn} differs from token {difference.token}", f"logit gap {difference.logit_gap:.2g}"
        )
    return table
