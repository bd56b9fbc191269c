"""Lossless decoding: the drafter proposes a block, the target checks it in one forward.

    prompt        one forward of the target gives the first token and the states of the prompt
    each round    drafter: context so far + [last token, mask, ...] -> K drafted tokens
                  target:  one forward over [last token, drafted tokens] -> keeps a prefix, adds one of its own
                  cache:   states of the kept tokens only, for target and drafter

The output is the target's own, token by token: with greedy decoding its argmax, with sampling a draw from its
distribution. Rounds are counted without the prompt's forward; each gives at least one token of the output. The block
does not shrink near the end: what lies past the last wanted token is cut off.

Plain decoding is the same loop with nothing drafted, so that comparing the two compares the drafter and nothing else.

Both halves use one `Sampling`: the drafter proposes from its own filtered distribution q, the target decides with its
filtered distribution p. Rejection sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318) then
gives tokens distributed exactly as p, whatever q is:

    accept x ~ q with probability min(1, p(x) / q(x)); on the first rejection draw from max(p - q, 0), normalised.

At temperature 0 both distributions are single points and the rule becomes: accept while the drafted token is the
target's argmax, then take the argmax.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from draftline.config import DFlashConfig
from draftline.draft.block import FrozenTarget, Head, block_input_ids, greedy_tokens
from draftline.draft.model import DFlashDraftModel
from draftline.errors import ConfigError, DataError, TargetError
from draftline.evaluate.target_state import open_target_state
from draftline.options import Sampling
from draftline.targets.model import Target
from draftline.targets.sampling import choose, draw, probabilities

GREEDY = Sampling()


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens [K] int64, and the distributions [K, V] they were drawn from (none for greedy)."""

    tokens_K: Tensor
    probabilities_KV: Tensor | None = None


class Proposer(Protocol):
    """Whatever drafts blocks: the drafter, or a stand-in."""

    target_layer_ids: tuple[int, ...]

    def extend(self, hidden_states: Tensor) -> None:
        """Take the states [1, n, L*D] of newly kept tokens."""

    def propose(self, anchor_id: int) -> Proposal:
        """Draft what follows the last kept token, whose own state does not exist yet."""


@dataclass(frozen=True)
class Generation:
    """One decoded answer.

    Attributes:
        output_ids: without the prompt, with the stop token, at most as many as were asked for.
        target_forwards: forwards after the prompt's own; each gave at least one token of the output.
        accepted_per_forward: drafted tokens that stood and are part of the output, per forward.
        drafted_blocks: what was drafted, per forward.
        replayed_forwards: further forwards to roll back linear-attention layers; they give no token.
    """

    output_ids: list[int]
    accepted_per_forward: list[int] = field(default_factory=list)
    drafted_blocks: list[list[int]] = field(default_factory=list)
    replayed_forwards: int = 0

    @property
    def target_forwards(self) -> int:
        """Forwards of the target after the prompt's own."""
        return len(self.accepted_per_forward)


class BlockDrafter:
    """The drafter and its cache over one sequence.

    Args:
        num_speculative_tokens: how many of a block's tokens are proposed; none: all. The block itself stays whole, so
            that every slot sees what it saw in training.
    """

    def __init__(
        self,
        target: Target,
        draft_model: DFlashDraftModel,
        sampling: Sampling,
        generator: torch.Generator | None,
        num_speculative_tokens: int | None = None,
    ) -> None:
        self.num_speculative_tokens = drafted_tokens(draft_model.config, num_speculative_tokens)
        self.target_layer_ids = draft_model.config.target_layer_ids
        self._target = target
        self._draft_model = draft_model
        self._sampling = sampling
        self._generator = generator
        self._cache = draft_model.new_cache()
        self._weight = draft_model.fc.weight
        self._frozen = FrozenTarget.of(target, draft_model.kept_ids, self._weight)

    def extend(self, hidden_states: Tensor) -> None:
        """Project the states of kept tokens once, for all blocks to come."""
        self._draft_model.extend_cache(self._cache, hidden_states.to(self._weight))

    @property
    def head(self) -> Head:
        """What it speaks through."""
        return self._frozen.head

    def propose(self, anchor_id: int) -> Proposal:
        """One forward of the drafter, one of the target's head or of the rows that the drafter can say."""
        states_KD, head = self.block_states(anchor_id), self.head
        if self._sampling.greedy:
            return Proposal(greedy_tokens(states_KD, head))
        probabilities_KV = head.to_whole(probabilities(self._sampling, head.logits(states_KD)))
        return Proposal(draw(probabilities_KV, self._generator), probabilities_KV)

    def block_states(self, anchor_id: int) -> Tensor:
        """What the drafter computes in the slots that are proposed, [K, D], ready for `head`."""
        config = self._draft_model.config
        anchor_1 = torch.tensor([anchor_id], device=self._target.device)
        block_ids = block_input_ids(anchor_1, config.block_size, config.mask_token_id)
        hidden = self._draft_model.draft(self._cache, self._frozen.embed(block_ids)).to(self._target.device)
        first = config.first_predicting_slot
        return hidden[0, first : first + self.num_speculative_tokens]


