"""Our decoder against z-lab's, an independent one: the same exported drafter, block by block."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import dflash.model as zlab
import pytest
import torch

from draftline.draft.model import DFlashDraftModel
from draftline.evaluate.generate import Generation, generate, generate_plain
from draftline.formats.load import load_drafter
from draftline.formats.write import export_zlab
from draftline.targets.model import Target
from tests.evaluate import pairs

NEW_TOKENS = pairs.ANSWER
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8}
BIDIRECTIONAL = {**SLIDING, "sliding_window_causal": False}
CAUSAL = {"layer_types": ("sliding_attention", "sliding_attention"), "sliding_window": 9}


class ZlabDecoder:
    """z-lab's decoder on an exported folder; it is given a block more than is compared, because its blocks shrink."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, target: Target) -> None:
        monkeypatch.setattr(zlab, "_cuda_time", time.perf_counter)
        self.target, self.model = target, zlab.DFlashDraftModel.from_pretrained(folder).eval()
        self.blocks: list[list[int]] = []
        compute_logits = self.model.compute_logits

        def recorded(*args: Any) -> torch.Tensor:
            logits = compute_logits(*args)
            self.blocks.append(logits[0].argmax(-1).tolist())
            return logits

        monkeypatch.setattr(self.model, "compute_logits", recorded)

    def __call__(self, prompt: list[int], stop_ids: list[int]) -> tuple[list[int], list[list[int]], list[int]]:
        """Output, drafted blocks and tokens per forward."""
        self.blocks.clear()
        ids, budget = torch.tensor([prompt]), NEW_TOKENS + self.model.block_size
        stats = zlab.dflash_generate(self.model, self.target.model, ids, budget, stop_ids, return_stats=True)
        return stats.output_ids[0, len(prompt) :].tolist(), self.blocks, stats.acceptance_lengths


def assert_same(ours: Generation, theirs: tuple[list[int], list[list[int]], list[int]]) -> None:
    output, blocks, produced = theirs
    assert ours.output_ids == output[: len(ours.output_ids)]
    assert ours.drafted_blocks == blocks[: ours.target_forwards]
    # z-lab's forwards that were needed for the tokens compared: the last of them reaches or passes our end
    needed, tokens = 0, 1
    while tokens < len(ours.output_ids):
        tokens += produced[needed]
        needed += 1
    assert ours.target_forwards == needed


def exported(draft_model: DFlashDraftModel, folder: Path) -> DFlashDraftModel:
    export_zlab(draft_model, folder, "float32")
    return load_drafter(folder).draft_model


@pytest.mark.parametrize(
    ("changes", "count"),
    [({}, 20), (SLIDING, 4), (BIDIRECTIONAL, 4), (CAUSAL, 4)],
    ids=["full", "mix", "both", "causal"],
)
def test_blocks_forwards_and_output_are_zlabs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], count: int
) -> None:
    target, trained, prompt_ids = pairs.trained_pair()
    draft_model = exported(pairs.reshaped(trained, **changes), tmp_path / "drafter")
    theirs = ZlabDecoder(monkeypatch, tmp_path / "drafter", target)
    accepted = 0
    for prompt in prompt_ids[:count]:
        assert len(prompt) > 9, "longer than every window"
        ours = generate(target, draft_model, torch.tensor([prompt]), max_new_tokens=NEW_TOKENS)
        assert_same(ours, theirs(prompt, stop_ids=[]))
        plain = generate_plain(target, torch.tensor([prompt]), max_new_tokens=NEW_TOKENS)
        assert ours.output_ids == plain.output_ids
        accepted += sum(ours.accepted_per_forward)
    assert accepted > count, "a drafter that is never right compares only its first block"


def test_stop_tokens_end_both_at_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, trained, prompt_ids = pairs.trained_pair()
    draft_model = exported(trained, tmp_path / "drafter")
    theirs = ZlabDecoder(monkeypatch, tmp_path / "drafter", target)
    for prompt in prompt_ids[:4]:
        stop_ids = generate_plain(target, torch.tensor([prompt]), max_new_tokens=NEW_TOKENS).output_ids[9:12]
        ours = generate(target, draft_model, torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, stop_token_ids=stop_ids)
        output, blocks, produced = theirs(prompt, stop_ids)
        assert ours.output_ids == output
        assert ours.drafted_blocks == blocks
        assert ours.target_forwards == len(produced)
        assert ours.output_ids[-1] in stop_ids


@pytest.mark.parametrize("changes", [{"layer_types": ("full_attention",) * 2, "sliding_window": None}, BIDIRECTIONAL])
def test_without_window_or_causality_the_blocks_differ(changes: dict[str, Any]) -> None:
    """The comparison of sliding drafters could not fail if they did not."""
    target, trained, prompt_ids = pairs.trained_pair()
    sliding, other = pairs.reshaped(trained, **SLIDING), pairs.reshaped(trained, **changes)
    blocks = [
        [
            generate(target, model, torch.tensor([prompt]), max_new_tokens=NEW_TOKENS).drafted_blocks
            for prompt in prompt_ids[:2]
        ]
        for model in (sliding, other)
    ]
    assert blocks[0] != blocks[1]
