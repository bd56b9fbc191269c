"""Is a drafter served as it was trained? A running server is asked the prompts of its proof.

Prompts travel as token ids. Compared are the tokens of each answer, which are the target's own whatever the drafter
does, and the number of target forwards, on which faults of the drafter show: a wrong mask changes it on most prompts
while it moves the mean acceptance by a few per cent. Ties are told from faults by the gaps that the proof has stored,
because a server says nothing of its logits.

In float32 every answer is compared by itself. A server that computes in 16 bits chooses otherwise at many near ties:
there the outputs are compared up to the first of them, and the forwards over all prompts together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from typing import Any, Literal

from draftline.data.server import Endpoint
from draftline.errors import ServerError
from draftline.evaluate.engines import Reply
from draftline.evaluate.replay import ROUNDING, KeptAnswer
from draftline.evaluate.server import RunningServer, find_engine

MOST_TIES = 0.2
"""Share of the prompts that may differ at near ties where each is compared by itself."""

COARSE_FORWARDS = 0.1
"""Relative difference of the forwards over all prompts that rounding to 16 bits explains."""

ALIKE = 0.5
"""Similarity of two texts of the same tokens: programs differ in blanks and in special tokens, tokenizers in words."""

_EDGES = " \n\r\t\N{REPLACEMENT CHARACTER}"
"""What programs differ in at the ends of a text: blanks, and a character that is cut off."""

Outcome = Literal["equal", "tie", "output", "forwards"]


@dataclass(frozen=True)
class ServedAnswer:
    """One answer of a server beside the written one.

    Attributes:
        prompt: index.
        token: of the output, the first that differs; None if none does.
        gaps: distances of the two best logits that may explain a difference, relative to the largest logit: the
            target's at that token, or, with equal outputs, those of the drafted tokens on which the forwards hang.
        forwards: of the target after the prompt's own; None where the server does not tell.
        expected: forwards in the proof.
        drafted: tokens of a block; a tie moves the forwards by no more.
        alike: whether the server's text is one that the written tokens can have.
    """

    prompt: int
    token: int | None
    gaps: list[float]
    forwards: int | None
    expected: int
    drafted: int
    alike: bool = True

    def outcome(self, rounding: float) -> Outcome:
        """What differs, and whether a relative rounding explains it."""
        ties = sum(gap <= rounding for gap in self.gaps)
        if self.token is not None:
            return "tie" if ties else "output"
        if self.forwards is not None and self.forwards != self.expected:
            return "tie" if abs(self.forwards - self.expected) <= ties * self.drafted else "forwards"
        return "equal"


@dataclass(frozen=True)
class Verdict:
    """Whether a drafter is served as it was trained.

    Attributes:
        served_as_trained: yes or no.
        exact: each answer was compared by itself; false where only the figures of a 16-bit server could be.
        reason: in one sentence.
        program: vLLM, SGLang or llama.cpp.
        model: its name on the server.
        notes: what to know besides, one sentence each.
    """

    served_as_trained: bool
    exact: bool
    reason: str
    program: str
    model: str
    base_url: str
    answers: list[ServedAnswer]
    notes: list[str]

    def sentence(self) -> str:
        """The verdict for people."""
        return f"served as trained: {'yes' if self.served_as_trained else 'no'}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return asdict(self)


@dataclass(frozen=True)
class Question:
    """What a server is asked, and in what it may differ.

    Attributes:
        answers: the written ones, with their prompts.
        max_new_tokens: longest answer, as in the proof.
        stop_token_ids: what ended the written answers.
        vocab_size: tokens that the tokenizer of the proof has; None if it had none.
        coarse: whether the drafter is meant to be served in 16 bits, so that figures are enough.
    """

    answers: Sequence[KeptAnswer]
    max_new_tokens: int
    stop_token_ids: Sequence[int]
    vocab_size: int | None
    coarse: bool


def verify_server(
    endpoint: Endpoint, model: str | None, question: Question, on_answer: Callable[[int, int], None] | None = None
) -> Verdict:
    """Ask a running server, one prompt after the other.

    Args:
        endpoint: where it is.
        model: its name there; none: the first that it serves.
        question: what it is asked.
        on_answer: called with answered prompts and all prompts.

    Raises:
        ServerError: it does not answer, is none of the known programs, or cannot be compared.
    """
    return asyncio.run(_verify(endpoint, model, question, on_answer))


async def _verify(
    endpoint: Endpoint, model: str | None, question: Question, on_answer: Callable[[int, int], None] | None
) -> Verdict:
    async with endpoint.client(1) as client:
        engine, name = await find_engine(client, endpoint, model)
        server = RunningServer(client, endpoint, engine, name)

        def verdict(good: bool, reason: str, answers: list[ServedAnswer], exact: bool = True) -> Verdict:
            return Verdict(good, exact, reason, engine.name, name, endpoint.url, answers, server.notes)

        if not await server.drafts(question.answers[0].input_ids):
            return verdict(False, f"the {engine.name} {server.without_a_drafter}", [])
        found, first_wrong = [], None
        for index, kept in enumerate(question.answers):
            answer, reply = await _ask(server, question, index)
            found.append(answer)
            if answer.outcome(_rounding(question)) == "output" and first_wrong is None:
                first_wrong = (kept, reply)
            if on_answer is not None:
                on_answer(index + 1, len(question.answers))
        if server.notes:  # others were answered meanwhile, and are in the counts
            raise ServerError(f"{server.notes[0]} Ask the {engine.name} at {endpoint.url} when it is idle.")
        if any(answer.token is None and answer.forwards is None for answer in found):
            raise ServerError(f"the {engine.name} at {endpoint.url} does not tell its forwards; {engine.fix}")
        if first_wrong is not None:
            kept, reply = first_wrong
            again, _, _ = await server.ask(kept.input_ids, question.max_new_tokens, text_is_enough=True)
            samples = (again.output_ids, again.text) != (reply.output_ids, reply.text)
            return verdict(False, _why_outputs_differ(found, reply, question, samples=samples), found)
        return verdict(*_judged(found, question))


async def _ask(server: RunningServer, question: Question, index: int) -> tuple[ServedAnswer, Reply]:
    kept = question.answers[index]
    before = await server.counts()
    reply, _, _ = await server.ask(kept.input_ids, question.max_new_tokens, text_is_enough=True)
    token = _first_difference(kept, reply, question.stop_token_ids)
    text_alone = (token is not None and len(reply.output_ids) < reply.tokens) or not reply.output_ids
    if text_alone:  # llama.cpp leaves out tokens that end inside a character, others send none
        token = None if _same_text(kept, reply, server.engine.name) else 0
    tokens = len(kept.output_ids) if token is None else reply.tokens
    counts = await server.counts_after(before, tokens or None, 1) if before is not None else reply.counts
    forwards = None if counts is None or not tokens else counts.acceptance(tokens, 1).forwards
    gaps = [gap / kept.largest_logit for gap in _gaps(kept, token, anywhere=text_alone)]
    drafted = max(map(len, kept.drafted_blocks), default=0)
    alike = kept.text is None or SequenceMatcher(None, kept.text, reply.text).ratio() >= ALIKE
    return ServedAnswer(index, token, gaps, forwards, kept.target_forwards, drafted, alike), reply


def _gaps(kept: KeptAnswer, token: int | None, *, anywhere: bool) -> Sequence[float]:
    """Gaps that may explain a difference: of a token, or of the drafted tokens on which the forwards hang.

    Args:
        anywhere: texts were compared, which do not say at which token they part.
    """
    if token is None:
        return kept.deciding_gaps()
    return kept.output_gaps if anywhere else kept.output_gaps[token : token + 1]


def _first_difference(kept: KeptAnswer, reply: Reply, stop_token_ids: Sequence[int]) -> int | None:
    """Index of the first token that differs; a stop token at the end need not be sent."""
    written, sent = list(kept.output_ids), reply.output_ids
    if written == sent or (written[-1] in stop_token_ids and written[:-1] == sent and reply.stopped):
        return None
    pairs = zip(written, sent, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(written), len(sent)))


def _same_text(kept: KeptAnswer, reply: Reply, program: str) -> bool:
    """Compare texts; servers differ in blanks at both ends, in special tokens, and in characters that are cut off."""
    if kept.text is None or kept.plain_text is None:
        raise ServerError(
            f"the {program} answers with text only, without token ids, and the proof has no text as its target has no "
            "tokenizer: serve with a version that returns ids"
        )
    written, plain, sent = (text.strip(_EDGES) for text in (kept.text, kept.plain_text, reply.text))
    return sent in (written, plain)


def _rounding(question: Question) -> float:
    return ROUNDING["bfloat16" if question.coarse else "float32"]


def _why_outputs_differ(found: Sequence[ServedAnswer], reply: Reply, question: Question, *, samples: bool) -> str:
    """The likeliest reason for outputs that are not those of the proof; the target's own tokens, not the drafter's."""
    wrong = [answer for answer in found if answer.outcome(_rounding(question)) == "output"]
    first, count = wrong[0], f"{len(wrong)} of {len(found)} outputs are not those of the proof"
    place = f"{count}, first prompt {first.prompt + 1} from token {(first.token or 0) + 1}"
    strange = [token for token in reply.output_ids if question.vocab_size is not None and token >= question.vocab_size]
    if strange:
        return (
            f"it answers with token {strange[0]}, the tokenizer of the proof has {question.vocab_size}: it serves "
            f"another model or tokenizer ({count})"
        )
    if samples:
        return (
            f"asked the same prompt again it answers otherwise: it samples although it is asked for greedy answers; "
            f"{place}"
        )
    if sum(answer.token == 0 for answer in wrong) > len(found) / 2:
        return f"{count}, most from their first token on: it serves another model, or one with another tokenizer"
    if all(answer.outcome(ROUNDING["bfloat16"]) == "tie" for answer in wrong):
        return f"{place}, all of them at gaps of the size of 16-bit rounding: serve target and drafter in float32"
    kept = question.answers[first.prompt]
    if first.token is not None and first.token >= len(kept.output_ids):
        return f"{place}, behind its end: the server does not stop at token {kept.output_ids[-1]}"
    return (
        f"{place}: it serves another target, or with settings of its own (penalties in generation_config.json; "
        "vLLM: --generation-config vllm)"
    )


def _judged(found: list[ServedAnswer], question: Question) -> tuple[bool, str, list[ServedAnswer], bool]:
    """Outputs are those of the proof but for ties: do the forwards say the same?

    Returns:
        Yes or no, the reason, the answers, and whether each was compared by itself.
    """
    same = [answer for answer in found if answer.token is None]
    if same and not any(answer.alike for answer in same):
        return False, "token ids are those of the proof, their text is not: it has another tokenizer", found, True
    outcomes = [answer.outcome(ROUNDING["float32"]) for answer in found]
    ties = outcomes.count("tie")
    if set(outcomes) <= {"equal", "tie"} and ties <= MOST_TIES * len(found):
        return True, _all_equal(found, ties), found, True
    expected, counted = _forwards(same)
    if question.coarse and 2 * len(same) >= len(found):
        off = counted / max(1, expected) - 1
        shown = f"{counted} forwards on {len(same)} of {len(found)} prompts with equal outputs, {expected} in the proof"
        if abs(off) <= COARSE_FORWARDS:
            return (
                True,
                f"{shown}, within {COARSE_FORWARDS:.0%}: in 16 bits only the figures can be asked",
                found,
                False,
            )
        return False, f"{shown}, {off:+.0%}: the drafter is not run as it was trained", found, False
    wrong = [answer for answer, outcome in zip(found, outcomes, strict=True) if outcome == "forwards"]
    if wrong:
        reason = (
            f"{len(wrong)} of {len(found)} prompts take another number of forwards, first prompt "
            f"{wrong[0].prompt + 1}: {wrong[0].forwards}, {wrong[0].expected} in the proof; in all {counted}, "
            f"{expected} in the proof: the drafter is not run as it was trained"
        )
        if all(answer.outcome(ROUNDING["bfloat16"]) == "tie" for answer in wrong):
            reason += ", or the server computes in 16 bits (the proof holds in float32: --dtype float32)"
        return False, reason, found, True
    many = f"{ties} of {len(found)} prompts part from the proof at near ties, which is no accident"
    return False, f"{many}: serve target and drafter in the number format of the proof", found, True


def _all_equal(found: Sequence[ServedAnswer], ties: int) -> str:
    compared = [answer for answer in found if answer.outcome(ROUNDING["float32"]) == "equal"]
    rest = f"; {ties} part at a near tie" if ties else ""
    return (
        f"{len(compared)} of {len(found)} outputs are those of the proof, with their number of forwards, "
        f"{_forwards(compared)[0]} in all{rest}"
    )


def _forwards(answers: Sequence[ServedAnswer]) -> tuple[int, int]:
    """Forwards over all answers, in the proof and counted."""
    return sum(answer.expected for answer in answers), sum(answer.forwards or 0 for answer in answers)