class NothingDrafted:
    """Plain decoding: one token per forward."""

    target_layer_ids: tuple[int, ...] = ()

    def __init__(self, target: Target) -> None:
        self._none = Proposal(
            torch.empty(0, dtype=torch.int64, device=target.device),
            torch.empty(0, target.vocab_size, dtype=torch.float64, device=target.device),
        )

    def extend(self, hidden_states: Tensor) -> None:
        """Nothing is captured, so nothing comes."""

    def propose(self, anchor_id: int) -> Proposal:
        """No tokens, whatever the last one was."""
        del anchor_id
        return self._none


def generate(
    target: Target,
    draft_model: DFlashDraftModel,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
    num_speculative_tokens: int | None = None,
) -> Generation:
    """Decode with the drafter.

    Args:
        input_ids: [1, S] int64 prompt.
        stop_token_ids: the output ends with the first of these.
        generator: of the target's device; makes sampling repeatable.
        num_speculative_tokens: drafted tokens that the target checks per forward; none: all of a block.

    Raises:
        ConfigError: a block has fewer tokens than are to be checked.
        DataError: the prompt is empty, or does not fit the target's positions with the answer.
        TargetError: the drafter was made for another target, or this target cannot be rolled back.
    """
    check_fits(draft_model.config, target)
    drafter = BlockDrafter(target, draft_model, sampling, generator, num_speculative_tokens)
    return decode(target, drafter, input_ids, max_new_tokens, stop_token_ids, sampling, generator)


def generate_plain(
    target: Target,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
) -> Generation:
    """Decode without a drafter, one token per forward, with the same cache; arguments and errors as in `generate`."""
    return decode(target, NothingDrafted(target), input_ids, max_new_tokens, stop_token_ids, sampling, generator)


@torch.no_grad()
def decode(
    target: Target,
    proposer: Proposer,
    input_ids: Tensor,
    max_new_tokens: int,
    stop_token_ids: Collection[int],
    sampling: Sampling,
    generator: torch.Generator | None,
    on_kept: Callable[[Tensor], None] | None = None,
) -> Generation:
    """The loop itself; see the head of this file.

    Args:
        on_kept: called with the target's logits [n, V] of each n tokens that the output grows by.
    """
    check_prompt(target, input_ids.shape[1], max_new_tokens)
    with open_target_state(target, proposer.target_layer_ids) as state:
        verified, kept_count = state.forward(input_ids.to(target.device)), input_ids.shape[1]
        answer = Generation([int(choose(sampling, verified.logits_nV[-1:], generator)[0])])
        if on_kept is not None:
            on_kept(verified.logits_nV[-1:])
        while len(answer.output_ids) < max_new_tokens and answer.output_ids[-1] not in stop_token_ids:
            # The last token of the output has no state yet; all before it are committed to both caches.
            state.keep(kept_count)
            if verified.hidden_states is not None:
                proposer.extend(verified.hidden_states[:, :kept_count])
            anchor = torch.tensor(answer.output_ids[-1:], device=target.device)
            proposal = proposer.propose(answer.output_ids[-1])
            verified = state.forward(torch.cat([anchor, proposal.tokens_K])[None])
            accepted, bonus = _verify(proposal, verified.logits_nV, sampling, generator)
            drafted = proposal.tokens_K.tolist()
            kept = _cut([*drafted[:accepted], bonus], max_new_tokens - len(answer.output_ids), stop_token_ids)
            answer.output_ids.extend(kept)
            answer.accepted_per_forward.append(min(accepted, len(kept)))
            answer.drafted_blocks.append(drafted)
            kept_count = len(kept)
            if on_kept is not None:
                on_kept(verified.logits_nV[:kept_count])
        return replace(answer, replayed_forwards=state.replayed_forwards)


@torch.no_grad()
def tie_gap(target: Target, input_ids: Tensor, output_ids: list[int], other_ids: list[int]) -> tuple[int, float]:
    """Where two greedy answers to one prompt part, and how close the two tokens were there.

    Forwards over one token and over a block round differently. Where the two best logits are closer than that
    rounding, the argmax may differ although both decoders are right.

    Returns:
        Index of the first differing token, and the distance of the two tokens' logits in one forward over the prompt
        and the common tokens. An answer that ends early counts as differing there, with an infinite distance.
    """
    pairs = zip(output_ids, other_ids, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(output_ids), len(other_ids)))
    if index == min(len(output_ids), len(other_ids)):
        return index, float("inf")
    common = torch.tensor([output_ids[:index]], dtype=torch.int64, device=target.device)
    with open_target_state(target, ()) as state:
        logits_V = state.forward(torch.cat([input_ids.to(target.device), common], dim=1)).logits_nV[-1].float()
    return index, abs(float(logits_V[output_ids[index]] - logits_V[other_ids[index]]))


