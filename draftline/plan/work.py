"""The arithmetic of each half of a run, counted from shapes alone, in floating-point operations.

A product of [m, k] and [k, n] is 2 m k n. The drafter's backward is twice its forward, but for `fc`, whose input needs
no gradient, and for the frozen head, whose weights need none. What is not a product is left out: on a device it is
part of the efficiency. Lengths are arrays, because attention costs the sum of squares and not the square of the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftline.config import (
    DFlashConfig,
    OptimConfig,
    PipelineConfig,
    PipelineMode,
    RunConfig,
    sent_beside_states,
)
from draftline.data.sampler import IntArray, Sampler, fill_rows
from draftline.data.split import RunData
from draftline.plan.sizes import TargetSizes

OPERATIONS_WORTH_A_PROCESS = 4e11
"""Of the target in a whole run on a CPU, floating-point: about half a minute of a core. A process takes some seconds to
begin, which a shorter run does not win back."""

_TRAINING = 3
"""A forward, the gradient of the states, the gradient of the weights."""
_FROZEN = 2
"""A forward and one gradient: of `fc`, whose input is constant, and of the head, whose weights are."""


@dataclass(frozen=True)
class Conversations:
    """How long they are: [n] tokens, and [n] supervised ones, which are taken to stand at the end."""

    lengths: IntArray
    supervised: IntArray

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.lengths)

    def anchors(self, most: int) -> IntArray:
        """[n] blocks that start in each."""
        return np.minimum(most, np.maximum(self.supervised - 1, 0))

    def of(self, rows: Sequence[int]) -> Conversations:
        """Some of them."""
        chosen = np.asarray(rows, dtype=np.int64)
        return Conversations(self.lengths[chosen], self.supervised[chosen])


@dataclass(frozen=True)
class Workload:
    """What a run goes through.

    Attributes:
        training: conversations of one pass.
        heldout: conversations of one evaluation.
        walked: those of them whose answer is walked over.
        row: conversations of its first row.
        passes: how often the training conversations are seen; a fraction where steps end before a pass does.
        rows, steps: of the whole run.
    """

    training: Conversations
    heldout: Conversations
    walked: Conversations
    row: Conversations
    passes: float
    rows: int
    steps: int

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation."""
        return max(int(each.lengths.max(initial=1)) for each in (self.training, self.heldout))

    @staticmethod
    def of_data(data: RunData, config: RunConfig) -> Workload:
        """Of prepared conversations."""
        training, heldout = data.training, data.heldout
        return Workload._of(
            Conversations(training.lengths[data.training_ids], training.supervised_lengths[data.training_ids]),
            Conversations(heldout.lengths[data.heldout_ids], heldout.supervised_lengths[data.heldout_ids]),
            config,
        )

    @staticmethod
    def of_mean(length: int, count: int, supervised_share: float, config: RunConfig) -> Workload:
        """Of `count` conversations of one length, of which a share is supervised; the held-out ones come on top."""
        supervised = max(2, round(length * supervised_share))

        def alike(number: int) -> Conversations:
            return Conversations(np.full(number, length), np.full(number, supervised))

        held = min(config.train.eval_conversations, round(count * config.data.heldout_fraction))
        return Workload._of(alike(count), alike(held), config)

    @staticmethod
    def _of(training: Conversations, heldout: Conversations, config: RunConfig) -> Workload:
        settings = config.train
        sampler = Sampler(
            sample_ids=np.arange(len(training)),
            lengths=training.lengths,
            tokens_per_row=settings.tokens_per_row,
            rows_per_step=settings.rows_per_step,
            epochs=settings.epochs,
            max_steps=settings.max_steps,
            seed=settings.seed,
        )
        for extension in settings.extensions:
            sampler.extend(extension)
        per_pass = len(fill_rows(np.arange(len(training)), training.lengths, settings.tokens_per_row))
        whole = settings.epochs + sum(settings.extensions)
        passes = whole if settings.max_steps is None else sampler.total_rows / per_pass
        row = training.of(sampler.plan(0).sample_ids)
        walked = heldout.of(range(min(settings.eval_walks, len(heldout))))
        return Workload(training, heldout, walked, row, passes, sampler.total_rows, sampler.total_steps)

    def evaluations(self, every: int) -> int:
        """How often held-out data is read; the last step counts once."""
        return -(-self.steps // every) if len(self.heldout) else 0


def choose_mode(
    pipeline: PipelineConfig, *, two_devices: bool, accelerator: bool, cores: int, operations: float
) -> tuple[PipelineMode, str]:
    """How the halves of a run share the time, and why: what is set, else by what can be measured before the run.

    Args:
        two_devices: whether target and drafter are on different ones.
        accelerator: whether one of these is none of the processor's.
        cores: that the run may use.
        operations: of the target in the whole run, floating-point.
    """
    if pipeline.mode != "auto":
        return pipeline.mode, "as set"
    if pipeline.states_path is not None:
        return "inline", "states are read from disk"
    if accelerator:
        return ("threads", "two devices") if two_devices else ("inline", "one device")
    if cores < 2:
        return "inline", "one core"
    if operations < OPERATIONS_WORTH_A_PROCESS:
        return "inline", "the run is short"
    return "processes", f"{cores} cores"


def target_operations(sizes: TargetSizes, config: RunConfig, some: Conversations) -> float:
    """Of captures: each conversation once through the decoder layers, and through the head where ids are sent."""
    said = float(some.supervised.sum()) if sent_beside_states(config) == "target_ids" else 0.0
    attention = sum(_keys_seen(some.lengths, reach) for reach in sizes.reach) * 4 * sizes.attention_width
    return 2.0 * (sizes.used * float(some.tokens) + sizes.head * said) + attention


def _keys_seen(lengths: NDArray[np.int64], reach: int | None) -> float:
    """Keys that all tokens of some conversations see in one layer."""
    tokens = lengths.astype(np.float64)
    if reach is None:
        return float((tokens**2 / 2).sum())
    window = np.minimum(tokens, reach)
    return float((tokens * window - window**2 / 2).sum())


def drafter_operations(
    shape: DFlashConfig, config: RunConfig, sizes: TargetSizes, conversations: Conversations, *, learn: bool = True
) -> float:
    """Of the drafter's rows: forward and backward, or the forward alone; without the move of the weights.

    Args:
        sizes: of the target, whose head is used twice: by the drafter, and where last states are sent to find labels.
    """
    times, frozen = (_TRAINING, _FROZEN) if learn else (1, 1)
    depth, width = shape.num_hidden_layers, shape.hidden_size
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    tokens = float(conversations.tokens)
    anchors = conversations.anchors(config.train.num_anchors)
    slots = float(anchors.sum()) * shape.block_size
    layer = width * (2 * queries + 2 * keys + 3 * shape.intermediate_size)
    seen = np.maximum(conversations.lengths - conversations.supervised / 2, 0) + shape.block_size
    context = 2 * tokens * width * (frozen * len(shape.target_layer_ids) * width + times * depth * 2 * keys)
    blocks = times * depth * (2 * slots * layer + 4 * float((anchors * seen).sum()) * shape.block_size * queries)
    return context + blocks + _head_operations(shape, config, sizes, conversations, frozen)


def supervised_slots(shape: DFlashConfig, conversations: Conversations, num_anchors: int) -> float:
    """Slots that carry a loss, where each conversation has one answer: those past its end do not."""
    anchors, places = conversations.anchors(num_anchors), np.maximum(conversations.supervised - 1, 1)
    most = np.minimum(shape.num_speculative_tokens, places)
    return float((anchors * (most - most * (most - 1) / (2 * places))).sum())


def _head_operations(
    shape: DFlashConfig, config: RunConfig, sizes: TargetSizes, conversations: Conversations, frozen: int
) -> float:
    slots = supervised_slots(shape, conversations, config.train.num_anchors)
    products = 2.0 * frozen * slots * shape.head_rows * shape.hidden_size
    if sent_beside_states(config) == "last_hidden":
        products += 2.0 * min(slots, float(conversations.supervised.sum())) * sizes.head
        if config.loss.teaches_distribution:
            products += 2.0 * slots * shape.head_rows * shape.hidden_size
    return products


def matrices_of(shape: DFlashConfig) -> dict[tuple[int, int], int]:
    """How many matrices of each size the drafter has."""
    width, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    sizes = [(width, len(shape.target_layer_ids) * width)]
    for _ in range(shape.num_hidden_layers):
        sizes += [(queries, width), (keys, width), (keys, width), (width, queries)]
        sizes += [(inner, width), (inner, width), (width, inner)]
    return {size: sizes.count(size) for size in sizes}


def update_operations(shape: DFlashConfig, optim: OptimConfig) -> float:
    """Of one move of the weights: Muon's iterations; what AdamW does is no product, and is counted in bytes."""
    if optim.name == "adamw":
        return 0.0
    total = 0.0
    for size, count in matrices_of(shape).items():
        low, high = min(size), max(size)
        total += count * optim.muon_ns_steps * (4.0 * low * low * high + 2.0 * low**3)
    return total
