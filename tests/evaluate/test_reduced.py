"""Decoding with a drafter that can say only some tokens: still the target's own output, and drafts in its numbering."""

from __future__ import annotations

import torch

from draftline.draft.block import block_input_ids
from draftline.draft.model import DFlashDraftModel
from draftline.evaluate.acceptance import Acceptance, teacher_forced_walk
from draftline.evaluate.generate import BlockDrafter, generate, generate_plain
from draftline.evaluate.sampling import Sampling
from tests.evaluate import pairs

KEPT = torch.arange(0, pairs.VOCABULARY - 1, 2)


def reduced(kept_ids: torch.Tensor) -> DFlashDraftModel:
    """The trained drafter of the pair, left with some of its tokens."""
    _, trained, _ = pairs.trained_pair()
    model = DFlashDraftModel(trained.config.model_copy(update={"draft_vocab_size": len(kept_ids)}))
    model.load_state_dict({**trained.state_dict(), "d2t": model.d2t})
    model.keep_tokens(kept_ids)
    return model.eval()


def test_greedy_output_is_the_targets_own_and_only_kept_tokens_are_drafted() -> None:
    target, trained, prompt_ids = pairs.trained_pair()
    model, accepted, whole = reduced(KEPT), 0, 0
    walked, decoded = [], []
    for prompt in prompt_ids[:8]:
        ids = torch.tensor([prompt])
        plain = generate_plain(target, ids, max_new_tokens=pairs.ANSWER).output_ids
        found = generate(target, model, ids, max_new_tokens=pairs.ANSWER)
        assert found.output_ids == plain
        assert {token for block in found.drafted_blocks for token in block} <= set(KEPT.tolist())
        accepted += sum(found.accepted_per_forward)
        whole += sum(generate(target, trained, ids, max_new_tokens=pairs.ANSWER).accepted_per_forward)
        decoded.append(Acceptance(len(plain) - 1, found.target_forwards))
        walked.append((prompt, plain))
    assert 0 < accepted < whole
    assert teacher_forced_walk(target, model, walked) == decoded


def test_all_tokens_kept_but_the_mask_drafts_what_the_whole_vocabulary_does() -> None:
    target, trained, prompt_ids = pairs.trained_pair()
    model = reduced(torch.arange(pairs.VOCABULARY - 1))
    ids = torch.tensor([prompt_ids[0]])
    found, wanted = (generate(target, m, ids, max_new_tokens=pairs.ANSWER) for m in (model, trained))
    assert found.drafted_blocks == wanted.drafted_blocks


def test_a_sampled_proposal_is_a_distribution_over_the_whole_vocabulary() -> None:
    target, _, prompt_ids = pairs.trained_pair()
    model, sampling = reduced(KEPT), Sampling(1.3, top_p=0.9)
    drafter = BlockDrafter(target, model, sampling, torch.Generator().manual_seed(0))
    states = torch.randn(1, 5, model.fc.in_features, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        drafter.extend(states)
        proposal = drafter.propose(prompt_ids[0][-1])
        cache = model.new_cache()
        model.extend_cache(cache, states)
        block = block_input_ids(torch.tensor([prompt_ids[0][-1]]), 6, model.config.mask_token_id)
        logits = target.head.logits(model.draft(cache, target.embed(block))[0, 1:])[:, KEPT]
    assert proposal.probabilities_KV is not None
    torch.testing.assert_close(proposal.probabilities_KV[:, KEPT], sampling.probabilities(logits))
    torch.testing.assert_close(proposal.probabilities_KV.sum(-1), torch.ones(5, dtype=torch.float64))
    assert (proposal.probabilities_KV.gather(1, proposal.tokens_K[:, None]) > 0).all()
    output = generate(
        target,
        model,
        torch.tensor([prompt_ids[0]]),
        max_new_tokens=pairs.ANSWER,
        sampling=sampling,
        generator=torch.Generator().manual_seed(2),
    ).output_ids
    assert set(output) - set(KEPT.tolist())  # the target still says what the drafter cannot
