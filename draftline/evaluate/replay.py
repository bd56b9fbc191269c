"""Answers that are kept as evidence: what was drafted, how sure each choice was, and the same decoding again.

A decoder that is right gives the same tokens again, but for near ties: forwards of other shapes, on other devices or in
other orders of summation round differently, and where two logits are closer than that rounding either token is right.
So every choice is kept with its gap, the distance of the two best logits. A replay decodes as before. Where that gives
something else, it goes the written way again, step by step with the written blocks, and measures how far the token that
it found is ahead of the one that was written: within rounding it is a tie, beyond it a fault.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from draftline.draft.model import DFlashDraftModel
from draftline.evaluate.generate import GREEDY, BlockDrafter, Generation, check_fits, decode
from draftline.evaluate.target_state import open_target_state
from draftline.targets.model import Target

TokenId = Annotated[int, Field(ge=0)]
Gap = Annotated[float, Field(ge=0, allow_inf_nan=False)]

ROUNDING = {"float64": 1e-4, "float32": 1e-4, "float16": 2.5e-3, "bfloat16": 2e-2}
"""Distance of two logits that rounding explains, relative to the largest logit, by the target's number format.

Measured between attention implementations, threads and formats on two targets: nothing in float32, up to 2.5e-3 in
bfloat16 with 30 layers, where deeper targets round more often."""


class KeptAnswer(BaseModel):
    """One greedy answer with the drafter."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    input_ids: tuple[TokenId, ...] = Field(min_length=1)
    """The prompt."""
    output_ids: tuple[TokenId, ...] = Field(min_length=1)
    """Without the prompt, with the stop token."""
    text: str | None
    """Of the output, without its stop token; none where the target has no tokenizer."""
    plain_text: str | None
    """The same without special tokens, as some servers write it."""
    target_forwards: int = Field(ge=0)
    """After the prompt's own."""
    drafted_blocks: tuple[tuple[TokenId, ...], ...]
    """What was drafted, per forward."""
    output_gaps: tuple[Gap, ...]
    """Per output token, how far its logit is ahead of the target's next best."""
    draft_gaps: tuple[tuple[Gap, ...], ...]
    """Per drafted token, how far its logit is ahead of the drafter's next best."""
    largest_logit: float = Field(gt=0, allow_inf_nan=False)
    """Largest absolute logit that was chosen from; rounding is relative to it."""

    @model_validator(mode="after")
    def _check(self) -> KeptAnswer:
        if len(self.output_gaps) != len(self.output_ids):
            raise ValueError(f"output_gaps has {len(self.output_gaps)} entries for {len(self.output_ids)} tokens")
        if not self.target_forwards == len(self.drafted_blocks) == len(self.draft_gaps):
            raise ValueError(
                f"{self.target_forwards} target_forwards with {len(self.drafted_blocks)} blocks and "
                f"{len(self.draft_gaps)} lists of gaps: they must be as many"
            )
        if any(len(block) != len(gaps) for block, gaps in zip(self.drafted_blocks, self.draft_gaps, strict=True)):
            raise ValueError("draft_gaps must have a gap for each drafted token")
        kept = list(self.kept_per_forward())
        if sum(kept) != len(self.output_ids) - 1 or 0 in kept:
            raise ValueError("drafted_blocks do not lead to output_ids")
        return self

    def kept_per_forward(self) -> Iterator[int]:
        """Tokens that the output grew by at each forward: what of the block it begins with, and one of the target's."""
        rest = self.output_ids[1:]
        for block in self.drafted_blocks:
            accepted = next((i for i, pair in enumerate(zip(block, rest, strict=False)) if pair[0] != pair[1]), None)
            accepted = min(len(block), len(rest)) if accepted is None else accepted
            kept = min(accepted + 1, len(rest))
            rest = rest[kept:]
            yield kept

    def deciding_gaps(self) -> list[float]:
        """Gaps of the drafted tokens on which the number of forwards hangs: what stood, and the first that fell."""
        pairs = zip(self.kept_per_forward(), self.draft_gaps, strict=True)
        return [gap for kept, gaps in pairs for gap in gaps[:kept]]


