"""How a fault is planted: one named change to the code, the target or the data that a small run is made of.

A plant gets a `World` before anything is put together, and changes what training, evaluation and export use, where
they use it. Nothing here knows what the audit looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from draftline import run as run_module
from draftline.draft.attention import BlockLayout
from draftline.draft.block import FrozenTarget
from draftline.draft.model import DFlashDraftModel
from draftline.records import CapturedSample, PackedBatch, Sample
from draftline.targets.loop import TargetForwardLoop
from draftline.train import step as step_module
from draftline.train.step import Drafter
from draftline.transfer import pack as pack_module
from tests.zoo.pipeline import Recipe, World

Plant = Callable[[World], None]


@dataclass(frozen=True)
class Fault:
    """One entry of the zoo.

    Attributes:
        name: what is changed.
        kind: the entry of the list of known faults that it belongs to.
        code: what the audit has to report.
        recipe: the run it is planted in.
        plant: changes what the run is made of.
    """

    name: str
    kind: str
    code: str
    recipe: Recipe
    plant: Plant


ZOO: list[Fault] = []


def fault(name: str, kind: str, code: str, recipe: Recipe | None = None) -> Callable[[Plant], Plant]:
    """Register a function that plants a fault."""

    def register(plant: Plant) -> Plant:
        assert all(name != other.name for other in ZOO), f"two faults are called {name!r}"
        ZOO.append(Fault(name, kind, code, recipe or Recipe(), plant))
        return plant

    return register


# Where the states come from.


def capturing(world: World, change: Callable[[CapturedSample], CapturedSample]) -> None:
    """Change every captured sample that a target loop hands on."""
    clean = TargetForwardLoop.capture

    def capture(loop: TargetForwardLoop, samples: Sequence[Sample]) -> list[CapturedSample]:
        return [change(item) for item in clean(loop, samples)]

    world.patch.setattr(TargetForwardLoop, "capture", capture)


def with_states(item: CapturedSample, states: Tensor) -> CapturedSample:
    return replace(item, hidden_states_SLD=states)


def with_last(item: CapturedSample, change: Callable[[Tensor], Tensor]) -> CapturedSample:
    """Last states changed, where they are sent."""
    last = item.verifier_last_hidden_SD
    return item if last is None else replace(item, verifier_last_hidden_SD=change(last))


def with_ids(item: CapturedSample, change: Callable[[Tensor], Tensor]) -> CapturedSample:
    """Greedy tokens changed, where they are sent."""
    ids = item.target_ids_S
    return item if ids is None else replace(item, target_ids_S=change(ids))


def packing(world: World, change: Callable[[PackedBatch], PackedBatch]) -> None:
    """Change every packed row."""
    clean = pack_module.pack
    world.patch.setattr(pack_module, "pack", lambda plan, captured: change(clean(plan, captured)))


# What the loss gets.


class Between(nn.Module):
    """Stands between the loss and the drafter and changes what goes in."""

    def __init__(self, inner: nn.Module, change: Callable[..., tuple[Tensor, Tensor, BlockLayout]]) -> None:
        super().__init__()
        self.inner, self.change, self.config = inner, change, inner.config

    def forward(self, states: Tensor, embeddings: Tensor, layout: BlockLayout, attention: Any) -> Tensor:
        return self.inner(*self.change(states, embeddings, layout), attention)


def handing(world: World, change: Callable[..., tuple[Tensor, Tensor, BlockLayout]]) -> None:
    """A loss that hands other inputs to the drafter."""
    clean = step_module.drafted_states
    world.patch.setattr(step_module, "drafted_states", lambda model, *rest: clean(Between(model, change), *rest))


def losing(world: World, change: Callable[..., Any]) -> None:
    """Another loss of a row, for training and evaluation: `change` gets the right one and its arguments."""
    clean = step_module.row_loss
    world.patch.setattr(step_module, "row_loss", lambda *given: change(clean, *given))


def seeing(world: World, change: Callable[[PackedBatch], PackedBatch]) -> None:
    """A loss that sees another row."""
    losing(world, lambda clean, model, row, *rest: clean(model, change(row), *rest))


# What the run is made of.


def on_model(world: World, change: Callable[[DFlashDraftModel], object]) -> None:
    """Change every drafter's model that is made from now on, be it trained, loaded for export or decoded with."""
    clean = DFlashDraftModel.__init__

    def init(model: DFlashDraftModel, config: Any) -> None:
        clean(model, config)
        change(model)

    world.patch.setattr(DFlashDraftModel, "__init__", init)


def on_drafter(world: World, change: Callable[[Drafter], object]) -> None:
    """Change every drafter in training that is made from now on, with its first weights."""
    clean = Drafter.__init__

    def init(drafter: Drafter, **given: Any) -> None:
        clean(drafter, **given)
        change(drafter)

    world.patch.setattr(Drafter, "__init__", init)


def on_frozen(world: World, change: Callable[[FrozenTarget], FrozenTarget]) -> None:
    """Change what a training run borrows of the target."""
    clean = run_module.frozen_target
    world.patch.setattr(run_module, "frozen_target", lambda *given: change(clean(*given)))


def on_optimizer(world: World, change: Callable[[DFlashDraftModel, Any], Any]) -> None:
    """Change every optimiser that is made from now on; what `change` returns is used, or the same if it is nothing."""
    clean = step_module.build_optimizer

    def build(model: DFlashDraftModel, config: Any) -> Any:
        optimizer = clean(model, config)
        return change(model, optimizer) or optimizer

    world.patch.setattr(step_module, "build_optimizer", build)


def shaped(world: World, **changes: Any) -> None:
    """Other fields in the shape that the drafter is built with."""
    clean = run_module.resolve_drafter_config
    world.patch.setattr(run_module, "resolve_drafter_config", lambda *given: clean(*given).model_copy(update=changes))


def with_config(world: World, **changes: Any) -> None:
    """Other fields in the shape that the drafter carries with it, and writes, than it was built with."""

    def change(model: DFlashDraftModel) -> None:
        model.config = model.config.model_copy(update=changes)

    on_model(world, change)


def with_samples(world: World, change: Callable[[Sample], Sample]) -> None:
    """Every conversation that is trained on changed."""
    world.samples = [change(sample) for sample in world.samples]


def unchecked_data(world: World) -> None:
    """Nobody compares the data with the target before the run."""
    world.patch.setattr(run_module, "_check_data_fits", lambda _data, _target: None)


def noise(like: Tensor, size: float, seed: int | None = None) -> Tensor:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return torch.randn(like.shape, generator=generator) * size * like.std()


def layer_part(states: Tensor, index: int, width: int = 32) -> Tensor:
    return states[..., index * width : (index + 1) * width]
