"""The reference run: a second trainer, naive and in float64, that shares no code with the one it judges.

    order       plan_run, plan_heldout, held_out      which conversations, in which rows, in which steps
    blocks      draw_anchors, capture, speak          one conversation: anchors, states, labels, loss, counts
    step        step_gradient, clip, train_step       (rates and updates are in oracle_update.py)
    figures     evaluate, figures, log_lines, checkpoints
    beginning   kept_tokens, first_weights, weights_of_target

It follows `docs/concepts/semantics.md`, whose sections are named below, and takes plain tensors and lists: what was
recorded of a run, or what is to be compared with it. There are no packed rows here: every conversation is computed
alone. The target runs through transformers (`reference.py`), the drafter's forward is in `drafter_reference.py`, walk
and decoding are in `oracle_decoding.py`. All arithmetic is in float64 on the CPU; ids are as the target numbers them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from draftline.audit.drafter_reference import ReferenceDrafter, block_outputs, said
from draftline.audit.oracle_update import Moment, learning_rate, moved
from draftline.audit.reference import (
    best_alone,
    decoder_layers,
    model_forward,
    naive_distances,
    naive_dpace,
    naive_slots,
    naive_weights,
)
from draftline.config import DFlashConfig, LossConfig, RunConfig, StatesDtype, TrainConfig

HELDOUT_SEED = HELDOUT_EPOCH = 0
"""What the anchors of held-out rows are drawn with, whatever the seed of the run (section 3)."""

_PUBLISHED_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}
_CLIP_EPS = 1e-6


# Order (section 1)


@dataclass(frozen=True)
class PlannedRow:
    """A row before anything was computed: its place among all rows, its step, its pass, and its conversations."""

    sequence_number: int
    step: int
    last_of_step: bool
    epoch: int
    sample_ids: tuple[int, ...]


def held_out(prompt_hashes: Sequence[int] | NDArray[np.uint64], fraction: float) -> tuple[list[int], list[int]]:
    """Sample ids to train on and to hold out where there is no held-out folder, both increasing."""
    hashes = [int(value) for value in prompt_hashes]
    prompts = sorted(set(hashes))
    count = min(max(round(len(prompts) * fraction), 1), len(prompts) - 1) if fraction > 0 else 0
    kept_back = {prompts[j] for j in np.random.default_rng(len(prompts)).permutation(len(prompts))[:count]}
    training = [i for i, value in enumerate(hashes) if value not in kept_back]
    return training, [i for i, value in enumerate(hashes) if value in kept_back]


def plan_run(sample_ids: Sequence[int], lengths: Sequence[int], train: TrainConfig) -> list[PlannedRow]:
    """All rows of a run.

    Args:
        sample_ids: conversations of the training side, in ascending order.
        lengths: tokens of each.
    """
    assert len(lengths), "a run has conversations"
    wanted = None if train.max_steps is None else train.max_steps * train.rows_per_step
    passes: list[list[tuple[int, ...]]] = []

    def count() -> int:
        return sum(map(len, passes))

    def one_more() -> None:
        order = np.random.default_rng([train.seed % 2**63, len(passes)]).permutation(len(lengths)).tolist()
        passes.append(_pack([sample_ids[i] for i in order], [lengths[i] for i in order], train.tokens_per_row))

    while len(passes) < train.epochs if wanted is None else count() < wanted:
        one_more()
    parts = [count() if wanted is None else wanted]  # rows of the run, then those of each extension
    for extension in train.extensions:
        for _ in range(extension):
            one_more()
        parts.append(count() - sum(parts))
    in_order = [(epoch, row) for epoch, rows in enumerate(passes) for row in rows]
    planned: list[PlannedRow] = []
    for rows_of_part in parts:
        first_step = planned[-1].step + 1 if planned else 0
        for place in range(rows_of_part):
            ends = (place + 1) % train.rows_per_step == 0 or place + 1 == rows_of_part
            number = len(planned)
            planned.append(PlannedRow(number, first_step + place // train.rows_per_step, ends, *in_order[number]))
    return planned


def seams(sample_ids: Sequence[int], lengths: Sequence[int], train: TrainConfig) -> list[int]:
    """Steps that are done where each extension begins."""
    before = (train.model_copy(update={"extensions": train.extensions[:n]}) for n in range(len(train.extensions)))
    return [plan_run(sample_ids, lengths, earlier)[-1].step + 1 for earlier in before]


def plan_heldout(sample_ids: Sequence[int], lengths: Sequence[int], tokens_per_row: int) -> list[PlannedRow]:
    """Rows of the held-out side, in the given order."""
    rows = _pack(sample_ids, lengths, tokens_per_row)
    return [PlannedRow(number, number, True, HELDOUT_EPOCH, row) for number, row in enumerate(rows)]


def _pack(sample_ids: Sequence[int], lengths: Sequence[int], tokens_per_row: int) -> list[tuple[int, ...]]:
    rows: list[list[int]] = []
    used = 0
    for sample_id, length in zip(sample_ids, lengths, strict=True):
        if not rows or used + length > tokens_per_row:
            rows.append([])
            used = 0
        rows[-1].append(int(sample_id))
        used += length
    return [tuple(row) for row in rows]


# Conversations, anchors and labels (sections 2 and 3)


@dataclass(frozen=True, eq=False)
class Conversation:
    """A conversation as it reaches the drafter.

    Attributes:
        input_ids: [S] int64.
        loss_mask: [S] bool.
        states: [S, L*D] captured states.
        next_ids: [S] the target's own greedy next tokens.
        best_kept_ids: [S] its best ones among the tokens that the drafter can say; None where it can say all.
        normed: [S, D] what its output matrix receives; None where no distribution is taught.
    """

    sample_id: int
    input_ids: Tensor
    loss_mask: Tensor
    states: Tensor
    next_ids: Tensor
    best_kept_ids: Tensor | None = None
    normed: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Row:
    """Conversations that travel together in pass `epoch`."""

    epoch: int
    conversations: tuple[Conversation, ...]


def split_row(epoch: int, sample_ids: Sequence[int], lengths: Sequence[int], whole: Conversation) -> Row:
    """A packed row, cut where its conversations end.

    Args:
        sample_ids, lengths: of its conversations, in row order.
        whole: its columns over the whole row.
    """
    columns = {f.name: getattr(whole, f.name) for f in fields(whole) if f.name != "sample_id"}
    cut = {name: c.cpu().split(list(lengths)) for name, c in columns.items() if c is not None}
    parts: list[dict[str, Any]] = [{name: pieces[i] for name, pieces in cut.items()} for i in range(len(lengths))]
    return Row(epoch, tuple(Conversation(i, **part) for i, part in zip(sample_ids, parts, strict=True)))


def draw_anchors(loss_mask: Tensor, sample_id: int, epoch: int, seed: int, budget: int) -> list[int]:
    """Anchors of one conversation, increasing positions in it.

    Args:
        loss_mask: [S] bool.
        budget: `train.num_anchors`.
    """
    mask = loss_mask.tolist()
    eligible = [t for t in range(len(mask) - 1) if mask[t] and mask[t + 1]]
    if len(eligible) <= budget:
        return eligible
    return sorted(np.random.default_rng((seed, epoch, sample_id)).choice(eligible, size=budget, replace=False).tolist())


def row_anchors(row: Row, seed: int, budget: int) -> list[list[int]]:
    """The draw of every conversation of a row."""
    return [draw_anchors(item.loss_mask, item.sample_id, row.epoch, seed, budget) for item in row.conversations]


def in_row_positions(row: Row, anchors: Sequence[Sequence[int]]) -> list[int]:
    """Anchors of the conversations as positions of the packed row."""
    starts = accumulate((len(item.input_ids) for item in row.conversations), initial=0)
    return [start + anchor for start, of_one in zip(starts, anchors, strict=False) for anchor in of_one]


def capture(
    model: PreTrainedModel, drafter: ReferenceDrafter, sample_id: int, input_ids: Tensor, loss_mask: Tensor
) -> Conversation:
    """A conversation, [S] ids and mask, with what the target alone says of it."""
    output = model_forward(model, input_ids)
    return Conversation(
        sample_id=sample_id,
        input_ids=input_ids,
        loss_mask=loss_mask,
        states=output.states(drafter.view.target_layer_ids).cpu(),
        next_ids=output.next_ids.cpu(),
        best_kept_ids=None if drafter.kept_ids is None else output.best_of(drafter.kept_ids).cpu(),
        normed=output.normed.cpu(),
    )


def decay_gamma(loss: LossConfig, block_size: int) -> float:
    """The decay of the loss weights in force."""
    return loss.decay_gamma or _PUBLISHED_GAMMA.get(block_size, block_size / 2)


# Loss and counts (sections 5 and 6)


@dataclass(frozen=True)
class Counts:
    """Sums over slots; lists have one number per place in the block. Added, and divided only when read.

    Attributes:
        slots, right, right_in_data, run, reached: [P], see section 6.
        blocks: blocks with a supervised slot.
        tokens: tokens of the conversations.
        loss_sum: weighted distances; weight_sum: the weights; lost_mass: of the slots, what `loss.top_k` cuts off.
    """

    slots: tuple[int, ...]
    right: tuple[int, ...]
    right_in_data: tuple[int, ...]
    run: tuple[int, ...]
    reached: tuple[int, ...]
    blocks: int
    tokens: int
    loss_sum: float
    weight_sum: float
    lost_mass: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        summed: dict[str, Any] = {}
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            listed = isinstance(ours, tuple)
            summed[field.name] = tuple(map(sum, zip(ours, theirs, strict=True))) if listed else ours + theirs
        return Counts(**summed)

    @staticmethod
    def zero(block_size: int) -> Counts:
        """Nothing counted."""
        none = (0,) * block_size
        return Counts(none, none, none, none, none, 0, 0, 0.0, 0.0)

    def divisor(self, loss: LossConfig) -> float:
        """What the summed loss of a step is divided by."""
        return float(sum(self.slots)) if loss.denominator == "slots" else self.weight_sum


@dataclass(frozen=True, eq=False)
class Spoken:
    """What the drafter says in the n supervised slots of one conversation.

    Attributes:
        slots: (index of the anchor, slot, position predicted) of each, block by block.
        ids: [n] the tokens said; gaps: [n] distance of the two best logits.
        loss: scalar, sum of weight * distance, with a gradient where the weights want one.
    """

    slots: list[tuple[int, int, int]]
    ids: Tensor
    gaps: Tensor
    loss: Tensor
    counts: Counts


def speak(drafter: ReferenceDrafter, item: Conversation, anchors: Sequence[int], loss: LossConfig) -> Spoken:
    """Loss and counts of the blocks at some anchors of one conversation."""
    view, gamma = drafter.view, decay_gamma(loss, drafter.view.block_size)
    slots = naive_slots([item], anchors, view.block_size, view.first)
    nothing = replace(Counts.zero(view.block_size), tokens=len(item.input_ids))
    if not slots:
        return Spoken([], torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(()), nothing)
    block, place, position = (torch.tensor(column) for column in zip(*slots, strict=True))
    next_ids, data_ids = item.next_ids[position - 1], item.input_ids[position]
    taught = next_ids if item.best_kept_ids is None else item.best_kept_ids[position - 1]
    labels = drafter.rows_of(taught if loss.labels == "target" else data_ids)
    logits_nV = drafter.logits(block_outputs(drafter, item.input_ids, item.states, anchors)[block, place])
    teacher_nV, lost = None, 0.0
    if loss.kl or loss.tv:
        assert item.normed is not None, "a distribution is taught"
        teacher_nV, lost_n = best_alone(drafter.logits(item.normed[position - 1].double()).softmax(-1), loss.top_k)
        lost = float(lost_n.sum())
    distance_n, nats_n = naive_distances(logits_nV, labels, teacher_nV, (loss.ce, loss.kl, loss.tv))
    if loss.weights == "dpace":
        weights = naive_dpace(block.tolist(), (-nats_n.detach()).exp().tolist(), loss.dpace_alpha)
    else:
        weights = torch.tensor(naive_weights(view.block_size, gamma, view.first), dtype=torch.float64)[place]
    loss_sum = (weights * distance_n).sum()
    ids, gaps = said(drafter, logits_nV)
    counts = replace(
        _count(slots, (ids == next_ids).tolist(), (ids == data_ids).tolist(), nothing),
        loss_sum=loss_sum.item(),
        weight_sum=weights.sum().item(),
        lost_mass=lost,
    )
    return Spoken(slots, ids, gaps, loss_sum, counts)


def _count(
    slots: Sequence[tuple[int, int, int]], right: Sequence[bool], right_in_data: Sequence[bool], nothing: Counts
) -> Counts:
    """One slot after the other, each block from its first."""
    names = ("slots", "right", "right_in_data", "run", "reached")
    tables: dict[str, Any] = {name: [0] * len(nothing.slots) for name in names}
    last_block, unbroken, blocks = -1, True, 0
    for (block, place, _), is_right, is_right_in_data in zip(slots, right, right_in_data, strict=True):
        if block != last_block:
            last_block, unbroken, blocks = block, True, blocks + 1
        reached = unbroken
        unbroken = unbroken and is_right
        for name, happened in zip(names, (True, is_right, is_right_in_data, unbroken, reached), strict=True):
            tables[name][place] += happened
    changed: dict[str, Any] = {name: tuple(table) for name, table in tables.items()}
    return replace(nothing, blocks=blocks, **changed)


# One step (section 5)


@dataclass(frozen=True, eq=False)
class StepGradient:
    """What the rows of one optimiser step say.

    Attributes:
        counts: over all rows.
        spoken: per row and conversation.
        gradients: by name, divided, not clipped; empty where no slot is supervised.
        norm: their global norm.
    """

    counts: Counts
    spoken: list[list[Spoken]]
    gradients: dict[str, Tensor]
    norm: float


def step_gradient(
    drafter: ReferenceDrafter, rows: Sequence[Row], anchors: Sequence[Sequence[Sequence[int]]], loss: LossConfig
) -> StepGradient:
    """Gradient of one optimiser step.

    Args:
        anchors: per row and conversation, as `row_anchors` draws them.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in drafter.weights.items()}
    learning = replace(drafter, weights=leaves)
    sums = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    counts = Counts.zero(drafter.view.block_size)
    spoken: list[list[Spoken]] = []
    for row, of_row in zip(rows, anchors, strict=True):
        spoken.append([])
        for item, of_one in zip(row.conversations, of_row, strict=True):
            heard = speak(learning, item, of_one, loss)
            if heard.slots:
                for name, part in zip(leaves, torch.autograd.grad(heard.loss, list(leaves.values())), strict=True):
                    sums[name] += part
            spoken[-1].append(replace(heard, loss=heard.loss.detach()))
            counts = counts + heard.counts
    if not sum(counts.slots):
        return StepGradient(counts, spoken, {}, 0.0)
    gradients = {name: total / counts.divisor(loss) for name, total in sums.items()}
    return StepGradient(counts, spoken, gradients, global_norm(gradients))


