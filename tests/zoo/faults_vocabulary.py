"""Faults of a reduced vocabulary: its mapping, its head, its labels, what is written, what is decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftline import run as run_module
from draftline.draft import model as model_module
from draftline.draft.block import FrozenTarget
from draftline.draft.vocabulary import ReducedVocabulary
from draftline.evaluate import generate as generate_module
from draftline.targets.head import ReducedHead
from draftline.train.step import Drafter
from tests.zoo.fault import fault, on_drafter, on_frozen
from tests.zoo.faults_serving import stored, written
from tests.zoo.pipeline import REDUCED, VOCABULARY, Recipe, World

LAST_HIDDEN = Recipe(settings={"pipeline": {"send": "last_hidden"}})


def _kept(world: World, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Another mapping, made from the counts of tokens [V] and the right one [Vd], in drafter and loss alike."""
    clean = run_module.reduce_vocabulary

    def reduce(counts_V: Tensor, size: int, always: Any) -> ReducedVocabulary:
        right = clean(counts_V, size, always)
        return replace(right, kept_ids=change(counts_V, right.kept_ids))

    world.patch.setattr(run_module, "reduce_vocabulary", reduce)


@fault("d2t holds absolute ids", "P9", "DRF013", REDUCED)
def _(world: World) -> None:
    world.patch.setattr(model_module, "offsets_of", lambda kept_ids: kept_ids)


@fault("the reduced head has the rows of the next ids", "P9", "DRF013", REDUCED)
def _(world: World) -> None:
    def next_rows(frozen: FrozenTarget) -> FrozenTarget:
        head, whole = frozen.head, world.target.head
        assert isinstance(head, ReducedHead)
        rows = (head.kept_ids + 1) % VOCABULARY
        head.lm_head.get_parameter("weight").copy_(whole.lm_head.get_parameter("weight")[rows])
        return frozen

    on_frozen(world, next_rows)


@fault("the loss maps rows to the next ids", "P9", "DRF013", REDUCED)
def _(world: World) -> None:
    def moved(drafter: Drafter) -> None:
        assert isinstance(drafter.frozen.head, ReducedHead)
        drafter.frozen.head.kept_ids.add_(1)

    on_drafter(world, moved)


@fault("the mapping is ordered by frequency", "P9", "DRF013", REDUCED)
def _(world: World) -> None:
    _kept(world, lambda _counts, kept_ids: kept_ids.flip(0))


@fault("the mapping names a token twice", "P9", "DRF013", REDUCED)
def _(world: World) -> None:
    _kept(world, lambda _counts, kept_ids: kept_ids.index_copy(0, torch.tensor([7]), kept_ids[6:7]))


@fault("the loss uses the whole head", "B65", "DRF013", REDUCED)
def _(world: World) -> None:
    def whole(drafter: Drafter) -> None:
        drafter.frozen = replace(drafter.frozen, head=drafter.frozen.head.whole)

    on_drafter(world, whole)


@fault("a reduced head that nobody asked for", "B67", "DRF013", LAST_HIDDEN)
def _(world: World) -> None:
    on_frozen(world, lambda frozen: replace(frozen, head=ReducedHead(world.target.head, torch.arange(32))))


@fault("the most frequent tokens left out", "P9", "DAT012", REDUCED)
def _(world: World) -> None:
    _kept(world, lambda counts, kept: counts.sort(stable=True).indices[: len(kept)].sort().values)


@fault("labels outside the vocabulary become its first row", "P9", "LOS002", REDUCED)
def _(world: World) -> None:
    def label_rows(head: ReducedHead, ids: Tensor, _last_hidden: Tensor, _chunk_size: int) -> Tensor:
        return (ids[:, None] == head.kept_ids).long().argmax(-1)

    world.patch.setattr(ReducedHead, "label_rows", label_rows)


@fault("drafted rows are taken for tokens", "P9", "EVL002", REDUCED)
def _(world: World) -> None:
    world.patch.setattr(generate_module, "greedy_tokens", lambda hidden, head: head.logits(hidden).argmax(-1))


def _tensor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, name: change(tensors[name])}


@fault("the export writes absolute ids as d2t", "P9", "EXP001", REDUCED)
def _(world: World) -> None:
    stored(world, _tensor("d2t", lambda d2t: d2t + torch.arange(len(d2t))))


@fault("the exported t2d and d2t disagree", "P9", "EXP011", REDUCED)
def _(world: World) -> None:
    stored(world, _tensor("t2d", lambda t2d: t2d.roll(1)))


@fault("the exported head has the rows of the next ids", "B66", "EXP011", REDUCED)
def _(world: World) -> None:
    whole = world.target.head.lm_head.get_parameter("weight").detach()

    def next_rows(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        rows = (tensors["d2t"] + torch.arange(len(tensors["d2t"])) + 1) % VOCABULARY
        return {**tensors, "lm_head.weight": whole[rows].to(tensors["lm_head.weight"].dtype)}

    stored(world, next_rows)


@fault("the reduced head is not exported", "B65", "EXP011", REDUCED)
def _(world: World) -> None:
    stored(world, lambda t: {name: tensor for name, tensor in t.items() if name != "lm_head.weight"})


@fault("draft_vocab_size is written as the whole vocabulary", "B65", "EXP011", REDUCED)
def _(world: World) -> None:
    written(world, lambda tree: tree.update(draft_vocab_size=VOCABULARY))
