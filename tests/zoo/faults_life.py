"""Faults that show over the life of a run: evaluation, log, checkpoints, a resume, the export of what was learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftline import run as run_module
from draftline.data.sampler import RowPlan, Sampler
from draftline.draft.model import DFlashDraftModel
from draftline.formats import check as check_module
from draftline.formats import files as files_module
from draftline.formats import load as load_module
from draftline.records import PackedBatch
from draftline.run import Run
from draftline.train import checkpoint as checkpoint_module
from draftline.train import step as step_module
from draftline.train.checkpoint import Checkpoint, TrainState
from draftline.train.run_folder import RunFolder
from draftline.train.step import Drafter
from tests.zoo.fault import fault, on_optimizer
from tests.zoo.pipeline import Recipe, World

SEEDED = Recipe(settings={"train": {"seed": 3}})
FROM_LAYERS = Recipe(settings={"drafter": {"start_from": "target_layers"}})
LOADED = Recipe(loaded=True)
LONG = Recipe(data="long")


# Steps.


@fault("the rate is counted in rows instead of steps", "B48", "OPT004")
def _(world: World) -> None:
    clean = Drafter.step

    def step(drafter: Drafter, batches: Sequence[PackedBatch]) -> Any:
        return clean(drafter, [replace(row, step=row.sequence_number) for row in batches])

    world.patch.setattr(Drafter, "step", step)


@fault("gradients of earlier steps stay", "B97", "RUN005")
def _(world: World) -> None:
    class Keeping(torch.optim.AdamW):
        def zero_grad(self, set_to_none: bool = True) -> None: ...

    on_optimizer(world, lambda model, made: Keeping(model.parameters(), lr=made.defaults["lr"], weight_decay=0.0))


@fault("first weights come from a generator that nobody seeds", "B77", "RUN004")
def _(world: World) -> None:
    clean, fresh = DFlashDraftModel.init_weights, torch.Generator()
    fresh.seed()
    world.patch.setattr(DFlashDraftModel, "init_weights", lambda model, _generator: clean(model, fresh))


@fault("only the first row of a step is learned from", "B106", "LOS006")
def _(world: World) -> None:
    clean = step_module.train_step

    def first(**given: Any) -> Any:
        return clean(**{**given, "rows": given["rows"][:1]})

    world.patch.setattr(step_module, "train_step", first)


@fault("the target's layers are trained along through shared memory", "B87", "OPT008", FROM_LAYERS)
def _(world: World) -> None:
    clean = DFlashDraftModel.start_from_layers

    def share(model: DFlashDraftModel, decoder_layers: Any, final_norm: nn.Module) -> None:
        clean(model, decoder_layers, final_norm)
        for ours, theirs in zip(model.layers, list(decoder_layers)[-len(model.layers) :], strict=True):
            named = dict(theirs.named_parameters())
            for name, parameter in ours.named_parameters():
                parameter.data = named[name].data

    world.patch.setattr(DFlashDraftModel, "start_from_layers", share)


# Evaluation and log.


def _after_evaluation(world: World, change: Any) -> None:
    clean = Run.evaluate

    def evaluate(run: Run) -> Any:
        figures = clean(run)
        change(run.drafter)
        return figures

    world.patch.setattr(Run, "evaluate", evaluate)


@fault("an evaluation leaves the drafter's fusion frozen", "B103", "RUN005")
def _(world: World) -> None:
    _after_evaluation(world, lambda drafter: drafter.model.fc.requires_grad_(False))


@fault("an evaluation leaves the drafter in low precision", "B71", "RUN005")
def _(world: World) -> None:
    _after_evaluation(world, lambda drafter: setattr(drafter, "dtype", torch.bfloat16))


@fault("an evaluation leaves dropout on", "B76", "RUN005")
def _(world: World) -> None:
    def dropping(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return nn.functional.dropout(output, 0.1, training=True)

    _after_evaluation(world, lambda drafter: drafter.model.layers[0].register_forward_hook(dropping))


@fault("held-out figures come from training data", "W40", "RUN007")
def _(world: World) -> None:
    clean = run_module.heldout_rows
    count = len(world.heldout)

    def rows(_ids: Any, lengths: Any, tokens_per_row: int) -> list[RowPlan]:
        return clean(torch.arange(len(lengths)).numpy(), lengths, tokens_per_row)

    assert count
    world.patch.setattr(run_module, "heldout_rows", rows)


@fault("an evaluation reads its first row alone", "B98", "RUN007", LONG)
def _(world: World) -> None:
    clean = run_module.heldout_rows
    world.patch.setattr(run_module, "heldout_rows", lambda *given: clean(*given)[:1])


@fault("held-out anchors follow the seed of the run", "B98", "RUN007", SEEDED)
def _(world: World) -> None:
    world.patch.setattr(step_module, "HELDOUT_SEED", 3)


@fault("the log averages over all steps so far", "B95", "RUN007")
def _(world: World) -> None:
    def window(state: TrainState) -> Any:
        state.logged_step = state.step
        return state.window

    world.patch.setattr(TrainState, "take_window", window)


@fault("the estimate walks over the first token too", "B98", "EVL005")
def _(world: World) -> None:
    clean = run_module.split_last_answer

    def split(sample: Any) -> tuple[list[int], list[int]]:
        prompt, answer = clean(sample)
        return prompt[:-1], [*prompt[-1:], *answer]

    world.patch.setattr(run_module, "split_last_answer", split)


# Checkpoints, and a resume.


@fault("the best checkpoint is the worst", "B98", "RUN008")
def _(world: World) -> None:
    def note(state: TrainState, streak: float) -> bool:
        if state.best_streak is not None and not streak <= state.best_streak:
            return False
        state.best_step, state.best_streak = state.step, streak
        return True

    world.patch.setattr(TrainState, "note_streak", note)


@fault("a checkpoint holds the weights of the step before", "B77", "RUN008")
def _(world: World) -> None:
    step, clean = Drafter.step, Drafter.checkpoint

    def stepping(drafter: Drafter, batches: Sequence[PackedBatch]) -> Any:
        drafter.__dict__["before"] = {name: t.clone() for name, t in drafter.model.state_dict().items()}
        return step(drafter, batches)

    def checkpoint(drafter: Drafter, *given: Any) -> Checkpoint:
        made = clean(drafter, *given)
        return replace(made, weights=drafter.__dict__.get("before", made.weights))

    world.patch.setattr(Drafter, "step", stepping)
    world.patch.setattr(Drafter, "checkpoint", checkpoint)


@fault("the optimiser's state is never saved", "B77", "OPT007")
def _(world: World) -> None:
    world.patch.setattr(step_module, "optimizer_tensors", lambda _optimizer, _model: {})


@fault("a resume at the end of a pass skips the next", "B77", "RUN002")
def _(world: World) -> None:
    clean = Sampler.plans

    def plans(sampler: Sampler, first: int = 0) -> Iterator[RowPlan]:
        if not first or first not in sampler._first_rows:
            yield from clean(sampler, first)
            return
        place = sampler._first_rows.index(first)
        following = sampler._first_rows[place + 1] if place + 1 < len(sampler._first_rows) else first
        for plan in clean(sampler, first):
            later = min(plan.sequence_number + following - first, sampler.total_rows - 1)
            other = sampler.plan(later)
            yield replace(plan, epoch=other.epoch, sample_ids=other.sample_ids)

    world.patch.setattr(Sampler, "plans", plans)


@fault("a resumed run draws its weights anew where norms are", "B77", "OPT007")
def _(world: World) -> None:
    clean = step_module.load_weights

    def load(model: DFlashDraftModel, weights: Any, folder: Path) -> None:
        norms = {name: p.detach().clone() for name, p in model.named_parameters() if p.ndim == 1}
        clean(model, weights, folder)
        for name, value in norms.items():
            model.get_parameter(name).data.copy_(value)

    world.patch.setattr(step_module, "load_weights", load)


# What is exported.


def _storing(world: World, change: Any) -> None:
    """Other tensors in every export, which its own checks expect as well."""
    clean = files_module.stored_tensors

    def stored(model: DFlashDraftModel, dtype: Any) -> dict[str, Tensor]:
        return {name: change(tensor) for name, tensor in clean(model, dtype).items()}

    for module in (files_module, check_module):
        world.patch.setattr(module, "stored_tensors", stored)


@fault("an export goes through eight bits", "B74", "EXP001")
def _(world: World) -> None:
    _storing(world, lambda t: t.to(torch.float8_e4m3fn).to(t.dtype) if t.is_floating_point() else t)


@fault("an export is rounded twice", "B74", "RUN009")
def _(world: World) -> None:
    clean = files_module.stored_tensors

    def stored(model: DFlashDraftModel, dtype: Any) -> dict[str, Tensor]:
        if dtype != "bfloat16":
            return clean(model, dtype)
        return {
            name: t.half().bfloat16() if t.is_floating_point() else t for name, t in clean(model, "float32").items()
        }

    for module in (files_module, check_module):
        world.patch.setattr(module, "stored_tensors", stored)


@fault("an export takes the last checkpoint for the best", "B98", "RUN009")
def _(world: World) -> None:
    def last(folder: Path) -> Path | None:
        return RunFolder(folder).checkpoint("last") or clean(folder)

    clean = checkpoint_module.checkpoint_folder
    for module in (checkpoint_module, load_module):
        world.patch.setattr(module, "checkpoint_folder", last)


# The target itself.


@fault("the target turns by another base than its checkpoint says", "B55", "RUN011", LOADED)
def _(world: World) -> None:
    rotary = world.target.model.model.rotary_emb
    rotary.inv_freq = 1.0 / 500_000.0 ** (torch.arange(len(rotary.inv_freq)) / len(rotary.inv_freq))


@fault("the target was loaded with the weights of an earlier layer twice", "B26", "RUN011", LOADED)
def _(world: World) -> None:
    layers = world.target.decoder_layers
    layers[3].load_state_dict(layers[2].state_dict())