@dataclass(frozen=True)
class Departure:
    """A step of a replay that does not give what was written.

    Attributes:
        prompt: index of its answer.
        block: index of the drafted block; None: the target itself says another token.
        token: index in the block, or in the output.
        found, expected: the block, or the one token.
        gap: how far the found token's logit is ahead of the expected one's; infinite if that cannot be said at all.
        largest_logit: what rounding is relative to.
        lost: tokens that differ in all.
    """

    prompt: int
    block: int | None
    token: int
    found: list[int]
    expected: list[int]
    gap: float
    largest_logit: float
    lost: int = 1

    def is_tie(self, rounding: float) -> bool:
        """Whether both tokens are right, as far as a relative rounding can tell."""
        return self.gap <= rounding * self.largest_logit

    def sentence(self) -> str:
        """What differs, in one line; prompts, blocks and tokens are counted from 1."""
        found, expected = (" ".join(map(str, ids)) for ids in (self.found, self.expected))
        apart = "a token that cannot be said" if math.isinf(self.gap) else f"logits {self.gap:.2g} apart"
        if self.block is None:
            place, does = f"prompt {self.prompt + 1}, token {self.token + 1}", "the target says"
        else:
            place, does = f"prompt {self.prompt + 1}, block {self.block + 1}, slot {self.token + 1}", "drafted"
        return f"{place}: {does} {found}, expected {expected} ({apart})"


@dataclass(frozen=True)
class Replay:
    """What a replay of some answers gave.

    Attributes:
        departures: steps that differ, in order.
        astray: prompts that decode otherwise although each step alone gives what was written, as (index, forwards).
        prompts: how many.
        drafted: drafted tokens in all.
        said: tokens of all outputs.
    """

    departures: list[Departure] = field(default_factory=list)
    astray: list[tuple[int, int]] = field(default_factory=list)
    prompts: int = 0
    drafted: int = 0
    said: int = 0

    @property
    def equal_drafted(self) -> float:
        """Share of drafted tokens that are the written ones."""
        return 1.0 - sum(d.lost for d in self.departures if d.block is not None) / max(1, self.drafted)

    @property
    def equal_said(self) -> float:
        """Share of the target's own tokens that are the written ones."""
        return 1.0 - sum(d.lost for d in self.departures if d.block is None) / max(1, self.said)

    def sentence(self) -> str:
        """The figures in one line."""
        ties = sum(d.lost for d in self.departures)
        same = f"{ties} of them with near ties" if ties else "all the same"
        return f"{self.prompts} prompts decoded again: {self.drafted} drafted tokens and {self.said} answered, {same}"


def keep_answers(
    target: Target,
    draft_model: DFlashDraftModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int],
) -> Iterator[KeptAnswer]:
    """Decode prompts, given as token ids, greedily with the drafter, one after the other.

    Raises:
        DataError: a prompt is empty, or does not fit the target's positions with its answer.
        TargetError: the drafter was made for another target, or this target cannot be decoded here.
    """
    check_fits(draft_model.config, target)
    for prompt in prompts:
        watched = _WatchedDrafter(target, draft_model)
        answer = _decode(watched, target, prompt, max_new_tokens, stop_token_ids)
        yield KeptAnswer(
            input_ids=tuple(prompt),
            output_ids=tuple(answer.output_ids),
            text=_text(target, answer.output_ids, stop_token_ids, special=True),
            plain_text=_text(target, answer.output_ids, stop_token_ids, special=False),
            target_forwards=answer.target_forwards,
            drafted_blocks=tuple(tuple(block) for block in answer.drafted_blocks),
            output_gaps=tuple(watched.output_gaps),
            draft_gaps=tuple(tuple(gaps) for gaps in watched.draft_gaps),
            largest_logit=watched.largest_logit,
        )


def replay_answers(
    target: Target,
    draft_model: DFlashDraftModel,
    answers: Sequence[KeptAnswer],
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int],
    step_by_step: bool = False,
) -> Replay:
    """Decode again, and compare.

    Args:
        step_by_step: only go the written way, because other tokens are expected: in another number format the two ways
            part early, and behind that nothing can be compared.

    Raises:
        TargetError: the drafter was made for another target, or this target cannot be decoded here.
    """
    check_fits(draft_model.config, target)
    departures, astray = [], []
    for index, kept in enumerate(answers):
        if not step_by_step:
            drafter = BlockDrafter(target, draft_model, GREEDY, None)
            again = _decode(drafter, target, kept.input_ids, max_new_tokens, stop_token_ids)
            same_blocks = [list(block) for block in kept.drafted_blocks] == again.drafted_blocks
            if same_blocks and list(kept.output_ids) == again.output_ids:
                continue
        found = _written_way(target, draft_model, kept, index)
        departures += found
        if not step_by_step and not found:
            astray.append((index, again.target_forwards))
    drafted = sum(len(block) for kept in answers for block in kept.drafted_blocks)
    said = sum(len(kept.output_ids) for kept in answers)
    return Replay(departures, astray, len(answers), drafted, said)


