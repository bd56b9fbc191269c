"""Faults between the stages: which rows are made, in which order, and what of them arrives at the drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftline import run as run_module
from draftline.data import sampler as sampler_module
from draftline.data.sampler import RowPlan, Sampler
from draftline.draft import attention as attention_module
from draftline.draft import block as block_module
from draftline.draft.attention import Attention, BlockLayout, GroupedAttention, LayerKind
from draftline.draft.model import DFlashDraftModel
from draftline.engine import inline as inline_module
from draftline.engine import threads as threads_module
from draftline.records import CapturedSample, PackedBatch, Sample
from draftline.targets.model import build_target
from draftline.train import step as step_module
from draftline.train.step import Drafter
from draftline.transfer import pack as pack_module
from draftline.transfer import stage as stage_module
from draftline.transfer import store as store_module
from draftline.transfer.queue import HiddenStatesQueue
from draftline.transfer.shared import RowPlace, RowReader
from draftline.transfer.store import StatesStore
from tests.zoo.fault import fault, handing, on_model
from tests.zoo.pipeline import Recipe, World, random_model

THREADS = Recipe(settings={"pipeline": {"mode": "threads", "target_loops": 2}})
PROCESSES = Recipe(settings={"pipeline": {"mode": "processes"}})
STORED = Recipe(settings={"pipeline": {"states_path": "states"}})
EIGHT_BITS = Recipe(settings={"pipeline": {"states_path": "states", "states_dtype": "fp8"}})
LONG = Recipe(data="long")
EXTENDED = Recipe(settings={"train": {"extensions": (1,), "rows_per_step": 2, "tokens_per_row": 100}})
CUT = Recipe(settings={"train": {"extensions": (1,), "max_steps": 3, "tokens_per_row": 100}})
WINDOW = Recipe(data="long", settings={"drafter": {"num_sliding_layers": 2, "sliding_window": 40}})


# The order of rows.


def _planning(world: World, change: Callable[[Callable[[int], RowPlan], int], RowPlan]) -> None:
    """Other plans, made from the right ones and the number of the row."""
    clean = Sampler.plan
    world.patch.setattr(Sampler, "plan", lambda sampler, number: change(lambda n: clean(sampler, n), number))


@fault("a conversation is lost at every border between rows", "W41", "RUN002")
def _(world: World) -> None:
    clean = sampler_module.fill_rows

    def fill(sample_ids: Any, lengths: Any, tokens_per_row: int) -> list[tuple[int, ...]]:
        rows = clean(sample_ids, lengths, tokens_per_row)
        return [row[1:] if place and len(row) > 1 else row for place, row in enumerate(rows)]

    world.patch.setattr(sampler_module, "fill_rows", fill)


@fault("the last row of every pass is dropped", "W41", "RUN002")
def _(world: World) -> None:
    clean = Sampler._rows_of_epoch
    world.patch.setattr(Sampler, "_rows_of_epoch", lambda sampler, epoch: clean(sampler, epoch)[:-1])


@fault("every third row repeats the one before it", "W41", "RUN002")
def _(world: World) -> None:
    def repeated(plan: Callable[[int], RowPlan], number: int) -> RowPlan:
        right = plan(number)
        return replace(right, sample_ids=plan(number - 1).sample_ids) if number % 3 == 2 else right

    _planning(world, repeated)


@fault("every pass has the order of the first", "W41", "RUN002")
def _(world: World) -> None:
    clean = Sampler._rows_of_epoch
    world.patch.setattr(Sampler, "_rows_of_epoch", lambda sampler, _epoch: clean(sampler, 0))


@fault("rows are never shuffled", "W41", "RUN002")
def _(world: World) -> None:
    def in_order(sampler: Sampler, _epoch: int) -> list[tuple[int, ...]]:
        return sampler_module.fill_rows(sampler._sample_ids, sampler._lengths, sampler._tokens_per_row)

    world.patch.setattr(Sampler, "_rows_of_epoch", in_order)


@fault("passes have no number", "B48", "RUN002")
def _(world: World) -> None:
    _planning(world, lambda plan, number: replace(plan(number), epoch=0))


@fault("a step takes one row more than it is told", "B97", "RUN002")
def _(world: World) -> None:
    clean = Sampler.__init__

    def init(sampler: Sampler, **given: Any) -> None:
        clean(sampler, **{**given, "rows_per_step": given["rows_per_step"] + 1})

    world.patch.setattr(Sampler, "__init__", init)


def _behind_the_seam(world: World, change: Callable[[Sampler, Callable[[int], RowPlan], int], RowPlan]) -> None:
    """Other plans of the rows of an extension."""
    clean = Sampler.plan

    def plan(sampler: Sampler, number: int) -> RowPlan:
        right = clean(sampler, number)
        behind = sampler.seams and right.step >= sampler.seams[0]
        return change(sampler, lambda n: clean(sampler, n), number) if behind else right

    world.patch.setattr(Sampler, "plan", plan)


@fault("an extension repeats the last row of the run", "B48", "RUN014", EXTENDED)
def _(world: World) -> None:
    def repeated(_sampler: Sampler, plan: Callable[[int], RowPlan], number: int) -> RowPlan:
        return replace(plan(number), sample_ids=plan(number - 1).sample_ids)

    _behind_the_seam(world, repeated)


@fault("an extension skips what the run has left of its last pass", "B48", "RUN014", CUT)
def _(world: World) -> None:
    def skipped(sampler: Sampler, plan: Callable[[int], RowPlan], number: int) -> RowPlan:
        later = min(number + 1, sampler.total_rows - 1)
        return replace(plan(number), sample_ids=plan(later).sample_ids, epoch=plan(later).epoch)

    _behind_the_seam(world, skipped)


@fault("an extension has the passes of the run again", "B48", "RUN014", EXTENDED)
def _(world: World) -> None:
    def again(sampler: Sampler, plan: Callable[[int], RowPlan], number: int) -> RowPlan:
        first = plan(number - sampler.total_rows // 2)
        return replace(plan(number), sample_ids=first.sample_ids, epoch=first.epoch)

    _behind_the_seam(world, again)


@fault("a step reaches across the seam of an extension", "B48", "RUN014", EXTENDED)
def _(world: World) -> None:
    clean = Sampler.extend

    def extend(sampler: Sampler, passes: int) -> None:
        clean(sampler, passes)
        del sampler.parts[1:]
        sampler._end_at(sampler.total_rows)

    world.patch.setattr(Sampler, "extend", extend)


@fault("conversations are cut to 64 tokens where rows are made", "B06", "RUN002", LONG)
def _(world: World) -> None:
    clean = pack_module.make_row

    class Cut:
        def __init__(self, samples: Any) -> None:
            self.samples = samples

        def __getitem__(self, number: int) -> Sample:
            whole = self.samples[number]
            return replace(whole, input_ids=whole.input_ids[:64], loss_mask=whole.loss_mask[:64])

    for module in (pack_module, inline_module, threads_module):
        world.patch.setattr(module, "make_row", lambda plan, samples, loop: clean(plan, Cut(samples), loop))


# What arrives.

Moved = Callable[[PackedBatch], PackedBatch]


def _eight_bits(states: Tensor) -> Tensor:
    return states.to(torch.float8_e4m3fn).to(states.dtype)


def _with_states(row: PackedBatch, change: Callable[[Tensor], Tensor]) -> PackedBatch:
    return replace(row, hidden_states_packed=change(row.hidden_states_packed))


def _staging(world: World, change: Moved) -> None:
    """Rows of training changed where they come onto the drafter's device."""
    clean = stage_module.to_device
    world.patch.setattr(stage_module, "to_device", lambda row, device: change(clean(row, device)))


