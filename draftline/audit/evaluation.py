"""EVL: does decoding give the target's own text, and is what is reported what happened?

A stand-in for the drafter knows the target's answer and is wrong in chosen slots, so that the number of forwards and
the acceptance length are known beforehand. The real drafter is compared with a decode loop of its own, on the exported
folder, that recomputes everything at every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from draftline import run as run_module
from draftline.audit.drafter_reference import DrafterView, reference_block
from draftline.audit.exported import exported, view_of
from draftline.audit.oracle_decoding import last_answer
from draftline.audit.probe import Probe, once_per_audit
from draftline.audit.reference import ReferenceForward, target_forward
from draftline.audit.report import Problem, check
from draftline.audit.subject import NotApplicable
from draftline.data.conversations import Conversation, Message
from draftline.data.prompts import Prompt
from draftline.draft.attention import BlockLayout
from draftline.errors import TargetError
from draftline.evaluate import acceptance, draft_length
from draftline.evaluate.acceptance import Acceptance
from draftline.evaluate.benchmark import evaluate_prompts
from draftline.evaluate.generate import Generation
from draftline.evaluate.result import CountedAnswer
from draftline.formats.proof_prompts import before_answer, choose_prompts
from draftline.options import EvaluationSettings
from draftline.records import Sample
from draftline.targets import model as model_module

_PROMPT = 9
"""Tokens of the probe prompt."""

_PROMPTS = 4
"""Prompts of which one has to be answered without passing a near tie."""

_MANY = 40
"""Short answers that are walked over at once."""

_LARGE_HEAD = 4_000_000
"""Entries of a target's head from which a whole chunk of slots takes seconds; chunks are then made smaller."""

_NEVER = 1 << 30
"""Modulus of a drafter that never errs: every block is accepted whole."""


@dataclass(frozen=True, eq=False)
class Answer:
    """A prompt and the target's own greedy answer, one token at a time and without a cache.

    Attributes:
        ids: prompt and answer, some tokens longer than is compared.
        length: answer tokens that are compared.
        forward: the target over all of `ids`.
    """

    ids: list[int]
    length: int
    forward: ReferenceForward

    @property
    def wanted(self) -> list[int]:
        """The answer that decoding must give."""
        return self.ids[_PROMPT : _PROMPT + self.length]


class OracleDrafter(nn.Module):
    """A drafter that errs in a known pattern, the more rarely the larger `modulus`; it has the real one's methods."""

    def __init__(self, probe: Probe, answer: Answer, modulus: int = 7) -> None:
        super().__init__()
        self.config = probe.subject.draft_model.config
        self.fc = nn.Linear(1, 1, bias=False, device=probe.device)
        self.first = probe.first
        self.kept_ids = probe.subject.draft_model.kept_ids
        self.spoken = answer.forward.next_ids.tolist()
        self.spoken[_PROMPT - 1 : -1] = answer.ids[_PROMPT:]  # of a near tie, the one that was said
        best, kept = probe.sayable(answer.forward.logits).argmax(-1).tolist(), set(probe.kept_ids.tolist())
        self.best = [own if own in kept else other for own, other in zip(self.spoken, best, strict=True)]
        self.states = probe.clear_states(answer.forward.normed, self.best)
        self.modulus = modulus

    def is_right(self, anchor: int, slot: int) -> bool:
        """Whether the slot of a block at a position says what the target will say."""
        speaker = self._speaker(anchor, slot)
        errs = self.modulus != _NEVER and (3 * anchor + 5 * slot) % self.modulus <= 1
        return not errs and self.best[speaker] == self.spoken[speaker]

    def new_cache(self) -> SimpleNamespace:
        """Nothing but a length."""
        return SimpleNamespace(length=0)

    def extend_cache(self, cache: SimpleNamespace, hidden_states: Tensor) -> None:
        """Count the tokens."""
        cache.length += hidden_states.shape[1]

    def draft(self, cache: SimpleNamespace, block_embeddings: Tensor) -> Tensor:
        """States whose greedy tokens are the block."""
        return self._block(cache.length, block_embeddings.shape[1])[None]

    def forward(
        self, hidden_states_packed: Tensor, block_embeddings: Tensor, layout: BlockLayout, attention: object = None
    ) -> Tensor:
        """The same for blocks of a row of one document."""
        del hidden_states_packed, block_embeddings, attention
        anchors = layout.anchor_positions_A.tolist()
        return torch.cat([self._block(anchor, layout.block_size) for anchor in anchors])[None]

    def _block(self, anchor: int, size: int) -> Tensor:
        rows = []
        for slot in range(size):
            speaker = self._speaker(anchor, slot)
            if not self.is_right(anchor, slot):
                speaker = next((i for i, token in enumerate(self.best) if token != self.spoken[speaker]), speaker)
            rows.append(self.states[speaker])
        return torch.stack(rows)

    def _speaker(self, anchor: int, slot: int) -> int:
        """The token of the answer at which the target says what the slot predicts."""
        return min(max(anchor + slot - self.first, 0), len(self.spoken) - 1)


