"""Faults of a reduced vocabulary: its mapping, its head, its labels, what is written, what is decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftline.audit.subject import AuditSubject
from draftline.evaluate import generate as generate_module
from draftline.targets.head import ReducedHead
from tests.zoo.fault import fault
from tests.zoo.faults_serving import stored, written
from tests.zoo.pipeline import REDUCED, VOCABULARY, Recipe

Patch = pytest.MonkeyPatch
LAST_HIDDEN = Recipe(settings={"pipeline": {"send": "last_hidden"}})


def _kept_ids(subject: AuditSubject) -> Tensor:
    kept_ids = subject.draft_model.kept_ids
    assert kept_ids is not None
    return kept_ids


def _head(subject: AuditSubject) -> ReducedHead:
    head = subject.frozen.head
    assert isinstance(head, ReducedHead)
    return head


def _kept(subject: AuditSubject, kept_ids: Tensor) -> AuditSubject:
    """The subject with another mapping, in drafter and loss alike."""
    subject.draft_model.keep_tokens(kept_ids)
    return replace(subject, frozen=replace(subject.frozen, head=ReducedHead(subject.target.head, kept_ids)))


@fault("d2t holds absolute ids", "P9", "DRF013", REDUCED)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    assert subject.draft_model.d2t is not None
    subject.draft_model.d2t.copy_(_kept_ids(subject))
    return subject


@fault("the reduced head has the rows of the next ids", "P9", "DRF013", REDUCED)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    rows = (_kept_ids(subject) + 1) % VOCABULARY
    _head(subject).lm_head.get_parameter("weight").copy_(subject.target.head.lm_head.get_parameter("weight")[rows])
    return subject


@fault("the loss maps rows to the next ids", "P9", "DRF013", REDUCED)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    _head(subject).kept_ids.add_(1)
    return subject


@fault("the mapping is ordered by frequency", "P9", "DRF013", REDUCED)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return _kept(subject, _kept_ids(subject).flip(0))


@fault("the mapping names a token twice", "P9", "DRF013", REDUCED)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    kept_ids = _kept_ids(subject)
    kept_ids[7] = kept_ids[6]
    return _kept(subject, kept_ids)


@fault("the loss uses the whole head", "B65", "DRF013", REDUCED)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return replace(subject, frozen=replace(subject.frozen, head=subject.frozen.head.whole))


@fault("a reduced head that nobody asked for", "B67", "DRF013", LAST_HIDDEN)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    head = ReducedHead(subject.target.head, torch.arange(32))
    return replace(subject, frozen=replace(subject.frozen, head=head))


@fault("the most frequent tokens left out", "P9", "DAT012", REDUCED)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    assert subject.data is not None
    said = torch.cat([sample.input_ids[sample.loss_mask] for sample in subject.data.samples])
    rarest = torch.bincount(said, minlength=VOCABULARY).sort(stable=True).indices[: len(_kept_ids(subject))]
    return _kept(subject, rarest.sort().values)


@fault("labels outside the vocabulary become its first row", "P9", "LOS002", REDUCED)
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    def label_rows(head: ReducedHead, ids: Tensor, _last_hidden: Tensor, _chunk_size: int) -> Tensor:
        return (ids[:, None] == head.kept_ids).long().argmax(-1)

    patch.setattr(ReducedHead, "label_rows", label_rows)
    return subject


@fault("drafted rows are taken for tokens", "P9", "EVL002", REDUCED)
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    patch.setattr(generate_module, "greedy_tokens", lambda hidden, head: head.logits(hidden).argmax(-1))
    return subject


def _tensor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, name: change(tensors[name])}


@fault("the export writes absolute ids as d2t", "P9", "EXP001", REDUCED)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return stored(subject, _tensor("d2t", lambda d2t: d2t + torch.arange(len(d2t))))


@fault("the exported t2d and d2t disagree", "P9", "EXP011", REDUCED)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return stored(subject, _tensor("t2d", lambda t2d: t2d.roll(1)))


@fault("the exported head has the rows of the next ids", "B66", "EXP011", REDUCED)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    whole = subject.target.head.lm_head.get_parameter("weight")
    rows = (_kept_ids(subject) + 1) % VOCABULARY
    return stored(subject, _tensor("lm_head.weight", lambda _: whole.detach()[rows].clone()))


@fault("the reduced head is not exported", "B65", "EXP011", REDUCED)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return stored(subject, lambda t: {name: tensor for name, tensor in t.items() if name != "lm_head.weight"})


@fault("draft_vocab_size is written as the whole vocabulary", "B65", "EXP011", REDUCED)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return written(subject, lambda tree: tree.update(draft_vocab_size=VOCABULARY))