def _sharing() -> Callable[[Tensor], Tensor]:
    """Copies what it is given into one buffer, whatever still lies there."""
    buffers: dict[int, Tensor] = {}

    def shared(states: Tensor) -> Tensor:
        width = states.shape[-1]
        buffer = buffers.setdefault(width, torch.zeros(1, 4096, width, dtype=states.dtype))
        return buffer[:, : states.shape[1]].data.copy_(states)  # as a copy by another stream: torch does not see it

    return shared


@fault("states go through eight bits on their way to the drafter's device", "B74", "RUN003")
def _(world: World) -> None:
    _staging(world, lambda row: _with_states(row, _eight_bits))


@fault("a row has the states of the row before it", "B23", "RUN003")
def _(world: World) -> None:
    kept: list[Tensor] = []

    def stale(states: Tensor) -> Tensor:
        kept.append(states)
        before = kept.pop(0) if len(kept) > 1 else states
        return before.repeat(1, -(-states.shape[1] // before.shape[1]), 1)[:, : states.shape[1]]

    _staging(world, lambda row: _with_states(row, stale))


@fault("the rows of a step share a staging buffer", "B23", "RUN003")
def _(world: World) -> None:
    shared = _sharing()
    _staging(world, lambda row: _with_states(row, shared))


@fault("rows that wait in the queue share a staging buffer", "B23", "RUN003", THREADS)
def _(world: World) -> None:
    clean, shared = threads_module.leave_device, _sharing()
    world.patch.setattr(threads_module, "leave_device", lambda row, device: _with_states(clean(row, device), shared))


@fault("the queue keeps states in eight bits", "B74", "RUN003", THREADS)
def _(world: World) -> None:
    clean = HiddenStatesQueue.put
    world.patch.setattr(HiddenStatesQueue, "put", lambda queue, row: clean(queue, _with_states(row, _eight_bits)))


@fault("the queue gives rows in pairs the wrong way round", "W41", "RUN002", THREADS)
def _(world: World) -> None:
    clean, held = HiddenStatesQueue.get, list[PackedBatch]()

    def get(queue: HiddenStatesQueue) -> PackedBatch | None:
        if held:
            return held.pop()
        first, second = clean(queue), clean(queue)
        if first is None or second is None:
            return first
        held.append(first)
        return second

    world.patch.setattr(HiddenStatesQueue, "get", get)


@fault("target loops run another target", "B26", "RUN003", THREADS)
def _(world: World) -> None:
    def others(target: Any, _config: Any, devices: Sequence[str]) -> list[Any]:
        models = [random_model(target.model.config, seed=5) for _ in devices]
        return [build_target("zoo", model, target.tokenizer) for model in models]

    world.patch.setattr(run_module, "loop_targets", others)


@fault("the last target loop runs the target in half precision", "B74", "RUN003", THREADS)
def _(world: World) -> None:
    clean = run_module.loop_targets

    def loops(target: Any, *rest: Any) -> list[Any]:
        made = clean(target, *rest)
        low = random_model(target.model.config).bfloat16().float()
        return [*made[:-1], build_target("zoo", low, target.tokenizer)]

    world.patch.setattr(run_module, "loop_targets", loops)


@fault("memory shared with a target loop is written again while its row waits", "B74", "RUN016", PROCESSES)
def _(world: World) -> None:
    clean = RowReader.read

    def read(reader: RowReader, plan: RowPlan, place: RowPlace) -> PackedBatch:
        reader.returned.append(place.offset)
        return clean(reader, plan, place)

    world.patch.setattr(RowReader, "read", read)


@fault("the store keeps states in eight bits", "B74", "RUN003", STORED)
def _(world: World) -> None:
    clean = StatesStore.write

    def write(store: StatesStore, shard: int, items: Sequence[CapturedSample]) -> None:
        clean(store, shard, [replace(item, hidden_states_SLD=_eight_bits(item.hidden_states_SLD)) for item in items])

    world.patch.setattr(StatesStore, "write", write)


@fault("the store gives each token the states of the one before", "B23", "RUN003", STORED)
def _(world: World) -> None:
    clean = StatesStore.read

    def read(store: StatesStore, sample: Sample) -> CapturedSample:
        item = clean(store, sample)
        return replace(item, hidden_states_SLD=item.hidden_states_SLD.roll(1, 0))

    world.patch.setattr(StatesStore, "read", read)


@fault("the store was filled by another target", "B26", "RUN003", STORED)
def _(world: World) -> None:
    clean = store_module.capture_shard
    model = random_model(world.target.model.config, seed=5).to(world.target.dtype)
    other = build_target("zoo", model, world.target.tokenizer)

    def capture(store: StatesStore, shard: int, loop: Any, samples: Any) -> None:
        clean(store, shard, type(loop)(other, loop.target_layer_ids, loop.send), samples)

    world.patch.setattr(store_module, "capture_shard", capture)


@fault("a shard has the states of a layer after the one it says", "F01", "RUN003", STORED)
def _(world: World) -> None:
    clean = store_module.capture_shard

    def capture(store: StatesStore, shard: int, loop: Any, samples: Any) -> None:
        first, *others = loop.target_layer_ids
        later = [first + 1, *others]
        clean(store, shard, type(loop)(loop.target, later, loop.send) if shard == 0 else loop, samples)

    world.patch.setattr(store_module, "capture_shard", capture)


@fault("the scale of states in eight bits is forgotten", "B74", "RUN016", EIGHT_BITS)
def _(world: World) -> None:
    clean = store_module.widened

    def widened(tensors: Any, identity: Any) -> Tensor:
        return clean({**tensors, "scale": torch.ones_like(tensors["scale"])}, identity)

    world.patch.setattr(store_module, "widened", widened)


@fault("states are halved on their way into the drafter", "B38", "RUN003")
def _(world: World) -> None:
    clean = Drafter.as_computed
    world.patch.setattr(
        Drafter, "as_computed", lambda drafter, row: _with_states(clean(drafter, row), lambda states: states * 0.5)
    )


# Further than a short conversation shows.


@fault("positions of a row end at 63", "B54", "RUN004", LONG)
def _(world: World) -> None:
    def ending(states: Tensor, embeddings: Tensor, layout: BlockLayout) -> tuple[Tensor, Tensor, BlockLayout]:
        return states, embeddings, replace(layout, position_ids_S=layout.position_ids_S.clamp(max=63))

    handing(world, ending)


@fault("the drafter turns everything beyond position 63 alike", "B54", "DRF008", LONG)
def _(world: World) -> None:
    clean = DFlashDraftModel._rotation
    world.patch.setattr(
        DFlashDraftModel, "_rotation", lambda model, like, places: clean(model, like, places.clamp(max=63))
    )


@fault("blocks see no further back than 64 tokens", "B58", "DRF008", LONG)
def _(world: World) -> None:
    clean = attention_module._groups

    def groups(layout: BlockLayout, kind: LayerKind, size: int) -> Any:
        for group in clean(layout, kind, size):
            first = (group.layout.anchor_positions_A - 64).clamp(min=0)
            near = torch.maximum(group.layout.context_start_A, first)
            yield replace(group, layout=replace(group.layout, context_start_A=near))

    world.patch.setattr(attention_module, "_groups", groups)


@fault("a window of 40 tokens is ignored", "B58", "DRF008", WINDOW)
def _(world: World) -> None:
    def attention(layout: BlockLayout, kind: LayerKind, context_length: int) -> Attention:
        return GroupedAttention(layout, replace(kind, window=None), context_length)

    world.patch.setattr(step_module, "attention_class", lambda _name, _device: attention)


@fault("the draft cache loses what is older than 64 tokens", "B41", "DRF007", LONG)
def _(world: World) -> None:
    clean = DFlashDraftModel.extend_cache

    def extend(model: DFlashDraftModel, cache: Any, states: Tensor) -> None:
        clean(model, cache, states)
        for kept in cache.keys_values():
            for tensor in kept:
                tensor[:-64] = 0.0

    world.patch.setattr(DFlashDraftModel, "extend_cache", extend)


# What a drafter in training keeps, draws and computes.


@fault("the mask of an earlier row of the same size is used again", "B50", "RUN005")
def _(world: World) -> None:
    kept: dict[Any, GroupedAttention] = {}

    def attention(layout: BlockLayout, kind: LayerKind, context_length: int) -> Attention:
        size = (kind, len(layout.anchor_positions_A), layout.block_size, context_length)
        same = [len(group.layout.anchor_positions_A) for group in attention_module._groups(layout, kind, 16)]
        return kept.setdefault((*size, *same), GroupedAttention(layout, kind, context_length))

    world.patch.setattr(step_module, "attention_class", lambda _name, _device: attention)


@fault("anchors of a pass are those of the next", "B48", "RUN004")
def _(world: World) -> None:
    clean = step_module.draw_anchors
    world.patch.setattr(step_module, "draw_anchors", lambda row, *rest: clean(replace(row, epoch=row.epoch + 1), *rest))


@fault("anchors are neighbours", "B48", "RUN004")
def _(world: World) -> None:
    def window(positions: np.ndarray, count: int, seed: Any) -> np.ndarray:
        if len(positions) <= count:
            return positions
        first = int(np.random.default_rng(seed).integers(len(positions) - count + 1))
        return positions[first : first + count]

    world.patch.setattr(block_module, "_draw", window)


def _epsilon(world: World, value: float) -> None:
    def change(model: DFlashDraftModel) -> None:
        for name, module in model.named_modules():
            if name.endswith("norm") or "layernorm" in name:
                module.variance_epsilon = value

    on_model(world, change)


@fault("an epsilon of 0.001 in the drafter's norms", "B38", "DRF008")
def _(world: World) -> None:
    _epsilon(world, 1e-3)


@fault("an epsilon of another family in the drafter's norms", "B38", "RUN005")
def _(world: World) -> None:
    _epsilon(world, 1e-5)
