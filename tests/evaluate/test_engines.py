"""Counters of servers: what two readings say of the answers between them, against forwards counted one by one."""

from __future__ import annotations

import pytest

from draftline.evaluate.engines import ENGINES, DraftCounts, Engine, Reply

VLLM, LLAMA_CPP, SGLANG = ENGINES
KEPT = [2, 0, 3, 1, 3]


def counted(kept: list[int]) -> DraftCounts:
    """Counters over forwards that kept so many drafted tokens each."""
    places = tuple(sum(count >= k for count in kept) for k in range(1, max(kept, default=0) + 1))
    return DraftCounts(len(kept), sum(kept), places, sum(kept) + len(kept))


def metrics(prefix: str, tokens: str, drafts: int, places: list[int], label: str = "") -> str:
    """Text as `/metrics` gives it."""
    name = f"{prefix}spec_decode_num"
    lines = [f"# HELP {name}_drafts_total x", f"{name}_drafts_total{{{label}}} {drafts}.0"]
    lines += [f"{name}_accepted_tokens_total{{{label}}} {sum(places)}.0", f"{tokens}{{{label}}} {drafts + sum(places)}"]
    lines += [f'{name}_accepted_tokens_per_pos_total{{position="{k}",{label}}} {n}.0' for k, n in enumerate(places)]
    return "\n".join(lines) + "\n"


def test_a_difference_of_readings_is_what_lay_between_them() -> None:
    before, after = counted([1, 0]), counted([1, 0, *KEPT])
    assert after - before == counted(KEPT)
    assert before + counted(KEPT) == after
    assert sorted((after - before).accepted_per_forward()) == sorted(KEPT)


def test_forwards_without_a_draft_are_seen_in_the_tokens() -> None:
    """Two answers: their first tokens come from the prompts' forwards; one later forward had nothing to draft for."""
    tokens = 2 + sum(KEPT) + len(KEPT) + 1
    found = counted(KEPT).acceptance(tokens, answers=2)
    assert (found.tokens, found.forwards) == (tokens - 2, len(KEPT) + 1)
    uncounted = DraftCounts(accepted=sum(KEPT), tokens=tokens)
    assert uncounted.acceptance(tokens, answers=2) == found
    assert uncounted.accepted_per_forward() == []


@pytest.mark.parametrize("engine", [VLLM, LLAMA_CPP])
def test_counters_are_summed_over_labels(engine: Engine) -> None:
    text = "".join(
        metrics(engine.metrics, engine.tokens_metric, drafts, places, f'engine="{i}"')
        for i, (drafts, places) in enumerate([(5, [4, 3, 2]), (2, [1, 0, 0])])
    )
    assert engine.counts(text) == DraftCounts(7, 10, (5, 3, 2), 17)
    assert engine.counts("process_cpu_seconds_total 3\n") is None
    assert SGLANG.counts(text) is None


def test_a_reply_that_repeats_itself_counts_once() -> None:
    reply = Reply()
    for length in (1, 4, 7):
        told = {"completion_tokens": length, "finish_reason": None}
        if length == 7:
            told |= {"finish_reason": {"type": "stop"}, "spec_verify_ct": 2, "spec_correct_drafts_histogram": [0, 0, 2]}
        SGLANG.read({"output_ids": list(range(length)), "text": "x" * length, "meta_info": told}, reply)
    assert (reply.tokens, reply.finished, reply.stopped) == (7, True, True)
    assert reply.counts == DraftCounts(2, 4, (2, 2), 7)
