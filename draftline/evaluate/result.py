"""What `draftline evaluate` reports: the records that it writes with `--json`, their parts, and the tables for people.

The acceptance length is shown in parts: by file of prompts, by length of the output, by place in the output. Two kinds
of length, because they answer two questions. *By length of the output*: what will answers as long as mine give? An
answer counts whole. *By place in the output*: does the drafter hold up further into an answer, or does it fall behind
past the lengths it was trained on? Each forward counts where it began, so a long answer counts in several places, and
short answers do not hide what happens late in long ones. In every breakdown tokens and forwards add up to those of the
whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from draftline.data.accounting import ChatMode
from draftline.evaluate.acceptance import (
    Acceptance,
    Interval,
    acceptance_interval,
    describe_acceptance_length,
    describe_figure,
    describe_interval,
)
from draftline.evaluate.draft_length import DraftLength
from draftline.options import EvaluationSettings
from draftline.progress import table
from draftline.storage import without_nan

_BOUNDS = (32, 128, 512, 2048, 8192)
"""Upper ends of the buckets, output tokens; wide, so that each holds enough prompts for an interval."""

_INTERVAL = "95 % by prompt"


@dataclass(frozen=True)
class ResultPart:
    """What one part of the evaluation gives.

    Attributes:
        name: file, or range of output tokens.
        prompts: how many have forwards in it.
        tokens: output tokens that the forwards gave.
        acceptance_length: bonus included; NaN without a forward.
        acceptance_length_interval: 95 %, clustered by prompt.
    """

    name: str
    prompts: int
    tokens: int
    forwards: int
    acceptance_length: float
    acceptance_length_interval: Interval


@dataclass(frozen=True)
class TurnResult:
    """One answered turn of one prompt.

    Attributes:
        file: file, data set or task of the prompt.
        number: the prompt's line or row there, from 1.
        turn: which turn of the prompt, from 1.
        asked: what the user says in it.
        input_ids: prompt with the history before it, as the target's template renders them.
        output_ids: decoded with the drafter, with the stop token.
        text_pieces: text of each output token; joined they are the output. A character that is spread over several
            tokens belongs to the last of them, the others have an empty piece.
        target_forwards: after the prompt's own.
        accepted_per_forward: drafted tokens that stood, per forward; `report.token_slots` tells from it which drafted
            token each output token was.
    """

    file: str
    number: int
    turn: int
    asked: str
    input_ids: list[int]
    output_ids: list[int]
    text_pieces: list[str]
    target_forwards: int
    accepted_per_forward: list[int]


@dataclass(frozen=True)
class OutputDifference:
    """A turn whose output is not that of plain greedy decoding.

    Attributes:
        turn: index in `EvaluationResult.per_prompt`.
        token: index of the first differing token of the output.
        logit_gap: distance of the two tokens' logits; within rounding, both outputs are right.
    """

    turn: int
    token: int
    logit_gap: float


@dataclass(frozen=True)
class Counts:
    """Sums over all turns.

    Attributes:
        output_tokens: the first token of each turn included.
        target_forwards: after the prompts' own.
        replayed_forwards: further ones to roll back linear-attention layers; they give no token.
        drafted_tokens: what the drafter proposed.
        verified_tokens: drafted tokens that the target judged: those that stood, and the one after them that did not;
            behind that one, drafted tokens are thrown away unread.
        accepted_tokens: drafted tokens that are part of an output.
    """

    output_tokens: int
    target_forwards: int
    replayed_forwards: int
    drafted_tokens: int
    verified_tokens: int
    accepted_tokens: int


@dataclass(frozen=True)
class EvaluationResult:
    """What `draftline evaluate` reports. All intervals are 95 %, clustered by prompt; see `interval`.

    Attributes:
        acceptance_length: decoded, bonus included; micro average: each forward counts once.
        acceptance_length_macro: the same as a mean over prompts: each prompt counts once.
        acceptance_rate_by_position: unconditional, one entry per drafted token.
        conditional_acceptance_rate_by_position: given that all drafted tokens before stood.
        accepted_histogram: forwards in which exactly 0, 1, .. drafted tokens stood.
        by_draft_length: what checking 1, 2, .. drafted tokens per forward gives and costs on this machine.
        by_output_length, by_output_position: what the two mean is said in `breakdown`.
        greedy_equal: share of the decoded prompts whose outputs, in all turns, are identical to plain greedy decoding.
            NaN with sampling, where two right outputs differ.
        prompts: how many there were.
        decoded_prompts: how many of them were decoded with the drafter: all, or a few (`--fast`). The drafter's blocks
            were counted along the target's own answers to the others, which gives the same numbers.
        differences: the turns that are not identical.
        teacher_forced_acceptance_length: the walk over plain greedy outputs, from the training forward; NaN with
            sampling, where there is no such walk.
        tokens_per_second: output tokens over wall-clock time with the drafter, the prompt's forward included; NaN, as
            is the next, where not all prompts were decoded.
        baseline_tokens_per_second: the same for plain decoding.
        target, target_dtype, target_weights: name, number format and fingerprint of the weights, as in run.json.
        drafter, drafter_weights: folder that it was read from, None if it was never on disk; and fingerprint.
        mode: how the prompts were put to the target, and whether it thought.
        trained_mode: the same of the drafter's training data; None if that is not recorded.
        warnings: what makes the numbers doubtful, one sentence each.
        per_prompt: one entry per turn.
    """

    acceptance_length: float
    acceptance_length_interval: Interval
    acceptance_length_macro: float
    acceptance_length_macro_interval: Interval
    acceptance_rate_by_position: list[float]
    acceptance_rate_by_position_interval: list[Interval]
    conditional_acceptance_rate_by_position: list[float]
    conditional_acceptance_rate_by_position_interval: list[Interval]
    accepted_histogram: list[int]
    by_draft_length: list[DraftLength]
    counts: Counts
    by_file: list[ResultPart]
    by_output_length: list[ResultPart]
    by_output_position: list[ResultPart]
    greedy_equal: float
    greedy_equal_interval: Interval
    prompts: int
    decoded_prompts: int
    differences: list[OutputDifference]
    teacher_forced_acceptance_length: float
    teacher_forced_acceptance_length_interval: Interval
    tokens_per_second: float
    baseline_tokens_per_second: float
    target: str
    target_dtype: str
    target_weights: str
    drafter: str | None
    drafter_weights: str
    settings: EvaluationSettings
    mode: ChatMode
    trained_mode: ChatMode | None
    warnings: list[str]
    per_prompt: list[TurnResult]

    @property
    def speedup(self) -> float:
        """How many times faster the same target decodes with the drafter."""
        return self.tokens_per_second / self.baseline_tokens_per_second

    @property
    def best_draft_length(self) -> DraftLength:
        """The number of drafted tokens that is fastest here."""
        return max(self.by_draft_length, key=lambda found: found.speedup)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values for JSON; what could not be measured is None, never NaN."""
        more = {
            "settings": self.settings.model_dump(),
            "speedup": self.speedup,
            "best_num_speculative_tokens": self.best_draft_length.num_speculative_tokens,
        }
        fields: dict[str, Any] = without_nan({**asdict(self), **more})
        return fields


