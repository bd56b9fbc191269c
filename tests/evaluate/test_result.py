"""Breakdowns against sums made by hand; in each, tokens and forwards add up to the whole."""

from __future__ import annotations

import pytest

from draftline.evaluate.acceptance import Acceptance, macro_acceptance_length
from draftline.evaluate.result import (
    CountedAnswer,
    ResultPart,
    by_file,
    by_output_length,
    by_output_position,
)

# 1 + 3 + 2 + 1 tokens; 1 + (4 + 1) tokens; 40 tokens after the first, the last forward cut inside its block
ANSWERS = [
    CountedAnswer(0, "a.jsonl", 7, [2, 1, 0]),
    CountedAnswer(0, "a.jsonl", 6, [3, 0]),
    CountedAnswer(1, "b.jsonl", 41, [3] * 9 + [4]),
    CountedAnswer(2, "a.jsonl", 1, []),
]


def figures(parts: list[ResultPart]) -> dict[str, tuple[int, int, int]]:
    return {part.name: (part.prompts, part.tokens, part.forwards) for part in parts}


def test_turns_of_a_dialogue_are_one_prompt() -> None:
    counted = ((answer.prompt, answer.acceptance) for answer in ANSWERS)
    assert Acceptance.by_prompt(counted) == [Acceptance(11, 5), Acceptance(40, 10), Acceptance(0, 0)]


def test_macro_counts_prompts_and_micro_counts_forwards() -> None:
    clusters = Acceptance.by_prompt((answer.prompt, answer.acceptance) for answer in ANSWERS)
    assert Acceptance.total(clusters).length == 51 / 15
    assert macro_acceptance_length(clusters) == pytest.approx((11 / 5 + 40 / 10) / 2)


def test_parts_by_file_keep_the_order_of_the_files() -> None:
    assert figures(by_file(ANSWERS, 5)) == {"a.jsonl": (1, 11, 5), "b.jsonl": (1, 40, 10)}


def test_an_answer_counts_whole_in_the_bucket_of_its_length() -> None:
    assert figures(by_output_length(ANSWERS, 5)) == {"1 to 32": (1, 11, 5), "33 to 128": (1, 40, 10)}


def test_a_forward_counts_where_its_first_token_stands() -> None:
    """Forwards of the long answer begin at 2, 6, .. 30, 34 and 38; the last of them gives 4 tokens and not 5."""
    assert figures(by_output_position(ANSWERS, 5)) == {"1 to 32": (2, 11 + 32, 5 + 8), "33 to 128": (1, 8, 2)}


def test_parts_add_up_and_hold_their_own_figures() -> None:
    for parts in (by_file(ANSWERS, 5), by_output_length(ANSWERS, 5), by_output_position(ANSWERS, 5)):
        assert (sum(part.tokens for part in parts), sum(part.forwards for part in parts)) == (51, 15)
        for part in parts:
            low, high = part.acceptance_length_interval
            assert low <= part.acceptance_length == part.tokens / part.forwards <= high
