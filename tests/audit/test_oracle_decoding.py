"""Walk and decoder of the reference run against the real ones, and their counts on hand-made cases."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from draftline.audit import oracle_decoding
from draftline.audit.drafter_reference import ReferenceDrafter
from draftline.audit.oracle_decoding import acceptance_length, decode, last_answer, walk_answer, walks
from draftline.audit.reference import model_forward
from draftline.evaluate.acceptance import Acceptance, split_last_answer, teacher_forced_walk
from draftline.evaluate.generate import generate, generate_plain
from tests.audit.real_run import RealRun, real_run

LAYOUTS = {
    "plain": (),
    "sliding": ("drafter.sliding_window=6", "drafter.num_sliding_layers=1"),
    "anchor-predicts": ("drafter.sample_from_anchor=true",),
    "reduced": ("drafter.draft_vocab_size=25",),
}

PROMPT = [5, 9, 21, 7, 3, 30]


@pytest.fixture(scope="module", params=LAYOUTS)
def run(request: pytest.FixtureRequest) -> RealRun:
    """A drafter that is right now and then: the target's own layers, trained for a few steps."""
    found = real_run("drafter.num_layers=2", "drafter.block_size=5", "train.epochs=8", *LAYOUTS[request.param])
    found.drafter.model.start_from_layers(found.target.decoder_layers, found.target.final_norm)
    for batches in found.steps():
        found.drafter.step(batches)
    found.drafter.model.eval()
    return found


def test_walks_are_those_of_the_run(run: RealRun) -> None:
    samples = [run.data.training[int(sample_id)] for sample_id in run.data.training_ids[:8]]
    answers = [split_last_answer(sample) for sample in samples]
    wanted = teacher_forced_walk(run.target, run.drafter.model, [pair for pair in answers if len(pair[1]) > 1])
    found = walks(run.reference(), run.target.model, [(sample.input_ids, sample.loss_mask) for sample in samples])
    assert [Acceptance(walk.tokens, walk.jumps) for walk in found] == wanted
    assert sum(sum(walk.streaks) for walk in found) > 0
    tokens, jumps = sum(walk.tokens for walk in found), sum(walk.jumps for walk in found)
    assert acceptance_length(tokens, jumps) == pytest.approx(Acceptance.total(wanted).length)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 30])
def test_blocks_and_outputs_are_those_of_the_decoder(run: RealRun, max_new_tokens: int) -> None:
    prompt = torch.tensor([PROMPT])
    plain = generate_plain(run.target, prompt, max_new_tokens=max_new_tokens)
    wanted = generate(run.target, run.drafter.model, prompt, max_new_tokens=max_new_tokens)
    found = decode(run.reference(), run.target.model, PROMPT, max_new_tokens, ())
    assert found.output_ids == wanted.output_ids == plain.output_ids
    assert found.drafted_blocks == wanted.drafted_blocks
    assert found.accepted_per_forward == wanted.accepted_per_forward
    assert max_new_tokens < 30 or sum(found.accepted_per_forward) > 0
    assert len(found.output_gaps) == len(found.output_ids)
    assert [len(gaps) for gaps in found.drafted_gaps] == [len(block) for block in found.drafted_blocks]


def test_an_answer_ends_with_its_first_stop_token(run: RealRun) -> None:
    whole = generate_plain(run.target, torch.tensor([PROMPT]), max_new_tokens=30).output_ids
    for place in range(4, 30, 5):
        stop = {whole[place]}
        wanted = generate(run.target, run.drafter.model, torch.tensor([PROMPT]), max_new_tokens=30, stop_token_ids=stop)
        found = decode(run.reference(), run.target.model, PROMPT, 30, stop)
        assert found.output_ids == wanted.output_ids == whole[: whole.index(whole[place]) + 1]
        assert found.accepted_per_forward == wanted.accepted_per_forward


def test_the_last_answer_of_a_mask() -> None:
    def of(mask: str) -> tuple[int, int]:
        return last_answer(torch.tensor([letter == "1" for letter in mask]))

    assert [of(mask) for mask in ("0011011", "0011000", "1", "000")] == [(5, 7), (2, 4), (0, 1), (0, 0)]


def test_an_answer_of_one_token_is_not_walked_over(run: RealRun) -> None:
    ids = torch.tensor(PROMPT)
    assert walks(run.reference(), run.target.model, [(ids, torch.arange(6) == 5), (ids, torch.arange(6) > 3)]) != []
    assert walks(run.reference(), run.target.model, [(ids, torch.arange(6) == 5)]) == []
    assert acceptance_length(0, 0) is None


def test_gaps_say_how_close_each_streak_was_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that always says what the target says most often, by a distance of 0.4."""
    run = real_run("drafter.block_size=5")
    ids = torch.tensor(PROMPT + generate_plain(run.target, torch.tensor([PROMPT]), max_new_tokens=30).output_ids)
    forward = model_forward(run.target.model, ids)
    reference = constant(run, int(forward.next_ids[len(PROMPT) :].mode().values), 0.4)
    walked = walk_answer(reference, run.target.model, ids, len(PROMPT))
    assert max(walked.streaks) > 0
    for anchor, streak, gap in zip(range(len(PROMPT), len(ids) - 1), walked.streaks, walked.gaps, strict=True):
        decided = forward.gaps[anchor : min(anchor + streak + 1, anchor + 4, len(ids) - 1)]
        assert gap == pytest.approx(min(0.4, float(decided.min())))
    monkeypatch.setattr(oracle_decoding, "_ANCHORS_AT_ONCE", 2)
    again = walk_answer(reference, run.target.model, ids, len(PROMPT))
    assert (again.streaks, again.gaps) == (walked.streaks, walked.gaps)


def constant(run: RealRun, token: int, distance: float) -> ReferenceDrafter:
    """A drafter that says one token whatever it reads, by a distance of logits."""
    logits = distance * torch.nn.functional.one_hot(torch.tensor(token), run.target.vocab_size).double()
    head = SimpleNamespace(logits=lambda hidden: logits.expand(len(hidden), -1))
    return replace(run.reference(), head=head)


def test_a_drafter_that_says_one_token_always_is_accepted_while_the_target_says_it() -> None:
    """Counted by hand, with outputs that end inside a run of that token as well."""
    run = real_run("drafter.block_size=5")
    output = generate_plain(run.target, torch.tensor([PROMPT]), max_new_tokens=24).output_ids
    repeated = [place for place in range(1, 23) if output[place] == output[place + 1]]
    token = output[repeated[0]]
    for limit in (2, repeated[0] + 1, 24):
        found = decode(constant(run, token, 1.0), run.target.model, PROMPT, limit, ())
        place, wanted = 1, []
        while place < limit:
            stood = 0
            while stood < 4 and place + stood < limit and output[place + stood] == token:
                stood += 1
            wanted.append(stood)
            place += stood + 1
        assert found.output_ids == output[:limit]
        assert found.accepted_per_forward == wanted