def check_fits(config: DFlashConfig, target: Target, drafter: str = "the drafter") -> None:
    """Refuse a drafter of another target; `drafter` is what the message calls it.

    Raises:
        TargetError: hidden size, vocabulary or depth differ.
    """
    for what, wanted, found in (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary rows", config.vocab_size, target.vocab_size),
        ("layers", config.num_target_layers, target.num_layers),
    ):
        if wanted != found:
            raise TargetError(
                f"{drafter} was trained for a target with {what} {wanted}, {target.name} has {found}: "
                "give the target it was trained for"
            )


def drafted_tokens(config: DFlashConfig, wanted: int | None) -> int:
    """How many tokens of a block are proposed: all of them where nothing is asked for.

    Raises:
        ConfigError: a block has fewer.
    """
    if wanted is not None and not 0 < wanted <= config.num_speculative_tokens:
        raise ConfigError(
            f"--num-speculative-tokens {wanted}: the drafter drafts {config.num_speculative_tokens} at a time, give 1 "
            "to that many"
        )
    return wanted or config.num_speculative_tokens


def verify_greedy(drafted_K: Tensor, target_logits_MV: Tensor) -> tuple[int, int]:
    """The longest prefix that the target would have written itself, and its own next token; M = K + 1."""
    chosen_M = target_logits_MV.argmax(-1)
    accepted = int((drafted_K == chosen_M[:-1]).cumprod(0).sum())
    return accepted, int(chosen_M[accepted])


def verify_sampled(
    drafted_K: Tensor,
    draft_probabilities_KV: Tensor,
    target_probabilities_MV: Tensor,
    generator: torch.Generator | None,
) -> tuple[int, int]:
    """Rejection sampling over one block.

    Args:
        drafted_K: tokens, each drawn from its row of `draft_probabilities_KV`.
        draft_probabilities_KV: the filtered distributions of the drafter.
        target_probabilities_MV: those of the target at the anchor and after each drafted token, M = K + 1 rows.

    Returns:
        Number of accepted tokens, and the token that follows them.
    """
    rows = torch.arange(len(drafted_K), device=drafted_K.device)
    p_K = target_probabilities_MV[rows, drafted_K]
    q_K = draft_probabilities_KV[rows, drafted_K]
    uniform_K = torch.rand(len(drafted_K), generator=generator, device=drafted_K.device, dtype=torch.float64)
    accepted = int((uniform_K * q_K < p_K).long().cumprod(0).sum())
    next_V = target_probabilities_MV[accepted]
    if accepted < len(drafted_K):
        residual_V = (next_V - draft_probabilities_KV[accepted]).clamp_min(0.0)
        # A rejection with p = q has probability zero; rounding can still bring it about, and then p is the answer.
        next_V = residual_V if residual_V.sum() > 0 else next_V
    return accepted, int(draw(next_V[None], generator)[0])


def _verify(
    proposal: Proposal, logits_MV: Tensor, sampling: Sampling, generator: torch.Generator | None
) -> tuple[int, int]:
    if sampling.greedy:
        return verify_greedy(proposal.tokens_K, logits_MV)
    assert proposal.probabilities_KV is not None, "a proposer has to say what it drew its tokens from"
    return verify_sampled(proposal.tokens_K, proposal.probabilities_KV, probabilities(sampling, logits_MV), generator)


def _cut(token_ids: list[int], budget: int, stop_token_ids: Collection[int]) -> list[int]:
    """Tokens up to the budget, and up to the first stop token, which is kept."""
    kept = token_ids[:budget]
    stop = next((i for i, token in enumerate(kept) if token in stop_token_ids), len(kept))
    return kept[: stop + 1]


def fits(target: Target, length: int, max_new_tokens: int) -> bool:
    """Whether a prompt of `length` tokens leaves room for its answer in the target's positions."""
    return length + max_new_tokens <= target.config.max_position_embeddings


def check_prompt(target: Target, length: int, max_new_tokens: int, prompt: str = "a prompt") -> None:
    """Refuse a prompt of `length` tokens that leaves no room for an answer; `prompt` is what the message calls it.

    Raises:
        DataError: it is empty, or does not fit the target's positions with the answer.
    """
    if max_new_tokens < 1:
        raise DataError(f"max_new_tokens is {max_new_tokens}: ask for at least 1")
    if length == 0:
        raise DataError(f"{prompt} has no tokens: give at least one")
    if not fits(target, length, max_new_tokens):
        limit = target.config.max_position_embeddings
        raise DataError(
            f"{prompt} of {length} tokens and {max_new_tokens} new ones exceed the {limit} positions of {target.name}: "
            "shorten the prompt or lower max_new_tokens"
        )