@check("EVL001", "decoding with a drafter gives another text than the target alone", needs=("DRF001",))
def lossless(probe: Probe) -> Problem | None:
    answer = own_answer(probe)
    for name, drafter in (
        ("a drafter that errs", OracleDrafter(probe, answer)),
        ("a drafter that never errs", OracleDrafter(probe, answer, _NEVER)),
        ("the drafter", None),
    ):
        output = _generate(probe, drafter, answer).output_ids
        index = _not_greedy(probe, answer, output)
        if index is not None:
            return Problem(
                f"with {name} the output differs from greedy decoding at token {index} of {len(answer.wanted)}",
                "accept a drafted token only if it is the target's argmax, and roll both caches back to what was kept",
            )
    return _past_the_stop(probe, answer)


def _not_greedy(probe: Probe, answer: Answer, output: list[int]) -> int | None:
    """Index of the first token of an output that is not the target's own choice after those before it, if any.

    A block rounds otherwise than one token at a time: of tokens that are nearly the best, either may be chosen.
    """
    if len(output) != answer.length:
        return min(len(output), answer.length)
    if output == answer.wanted:
        return None
    forward = target_forward(probe.subject.target, torch.tensor([*answer.ids[:_PROMPT], *output]))
    logits, places = forward.logits.double().cpu(), range(_PROMPT - 1, _PROMPT - 1 + len(output))
    off = [float(logits[place].max() - logits[place, token]) for place, token in zip(places, output, strict=True)]
    return next((i for i, place in enumerate(places) if off[i] > float(forward.rounding[place])), None)


