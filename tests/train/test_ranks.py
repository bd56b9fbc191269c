"""The update of several ranks against that of one with all rows: gloo, float64, and faults that must show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftline.config import LossConfig, RunConfig, TrainConfig
from draftline.draft.attention import GroupedAttention
from draftline.draft.block import draw_anchors
from draftline.draft.loss import StepMetrics
from draftline.errors import ConfigError
from draftline.records import PackedBatch
from draftline.train.ranks import ALONE, Ranks
from draftline.train.shards import shard_model, whole
from draftline.train.step import train_step
from tests.draft.layouts import TinyTarget, drafter, drafter_config, make_row
from tests.run.world import on_ranks

DOUBLE = torch.float64
TARGET = TinyTarget(dtype=DOUBLE)
SILENT = (3, 7)
"""Rows without a supervised slot: of four ranks, those of the last; of eight, two have nothing to learn from."""
COUNTS = (2, 4, 8)

Update = tuple[dict[str, Tensor], StepMetrics, float]


def rows(count: int) -> list[PackedBatch]:
    """Of very unlike lengths, so that local counts are unlike the mean."""
    made = []
    for index in range(count):
        lengths = [3 + 4 * (index % 3), 5 + 9 * (index % 2)]
        mask = torch.full((sum(lengths),), index not in SILENT)
        mask[1] = False
        made.append(make_row(lengths, mask, seed=index, dtype=DOUBLE, sample_ids=(2 * index, 2 * index + 1)))
    return made


def update(ranks: Ranks, mine: Sequence[PackedBatch], denominator: str, clip_norm: float = 1e9) -> Update:
    """What an SGD step of rate 1 takes away from each tensor."""
    model = drafter(drafter_config(), dtype=DOUBLE)
    if ranks.sharded:
        shard_model(model, torch.device("cpu"))
    before = {name: whole(parameter).detach().clone() for name, parameter in model.named_parameters()}
    result = train_step(
        draft_model=model,
        rows=[(batch, draw_anchors(batch, 5, seed=0)) for batch in mine],
        frozen=TARGET.frozen(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        loss=LossConfig(denominator=denominator),  # type: ignore[arg-type]
        attention=GroupedAttention,
        clip_norm=clip_norm,
        ranks=ranks,
    )
    taken = {name: before[name] - whole(parameter).detach() for name, parameter in model.named_parameters()}
    return taken, result.metrics, result.grad_norm


VARIANTS: list[dict[str, Any]] = [
    {"rows": 8, "denominator": "slots"},
    {"rows": 8, "denominator": "weights"},
    {"rows": 8, "denominator": "slots", "clip_norm": 0.01},
    {"rows": 7, "denominator": "slots"},  # of eight ranks, the last has no row at all
    {"rows": 8, "denominator": "slots", "sharded": True},
    {"rows": 7, "denominator": "weights", "sharded": True, "clip_norm": 0.01},
]
"""What each number of ranks is tried with."""


def local_count(ranks: Ranks) -> None:
    """Divides by what it has counted itself: the mean of sums becomes a sum of means."""
    own: list[StepMetrics] = []
    ranks.sum_metrics = lambda metrics: own.append(metrics) or metrics  # type: ignore[method-assign,func-returns-value]


def as_ddp(ranks: Ranks) -> None:
    """Takes the mean of gradients over ranks, as the wrapper DDP does."""
    clean = ranks.sum_gradients

    def mean(parameters: Any) -> None:
        kept: list[nn.Parameter] = list(parameters)
        clean(kept)
        for parameter in kept:
            assert parameter.grad is not None
            parameter.grad /= ranks.count

    ranks.sum_gradients = mean  # type: ignore[method-assign]


FAULTS = {"local_count": local_count, "as_ddp": as_ddp}


def all_updates(ranks: Ranks) -> dict[str, list[Update]]:
    """Body of a rank: every variant, and with two ranks every fault in the first of them."""
    found: dict[str, list[Update]] = {"right": []}
    for variant in VARIANTS:
        given = dict(variant)
        ranks.sharded = given.pop("sharded", False)
        found["right"].append(update(ranks, rows(given.pop("rows"))[ranks.rank :: ranks.count], **given))
    ranks.sharded = False
    for name, plant in FAULTS.items() if ranks.count == 2 else ():
        plant(ranks)
        found[name] = [update(ranks, rows(8)[ranks.rank :: ranks.count], "slots")]
        del ranks.__dict__["sum_metrics" if name == "local_count" else "sum_gradients"]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, list[Update]]]]:
    """By number of ranks, what each rank found."""
    return {count: on_ranks(tmp_path_factory.mktemp("world"), count, all_updates) for count in COUNTS}


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest difference in the maximum of its tensor."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - want).abs().max() / want.abs().max()) for name, want in wanted.items())


@pytest.mark.parametrize("place", range(len(VARIANTS)))
def test_eight_rows_on_any_number_of_ranks_are_one_update(found: Any, place: int) -> None:
    given = {name: value for name, value in VARIANTS[place].items() if name != "sharded"}
    wanted, metrics, norm = update(ALONE, rows(given.pop("rows")), **given)
    assert min(float(tensor.abs().max()) for tensor in wanted.values()) > 0
    for count in COUNTS:
        for taken, counted, its_norm in (of_rank["right"][place] for of_rank in found[count]):
            assert worst(taken, wanted) <= 1e-6
            assert its_norm == pytest.approx(norm, rel=1e-9)
            for field in fields(StepMetrics):
                ours, theirs = getattr(counted, field.name), getattr(metrics, field.name)
                assert type(ours) is type(theirs)
                assert torch.as_tensor(ours).tolist() == pytest.approx(torch.as_tensor(theirs).tolist(), rel=1e-12)


@pytest.mark.parametrize("count", COUNTS)
def test_all_ranks_move_by_the_same_bits(found: Any, count: int) -> None:
    for place in range(len(VARIANTS)):
        (first, *_), *others = (of_rank["right"][place] for of_rank in found[count])
        assert all(torch.equal(first[name], other[0][name]) for other in others for name in first)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_division_by_anything_but_the_global_count_shows(found: Any, fault: str) -> None:
    wanted = update(ALONE, rows(8), "slots")[0]
    assert min(worst(of_rank[fault][0][0], wanted) for of_rank in found[2]) > 0.05


def test_nothing_supervised_anywhere_moves_nothing() -> None:
    class Two(Ranks):
        """Two ranks, the other of which has the same."""

        count = 2

        def sum_(self, tensors: Sequence[Tensor]) -> None:
            for tensor in tensors:
                tensor *= 2

    silent = [row for index, row in enumerate(rows(8)) if index in SILENT]
    taken, metrics, norm = update(Two(), silent, "slots")
    assert norm == 0.0
    assert metrics.slots == 0
    assert metrics.tokens == 2 * sum(row.input_ids.numel() for row in silent)
    assert not any(tensor.any() for tensor in taken.values())


class Told(Ranks):
    """A rank of two that are told what the other has."""

    count = 2

    def __init__(self, other: Any) -> None:
        self.other = other

    def gather(self, value: Any) -> list[Any]:
        return [value, self.other]


def test_what_differs_is_named_with_the_rank() -> None:
    Told({"data": "a"}).compare({"data": "a"})
    with pytest.raises(ConfigError, match=r"^rank 1 has data b, rank 0 has a: start all ranks with the same"):
        Told({"data": "b"}).compare({"data": "a"})
    with pytest.raises(ConfigError, match=r"^rank 1 has data bbbbbbbbbbbb\.\., rank 0 has a: "):
        Told({"data": "b" * 64}).compare({"data": "a"})
    with pytest.raises(ConfigError, match=r"^rank 1 has train.seed nothing, rank 0 has 3"):
        Told({}).compare({"train.seed": "3"})


def test_places_may_differ_and_every_rank_has_a_row() -> None:
    here = RunConfig(train=TrainConfig(rows_per_step=2))
    there = here.model_copy(update={"target": here.target.model_copy(update={"name": "/elsewhere", "device": "cuda"})})
    two = Told(None)
    two.gather = lambda value: [value, value]  # type: ignore[method-assign]
    two.check_settings(here, {})
    facts: list[dict[str, str]] = []
    two.gather = lambda value: facts.append(value) or [value]  # type: ignore[method-assign,func-returns-value]
    two.check_settings(here, {"commit": "c"})
    two.check_settings(there, {"commit": "c"})
    assert facts[0] == facts[1]
    assert facts[0]["code commit"] == "c"
    assert facts[0]["train.seed"] == "0"
    with pytest.raises(
        ConfigError, match=r"rows_per_step = 1 leaves 1 of 2 ranks without a row: set train.rows_per_st"
    ):
        two.check_settings(RunConfig(), {})


def test_one_rank_alone_exchanges_nothing() -> None:
    assert ALONE.first(lambda: 3) == 3
    assert ALONE.gather("a") == ["a"]
    assert ALONE.numbers(2.0) == [2.0]
    assert not ALONE.any(False)
    assert ALONE.turns(5) == 5
