"""How a fault is planted: one named change to one part of a clean pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftline.audit.subject import AuditSubject
from draftline.draft.attention import BlockLayout
from draftline.records import CapturedSample, PackedBatch, Sample
from tests.zoo.pipeline import Recipe

Plant = Callable[[AuditSubject, pytest.MonkeyPatch], AuditSubject]


@dataclass(frozen=True)
class Fault:
    """One entry of the zoo.

    Attributes:
        name: what is changed.
        kind: the entry of the list of known faults that it belongs to.
        code: what the audit has to report.
        recipe: the pipeline it is planted in.
        plant: changes the pipeline.
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


def capturing(subject: AuditSubject, change: Callable[[CapturedSample], CapturedSample]) -> AuditSubject:
    """The subject with every captured sample changed."""
    clean = subject.capture
    return replace(subject, capture=lambda samples: [change(item) for item in clean(samples)])


def with_states(item: CapturedSample, states: Tensor) -> CapturedSample:
    return replace(item, hidden_states_SLD=states)


def packing(subject: AuditSubject, change: Callable[[PackedBatch], PackedBatch]) -> AuditSubject:
    """The subject with every packed row changed."""
    clean = subject.pack
    return replace(subject, pack=lambda plan, captured: change(clean(plan, captured)))


class Between(nn.Module):
    """Stands between the loss and the drafter and changes what goes in."""

    def __init__(self, inner: nn.Module, change: Callable[..., tuple[Tensor, Tensor, BlockLayout]]) -> None:
        super().__init__()
        self.inner, self.change, self.config = inner, change, inner.config

    def forward(self, states: Tensor, embeddings: Tensor, layout: BlockLayout, attention: Any) -> Tensor:
        return self.inner(*self.change(states, embeddings, layout), attention)


def losing(
    subject: AuditSubject,
    row: Callable[[PackedBatch], PackedBatch] = lambda batch: batch,
    inputs: Callable[..., tuple[Tensor, Tensor, BlockLayout]] | None = None,
) -> AuditSubject:
    """The subject whose loss sees another row, or hands other inputs to the drafter."""
    clean = subject.row_loss

    def row_loss(draft_model: Any, batch: PackedBatch, *rest: Any) -> Any:
        model = draft_model if inputs is None else Between(draft_model, inputs)
        return clean(model, row(batch), *rest)

    return replace(subject, row_loss=row_loss)


def with_config(subject: AuditSubject, **changes: Any) -> AuditSubject:
    """The drafter's configuration changed after it was built."""
    subject.draft_model.config = subject.draft_model.config.model_copy(update=changes)
    return subject


def with_samples(subject: AuditSubject, change: Callable[[Sample], Sample]) -> AuditSubject:
    """The subject with every conversation of its data changed."""
    assert subject.data is not None
    return replace(subject, data=replace(subject.data, samples=[change(s) for s in subject.data.samples]))


def noise(like: Tensor, size: float, seed: int | None = None) -> Tensor:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return torch.randn(like.shape, generator=generator) * size * like.std()


def layer_part(states: Tensor, index: int, width: int = 32) -> Tensor:
    return states[..., index * width : (index + 1) * width]


def joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), dim=-1)