@dataclass(frozen=True)
class CountedAnswer:
    """One answer as far as it is counted.

    Attributes:
        prompt: index of its prompt among all; several turns of a dialogue share it.
        file: where the prompt comes from.
        output_length: tokens, the first one included.
    """

    prompt: int
    file: str
    output_length: int
    accepted_per_forward: Sequence[int]

    @property
    def acceptance(self) -> Acceptance:
        """Tokens after the first, and the forwards that gave them."""
        return Acceptance(self.output_length - 1, len(self.accepted_per_forward))


def by_file(answers: Sequence[CountedAnswer], longest: int) -> list[ResultPart]:
    """One part per file, in the order of their first prompts; `longest` is drafted tokens + 1."""
    return _parts(((answer.file, answer.prompt, answer.acceptance) for answer in answers), longest)


def by_output_length(answers: Sequence[CountedAnswer], longest: int) -> list[ResultPart]:
    """One part per bucket of output lengths that occurs."""
    ordered = sorted(answers, key=lambda answer: answer.output_length)
    return _parts(((_bucket(answer.output_length), answer.prompt, answer.acceptance) for answer in ordered), longest)


def by_output_position(answers: Sequence[CountedAnswer], longest: int) -> list[ResultPart]:
    """One part per bucket of places in the output, counted from 1; a forward counts where its first token stands."""
    placed = sorted(
        ((place, answer.prompt, given) for answer in answers for place, given in _forwards(answer)),
        key=lambda item: item[0],
    )
    return _parts(((_bucket(place), prompt, Acceptance(given, 1)) for place, prompt, given in placed), longest)


def _forwards(answer: CountedAnswer) -> Iterable[tuple[int, int]]:
    """Place of the first token that each forward gave, and how many it gave; the last may end inside its block."""
    place = 2  # the first token comes from the prompt's own forward
    for accepted in answer.accepted_per_forward:
        given = min(accepted + 1, answer.output_length - place + 1)
        yield place, given
        place += given


def _bucket(length: int) -> str:
    below = 0
    for bound in _BOUNDS:
        if length <= bound:
            return f"{below + 1} to {bound}"
        below = bound
    return f"over {below}"


def _parts(counted: Iterable[tuple[str, int, Acceptance]], longest: int) -> list[ResultPart]:
    """Group by name, and within a name by prompt, in the order in which they come."""
    groups: dict[str, list[tuple[int, Acceptance]]] = {}
    for name, prompt, acceptance in counted:
        groups.setdefault(name, []).append((prompt, acceptance))
    return [_part(name, Acceptance.by_prompt(parts), longest) for name, parts in groups.items()]


def _part(name: str, clusters: Sequence[Acceptance], longest: int) -> ResultPart:
    clusters = [cluster for cluster in clusters if cluster.forwards]
    total = Acceptance.total(clusters)
    interval = acceptance_interval(clusters, longest)
    return ResultPart(name, len(clusters), total.tokens, total.forwards, total.length, interval)


