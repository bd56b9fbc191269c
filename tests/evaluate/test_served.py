"""Servers that serve a drafter as it was trained, and those that do not: each has its line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from draftline.data.server import Endpoint
from draftline.errors import ServerError
from draftline.evaluate.replay import KeptAnswer
from draftline.evaluate.served import Question, ServedAnswer, Verdict, verify_server
from tests.evaluate.engine_servers import DRAFTED, Answer, EngineServer, Program

STOP = 3
PROGRAMS: list[Program] = ["vllm", "llamacpp", "sglang"]
Change = Callable[[KeptAnswer, Answer], Answer]


def kept(number: int, **changes: Any) -> KeptAnswer:
    """An answer of 8 tokens in 3 forwards, of which the last ends inside its block."""
    output = (*range(20 + number, 27 + number), STOP)
    fields = {
        "input_ids": tuple(range(5, 9 + number)),
        "output_ids": output,
        "text": f"<think>the answer to question {number} in quite a few words",
        "plain_text": f"the answer to question {number} in quite a few words",
        "target_forwards": 3,
        "drafted_blocks": ((output[1], output[2], 9), (output[4], 9, 9), (output[6], STOP, 9)),
        "output_gaps": (2.0,) * 8,
        "draft_gaps": ((1.0, 1.0, 1.0),) * 3,
        "largest_logit": 20.0,
    }
    return KeptAnswer(**{**fields, **changes})


ANSWERS = [kept(number) for number in range(10)]


def served(answer: KeptAnswer) -> Answer:
    """What a server says that does the same."""
    pieces, place = [list(answer.output_ids[:1])], 1
    for grown in answer.kept_per_forward():
        pieces.append(list(answer.output_ids[place : place + grown]))
        place += grown
    return Answer(pieces, [2, 1, 2], True, answer.text)


def other_forwards(answer: Answer, accepted: list[int]) -> Answer:
    """The same output in other pieces."""
    ids, pieces, place = answer.output_ids, [answer.output_ids[:1]], 1
    for number in accepted:
        pieces.append(ids[place : place + number + 1])
        place += number + 1
    return replace(answer, pieces=pieces, accepted=accepted)


def other_output(answer: Answer, place: int, token: int = 77) -> Answer:
    ids = answer.output_ids
    ids[place] = token
    return replace(answer, pieces=[ids[:1], ids[1:4], ids[4:6], ids[6:]])


@pytest.fixture
def start() -> Iterator[Any]:
    started: list[EngineServer] = []

    def new(program: Program = "vllm", change: Change | None = None, answers: Any = None, **words: Any) -> EngineServer:
        server = EngineServer(program, **words)
        by_prompt = {answer.input_ids: answer for answer in answers or ANSWERS}

        def script(prompt: list[int], _limit: int) -> Answer:
            answer = by_prompt[tuple(prompt)]
            return served(answer) if change is None else change(answer, served(answer))

        server.script = script
        started.append(server)
        return server

    yield new
    for server in started:
        server.close()


def ask(server: EngineServer, answers: list[KeptAnswer] | None = None, **words: Any) -> Verdict:
    question = Question(answers or ANSWERS, 8, (STOP,), words.pop("vocab_size", 100), words.pop("coarse", False))
    return verify_server(Endpoint(server.url), words.pop("model", None), question, **words)


def test_the_fake_drafts_in_blocks_of_three() -> None:
    assert {len(block) for answer in ANSWERS for block in answer.drafted_blocks} == {DRAFTED}
    assert [list(answer.kept_per_forward()) for answer in ANSWERS] == [[3, 2, 2]] * 10


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_server_that_does_the_same_is_named_so(program: Program, start: Any) -> None:
    done: list[tuple[int, int]] = []
    server = start(program)
    verdict = ask(server, on_answer=lambda *counts: done.append(counts))
    assert (verdict.served_as_trained, verdict.exact) == (True, True)
    assert verdict.sentence() == (
        "served as trained: yes: 10 of 10 outputs are those of the proof, with their number of forwards, 30 in all"
    )
    assert [answer.forwards for answer in verdict.answers] == [3] * 10
    assert server.prompts[1:] == [list(answer.input_ids) for answer in ANSWERS]
    assert done == [(n, 10) for n in range(1, 11)]
    assert verdict.to_json()["answers"][0]["expected"] == 3


@pytest.mark.parametrize("program", PROGRAMS)
def test_other_forwards_are_a_fault_of_the_drafter(program: Program, start: Any) -> None:
    """One prompt of ten takes another number: what a wrong mask does to a mean of 2.33 is 3 %."""
    change: Change = lambda kept, answer: other_forwards(answer, [2, 0, 0, 1]) if kept is ANSWERS[6] else answer  # noqa: E731
    verdict = ask(start(program, change))
    assert not verdict.served_as_trained
    assert "1 of 10 prompts take another number of forwards, first prompt 7: 4, 3 in the proof" in verdict.reason
    assert "in all 31, 30 in the proof: the drafter is not run as it was trained" in verdict.reason


def test_a_tie_of_the_drafter_explains_a_count(start: Any) -> None:
    close = kept(6, draft_gaps=((1.0, 1.0, 1.0), (1.0, 1e-3, 1.0), (1.0,) * 3))
    answers = [*ANSWERS[:6], close, *ANSWERS[7:]]
    change: Change = lambda kept, answer: other_forwards(answer, [2, 0, 0, 1]) if kept is close else answer  # noqa: E731
    verdict = ask(start("vllm", change, answers), answers)
    assert verdict.served_as_trained
    assert "9 of 10 outputs are those of the proof, with their number of forwards, 27 in all; 1 part at a near tie" in (
        verdict.reason
    )
    behind = kept(6, draft_gaps=((1.0,) * 3, (1.0, 1.0, 1e-3), (1.0,) * 3))  # nothing hangs on this
    answers = [*ANSWERS[:6], behind, *ANSWERS[7:]]
    change = lambda kept, answer: other_forwards(answer, [2, 0, 0, 1]) if kept is behind else answer  # noqa: E731
    assert not ask(start("vllm", change, answers), answers).served_as_trained


def test_a_tie_of_the_target_explains_an_output(start: Any) -> None:
    close = kept(2, output_gaps=(2.0, 2.0, 1e-3, *[2.0] * 5))
    answers = [*ANSWERS[:2], close, *ANSWERS[3:]]
    change: Change = lambda kept, answer: other_output(answer, 2) if kept is close else answer  # noqa: E731
    assert ask(start("vllm", change, answers), answers).served_as_trained
    change = lambda kept, answer: other_output(answer, 4) if kept is close else answer  # noqa: E731
    verdict = ask(start("vllm", change, answers), answers)
    assert not verdict.served_as_trained
    assert "1 of 10 outputs are not those of the proof, first prompt 3 from token 5: it serves another target, or" in (
        verdict.reason
    )


def test_ties_everywhere_are_no_accident(start: Any) -> None:
    answers = [kept(number, output_gaps=(2.0, 2.0, 1e-3, *[2.0] * 5)) for number in range(10)]
    change: Change = lambda kept, answer: other_output(answer, 2) if len(kept.input_ids) < 8 else answer  # noqa: E731
    verdict = ask(start("vllm", change, answers), answers)
    assert "4 of 10 prompts part from the proof at near ties, which is no accident" in verdict.reason


def test_counts_that_16_bits_would_explain_say_so(start: Any) -> None:
    close = kept(6, draft_gaps=((1.0, 1.0, 1.0), (1.0, 0.2, 1.0), (1.0,) * 3))
    answers = [*ANSWERS[:6], close, *ANSWERS[7:]]
    change: Change = lambda kept, answer: other_forwards(answer, [2, 0, 0, 1]) if kept is close else answer  # noqa: E731
    said = "or the server computes in 16 bits (the proof holds in float32: --dtype float32)"
    verdict = ask(start("vllm", change, answers), answers)
    assert not verdict.served_as_trained
    assert verdict.reason.endswith(said)
    change = lambda kept, answer: other_forwards(answer, [2, 0, 0, 1]) if kept is answers[0] else answer  # noqa: E731
    assert said not in ask(start("vllm", change, answers), answers).reason


def test_another_model_is_told_by_its_first_tokens(start: Any) -> None:
    verdict = ask(start("vllm", lambda _kept, answer: other_output(answer, 0)))
    assert "most from their first token on: it serves another model, or one with another tokenizer" in verdict.reason


def test_tokens_that_the_tokenizer_does_not_have_are_named(start: Any) -> None:
    verdict = ask(start("vllm", lambda _kept, answer: other_output(answer, 4, token=500)))
    assert "it answers with token 500, the tokenizer of the proof has 100: it serves another model" in verdict.reason


def test_the_same_ids_in_other_words_are_another_tokenizer(start: Any) -> None:
    verdict = ask(start("vllm", lambda _kept, answer: replace(answer, text="zzz 123 zzz")))
    assert not verdict.served_as_trained
    assert verdict.reason == "token ids are those of the proof, their text is not: it has another tokenizer"
    spoken = ask(start("vllm", lambda kept, answer: replace(answer, text=f" {kept.plain_text}\n")))
    assert spoken.served_as_trained  # blanks and special tokens are shown or not


def test_a_server_that_samples_answers_otherwise_each_time(start: Any) -> None:
    numbers = count(40)
    verdict = ask(start("vllm", lambda _kept, answer: other_output(answer, 3, token=next(numbers))))
    assert "asked the same prompt again it answers otherwise: it samples although it is asked for" in verdict.reason
    assert "first prompt 1 from token 4" in verdict.reason


def test_a_server_that_does_not_stop_is_named(start: Any) -> None:
    def goes_on(_kept: KeptAnswer, answer: Answer) -> Answer:
        return replace(answer, pieces=[*answer.pieces, [50, 51]], accepted=[*answer.accepted, 1], stopped=False)

    assert "behind its end: the server does not stop at token 3" in ask(start("vllm", goes_on)).reason


def test_outputs_that_part_at_gaps_of_16_bits_say_so(start: Any) -> None:
    answers = [kept(number, output_gaps=(2.0, 2.0, 0.2, *[2.0] * 5)) for number in range(10)]
    change: Change = lambda kept, answer: other_output(answer, 2) if len(kept.input_ids) < 7 else answer  # noqa: E731
    verdict = ask(start("vllm", change, answers), answers)
    assert "all of them at gaps of the size of 16-bit rounding: serve target and drafter in float32" in verdict.reason


def test_a_16_bit_server_is_asked_for_its_figures(start: Any) -> None:
    """Two prompts part at a gap that bfloat16 explains, one takes a forward more: 25 for 24 over the other eight."""
    answers = [kept(number, output_gaps=(2.0, 2.0, 0.2, *[2.0] * 5)) for number in range(10)]

    def rounded(kept: KeptAnswer, answer: Answer) -> Answer:
        if kept is answers[9]:
            return other_forwards(answer, [2, 0, 0, 1])
        return other_output(answer, 2) if kept in answers[:2] else answer

    verdict = ask(start("vllm", rounded, answers), answers, coarse=True)
    assert (verdict.served_as_trained, verdict.exact) == (True, False)
    assert "25 forwards on 8 of 10 prompts with equal outputs, 24 in the proof, within 10%" in verdict.reason

    slower: Change = lambda _kept, answer: other_forwards(answer, [2, 0, 0, 1])  # noqa: E731
    verdict = ask(start("vllm", slower, answers), answers, coarse=True)
    assert (
        "40 forwards on 10 of 10 prompts with equal outputs, 30 in the proof, +33%: the drafter is not"
        in verdict.reason
    )
    far: Change = lambda _kept, answer: other_output(answer, 5)  # noqa: E731
    assert (
        "10 of 10 outputs are not those of the proof" in ask(start("vllm", far, answers), answers, coarse=True).reason
    )
    assert ask(start("vllm", None, answers), answers, coarse=True).exact


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_server_without_a_drafter_is_not_served_as_trained(program: Program, start: Any) -> None:
    def alone(_kept: KeptAnswer, answer: Answer) -> Answer:
        return replace(answer, pieces=[[token] for token in answer.output_ids], accepted=[0] * 7)

    verdict = ask(start(program, alone, drafter=False))
    assert not verdict.served_as_trained
    assert "counts no drafted tokens: it was started without a drafter; start it with" in verdict.reason
    assert "\n" not in verdict.sentence()


@pytest.mark.parametrize("program", PROGRAMS)
def test_text_alone_is_compared_with_the_text_of_the_proof(program: Program, start: Any) -> None:
    server = start(program)
    server.text_only = True
    verdict = ask(server)
    assert verdict.served_as_trained
    assert [answer.forwards for answer in verdict.answers] == [3] * 10
    plain = start(program, lambda kept, answer: replace(answer, text=f"{kept.plain_text}\N{REPLACEMENT CHARACTER}\n"))
    plain.text_only = True
    assert ask(plain).served_as_trained
    other = start(program, lambda kept, answer: replace(answer, text=f"{kept.text} and more"))
    other.text_only = True
    assert "10 of 10 outputs are not those of the proof" in ask(other).reason


@pytest.mark.parametrize("program", PROGRAMS)
def test_text_alone_needs_a_text_to_compare_with(program: Program, start: Any) -> None:
    answers = [kept(number, text=None, plain_text=None) for number in range(3)]
    server = start(program, lambda _kept, answer: replace(answer, text="words"), answers)
    server.text_only = True
    with pytest.raises(ServerError, match=r"answers with text only, without token ids.*serve with a version"):
        ask(server, answers)


def test_tokens_inside_a_character_are_made_up_for_by_the_text(start: Any) -> None:
    """llama.cpp sends no token that ends inside a character, and counts it."""
    server = start("llamacpp")
    server.left_out = {20 + number + 2 for number in range(10)}
    assert ask(server).served_as_trained
    other = start("llamacpp", lambda kept, answer: replace(answer, text=f"{kept.text}!"))
    other.left_out = server.left_out
    assert "10 of 10 outputs are not those of the proof" in ask(other).reason


def test_a_stop_token_need_not_be_sent(start: Any) -> None:
    def without_stop(_kept: KeptAnswer, answer: Answer) -> Answer:
        return replace(answer, pieces=[*answer.pieces[:-1], answer.pieces[-1][:-1]])

    verdict = ask(start("sglang", without_stop))
    assert all(answer.token is None for answer in verdict.answers)


def test_counts_of_others_end_the_comparison(start: Any) -> None:
    server = start("vllm")
    server.strangers = 5
    with pytest.raises(ServerError, match=r"Others used the server meanwhile.*when it is idle"):
        ask(server)


def test_other_names_and_programs_are_one_line(start: Any) -> None:
    with pytest.raises(ServerError, match="has no model 'other': it serves target"):
        ask(start("vllm"), model="other")
    with pytest.raises(ServerError, match=r"is not vLLM, SGLang or llama.cpp"):
        ask(start("vllm", owner="somebody"))
    question = Question(ANSWERS, 8, (STOP,), 100, False)
    with pytest.raises(ServerError, match=r"does not answer .*start it, or fix --base-url"):
        verify_server(Endpoint("http://127.0.0.1:9/v1"), None, question)


def test_forwards_that_are_not_told_are_not_compared() -> None:
    silent = ServedAnswer(prompt=0, token=None, gaps=[1e-5, 1.0], forwards=None, expected=3, drafted=3)
    assert silent.outcome(1e-4) == "equal"
    assert replace(silent, forwards=6).outcome(1e-4) == "tie"
    assert replace(silent, forwards=7).outcome(1e-4) == "forwards"  # one tie moves no more than one block
    assert replace(silent, forwards=4, gaps=[1e-3]).outcome(1e-4) == "forwards"
    assert replace(silent, token=2, gaps=[]).outcome(1e-4) == "output"