def global_norm(gradients: Mapping[str, Tensor]) -> float:
    """Root of the sum of the squares of all entries."""
    return math.sqrt(math.fsum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def clip(gradients: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
    """Gradients as the optimiser receives them."""
    factor = min(1.0, clip_norm / (global_norm(gradients) + _CLIP_EPS))
    return {name: gradient * factor for name, gradient in gradients.items()}


@dataclass(frozen=True, eq=False)
class StepOutcome:
    """One whole step: its gradient, the rate, and weights and moments after it."""

    gradient: StepGradient
    rate: float
    weights: dict[str, Tensor]
    moments: dict[str, Moment]


def train_step(
    drafter: ReferenceDrafter,
    moments: Mapping[str, Moment],
    rows: Sequence[Row],
    step: int,
    total_steps: int,
    config: RunConfig,
) -> StepOutcome:
    """Step number `step`, from 0, of a run, with the anchors that the run's seed gives.

    Args:
        rows: all rows of the step.
    """
    anchors = [row_anchors(row, config.train.seed, config.train.num_anchors) for row in rows]
    gradient = step_gradient(drafter, rows, anchors, config.loss)
    rate = learning_rate(step, total_steps, config.optim)
    weights, after = dict(drafter.weights), dict(moments)
    for name, clipped in clip(gradient.gradients, config.optim.clip_norm).items():
        weights[name], after[name] = moved(weights[name], clipped, after[name], rate, config.optim)
    return StepOutcome(gradient, rate, weights, after)


# Figures (section 6)

Figures = dict[str, float | list[float | None] | None]


def figures(counts: Counts, loss: LossConfig) -> Figures:
    """What a line of the log or an evaluation says of counts; None where nothing was counted."""
    return {
        "loss": _ratio(counts.loss_sum, counts.divisor(loss)),
        "accuracy": _ratio(sum(counts.right), sum(counts.slots)),
        "streak": _ratio(sum(counts.run), counts.blocks),
        "data_accuracy": _ratio(sum(counts.right_in_data), sum(counts.slots)),
        "accuracy_by_position": [_ratio(*pair) for pair in zip(counts.right, counts.slots, strict=True)],
        "conditional_accuracy_by_position": [_ratio(*pair) for pair in zip(counts.run, counts.reached, strict=True)],
    } | ({} if loss.top_k is None else {"lost_mass": counts.lost_mass / max(1, sum(counts.slots))})


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


@torch.no_grad()
def evaluate(drafter: ReferenceDrafter, rows: Sequence[Row], num_anchors: int, loss: LossConfig) -> Counts:
    """Counts of held-out rows."""
    total = Counts.zero(drafter.view.block_size)
    for row in rows:
        for item, anchors in zip(row.conversations, row_anchors(row, HELDOUT_SEED, num_anchors), strict=True):
            total = total + speak(drafter, item, anchors, loss).counts
    return total


def is_due(step: int, every: int, total_steps: int) -> bool:
    """Whether something is done after `step` steps."""
    return step % every == 0 or step == total_steps


def log_lines(counts: Sequence[Counts], train: TrainConfig, total_steps: int, evaluates: bool) -> dict[int, Counts]:
    """The lines of the log by their steps, each with the counts since the line before.

    Args:
        counts: of the steps from the first of the run on.
        evaluates: whether anything is held out.
    """
    lines: dict[int, Counts] = {}
    window: list[Counts] = []
    for step, of_step in enumerate(counts, start=1):
        window.append(of_step)
        if is_due(step, train.log_every, total_steps) or (evaluates and is_due(step, train.eval_every, total_steps)):
            lines[step] = sum(window[1:], window[0])
            window = []
    return lines


def checkpoints(
    streaks: Mapping[int, float | None], train: TrainConfig, total_steps: int
) -> tuple[list[int], int | None]:
    """Steps after which a run saves, and the step of its best checkpoint, none without an evaluation.

    Args:
        streaks: held-out streak by the step of its evaluation; None where nothing was counted.
    """
    saved: list[int] = []
    best, highest = None, -math.inf
    for step in range(1, total_steps + 1):
        streak = streaks.get(step)
        if streak is not None and streak > highest:
            best, highest = step, streak
        if best == step or is_due(step, train.save_every, total_steps):
            saved.append(step)
    return saved, best


# Beginning (sections 3 and 4)


def kept_tokens(
    conversations: Iterable[tuple[Tensor, Tensor]], size: int, vocab_size: int, always: Collection[int]
) -> list[int]:
    """Tokens of a reduced vocabulary, increasing.

    Args:
        conversations: [S] ids and [S] mask of each that is trained on.
        always: tokens that end an answer.
    """
    counts = Counter(token for ids, mask in conversations for token in ids[mask].tolist())
    ranked = sorted(range(vocab_size), key=lambda token: (token not in always, -counts[token], token))
    return sorted(ranked[:size])


def first_weights(config: DFlashConfig, seed: int) -> dict[str, Tensor]:
    """Random weights of the first step, in float32, bit for bit."""
    width, mlp, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    matrices = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (mlp, width),
        "mlp.up_proj": (mlp, width),
        "mlp.down_proj": (width, mlp),
    }
    norms = {
        "input_layernorm": width,
        "post_attention_layernorm": width,
        "self_attn.q_norm": head,
        "self_attn.k_norm": head,
    }
    layers = [f"layers.{index}." for index in range(config.num_hidden_layers)]
    shapes = {"fc": (width, len(config.target_layer_ids) * width)}
    shapes |= {layer + name: shape for layer in layers for name, shape in matrices.items()}
    sizes = {"hidden_norm": width, "norm": width} | {
        layer + name: size for layer in layers for name, size in norms.items()
    }
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        name: torch.normal(0.0, config.initializer_range, shape, generator=generator) for name, shape in shapes.items()
    }
    found = drawn | {name: torch.ones(size) for name, size in sizes.items()}
    return {f"{name}.weight": tensor for name, tensor in found.items()}


