"""Run the frozen target over samples and keep what the drafter learns from.

Samples are batched by length and padded on the right: with causal attention, and with the recurrent state of linear
attention, nothing to the right of a token can reach it, so a sample's states do not depend on what shares its batch.
Packing several samples into one row would not have that property for recurrent layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from draftline.config import PipelineConfig
from draftline.errors import TargetError
from draftline.records import CapturedSample, HiddenStates, Sample, taught_positions
from draftline.targets.cached import last_logits_only
from draftline.targets.capture import HookCapture, check_features
from draftline.targets.layers import check_target_layer_ids
from draftline.targets.model import Target

BATCH_TOKENS = PipelineConfig().target_batch_tokens
"""Most padded tokens in one forward where nobody says otherwise."""

CHECKED_BATCHES = 4
"""First batches whose states are checked in full; a target that gives bad states gives them from the start."""


class TargetForwardLoop:
    """The target's half of the pipeline.

    Args:
        target: frozen target; nothing else may capture from it during `capture`.
        target_layer_ids: layers for the drafter's `fc`.
        send: `target_ids` computes the greedy next token here; `last_hidden` hands over the last layer's output.
        batch_tokens: most padded tokens in one forward; a longer sample runs alone.
        checked_batches: first batches whose states are checked in full; the audit wants to see bad ones, and sets 0.

    Raises:
        ConfigError: `target_layer_ids` does not fit the target.
    """

    def __init__(
        self,
        target: Target,
        target_layer_ids: Sequence[int],
        send: Literal["target_ids", "last_hidden"] = "target_ids",
        batch_tokens: int = BATCH_TOKENS,
        checked_batches: int = CHECKED_BATCHES,
    ) -> None:
        self.target = target
        self.target_layer_ids = check_target_layer_ids(target_layer_ids, target.num_layers)
        self.send = send
        self.batch_tokens = batch_tokens
        self.checked_batches = checked_batches
        # logits of every position would be the largest tensor of the forward, and nobody reads them
        self._few_logits = last_logits_only(target.model)
        self._batches = 0

    def capture(self, samples: Sequence[Sample]) -> list[CapturedSample]:
        """States for each sample, in the order given, on the target's device, usable as constants in autograd.

        Raises:
            TargetError: a sample does not fit the target, or its states are unusable.
        """
        for sample in samples:
            self._check(sample)
        captured: dict[int, CapturedSample] = {}
        with HookCapture(self.target.model, self.target_layer_ids) as capture:
            for members in bucket([len(sample) for sample in samples], self.batch_tokens):
                batch = [samples[i] for i in members]
                captured.update(zip(members, self._forward(capture, batch), strict=True))
        return [captured[i] for i in range(len(samples))]

    @torch.no_grad()
    def _forward(self, capture: HookCapture, batch: list[Sample]) -> list[CapturedSample]:
        input_ids, attention_mask = pad_right([sample.input_ids for sample in batch])
        input_ids, attention_mask = input_ids.to(self.target.device), attention_mask.to(self.target.device)
        self.target.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **self._few_logits)
        results = self._split(capture.get_hidden_states_packed(attention_mask), batch)
        self._batches += 1
        for result in results:
            if self._batches <= self.checked_batches or not result.hidden_states_SLD.isfinite().all():
                check_features(result, self.target_layer_ids)
        return results

    def _split(self, states: HiddenStates, batch: list[Sample]) -> list[CapturedSample]:
        lengths = [len(sample) for sample in batch]
        hidden = states.hidden_states_packed[0].split(lengths)
        last = states.verifier_last_hidden_packed[0]
        if self.send == "target_ids":
            ids = self._target_ids(last, batch).split(lengths)
            return [CapturedSample(s, h, target_ids_S=i) for s, h, i in zip(batch, hidden, ids, strict=True)]
        rows = last.split(lengths)
        return [CapturedSample(s, h, verifier_last_hidden_SD=r) for s, h, r in zip(batch, hidden, rows, strict=True)]

    def _target_ids(self, last_TD: Tensor, batch: list[Sample]) -> Tensor:
        """[T] int64: the head is the largest product of the forward, and most positions of a chat teach nothing."""
        places = torch.cat([taught_positions(sample.loss_mask) for sample in batch]).nonzero()[:, 0]
        places = places.to(last_TD.device)
        ids_T = torch.full((len(last_TD),), -1, dtype=torch.int64, device=last_TD.device)
        return ids_T.index_copy_(0, places, self.target.head.target_ids(last_TD.index_select(0, places)))

    def _check(self, sample: Sample) -> None:
        limit, rows = self.target.config.max_position_embeddings, self.target.vocab_size
        if not 0 < len(sample) <= limit:
            raise TargetError(
                f"sample {sample.sample_id} has {len(sample)} tokens, target {self.target.name} reads 1 to {limit}: "
                "prepare the data again with a smaller max_length"
            )
        low, high = int(sample.input_ids.min()), int(sample.input_ids.max())
        if low < 0 or high >= rows:
            raise TargetError(
                f"sample {sample.sample_id} has token {low if low < 0 else high}, target {self.target.name} knows "
                f"0..{rows - 1}: the data was prepared for another target"
            )


def bucket(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Group indices so that samples of like length share a batch of at most `batch_tokens` padded tokens.

    Longest first, so that the largest batch comes first and a lack of memory shows at once. A sample longer than
    `batch_tokens` is a batch of its own. The grouping depends on `lengths` alone.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def pad_right(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows of ids as one [B, T] tensor and its attention mask.

    Padding repeats the row's last token: any id would do, but the pad id may be missing or mean an image.
    """
    longest = max(len(row) for row in rows)
    input_ids = torch.stack([torch.cat([row, row[-1:].expand(longest - len(row))]) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    attention_mask = (torch.arange(longest) < lengths[:, None]).to(torch.int64)
    return input_ids, attention_mask