class _WatchedDrafter(BlockDrafter):
    """A drafter that notes how sure it and the target were."""

    def __init__(self, target: Target, draft_model: DFlashDraftModel) -> None:
        super().__init__(target, draft_model, GREEDY, None)
        self.draft_gaps: list[list[float]] = []
        self.output_gaps: list[float] = []
        self.largest_logit = 0.0

    def block_states(self, anchor_id: int) -> Tensor:
        """The same, and how sure the drafter is of what it says."""
        states_KD = super().block_states(anchor_id)
        self.draft_gaps.append(self._gaps(self.head.logits(states_KD)))
        return states_KD

    def target_said(self, logits_nV: Tensor) -> None:
        """Take the target's logits for the tokens that were kept."""
        self.output_gaps += self._gaps(logits_nV)

    def _gaps(self, logits_nV: Tensor) -> list[float]:
        best_n2 = logits_nV.topk(min(2, logits_nV.shape[-1]), dim=-1).values.float()
        self.largest_logit = max(self.largest_logit, float(logits_nV.abs().max()))
        return [float(f"{gap:.4g}") for gap in (best_n2[:, 0] - best_n2[:, -1]).tolist()]


def _decode(
    drafter: BlockDrafter, target: Target, prompt: Sequence[int], max_new_tokens: int, stop_token_ids: Collection[int]
) -> Generation:
    ids = torch.tensor([list(prompt)], dtype=torch.int64)
    watch = drafter.target_said if isinstance(drafter, _WatchedDrafter) else None
    return decode(target, drafter, ids, max_new_tokens, stop_token_ids, GREEDY, None, watch)


@torch.no_grad()
def _written_way(target: Target, draft_model: DFlashDraftModel, kept: KeptAnswer, index: int) -> list[Departure]:
    """Each step after what was written before it: the target reads the written blocks, whatever is drafted now."""
    drafter = BlockDrafter(target, draft_model, GREEDY, None)
    departures: list[Departure] = []

    def compare(logits_nV: Tensor, expected: Sequence[int], block: int | None, place: int, rows: Tensor) -> None:
        found = rows[logits_nV.argmax(-1)].tolist()
        wrong = [i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
        gaps = [_ahead(logits_nV[i], rows, expected[i]) for i in wrong]
        if not wrong:
            return
        worst = max(range(len(wrong)), key=gaps.__getitem__)
        shown = (found, list(expected)) if block is not None else ([found[wrong[worst]]], [expected[wrong[worst]]])
        where = (index, block, place + wrong[worst])
        departures.append(Departure(*where, *shown, gaps[worst], kept.largest_logit, len(wrong)))

    with open_target_state(target, drafter.target_layer_ids) as state:
        prompt = torch.tensor([kept.input_ids], device=target.device)
        verified, count, place = state.forward(prompt), prompt.shape[1], 0
        all_tokens = torch.arange(target.vocab_size, device=target.device)
        sayable = drafter.head.to_target_ids(torch.arange(draft_model.config.head_rows, device=target.device))
        compare(verified.logits_nV[-1:], kept.output_ids[:1], None, 0, all_tokens)
        for number, (block, grown) in enumerate(zip(kept.drafted_blocks, kept.kept_per_forward(), strict=True)):
            state.keep(count)
            assert verified.hidden_states is not None, "a drafter has captured layers"
            drafter.extend(verified.hidden_states[:, :count])
            compare(drafter.head.logits(drafter.block_states(kept.output_ids[place])), block, number, 0, sayable)
            verified = state.forward(torch.tensor([[kept.output_ids[place], *block]], device=target.device))
            said = kept.output_ids[place + 1 : place + 1 + grown]
            compare(verified.logits_nV[:grown], said, None, place + 1, all_tokens)
            count, place = grown, place + grown
    return departures


def _ahead(logits_V: Tensor, rows: Tensor, expected: int) -> float:
    """How far the best logit is ahead of the expected token's."""
    row = (rows == expected).nonzero()
    return float(logits_V.max() - logits_V[row[0, 0]]) if len(row) else math.inf


def _text(target: Target, output_ids: Sequence[int], stop_token_ids: Collection[int], *, special: bool) -> str | None:
    if target.tokenizer is None:
        return None
    ids = list(output_ids[:-1] if output_ids[-1] in stop_token_ids else output_ids)
    return str(target.tokenizer.decode(ids, skip_special_tokens=not special))