def weights_of_target(weights: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """First weights that begin as the target's last layers, in float32; `weights` are those of `first_weights`."""
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    depth = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    for index, layer in enumerate(decoder_layers(model)[-depth:]):
        changed |= {
            f"layers.{index}.{name}": tensor.detach().float().cpu() for name, tensor in layer.named_parameters()
        }
    changed["norm.weight"] = model.get_decoder().norm.weight.detach().float().cpu()
    width = len(changed["norm.weight"])
    changed["fc.weight"][:, -width:] += torch.eye(width)
    return changed


# States that are kept on disk in fewer bits (section 8).

ROUNDING_OF_KEPT: dict[StatesDtype, float] = {"bfloat16": 2.0**-8, "fp8": 2.0**-4}
"""Relative difference of a number that was kept in fewer bits: half a unit in the last place, and a little more."""


def kept_narrow(config: RunConfig) -> StatesDtype | None:
    """In which format states are kept on disk, if that is not the target's own."""
    pipeline = config.pipeline
    return None if pipeline.states_path is None or pipeline.states_dtype == "target" else pipeline.states_dtype


def as_kept(states: Tensor, layers: int, kept: StatesDtype | None) -> Tensor:
    """[S, L*D] rounded as the written recipe says of states that are kept on disk."""
    if kept is None:
        return states
    if kept == "bfloat16":
        return states.to(torch.bfloat16).to(states.dtype)
    parts = []
    for part in states.double().chunk(layers, dim=-1):
        unit = part.abs().max(dim=-1, keepdim=True).values.clamp_min(1e-30) / 448
        parts.append((part / unit).float().to(torch.float8_e4m3fn).double() * unit)
    return torch.cat(parts, dim=-1).to(states.dtype)
