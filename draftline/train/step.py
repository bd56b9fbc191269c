"""One optimiser step, top to bottom: a drafter in training, and the step as a function of its arguments.

    labels      the target's own greedy next token, once per row position
    blocks      [embed(token at anchor), embed(mask), ...] for every anchor
    hidden      drafter(captured states, blocks)
    loss        sum over supervised slots of weight * cross entropy (or another distance), through the target's head
    gradient    summed over the rows of the step, on all ranks, divided once by the global count, clipped

The division comes last, so the update does not depend on how rows are split over micro-batches and ranks. No logging,
clock or environment inside.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from draftline.config import DFlashConfig, LossConfig, RunConfig, decay_gamma, slots_per_chunk
from draftline.draft.attention import Attention, attention_class
from draftline.draft.block import Blocks, FrozenTarget, Head, drafted_states, draw_anchors, slot_labels, slot_weights
from draftline.draft.loss import StepMetrics, TaughtSlots, slot_loss_sum
from draftline.draft.model import DFlashDraftModel
from draftline.errors import CheckpointError, PipelineError, UpdateError
from draftline.records import PackedBatch
from draftline.train.checkpoint import Checkpoint, TrainState, load_weights, random_states, restore_random_states
from draftline.train.optim import (
    build_optimizer,
    extension_rate,
    learning_rate,
    optimizer_tensors,
    restore_optimizer,
    set_learning_rate,
)
from draftline.train.ranks import ALONE, Ranks
from draftline.train.shards import nothing_learned, shard_model, share_of, whole

HELDOUT_SEED = 0
"""Draws the anchors of held-out rows, whatever the seed of the run: runs that differ in their seed are asked the same
questions, so that what they differ by is what they learned."""


@dataclass(frozen=True)
class StepResult:
    """What a step leaves for the log.

    Attributes:
        metrics: sums and counts over all rows of the step.
        grad_norm: global gradient norm before clipping; 0 where nothing was supervised.
    """

    metrics: StepMetrics
    grad_norm: float


class Drafter:
    """A drafter in training: weights and optimiser together, and what one step does to them.

    Everything that a run adds to the bare `train_step` is here: the rate of the step, the anchors of its rows, the
    precision of its products; and what of it goes into a checkpoint and comes back.

    Args:
        config: settings of the run.
        shape: of the drafter.
        total_steps: of the run, for the learning rate.
        seams: steps that were done where each of its extensions begins.
        frozen: embedding and head of the target, on `device`; with them comes a reduced vocabulary.
        device: where the drafter trains.

    Attributes:
        model, optimizer: the weights, and what moves them.
        attention: implementation used in training.
        dtype: of matrix products, see `train.precision`.
        ranks: with whom it trains.

    Raises:
        ConfigError: the attention that was asked for does not run on the device.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        shape: DFlashConfig,
        total_steps: int,
        seams: tuple[int, ...] = (),
        frozen: FrozenTarget,
        device: torch.device,
    ) -> None:
        self.config, self.frozen, self.device = config, frozen, device
        self.total_steps, self.seams = total_steps, seams
        self.attention = attention_class(config.train.attention, device)
        low = config.train.precision == "bfloat16" or (config.train.precision == "auto" and device.type != "cpu")
        self.dtype = torch.bfloat16 if low else torch.float32
        torch.manual_seed(config.train.seed)
        self.model = DFlashDraftModel(shape)
        self.model.init_weights(torch.Generator().manual_seed(config.train.seed))
        if self.model.d2t is not None:
            self.model.keep_tokens(frozen.head.to_target_ids(torch.arange(shape.head_rows)))
        self.model.to(device)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.ranks = ALONE

    def join(self, ranks: Ranks) -> None:
        """Train with other ranks from now on, all of which have these weights and moments."""
        self.ranks = ranks
        if ranks.sharded:
            moments = optimizer_tensors(self.optimizer, self.model)
            mesh = shard_model(self.model, self.device)
            self.optimizer = build_optimizer(self.model, self.config.optim)
            shares = {name: share_of(moment, mesh) for name, moment in moments.items()}
            restore_optimizer(self.optimizer, self.model, shares)

    def learning_rate(self, step: int) -> float:
        """Rate of the update number `step`, from 0."""
        first = max((seam for seam in self.seams if seam <= step), default=None)
        end = min((seam for seam in self.seams if seam > step), default=self.total_steps)
        if first is None:
            return learning_rate(step, end, self.config.optim)
        return extension_rate(step - first, end - first, self.config.optim)

    def anchors(self, batch: PackedBatch, seed: int) -> Tensor:
        """[A] anchors of a row."""
        return draw_anchors(batch, self.config.train.num_anchors, seed)

    def step(self, batches: Sequence[PackedBatch]) -> StepResult:
        """Move the weights by the rows of one optimiser step."""
        return self._step(batches, batches[0].step)

    def idle(self, step: int) -> StepResult:
        """Move the weights in a step in which all rows are on other ranks."""
        return self._step([], step)

    def _step(self, batches: Sequence[PackedBatch], step: int) -> StepResult:
        set_learning_rate(self.optimizer, self.learning_rate(step))
        seed = self.config.train.seed
        with self.precision():
            return train_step(
                draft_model=self.model,
                rows=[(self.as_computed(batch), self.anchors(batch, seed)) for batch in batches],
                frozen=self.frozen,
                optimizer=self.optimizer,
                loss=self.config.loss,
                attention=self.attention,
                clip_norm=self.config.optim.clip_norm,
                ranks=self.ranks,
            )

    @torch.no_grad()
    def measure(self, batch: PackedBatch) -> StepMetrics:
        """Metrics of a held-out row; its anchors are the same in every evaluation of every run with that budget."""
        with self.precision():
            row, anchors = self.as_computed(batch), self.anchors(batch, HELDOUT_SEED)
            return row_loss(self.model, row, anchors, self.frozen, self.config.loss, self.attention)[1]

    def checkpoint(self, state: TrainState, data_fingerprint: str) -> Checkpoint:
        """The present moment, to be written before the next step; if it is sharded, all ranks have to ask for it."""
        return Checkpoint(
            weights={name: whole(tensor) for name, tensor in self.model.state_dict().items()},
            moments={name: whole(tensor) for name, tensor in optimizer_tensors(self.optimizer, self.model).items()},
            random=random_states(),
            state=state,
            run_config=self.config,
            drafter_config=self.model.config,
            data_fingerprint=data_fingerprint,
        )

    def restore(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Put everything back as it was; `folder` is named in messages.

        Raises:
            CheckpointError: a tensor does not fit, or the checkpoint's reduced vocabulary is not that of this run.
        """
        kept = self.model.d2t
        if kept is not None and not torch.equal(kept.cpu(), checkpoint.weights.get("d2t", torch.empty(0))):
            raise CheckpointError(
                f"{folder} can say other tokens (d2t) than the data gives now: give the same data and tokenizer"
            )
        load_weights(self.model, checkpoint.weights, folder)
        restore_optimizer(self.optimizer, self.model, checkpoint.moments)
        restore_random_states(checkpoint.random)

    def twin(self) -> Drafter:
        """Another drafter of the same run with a copy of the weights and an optimiser that has not moved yet."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        other.optimizer = build_optimizer(other.model, self.config.optim)
        return other

    def checksum(self) -> str:
        """Of the weights' bits: where it differs, they do."""
        sums = [parameter.detach().view(torch.int32).sum(dtype=torch.int64) for parameter in self.model.parameters()]
        return hashlib.sha256(str(torch.stack(sums).tolist()).encode()).hexdigest()[:16]

    def assembled(self) -> Drafter:
        """A drafter to be measured on one rank: this one, or, if it is sharded, a copy with all of the weights.

        If it is sharded, all ranks have to ask for it.
        """
        if not self.ranks.sharded:
            return self
        other = copy.copy(self)
        other.model = DFlashDraftModel(self.model.config).to(self.device)
        other.model.load_state_dict({name: whole(tensor) for name, tensor in self.model.state_dict().items()})
        other.model.train(self.model.training)
        return other

    def as_computed(self, batch: PackedBatch) -> PackedBatch:
        """States in float32 where products are, whatever the target's precision; autocast converts them otherwise."""
        if self.dtype != torch.float32:
            return batch
        return replace(batch, hidden_states_packed=batch.hidden_states_packed.float())

    def precision(self) -> AbstractContextManager[object]:
        """Matrix products in `dtype`; weights, norms and the optimiser in float32."""
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, self.dtype)


