"""Faults that only sizes, stops and joins show: what is capped, lost after many, or taken from another place."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftline import run as run_module
from draftline.data.sampler import Sampler, fill_rows
from draftline.data.split import RunData
from draftline.draft.model import DFlashDraftModel
from draftline.engine import threads as threads_module
from draftline.evaluate import acceptance as acceptance_module
from draftline.evaluate import answer as answer_module
from draftline.evaluate import generate as generate_module
from draftline.formats import exporting
from draftline.records import PackedBatch
from draftline.run import Run
from draftline.train import log as log_module
from draftline.train import optim as optim_module
from draftline.train import step as step_module
from draftline.train.step import Drafter
from draftline.transfer.store import StatesStore
from tests.zoo import pipeline
from tests.zoo.fault import fault
from tests.zoo.pipeline import REDUCED, Recipe, World

THREADS = Recipe(settings={"pipeline": {"mode": "threads"}})
FROM_TARGET = Recipe(settings={"drafter": {"start_from": "target_layers"}})
LOW = Recipe(settings={"train": {"precision": "bfloat16"}})
USUAL = Recipe(settings={"drafter": {"target_layer_ids": None, "num_captured_layers": 1}})


def _assembling(world: World, **changes: Any) -> None:
    """Other arguments for the sampler of every run."""
    clean = run_module.Sampler
    world.patch.setattr(
        run_module, "Sampler", lambda **given: clean(**{**given, **{k: v(given[k]) for k, v in changes.items()}})
    )


@fault("rows capped at fewer tokens than configured", "B86", "RUN014")
def _(world: World) -> None:
    _assembling(world, tokens_per_row=lambda tokens: min(tokens, 96))


@fault("one pass too few", "B19", "RUN014")
def _(world: World) -> None:
    _assembling(world, epochs=lambda epochs: epochs - 1)


@fault("only as many conversations are trained on as are held out", "B02", "RUN014", Recipe(data="rows"))
def _(world: World) -> None:
    clean = pipeline.choose_conversations

    def choose(*words: Any) -> RunData:
        data = clean(*words)
        return replace(data, training_ids=data.training_ids[: len(data.heldout_ids)])

    world.patch.setattr(pipeline, "choose_conversations", choose)


@fault("a left-over cap on anchors", "B105", "RUN014")
def _(world: World) -> None:
    clean = step_module.draw_anchors
    world.patch.setattr(
        Drafter,
        "anchors",
        lambda drafter, batch, seed: clean(batch, min(drafter.config.train.num_anchors, 8), seed),
    )


@fault("the usual layers counted from another depth", "B32", "RUN015", USUAL)
def _(world: World) -> None:
    clean = run_module.resolve_drafter_config

    def resolve(*words: Any) -> Any:
        shape = clean(*words)
        return shape.model_copy(update={"target_layer_ids": tuple(i - 1 for i in shape.target_layer_ids)})

    world.patch.setattr(run_module, "resolve_drafter_config", resolve)


@fault("the target's first layers instead of its last", "B81", "RUN015", FROM_TARGET)
def _(world: World) -> None:
    clean = DFlashDraftModel.start_from_layers
    world.patch.setattr(
        DFlashDraftModel,
        "start_from_layers",
        lambda model, layers, norm: clean(model, list(layers)[: len(model.layers)], norm),
    )


@fault("fc passes the first captured layer on instead of the last", "F01", "RUN015", FROM_TARGET)
def _(world: World) -> None:
    clean = DFlashDraftModel.start_from_layers

    def start(model: DFlashDraftModel, *words: Any) -> None:
        clean(model, *words)
        width = model.config.hidden_size
        with torch.no_grad():
            model.fc.weight[:, -width:] -= torch.eye(width)
            model.fc.weight[:, :width] += torch.eye(width)

    world.patch.setattr(DFlashDraftModel, "start_from_layers", start)


@fault("tokens of a reduced vocabulary counted in the last conversations alone", "P9", "RUN015", REDUCED)
def _(world: World) -> None:
    clean = run_module.count_supervised
    world.patch.setattr(run_module, "count_supervised", lambda samples, ids, size: clean(samples, ids[-2:], size))


def _travelling(world: World, change: Any) -> None:
    clean = threads_module.leave_device
    world.patch.setattr(threads_module, "leave_device", lambda batch, to: change(clean(batch, to)))


def _with_states(batch: PackedBatch, states: Tensor) -> PackedBatch:
    return replace(batch, hidden_states_packed=states)


@fault("states halved to float16 in the queue", "B25", "RUN016", THREADS)
def _(world: World) -> None:
    _travelling(world, lambda b: _with_states(b, b.hidden_states_packed.half().to(b.hidden_states_packed.dtype)))


@fault("states sent through eight bits", "B25", "RUN016", THREADS)
def _(world: World) -> None:
    kind = torch.float8_e4m3fn
    _travelling(world, lambda b: _with_states(b, b.hidden_states_packed.to(kind).to(b.hidden_states_packed.dtype)))


@fault("a ring of staging buffers that waiting rows share", "B25", "RUN016", THREADS)
def _(world: World) -> None:
    ring: dict[int, Tensor] = {}

    def staged(batch: PackedBatch) -> PackedBatch:
        states = batch.hidden_states_packed
        place = ring.setdefault(batch.sequence_number % 4, states.clone())
        if place.shape != states.shape:
            place = ring[batch.sequence_number % 4] = states.clone()
        place.copy_(states)
        return _with_states(batch, place)

    _travelling(world, staged)


@fault("the store keeps states in half precision", "B25", "RUN016")
def _(world: World) -> None:
    clean = StatesStore.read
    world.patch.setattr(
        StatesStore,
        "read",
        lambda store, sample: replace(
            clean(store, sample), hidden_states_SLD=clean(store, sample).hidden_states_SLD.half().float()
        ),
    )


@fault("gradients dropped after every fourth row", "B106", "LOS006")
def _(world: World) -> None:
    clean, rows = step_module.row_loss, [0]

    def row_loss(model: Any, *words: Any) -> Any:
        rows[0] += 1
        if rows[0] % 4 == 0:
            model.zero_grad(set_to_none=True)
        return clean(model, *words)

    world.patch.setattr(step_module, "row_loss", row_loss)


@fault("the walk loses the sixteenth answer of every group", "B94", "EVL005")
def _(world: World) -> None:
    clean = acceptance_module.teacher_forced_walk

    def walk(*words: Any, **given: Any) -> Any:
        return [one for place, one in enumerate(clean(*words, **given)) if place % 16 != 15]

    world.patch.setattr(acceptance_module, "teacher_forced_walk", walk)
    world.patch.setattr(run_module, "teacher_forced_walk", walk)


@fault("a resume goes back to the beginning of the pass", "B77", "RUN006")
def _(world: World) -> None:
    clean = Run.engine

    def engine(run: Run, first_row: int, *rest: Any) -> Any:
        borders = [row.sequence_number for row in _first_rows(run.sampler)]
        return clean(run, max(border for border in borders if border <= first_row), *rest)

    world.patch.setattr(Run, "engine", engine)


def _first_rows(sampler: Sampler) -> list[Any]:
    rows = list(sampler.plans())
    return [rows[0], *(later for earlier, later in pairwise(rows) if later.epoch != earlier.epoch)]


@fault("the export takes the newest checkpoint", "B81", "RUN009")
def _(world: World) -> None:
    clean = exporting.load_drafter
    world.patch.setattr(
        exporting,
        "load_drafter",
        lambda source, *rest: clean(source / "last" if (source / "last").exists() else source, *rest),
    )


@fault("an evaluation reads the first rows alone", "B19", "RUN014")
def _(world: World) -> None:
    clean = run_module.heldout_rows
    world.patch.setattr(run_module, "heldout_rows", lambda *words: clean(*words)[:4])


@fault("positions of the draft cache end at 256", "B53", "DRF007")
def _(world: World) -> None:
    clean = DFlashDraftModel.extend_cache

    def extend(model: DFlashDraftModel, cache: Any, states: Tensor) -> None:
        length, cache.length = cache.length, min(cache.length, 256)
        clean(model, cache, states)
        cache.length = length + states.shape[1]

    world.patch.setattr(DFlashDraftModel, "extend_cache", extend)


@fault("a warm-up of two steps at most", "B86", "RUN014", Recipe(settings={"train": {"max_steps": 200}}))
def _(world: World) -> None:
    clean = optim_module.learning_rate

    def rate(step: int, total_steps: int, config: Any) -> float:
        shares = {"warmup_fraction": min(config.warmup_fraction, 2 / total_steps)}
        return clean(step, total_steps, config.model_copy(update=shares))

    world.patch.setattr(step_module, "learning_rate", rate)


@fault("the order of a pass is drawn within windows", "B19", "RUN014")
def _(world: World) -> None:
    def rows(sampler: Any, epoch: int) -> list[tuple[int, ...]]:
        generator = np.random.default_rng([sampler._seed % 2**63, epoch])
        parts = np.split(np.arange(len(sampler._lengths)), [4])
        order = np.concatenate([generator.permutation(part) for part in parts])
        return fill_rows(sampler._sample_ids[order], sampler._lengths[order], sampler._tokens_per_row)

    world.patch.setattr(Sampler, "_rows_of_epoch", rows)


@fault("cross entropy in bfloat16", "B58", "LOS001")
def _(world: World) -> None:
    clean = step_module.slot_loss_sum

    def narrow(*given: Any) -> Any:
        found = clean(*given)
        rounded = found.loss_sum + (found.loss_sum.bfloat16().float() - found.loss_sum).detach()
        return replace(found, loss_sum=rounded)

    world.patch.setattr(step_module, "slot_loss_sum", narrow)


@fault("gradients rounded to bfloat16 before they are clipped", "B58", "RUN005")
def _(world: World) -> None:
    clean = torch.nn.utils.clip_grad_norm_

    def clip(parameters: Any, *words: Any, **given: Any) -> Any:
        weights = list(parameters)
        for weight in weights:
            if weight.grad is not None:
                weight.grad = weight.grad.bfloat16().float()
        return clean(weights, *words, **given)

    world.patch.setattr(torch.nn.utils, "clip_grad_norm_", clip)


@fault("an evaluation that nothing ends", "B95", "EVL008", Recipe(data="chats"))
def _(world: World) -> None:
    world.patch.setattr(answer_module, "stop_token_ids", lambda *_: frozenset())


@fault("after a rejection a token is drawn from the whole of p", "B92", "EVL009")
def _(world: World) -> None:
    clean = generate_module.verify_sampled

    def verify(drafted: Tensor, draft: Tensor, target: Tensor, generator: Any) -> tuple[int, int]:
        accepted, following = clean(drafted, draft, target, generator)
        if accepted < len(drafted):
            following = int(torch.multinomial(target[accepted], 1, generator=generator))
        return accepted, following

    world.patch.setattr(generate_module, "verify_sampled", verify)


@fault("anchors repeat from the fifth pass on", "B105", "RUN014", Recipe(settings={"train": {"num_anchors": 4}}))
def _(world: World) -> None:
    clean = step_module.draw_anchors
    world.patch.setattr(
        step_module, "draw_anchors", lambda row, *words: clean(replace(row, epoch=row.epoch % 4), *words)
    )


@fault("top-p loses the token that reaches it", "B92", "EVL009")
def _(world: World) -> None:
    clean = generate_module.probabilities

    def probabilities(sampling: Any, logits: Tensor) -> Tensor:
        likely = clean(sampling, logits)
        least = likely.masked_fill(likely == 0, 2.0).argmin(-1, keepdim=True)
        return likely.scatter(-1, least, 0.0) / likely.scatter(-1, least, 0.0).sum(-1, keepdim=True)

    world.patch.setattr(generate_module, "probabilities", probabilities)


@fault(
    "the precision of training is not the configured one",
    "B58",
    "RUN015",
    Recipe(settings={"train": {"precision": "bfloat16"}}),
)
def _(world: World) -> None:
    world.patch.setattr(Drafter, "precision", lambda _drafter: nullcontext())


@fault("lines of a killed session stay in the log", "B77", "RUN007")
def _(world: World) -> None:
    clean = log_module._lines_to_keep
    world.patch.setattr(log_module, "_lines_to_keep", lambda path, _step, logged: clean(path, 10**9, logged))
