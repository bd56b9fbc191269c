"""What was measured at a running server, level by level of concurrency, as numbers and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from draftline.evaluate.acceptance import (
    Acceptance,
    acceptance_interval,
    acceptance_rate_by_position,
    accepted_histogram,
    conditional_acceptance_rate_by_position,
    describe_rates,
)
from draftline.evaluate.engines import DraftCounts
from draftline.storage import without_nan


@dataclass(frozen=True)
class ServerTurn:
    """One answered turn.

    Attributes:
        prompt: index of its prompt.
        output_ids: as the server sent them; llama.cpp leaves out tokens that end inside a character.
        tokens: of the output, as the server counts them.
        target_forwards: after the prompt's own; None where the server counts only over all requests at once.
        first_token_s: from the request to the first token.
        seconds: from the request to the last token.
    """

    prompt: int
    input_ids: list[int]
    output_ids: list[int]
    tokens: int
    target_forwards: int | None
    first_token_s: float
    seconds: float


@dataclass(frozen=True)
class Latency:
    """Percentiles over answers, milliseconds; NaN where no answer had what is measured."""

    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Latency:
        """Percentiles of durations."""
        if not seconds:
            return Latency(*[float("nan")] * 3)
        return Latency(*(float(value) * 1000 for value in np.percentile(seconds, [50, 90, 99])))

    def __str__(self) -> str:
        return f"{self.p50:.0f} / {self.p90:.0f} / {self.p99:.0f}"


@dataclass(frozen=True)
class Level:
    """What was measured with so many requests under way at once.

    Attributes:
        acceptance_length: by the definition of `evaluate.acceptance`, from the server's counters.
        acceptance_length_interval: 95 %, clustered by prompt; None where forwards are not known by prompt.
        acceptance_rate_by_position: unconditional; empty where the server does not count places.
        accepted_histogram: drafts of which exactly 0, 1, .. tokens stood.
        tokens_per_second: output tokens of all answers over the time that they took together.
        first_token_ms: from the request to the first token, waiting in the server's queue included.
        per_token_ms: mean time between tokens of an answer after its first.
    """

    concurrency: int
    answers: int
    tokens: int
    target_forwards: int
    acceptance_length: float
    acceptance_length_interval: tuple[float, float] | None
    acceptance_rate_by_position: list[float]
    conditional_acceptance_rate_by_position: list[float]
    accepted_histogram: list[int]
    tokens_per_second: float
    first_token_ms: Latency
    per_token_ms: Latency

    @staticmethod
    def of(concurrency: int, turns: Sequence[ServerTurn], counts: DraftCounts, seconds: float) -> Level:
        """Sum up the answers of one level; `seconds` is the time that they took together."""
        tokens = sum(turn.tokens for turn in turns)
        total = counts.acceptance(tokens, len(turns))
        per_forward, drafted = counts.accepted_per_forward(), len(counts.accepted_per_position)
        return Level(
            concurrency=concurrency,
            answers=len(turns),
            tokens=tokens,
            target_forwards=total.forwards,
            acceptance_length=total.length,
            acceptance_length_interval=_interval(turns, drafted + 1),
            acceptance_rate_by_position=acceptance_rate_by_position(per_forward, drafted),
            conditional_acceptance_rate_by_position=conditional_acceptance_rate_by_position(per_forward, drafted),
            accepted_histogram=accepted_histogram(per_forward, drafted) if drafted else [],
            tokens_per_second=tokens / seconds,
            first_token_ms=Latency.of([turn.first_token_s for turn in turns]),
            per_token_ms=Latency.of(
                [(turn.seconds - turn.first_token_s) / (turn.tokens - 1) for turn in turns if turn.tokens > 1]
            ),
        )


@dataclass(frozen=True)
class ServerResult:
    """What `draftline evaluate --base-url` reports.

    Attributes:
        program: vLLM, SGLang or llama.cpp.
        model: its name on the server.
        levels: one per concurrency, in the order asked for.
        per_prompt: the turns of the first level.
        notes: what to know about the numbers, one sentence each.
    """

    program: str
    model: str
    base_url: str
    levels: list[Level]
    per_prompt: list[ServerTurn]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values for JSON; what could not be measured is None, never NaN."""
        fields: dict[str, Any] = without_nan(asdict(self))
        return fields


def server_table(result: ServerResult) -> Table:
    """The result for people, a column per concurrency."""
    title = f"{result.program} at {result.base_url}, {result.model}"
    table = Table(title=escape(title), title_justify="left")
    table.add_column("measured", overflow="fold")
    for level in result.levels:
        table.add_column(f"concurrency {level.concurrency}", justify="right", overflow="fold")

    def row(what: str, *cells: str) -> None:
        table.add_row(what, *cells)

    levels = result.levels
    row("acceptance length (with bonus)", *(f"{level.acceptance_length:.2f}" for level in levels))
    row("95 % by prompt", *(_range(level.acceptance_length_interval) for level in levels))
    row("acceptance rate by position", *(describe_rates(level.acceptance_rate_by_position) for level in levels))
    conditional = (describe_rates(level.conditional_acceptance_rate_by_position) for level in levels)
    row("the same, if all before stood", *conditional)
    row("drafts with 0, 1, .. accepted", *(" ".join(map(str, level.accepted_histogram)) or "-" for level in levels))
    row("answers, tokens", *(f"{level.answers}, {level.tokens}" for level in levels))
    row("tokens per second", *(f"{level.tokens_per_second:.1f}" for level in levels))
    row("first token, ms (50 / 90 / 99 %)", *(str(level.first_token_ms) for level in levels))
    row("each further token, ms", *(str(level.per_token_ms) for level in levels))
    return table


def _range(interval: tuple[float, float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"


def _interval(turns: Sequence[ServerTurn], longest: int) -> tuple[float, float] | None:
    by_prompt: dict[int, Acceptance] = {}
    for turn in turns:
        if turn.target_forwards is None:
            return None
        counted = Acceptance(turn.tokens - 1, turn.target_forwards)
        by_prompt[turn.prompt] = by_prompt.get(turn.prompt, Acceptance(0, 0)) + counted
    return acceptance_interval(list(by_prompt.values()), longest) if len(by_prompt) > 1 else None