def train_step(
    *,
    draft_model: DFlashDraftModel,
    rows: Sequence[tuple[PackedBatch, Tensor]],
    frozen: FrozenTarget,
    optimizer: Optimizer,
    loss: LossConfig,
    attention: type[Attention],
    clip_norm: float,
    ranks: Ranks = ALONE,
) -> StepResult:
    """Sum the gradients of all rows of a step and move the optimiser once.

    Args:
        rows: of this optimiser step and this rank, each with its [A] int64 anchor positions.
        ranks: who has the other rows.

    Raises:
        PipelineError: the gradient is not finite; the weights are left as they were.
        UpdateError: the optimiser itself failed. Whatever else is raised, nothing has moved yet.
    """
    optimizer.zero_grad(set_to_none=True)
    metrics = StepMetrics.zero(draft_model.config.block_size)
    for turn in range(ranks.turns(len(rows))):
        loss_sum = torch.zeros(())
        if turn < len(rows):
            loss_sum, row_metrics = row_loss(draft_model, *rows[turn], frozen, loss, attention)
            metrics = metrics + row_metrics
        if ranks.sharded:
            loss_sum = loss_sum + nothing_learned(draft_model, attention)
        if loss_sum.requires_grad:
            loss_sum.backward()
    metrics = ranks.sum_metrics(metrics)
    if metrics.slots == 0:
        return StepResult(metrics, grad_norm=0.0)
    parameters = list(draft_model.parameters())
    ranks.sum_gradients(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    denominator = metrics.slots if loss.denominator == "slots" else metrics.weight_sum
    torch._foreach_div_(gradients, float(denominator))
    grad_norm = whole(torch.nn.utils.clip_grad_norm_(parameters, clip_norm)).item()
    where = f"at step {rows[0][0].step}" if rows else "in a step without rows of this rank"
    if not math.isfinite(grad_norm):
        optimizer.zero_grad(set_to_none=True)
        raise PipelineError(
            f"gradient norm {grad_norm} {where}: the captured states or the learning rate are broken, run `draftline "
            "audit`, or lower optim.learning_rate"
        )
    try:
        optimizer.step()
    except Exception as error:  # the border between nothing has moved and all has
        raise UpdateError(
            f"the optimiser failed {where} ({type(error).__name__}: {' '.join(str(error).split())}): "
            "continue from the last checkpoint with --resume"
        ) from error
    optimizer.zero_grad(set_to_none=True)
    return StepResult(metrics, grad_norm)


def row_loss(
    draft_model: DFlashDraftModel,
    batch: PackedBatch,
    anchor_positions_A: Tensor,
    frozen: FrozenTarget,
    loss: LossConfig,
    attention: type[Attention],
) -> tuple[Tensor, StepMetrics]:
    """Undivided loss of one row (with a gradient where grad mode is on) and its metrics.

    With a reduced vocabulary a slot is taught the best token that the drafter can say, whether or not the target would
    say another, as in speculators 0.9; but it counts as right only if it says what the target would.

    Under `torch.no_grad()` this is the evaluation of a held-out row.
    """
    config, head = draft_model.config, frozen.head
    loss = loss.model_copy(update={"chunk_size": loss.chunk_size or slots_per_chunk(head.rows)})
    tokens = batch.input_ids.numel()
    blocks = Blocks.of_row(batch, anchor_positions_A, config)
    supervised_AP = blocks.supervised_AP
    if not supervised_AP.any():
        return torch.zeros(()), replace(StepMetrics.zero(config.block_size), tokens=tokens)

    hidden_APD = drafted_states(draft_model, batch.hidden_states_packed, blocks, frozen.embed, attention)

    target_ids_S, label_rows_S = _what_the_target_says(batch, head, blocks, loss)
    target_AP = slot_labels(blocks.predicted_AP, target_ids_S, shift=-1)
    data_AP = slot_labels(blocks.predicted_AP, batch.input_ids[0], shift=0)
    label_AP = data_AP if loss.labels == "data" else slot_labels(blocks.predicted_AP, label_rows_S, shift=-1)
    weight_P = slot_weights(config.block_size, decay_gamma(loss, config.block_size), config.sample_from_anchor)
    slots = TaughtSlots(
        labels_n=label_AP[supervised_AP],
        block_n=supervised_AP.nonzero()[:, 0],
        weights_n=weight_P.to(hidden_APD.device).expand_as(supervised_AP)[supervised_AP],
        teacher=partial(_teacher_logits, batch, head, blocks.predicted_AP[supervised_AP] - 1),
    )
    results = slot_loss_sum(hidden_APD[supervised_AP], slots, head.logits, loss)
    predicted_AP = torch.full_like(target_AP, -1)
    predicted_AP[supervised_AP] = head.to_target_ids(results.predicted_n)
    metrics = StepMetrics.of_blocks(
        correct_target_AP=predicted_AP == target_AP,
        correct_data_AP=predicted_AP == data_AP,
        supervised_AP=supervised_AP,
        loss_sum=results.loss_sum.item(),
        weight_sum=results.weight_sum.item(),
        tokens=tokens,
    )
    return results.loss_sum, replace(metrics, lost_mass=results.lost_mass.item())


def _what_the_target_says(batch: PackedBatch, head: Head, blocks: Blocks, loss: LossConfig) -> tuple[Tensor, Tensor]:
    """The target's greedy next token at row positions, [S], and the row of the head that is taught for it, [S].

    The ids were sent along, or are computed here: once per position, and only where a supervised slot asks, because
    the head is the largest product of the step. What nobody asks for is 0.
    """
    if batch.target_ids is not None:
        with _as_the_target_says(batch):
            return batch.target_ids[0], head.label_rows(batch.target_ids[0], None, loss.chunk_size)
    assert batch.verifier_last_hidden_packed is not None, "PackedBatch carries one of the two"
    asked_n = blocks.predicted_AP[blocks.supervised_AP] - 1
    asked_S = torch.zeros_like(batch.loss_mask[0]).index_fill_(0, asked_n, True)
    ids_S, rows_S = torch.zeros_like(batch.input_ids[0]), torch.zeros_like(batch.input_ids[0])
    with _as_the_target_says(batch):
        states = batch.verifier_last_hidden_packed[0, asked_S]
        ids = head.target_ids(states, loss.chunk_size)
        ids_S[asked_S], rows_S[asked_S] = ids, head.label_rows(ids, states, loss.chunk_size)
    return ids_S, rows_S


def _teacher_logits(batch: PackedBatch, head: Head, positions_n: Tensor, chunk: slice) -> Tensor:
    """The target's logits at some of the row positions, [m, rows]; where slots share a position they are made once."""
    last = batch.verifier_last_hidden_packed
    assert last is not None, "a distribution is taught with send = last_hidden"
    some, place_m = positions_n[chunk].unique(return_inverse=True)
    with _as_the_target_says(batch):
        return head(last[0, some])[place_m]


@contextmanager
def _as_the_target_says(batch: PackedBatch) -> Iterator[None]:
    """Without a gradient and in the target's own precision: the drafter's autocast would teach other tokens."""
    with torch.no_grad(), torch.autocast(batch.input_ids.device.type, enabled=False):
        yield
