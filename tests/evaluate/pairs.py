"""Small random targets, and drafters for them that are right often but not always."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftline.config import DFlashConfig, LossConfig
from draftline.data.sampler import RowPlan
from draftline.draft.attention import GroupedAttention
from draftline.draft.block import FrozenTarget, draw_anchors
from draftline.draft.model import DFlashDraftModel
from draftline.evaluate.generate import Proposal, generate_plain
from draftline.records import Sample
from draftline.targets.loop import TargetForwardLoop
from draftline.targets.model import Target, build_target
from draftline.train.step import train_step
from draftline.transfer.pack import pack

VOCABULARY = 64
ANSWER = 24
TRAINED_PROMPTS = 20


@functools.cache
def random_target() -> Target:
    """Six layers whose weights are wide enough that greedy answers do not fall into a loop at once."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    return build_target("random", Qwen3ForCausalLM(config), None)


def new_drafter(target: Target, **changes: Any) -> DFlashDraftModel:
    """Two untrained layers for a target, blocks of 6."""
    config = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "max_position_embeddings": 256,
        "layer_types": ("full_attention", "full_attention"),
        "sliding_window": None,
        "block_size": 6,
        "mask_token_id": target.vocab_size - 1,
        "target_layer_ids": (1, 3, 4) if target.num_layers == 6 else (0, 1),
        "num_target_layers": target.num_layers,
        "sample_from_anchor": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    model = DFlashDraftModel(DFlashConfig(**{**config, **changes}))
    model.init_weights(torch.Generator().manual_seed(1))
    return model.eval()


def prompts(count: int, length: int = 12, seed: int = 5) -> list[list[int]]:
    """Random prompts that never hold the mask token."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY - 1, (length,), generator=generator).tolist() for _ in range(count)]


@functools.cache
def trained_pair() -> tuple[Target, DFlashDraftModel, list[list[int]]]:
    """A target, a drafter that has seen its answers for a few seconds, and the prompts of those answers."""
    target = random_target()
    draft_model = new_drafter(target)
    prompt_ids = prompts(TRAINED_PROMPTS)
    overfit(target, draft_model, prompt_ids, steps=80)
    return target, draft_model, prompt_ids


def reshaped(draft_model: DFlashDraftModel, **changes: Any) -> DFlashDraftModel:
    """The same weights under a changed configuration."""
    model = DFlashDraftModel(draft_model.config.model_copy(update=changes))
    model.load_state_dict(draft_model.state_dict())
    return model.eval()


def overfit(target: Target, draft_model: DFlashDraftModel, prompt_ids: list[list[int]], steps: int) -> None:
    """Train on the target's own greedy answers to these very prompts."""
    samples = []
    for index, prompt in enumerate(prompt_ids):
        answer = generate_plain(target, torch.tensor([prompt]), max_new_tokens=ANSWER).output_ids
        ids = torch.tensor([*prompt, *answer])
        samples.append(Sample(index, ids, torch.arange(len(ids)) >= len(prompt)))
    captured = TargetForwardLoop(target, draft_model.config.target_layer_ids).capture(samples)
    row = pack(RowPlan(0, 0, True, 0, tuple(range(len(samples)))), captured)
    optimizer = torch.optim.AdamW(draft_model.parameters(), lr=8e-3, weight_decay=0.0)
    for step in range(steps):
        train_step(
            draft_model=draft_model.train(),
            rows=[(row, draw_anchors(row, 8, seed=step))],
            frozen=FrozenTarget(target.embed, target.head),
            optimizer=optimizer,
            loss=LossConfig(),
            attention=GroupedAttention,
            clip_norm=1.0,
        )
    draft_model.eval()


class Clairvoyant:
    """Knows the answer and drafts what follows, read `shift` tokens too late; tokens from `wrong_from` on are wrong."""

    target_layer_ids = (1,)

    def __init__(self, prompt_length: int, answer: list[int], shift: int = 0, wrong_from: int = 5) -> None:
        self.answer, self.shift, self.wrong_from = answer, shift, wrong_from
        self.place = -prompt_length

    def extend(self, hidden_states: torch.Tensor) -> None:
        """As many states as tokens before the anchor, or the place in the answer is wrong."""
        self.place += hidden_states.shape[1]

    def propose(self, anchor_id: int) -> Proposal:
        assert self.answer[self.place] == anchor_id
        begin = self.place + 1 + self.shift
        tokens = torch.tensor(self.answer[begin : begin + 5])
        tokens[self.wrong_from :] ^= 1
        return Proposal(tokens)