def _past_the_stop(probe: Probe, answer: Answer) -> Problem | None:
    """Stop tokens in the middle of an accepted block end the answer there."""
    stop = answer.wanted[answer.length // 2]
    for modulus in (7, _NEVER):
        output = _generate(probe, OracleDrafter(probe, answer, modulus), answer, [stop]).output_ids
        end = output.index(stop) + 1 if stop in output else answer.length
        if len(output) != end:
            return Problem(
                f"with {stop} as stop token the output has {len(output)} tokens, it should end after {end}",
                "cut an accepted block behind the first stop token",
            )
    return None


@check("EVL002", "accepted tokens and target forwards are miscounted, or right drafts are rejected", needs=("EVL001",))
def counts(probe: Probe) -> Problem | None:
    for modulus in (7, _NEVER):
        answer, found = _decoded_as_wanted(probe, modulus)
        wanted = _expected_rounds(OracleDrafter(probe, answer, modulus), answer)
        if list(found.accepted_per_forward) != wanted or found.target_forwards != len(wanted):
            return Problem(
                f"accepted per forward {found.accepted_per_forward[:8]} in {found.target_forwards} forwards, by the "
                f"rule {wanted[:8]} in {len(wanted)}",
                "keep the longest right prefix of the block, add the target's next token, count one forward a round",
            )
    return None


@check("EVL003", "the reported acceptance length is not tokens per target forward", needs=("EVL001", "EVL002"))
def acceptance_length(probe: Probe) -> Problem | None:
    del probe  # known counts tell, whatever the run
    generations = [
        Generation([5] * 9, accepted_per_forward=[3, 0, 2]),
        Generation([5] * 3, accepted_per_forward=[0, 0]),
        Generation([5] * 13, accepted_per_forward=[5, 5]),
    ]
    wanted = (8 + 2 + 12) / 7
    found = _acceptance_length(generations)
    if abs(found - wanted) < 1e-6:
        return None
    return Problem(
        f"for answers of 9, 3 and 13 tokens in 3, 2 and 2 forwards it is {found:.3f}, by definition {wanted:.3f}",
        "sum of (output tokens - 1) over sum of target forwards: the bonus token counts, forwards are summed first",
    )


@check(
    "EVL004",
    "the exported drafter drafts other tokens in an independent decode loop",
    needs=(
        *("TGT001", "TGT004", "TGT006", "TGT008", "TGT009"),
        *("DRF001", "DRF002", "DRF003", "DRF004", "DRF005", "DRF006", "DRF007", "DRF008"),
        *("EXP001", "EXP003", "EXP006", "EXP007", "EXP008", "EXP012", "EVL001"),
    ),
)
def independent_loop(probe: Probe) -> Problem | None:
    found = exported(probe)
    reading = None if found.refusal else found.readings[0]
    if reading is None or reading.shape is None:
        raise NotApplicable("nothing was exported")
    # What the audit exports itself holds shaken weights; a folder that lies there holds the drafter's own.
    with nullcontext() if probe.subject.folder is not None else probe.shaken_weights():
        answer, generation = _decoded_as_wanted(probe, None)
    position, equal, total = _PROMPT, 0, 0
    for drafted, accepted in zip(generation.drafted_blocks, generation.accepted_per_forward, strict=True):
        wanted = _reference_draft(probe, view_of(reading), found.tensors, answer, position)
        equal += sum(token in ids for token, ids in zip(drafted, wanted, strict=False))
        total += max(len(drafted), len(wanted))
        position += accepted + 1
    if equal >= 0.9 * total:
        return None
    return Problem(
        f"{equal} of {total} drafted tokens are those of a loop on the exported folder",
        "states of the tokens before the anchor, positions, embeddings and slots must be those of training",
    )


@check(
    "EVL005",
    "the teacher-forced estimate is not what decoding gives",
    needs=("TGT001", "TGT002", "TGT003", "LOS001", "LOS002", "EVL002", "EVL003"),
)
def teacher_forced(probe: Probe) -> Problem | None:
    answer = _answer_without_ties(probe)
    for modulus in (3, 5, 7):
        drafter = OracleDrafter(probe, answer, modulus)
        decoded = (answer.length - 1) / len(_expected_rounds(drafter, answer))
        estimate = _teacher_forced(probe, drafter, [(answer.ids[:_PROMPT], answer.wanted)])
        if abs(estimate / decoded - 1) > 0.05:
            return Problem(
                f"a drafter of known errors is estimated at {estimate:.2f} and decodes at {decoded:.2f} (with bonus)",
                "walk over the target's own answer: streak from the first token on, jump streak + 1, repeat",
            )
    return _walks_elsewhere(probe) or _walks_lost(probe, answer) or _walk_cut(probe)


def _walks_elsewhere(probe: Probe) -> Problem | None:
    """The estimate of a held-out conversation is of its last answer, from the first token of it on."""
    for sample in probe.samples:
        start, end = last_answer(sample.loss_mask)
        prompt, answer = run_module.split_last_answer(sample)
        if (len(prompt), len(answer)) != (start, end - start):
            return Problem(
                f"an answer at {start}..{end - 1} of a conversation is walked over at {len(prompt)}.."
                f"{len(prompt) + len(answer) - 1}",
                "walk over the last supervised run of tokens, and only that",
            )
    return None


def _walks_lost(probe: Probe, answer: Answer) -> Problem | None:
    """Many short answers: each is walked over, to its last token."""
    many = [(answer.ids[: _PROMPT - i % 3], answer.wanted[: 2 + i % 3]) for i in range(_MANY)]
    walks = acceptance.teacher_forced_walk(probe.subject.target, probe.subject.draft_model, many)
    found, wanted = sum(walk.tokens for walk in walks), sum(len(output) - 1 for _, output in many)
    if (len(walks), found) == (len(many), wanted):
        return None
    return Problem(
        f"of {len(many)} short answers with {wanted} tokens after the first, {len(walks)} with {found} are walked over",
        "walk over every answer from its first token to its last",
    )


def _walk_cut(probe: Probe) -> Problem | None:
    """A text with more anchors than are asked at once, and a drafter of known errors: each anchor is walked over."""
    target, whole = probe.subject.target, acceptance.CHUNK_SIZE
    if target.vocab_size * target.hidden_size > _LARGE_HEAD:
        acceptance.CHUNK_SIZE = 8 * probe.block_size
    try:
        return _cut_in_chunks(probe, acceptance.CHUNK_SIZE // probe.block_size)
    finally:
        acceptance.CHUNK_SIZE = whole


def _cut_in_chunks(probe: Probe, at_once: int) -> Problem | None:
    """The same for a number of anchors that are asked at once."""
    target = probe.subject.target
    length = _PROMPT + at_once + 2 * probe.block_size
    length = min(length, target.config.max_position_embeddings)
    ids = probe.random_ids(length, probe.generator(12))
    answer = Answer(ids.tolist(), 0, target_forward(target, ids))
    said = answer.forward.next_ids.tolist()
    drafter = _Waning(probe, replace(answer, ids=[*ids[:_PROMPT].tolist(), *said[_PROMPT - 1 : -1]]))
    right = [
        next((i for i, k in enumerate(_slots(drafter)) if not drafter.is_right(a, k)), len(_slots(drafter)))
        for a in range(_PROMPT, length - 1)
    ]
    room = [min(streak, length - 1 - a) for a, streak in enumerate(right, start=_PROMPT)]
    place = jumps = 0
    while place < len(room):
        place, jumps = place + room[place] + 1, jumps + 1
    (walk,) = acceptance.teacher_forced_walk(target, drafter, [(ids[:_PROMPT].tolist(), ids[_PROMPT:].tolist())])  # type: ignore[arg-type]
    near = int(answer.forward.ties[_PROMPT:].sum())
    if walk.tokens == len(room) and abs(walk.forwards - jumps) <= 2 * near:
        return None
    return Problem(
        f"a text of {len(room) + 1} tokens is walked over in {walk.forwards} jumps over {walk.tokens} tokens, by the "
        f"rule in {jumps} over {len(room)}",
        "walk over every answer to its last token, however many anchors are asked at once",
    )


class _Waning(OracleDrafter):
    """Right in nothing from the middle of a chunk of anchors on."""

    def is_right(self, anchor: int, slot: int) -> bool:
        """As the other, before that."""
        half = acceptance.CHUNK_SIZE // self.config.block_size // 2
        return anchor < _PROMPT + half and super().is_right(anchor, slot)


def _slots(drafter: OracleDrafter) -> range:
    """Those that predict."""
    return range(drafter.first, drafter.config.block_size)


@check(
    "EVL008", "an evaluation ends or counts answers otherwise than decoding does", needs=("EVL001", "EVL002", "EVL003")
)
def evaluated(probe: Probe) -> Problem | None:
    """One prompt through `draftline evaluate`, with a token of its own answer as what ends answers."""
    target, model = probe.subject.target, probe.subject.draft_model
    tokenizer, settings = target.tokenizer, target.model.generation_config
    if tokenizer is None or not tokenizer.chat_template or settings is None:
        raise NotApplicable("the target has no chat template")
    prompt = Prompt("audit", 1, Conversation(messages=(Message(role="user", content="Name a colour, and say why."),)))
    kept, limit = settings.eos_token_id, EvaluationSettings(max_new_tokens=2 * probe.block_size)
    try:
        settings.eos_token_id = None
        with one_round():
            plain = evaluate_prompts(target, model, [prompt], limit).per_prompt[0]
            stop = plain.output_ids[len(plain.output_ids) // 2]
            settings.eos_token_id = [stop]
            ended = evaluate_prompts(target, model, [prompt], limit).per_prompt[0]
    except TargetError as error:
        raise NotApplicable(f"this target is not decoded here: {error}") from error
    finally:
        settings.eos_token_id = kept
    stops = sorted({stop, *_ends(tokenizer)})
    wanted = probe.subject.generate(model, ended.input_ids, limit.max_new_tokens, stops)
    found = (ended.output_ids, ended.accepted_per_forward, ended.target_forwards)
    if found == (wanted.output_ids, wanted.accepted_per_forward, wanted.target_forwards):
        return None
    return Problem(
        f"with {stop} as a token that ends answers, an evaluation gives {len(ended.output_ids)} tokens in "
        f"{ended.target_forwards} forwards, the decoder {len(wanted.output_ids)} in {wanted.target_forwards}",
        "give the decoder the tokens that end an answer, and count what it gives back",
    )


@contextmanager
def one_round() -> Iterator[None]:
    """What a round costs is measured once: that is a matter of the clock, which nothing here looks at."""
    rounds, draft_length._ROUNDS = draft_length._ROUNDS, 1
    try:
        yield
    finally:
        draft_length._ROUNDS = rounds


def _ends(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


@check("EVL006", "the trained drafter is hardly accepted", needs=("DRF001", "EVL001", "EVL002"))
def useful(probe: Probe) -> Problem | None:
    if not probe.subject.trained:
        raise NotApplicable("the drafter is not trained")
    prompts, of_text = _prompts(probe)
    generations, answers = [], []
    for prompt in prompts[:4]:
        generations.append(_decode(probe, probe.subject.draft_model, prompt, 40))
        answers.append((prompt, generations[-1].output_ids))
    decoded = _acceptance_length(generations)
    estimate = _teacher_forced(probe, probe.subject.draft_model, answers)
    probe.notes.append(
        f"acceptance length (with bonus), {len(answers)} prompts: decoded {decoded:.2f}, teacher-forced {estimate:.2f}"
    )
    if decoded < 1.15 and of_text:
        return Problem(
            f"acceptance length (with bonus) {decoded:.2f} on {len(answers)} prompts, teacher-forced {estimate:.2f}",
            "train longer, and on the target's own answers; see the other findings first",
            "warning",
        )
    if abs(estimate / decoded - 1) > 0.15:
        return Problem(
            f"decoded {decoded:.2f}, teacher-forced {estimate:.2f}: training and decoding differ",
            "see DRF007 and EVL004",
        )
    return None


@check("EVL007", "the data was made in another mode than plain serving has")
def serving_mode(probe: Probe) -> Problem | None:
    data = probe.subject.data
    if data is None or not (data.meta or data.report):
        raise NotApplicable("the data does not say how it was made")
    options = data.meta.get("template_options") or {}
    fix = "serve and evaluate with the same template options, thinking mode and system prompt"
    if options:
        return Problem(f"its conversations were rendered with {options}", fix, "warning")
    thinking = data.report.get("thinking") or {}
    with_reasoning, total = thinking.get("with_reasoning", 0), sum(thinking.values())
    if total and 0.1 < with_reasoning / total < 0.9:
        return Problem(f"{with_reasoning} of {total} answers think first, the others do not", fix, "warning")
    return _runs_on(probe, data.samples)


def _runs_on(probe: Probe, samples: Sequence[Sample]) -> Problem | None:
    """Decoding has to stop at the token that ends the answers of the data."""
    target = probe.subject.target
    if target.tokenizer is None:
        return None
    special = {*target.tokenizer.all_special_ids, *target.tokenizer.get_added_vocab().values()}
    last = Counter(int(sample.input_ids[sample.loss_mask][-1]) for sample in samples if sample.loss_mask.any())
    stops = model_module.stop_token_ids(target.model, target.tokenizer)
    missed = sum(count for token, count in last.items() if token in special and token not in stops)
    if missed <= 0.5 * len(samples):
        return None
    token = next(token for token, _ in last.most_common() if token in special and token not in stops)
    return Problem(
        f"{missed} of {len(samples)} conversations end with {target.tokenizer.decode([token])!r} ({token}), and "
        f"decoding stops at {sorted(stops)} only: it goes on behind the end of an answer",
        "name the token in eos_token_id of the target's generation_config.json",
        "warning",
    )


@once_per_audit
def own_answer(probe: Probe) -> Answer:
    """The probe's prompt and the target's answer to it."""
    return _answer_to(probe, 0)


def _decoded_as_wanted(probe: Probe, modulus: int | None) -> tuple[Answer, Generation]:
    """An answer and how it is decoded token by token with a stand-in, or with the drafter.

    Where the first prompt's answer passes a near tie, which a block may decide otherwise, another prompt is tried.

    Raises:
        NotApplicable: the answers to all of them do.
    """
    for number in range(_PROMPTS):
        answer = own_answer(probe) if number == 0 else _answer_to(probe, number)
        drafter = None if modulus is None else OracleDrafter(probe, answer, modulus)
        generation = _generate(probe, drafter, answer)
        if generation.output_ids == answer.wanted:
            return answer, generation
    raise NotApplicable("near ties of the target's logits in every answer")


def _answer_without_ties(probe: Probe) -> Answer:
    """An answer of which the target says the same token by token and at once.

    Raises:
        NotApplicable: no prompt has one.
    """
    for number in range(_PROMPTS):
        answer = own_answer(probe) if number == 0 else _answer_to(probe, number)
        if answer.forward.next_ids.tolist()[_PROMPT - 1 : _PROMPT - 1 + answer.length] == answer.wanted:
            return answer
    raise NotApplicable("near ties of the target's logits in every answer")


@torch.no_grad()
def _answer_to(probe: Probe, number: int) -> Answer:
    target, length = probe.subject.target, 2 * probe.block_size + 5
    ids = probe.random_ids(_PROMPT, probe.generator(11 + 100 * number))[None].to(target.device)
    for _ in range(length + probe.block_size):
        logits = target.model(input_ids=ids, use_cache=False).logits[:, -1:]
        ids = torch.cat([ids, logits.argmax(-1)], dim=1)
    return Answer(ids[0].tolist(), length, target_forward(target, ids[0]))


def _prompts(probe: Probe) -> tuple[list[list[int]], bool]:
    """What a trained drafter is asked, and whether it is text: the run's data, else what comes with a folder."""
    data, folder = probe.subject.data, probe.subject.folder
    if data is not None:
        return [before_answer(sample) for sample in data.heldout or data.samples], True
    if folder is None:
        raise NotApplicable("there is no data to ask from")
    prompts = choose_prompts(folder, probe.subject.target)
    return prompts.ids, prompts.source != "random"


def _acceptance_length(generations: Sequence[Generation]) -> float:
    """As an evaluation reports it."""
    counted = [CountedAnswer(i, "", len(g.output_ids), g.accepted_per_forward) for i, g in enumerate(generations)]
    return Acceptance.total(Acceptance.by_prompt((one.prompt, one.acceptance) for one in counted)).length


def _teacher_forced(probe: Probe, drafter: nn.Module, answers: Sequence[tuple[list[int], list[int]]]) -> float:
    """The estimate from the training forward, for a drafter or a stand-in with its methods."""
    walks = acceptance.teacher_forced_walk(probe.subject.target, drafter, answers)  # type: ignore[arg-type]
    return Acceptance.total(walks).length


def _generate(probe: Probe, drafter: OracleDrafter | None, answer: Answer, stop: Sequence[int] = ()) -> Generation:
    return _decode(probe, drafter or probe.subject.draft_model, answer.ids[:_PROMPT], answer.length, stop)


def _decode(
    probe: Probe, drafter: nn.Module, prompt: list[int], max_new_tokens: int, stop: Sequence[int] = ()
) -> Generation:
    """An answer, by the run's own decoder.

    Raises:
        NotApplicable: transformers cannot verify blocks of this target.
    """
    try:
        return probe.subject.generate(drafter, prompt, max_new_tokens, stop)
    except TargetError as error:
        raise NotApplicable(f"this target is not decoded here: {error}") from error


def _expected_rounds(drafter: OracleDrafter, answer: Answer) -> list[int]:
    """Accepted tokens of each round by the rule of speculative decoding."""
    made, rounds = 1, []
    while made < answer.length:
        anchor = _PROMPT + made - 1
        slots = range(drafter.first, drafter.config.block_size)
        accepted = next((i for i, slot in enumerate(slots) if not drafter.is_right(anchor, slot)), len(slots))
        kept = min(accepted + 1, answer.length - made)
        rounds.append(min(accepted, kept))
        made += kept
    return rounds


@torch.no_grad()
def _reference_draft(
    probe: Probe, view: DrafterView, weights: dict[str, Tensor], answer: Answer, anchor: int
) -> list[list[int]]:
    """One block, as a reader of the exported folder drafts it, from scratch: the best tokens of each slot.

    More than one where the target's number format rounds their logits to the same, or nearly.
    """
    target = probe.subject.target
    states = torch.cat([answer.forward.layers[i] for i in view.target_layer_ids], dim=-1)[:anchor]
    assert view.mask_token_id is not None, "read_as refuses a config without one"
    tokens = torch.tensor([answer.ids[anchor], *[view.mask_token_id] * (view.block_size - 1)], device=target.device)
    rows = target.embedding.get_parameter("weight")[tokens] * view.input_embedding_scale
    outputs = reference_block(view, weights, states, rows)[view.first :]
    outputs = outputs.to(target.device, target.dtype)
    if "d2t" in weights:  # the folder brings its own rows of the head, and where they belong
        logits = outputs @ weights["lm_head.weight"].to(outputs).T
        ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
    else:
        logits = target.model.get_output_embeddings()(outputs)
        ids = torch.arange(logits.shape[-1])
    logits = logits.double().cpu() * view.output_multiplier
    if view.final_logit_softcapping is not None:
        logits = (logits / view.final_logit_softcapping).tanh() * view.final_logit_softcapping
    best = logits.amax(-1, keepdim=True)
    near = logits >= best - 2 * torch.finfo(target.dtype).eps * best.abs()
    return [ids[row].tolist() for row in near]
