"""Small real runs, recorded, and what the reference run makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftline.audit.drafter_reference import ReferenceDrafter, drafter_of
from draftline.audit.oracle import Conversation, Row, capture, split_row
from draftline.config import RunConfig, load_run_config, sent_beside_states
from draftline.data.sampler import RowPlan, Sampler
from draftline.data.split import RunData
from draftline.draft.block import FrozenTarget
from draftline.draft.vocabulary import count_supervised, reduce_vocabulary
from draftline.records import PackedBatch, Sample, Samples
from draftline.targets.drafter_shape import resolve_drafter_config
from draftline.targets.loop import TargetForwardLoop
from draftline.targets.model import Target, build_target
from draftline.train.step import Drafter
from draftline.transfer.pack import make_row
from tests.engine.tiny_target import tiny_samples, tiny_target
from tests.run.small_run import SETTINGS, small_data

LAYOUTS = {
    "plain": (),
    "blocks-of-8": ("drafter.block_size=8", "train.num_anchors=3"),
    "sliding": ("drafter.num_layers=2", "drafter.sliding_window=5", "drafter.num_sliding_layers=1"),
    "all-sliding": ("drafter.num_layers=2", "drafter.sliding_window=2", "drafter.num_sliding_layers=2"),
    "anchor-predicts": ("drafter.sample_from_anchor=true", "drafter.block_size=5"),
    "reduced": ("drafter.draft_vocab_size=12",),
    "data-labels": ("loss.labels=data", "loss.decay_gamma=1.5"),
    "by-weights": ("loss.denominator=weights", "train.rows_per_step=3", "optim.weight_decay=0.1"),
    "muon": ("optim.name=muon", "optim.muon_learning_rate=0.02", "optim.muon_weight_decay=0.3"),
    "dpace": ("loss.weights=dpace", "loss.dpace_alpha=0.3", "loss.denominator=weights"),
    "kl": ("loss.ce=0", "loss.kl=1", "drafter.draft_vocab_size=12"),
    "dspark": ("loss.ce=0.1", "loss.tv=0.9", "loss.top_k=9", "loss.weights=dpace", "optim.name=muon"),
    "states-sent": ("pipeline.send=last_hidden", "optim.clip_norm=0.05", "train.seed=7"),
}
"""What the runs of the tests differ in; all have two or more rows a step, and passes that end inside a step."""


@dataclass(frozen=True, eq=False)
class RealRun:
    """The parts of a run before its first step."""

    config: RunConfig
    data: RunData
    target: Target
    sampler: Sampler
    drafter: Drafter
    loop: TargetForwardLoop

    def row(self, plan: RowPlan, samples: Samples) -> PackedBatch:
        """What the drafter receives for a row."""
        return make_row(plan, samples, self.loop)

    def steps(self) -> list[list[PackedBatch]]:
        """The rows of every step."""
        steps: list[list[PackedBatch]] = []
        for plan in self.sampler.plans():
            if not steps or steps[-1][-1].last_of_step:
                steps.append([])
            steps[-1].append(self.row(plan, self.data.training))
        return steps

    def reference(self) -> ReferenceDrafter:
        """The drafter as it is now."""
        return drafter_of(self.drafter.model.config, self.drafter.model.state_dict(), self.target.model)


def two_answers() -> list[Sample]:
    """Conversations with a user's turn between two answers."""
    samples = tiny_samples(24, seed=5)
    gaps = [(torch.arange(len(sample)) - 2 * len(sample) // 3).abs() < 2 for sample in samples]
    return [replace(sample, loss_mask=sample.loss_mask & ~gap) for sample, gap in zip(samples, gaps, strict=True)]


def real_run(*words: str, target_dtype: torch.dtype = torch.float32) -> RealRun:
    """Parts as `draftline train` puts them together, from random target and data."""
    config, data = load_run_config(None, [*SETTINGS, *words]), small_data(two_answers(), words)
    target = build_target("random", tiny_target().model.to(target_dtype), None)
    shape = resolve_drafter_config(target, config.drafter, None)
    ids = data.training_ids
    train = config.train
    sampler = Sampler(
        sample_ids=ids,
        lengths=data.training.lengths[ids],
        tokens_per_row=train.tokens_per_row,
        rows_per_step=train.rows_per_step,
        epochs=train.epochs,
        max_steps=train.max_steps,
        seed=train.seed,
    )
    kept_ids = None
    if shape.draft_vocab_size is not None:
        counts_V = count_supervised(data.training, ids, target.vocab_size)
        kept_ids = reduce_vocabulary(counts_V, shape.draft_vocab_size, ()).kept_ids
    drafter = Drafter(
        config=config,
        shape=shape,
        total_steps=sampler.total_steps,
        frozen=FrozenTarget.of(target, kept_ids, torch.zeros(())),
        device=torch.device("cpu"),
    )
    loop = TargetForwardLoop(target, shape.target_layer_ids, sent_beside_states(config))
    return RealRun(config, data, target, sampler, drafter, loop)


def recorded_row(run: RealRun, reference: ReferenceDrafter, batch: PackedBatch, samples: Samples) -> Row:
    """A row with the states that arrived at the drafter; labels by the target alone, unless it is narrow."""
    alone = [_alone(run, reference, samples, sample_id) for sample_id in batch.sample_ids]
    kept = [item.best_kept_ids for item in alone if item.best_kept_ids is not None]
    next_ids = torch.cat([item.next_ids for item in alone])
    if run.target.dtype != torch.float32:  # ties are frequent, and are decided otherwise in a batch
        assert batch.target_ids is not None
        next_ids = batch.target_ids[0]
    whole = Conversation(
        -1,
        batch.input_ids[0],
        batch.loss_mask[0],
        batch.hidden_states_packed[0],
        next_ids,
        torch.cat(kept) if kept else None,
        torch.cat([item.normed for item in alone if item.normed is not None]),
    )
    return split_row(batch.epoch, batch.sample_ids, batch.document_ids[0].bincount().tolist(), whole)


def planned_row(run: RealRun, reference: ReferenceDrafter, epoch: int, ids: Sequence[int], samples: Samples) -> Row:
    """A row of which the reference run makes everything itself."""
    return Row(epoch, tuple(_alone(run, reference, samples, sample_id) for sample_id in ids))


def _alone(run: RealRun, reference: ReferenceDrafter, samples: Samples, sample_id: int) -> Conversation:
    sample = samples[sample_id]
    return capture(run.target.model, reference, sample.sample_id, sample.input_ids, sample.loss_mask)


def assert_close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float) -> None:
    """Every tensor equal up to a share of its largest entry; tiny ones are sums of large terms, and as rounded."""
    assert found.keys() == wanted.keys()
    scales = {name: want.double().abs().max().item() for name, want in wanted.items()}
    for name, want in wanted.items():
        assert scales[name] > 0, name
        scale = max(scales[name], 1e-3 * max(scales.values()))
        assert (found[name].double() - want.double()).abs().max().item() <= tolerance * scale, name