def result_table(result: EvaluationResult, draft_name: str) -> Group:
    """The result for people: what was measured, by position in the block, and in parts."""
    parts = [
        ("by file", result.by_file),
        ("by length of the output, tokens", result.by_output_length),
        ("by place in the output, tokens", result.by_output_position),
    ]
    tables = [_measured(result, draft_name), _by_position(result), _by_draft_length(result)]
    tables += [_parts_table(title, found) for title, found in parts if len(found) > 1]
    return Group(*tables, *(Text(f"warning: {warning}") for warning in result.warnings))


def _measured(result: EvaluationResult, draft_name: str) -> Table:
    counts, sampling = result.counts, result.settings.sampling
    undefined = f"not defined at temperature {sampling.temperature:g}"
    equal = f"{result.greedy_equal:.1%} of {result.decoded_prompts}" if sampling.greedy else undefined
    forced = _figure(result.teacher_forced_acceptance_length, result.teacher_forced_acceptance_length_interval)
    rows: list[tuple[str, ...]] = [
        ("acceptance length (with bonus)", *_figure(result.acceptance_length, result.acceptance_length_interval)),
        (
            "mean over prompts (macro)",
            *_figure(result.acceptance_length_macro, result.acceptance_length_macro_interval),
        ),
        ("teacher-forced acceptance length", *(forced if sampling.greedy else (undefined, ""))),
        (
            "outputs equal to plain greedy",
            equal,
            describe_interval(result.greedy_equal_interval) if sampling.greedy else "",
        ),
        *_speed(result),
        ("output tokens, target forwards", f"{counts.output_tokens:,}, {counts.target_forwards:,}", ""),
        (
            "drafted, verified, accepted tokens",
            f"{counts.drafted_tokens:,}, {counts.verified_tokens:,}, {counts.accepted_tokens:,}",
            "",
        ),
        ("decoding", sampling.describe(), ""),
    ]
    rows += [
        (f"turn {found.turn} differs from token {found.token}", f"logit gap {found.logit_gap:.2g}", "")
        for found in result.differences
    ]
    title = f"{draft_name}: {describe_acceptance_length(result.acceptance_length)}"
    return table(title, ("measured", "value", _INTERVAL), rows)


def _speed(result: EvaluationResult) -> list[tuple[str, ...]]:
    if result.decoded_prompts < result.prompts:
        return [("decoded with the drafter", f"{result.decoded_prompts} of {result.prompts} prompts", "")]
    return [
        ("tokens per second with drafter", f"{result.tokens_per_second:.1f}", ""),
        ("tokens per second without", f"{result.baseline_tokens_per_second:.1f}", ""),
        ("speed-up", f"{result.speedup:.2f}", ""),
    ]


def _by_position(result: EvaluationResult) -> Table:
    """A row per drafted token of the block; `forwards` counts those in which it was the last one that stood."""
    rates = map(_figure, result.acceptance_rate_by_position, result.acceptance_rate_by_position_interval)
    conditional = map(
        _figure,
        result.conditional_acceptance_rate_by_position,
        result.conditional_acceptance_rate_by_position_interval,
    )
    none, *forwards = (f"{count:,}" for count in result.accepted_histogram)
    rows = [
        (str(k), *rate, *if_before, count)
        for k, (rate, if_before, count) in enumerate(zip(rates, conditional, forwards, strict=True), start=1)
    ]
    head = ("drafted\ntoken", "accepted", "95 %", "if all\nbefore", "95 %", "forwards")
    title = f"by position in the block (intervals: {_INTERVAL})"
    return table(title, head, [("none", "", "", "", "", none), *rows])


def _by_draft_length(result: EvaluationResult) -> Table:
    """A row per number of drafted tokens that the target could check."""
    best = result.best_draft_length
    rows = [
        (
            str(found.num_speculative_tokens),
            describe_figure(found.acceptance_length),
            f"{1000 * found.seconds_per_round:.1f}",
            describe_figure(found.speedup),
            "fastest" if found is best else "",
        )
        for found in result.by_draft_length
    ]
    title = f"fastest on this machine: --num-speculative-tokens {best.num_speculative_tokens}"
    if best.speedup <= 1:
        title = "plain decoding is faster on this machine, however many tokens are checked"
    return table(title, ("checked\ntokens", "acceptance\nlength", "ms a\nround", "expected\nspeed-up", ""), rows)


def _parts_table(title: str, parts: Sequence[ResultPart]) -> Table:
    rows = [
        (
            part.name,
            f"{part.prompts:,}",
            f"{part.forwards:,}",
            *_figure(part.acceptance_length, part.acceptance_length_interval),
        )
        for part in parts
    ]
    return table(f"acceptance length (with bonus) {title}", ("", "prompts", "forwards", "length", _INTERVAL), rows)


def _figure(value: float, interval: Interval) -> tuple[str, str]:
    return describe_figure(value), describe_interval(interval)
