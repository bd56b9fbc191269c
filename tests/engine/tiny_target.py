"""A random Qwen3 target of a few thousand weights, and samples for it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftline.records import CapturedSample, Sample
from draftline.targets.loop import TargetForwardLoop
from draftline.targets.model import Target, build_target

VOCAB_SIZE = 40
TARGET_LAYER_IDS = (0, 2)


def tiny_target(seed: int = 0) -> Target:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return build_target("random", Qwen3ForCausalLM(config), None)


def tiny_samples(count: int, seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for sample_id in range(count):
        length = int(torch.randint(5, 30, (1,), generator=generator))
        ids = torch.randint(2, VOCAB_SIZE - 4, (length,), generator=generator)
        samples.append(Sample(sample_id, ids, torch.arange(length) >= length // 3))
    return samples


class SlowLoop:
    """A target loop that is late at chosen rows."""

    def __init__(self, loop: TargetForwardLoop, delays: Sequence[float]) -> None:
        self._loop = loop
        self._delays = delays
        self._rows = 0

    def capture(self, samples: Sequence[Sample]) -> list[CapturedSample]:
        time.sleep(self._delays[self._rows % len(self._delays)])
        self._rows += 1
        return self._loop.capture(samples)


class FailingLoop:
    """A target loop that breaks at its n-th row."""

    def __init__(self, loop: TargetForwardLoop, row: int, error: Exception) -> None:
        self._loop = loop
        self._left = row
        self._error = error

    def capture(self, samples: Sequence[Sample]) -> list[CapturedSample]:
        if not self._left:
            raise self._error
        self._left -= 1
        return self._loop.capture(samples)
