"""The order of rows, against a packing written as a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.data.sampler import Deal, RowPlan, Sampler, fill_rows, heldout_rows
from draftline.errors import DataError


def make_sampler(
    lengths: list[int],
    *,
    tokens_per_row: int = 10,
    rows_per_step: int = 2,
    epochs: int = 3,
    max_steps: int | None = None,
    seed: int = 0,
) -> Sampler:
    return Sampler(
        sample_ids=list(range(100, 100 + len(lengths))),
        lengths=lengths,
        tokens_per_row=tokens_per_row,
        rows_per_step=rows_per_step,
        epochs=epochs,
        max_steps=max_steps,
        seed=seed,
    )


def naive_rows(lengths: list[int], limit: int) -> list[tuple[int, ...]]:
    rows: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if not rows or length > room:
            rows.append([])
            room = limit
        rows[-1].append(index)
        room -= length
    return [tuple(row) for row in rows]


@given(st.lists(st.integers(1, 15), min_size=1, max_size=40), st.integers(2, 12))
def test_rows_are_filled_as_by_a_plain_loop(lengths: list[int], limit: int) -> None:
    assert fill_rows(np.arange(len(lengths)), np.array(lengths), limit) == naive_rows(lengths, limit)


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 15), min_size=1, max_size=20),
    rows_per_step=st.integers(1, 4),
    epochs=st.integers(1, 4),
    seed=st.integers(-3, 3),
)
def test_every_pass_holds_every_conversation_once(
    lengths: list[int], rows_per_step: int, epochs: int, seed: int
) -> None:
    sampler = make_sampler(lengths, rows_per_step=rows_per_step, epochs=epochs, seed=seed)
    plans = list(sampler.plans())
    for epoch in range(epochs):
        seen = [i for plan in plans if plan.epoch == epoch for i in plan.sample_ids]
        assert sorted(seen) == list(range(100, 100 + len(lengths)))
    assert [plan.sequence_number for plan in plans] == list(range(sampler.total_rows))
    assert [plan.step for plan in plans] == [n // rows_per_step for n in range(len(plans))]
    assert sum(plan.last_of_step for plan in plans) == sampler.total_steps == plans[-1].step + 1


def test_a_row_never_exceeds_the_limit_unless_it_holds_one_conversation() -> None:
    lengths = [3, 30, 4, 4, 4, 10, 1]
    for plan in make_sampler(lengths).plans():
        tokens = sum(lengths[i - 100] for i in plan.sample_ids)
        assert tokens <= 10 or len(plan.sample_ids) == 1


def test_plan_of_a_row_is_the_same_whether_or_not_earlier_rows_were_asked_for() -> None:
    whole = list(make_sampler([3, 5, 2, 9, 7, 4]).plans())
    for number in reversed(range(len(whole))):
        assert make_sampler([3, 5, 2, 9, 7, 4]).plan(number) == whole[number]
    assert list(make_sampler([3, 5, 2, 9, 7, 4]).plans(first=4)) == whole[4:]


def test_passes_differ_in_order_and_seeds_differ() -> None:
    lengths = [1] * 50
    first, second = make_sampler(lengths, tokens_per_row=50, epochs=2).plans()
    other = make_sampler(lengths, tokens_per_row=50, epochs=2, seed=1).plan(0)
    assert len({first.sample_ids, second.sample_ids, other.sample_ids}) == 3


@pytest.mark.parametrize("max_steps", [1, 2, 3, 50])
def test_max_steps_overrides_epochs_in_both_directions(max_steps: int) -> None:
    sampler = make_sampler([5, 5, 5], rows_per_step=2, epochs=1, max_steps=max_steps)
    assert sampler.total_steps == max_steps
    assert sampler.total_rows == 2 * max_steps


def test_unusable_lengths_are_named() -> None:
    with pytest.raises(DataError, match="no conversation"):
        make_sampler([])
    with pytest.raises(DataError, match="conversation 101"):
        make_sampler([3, 0])


def test_heldout_rows_keep_their_order() -> None:
    plans = heldout_rows(np.array([7, 8, 9]), np.array([4, 7, 3]), 10)
    assert [plan.sample_ids for plan in plans] == [(7,), (8, 9)]
    assert all(plan.last_of_step for plan in plans)


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 15), min_size=1, max_size=20),
    rows_per_step=st.integers(1, 4),
    max_steps=st.one_of(st.none(), st.integers(1, 9)),
    extensions=st.lists(st.integers(1, 3), min_size=1, max_size=3),
)
def test_an_extension_goes_on_in_the_same_rows_with_steps_of_its_own(
    lengths: list[int], rows_per_step: int, max_steps: int | None, extensions: list[int]
) -> None:
    """Against a run that is long enough, cut by hand: rows as they are, steps counted anew from each seam."""
    given = {"rows_per_step": rows_per_step, "max_steps": max_steps, "epochs": 2}
    before, sampler = make_sampler(lengths, **given), make_sampler(lengths, **given)
    for passes in extensions:
        sampler.extend(passes)
    endless = list(make_sampler(lengths, rows_per_step=1, epochs=40).plans())
    found = list(sampler.plans())
    begun = before.plan(before.total_rows - 1).epoch + 1
    assert found[: before.total_rows] == list(before.plans())
    assert [plan.sample_ids for plan in found] == [plan.sample_ids for plan in endless[: len(found)]]
    assert [plan.epoch for plan in found] == [plan.epoch for plan in endless[: len(found)]]
    assert {plan.epoch for plan in found} == set(range(begun + sum(extensions)))
    assert endless[len(found)].epoch == begun + sum(extensions)
    steps: dict[int, list[RowPlan]] = {}
    for plan in found:
        steps.setdefault(plan.step, []).append(plan)
    assert list(steps) == list(range(sampler.total_steps))
    ends = [steps[seam - 1][-1].sequence_number + 1 for seam in sampler.seams]
    for step, rows in steps.items():
        full = len(rows) == rows_per_step
        assert full or step + 1 in (*sampler.seams, sampler.total_steps)
        assert [row.last_of_step for row in rows] == [False] * (len(rows) - 1) + [True]
    assert ends[0] == before.total_rows
    for ranks in (1, 2, 3):
        deals = [Deal(sampler.total_rows, rows_per_step, rank, ranks, tuple(sampler.parts)) for rank in range(ranks)]
        for step, rows in steps.items():
            assert sum(deal.rows_of_step(step) for deal in deals) == len(rows)
        dealt = [list(deal.plans(sampler.plans())) for deal in deals]
        for deal, mine in zip(deals, dealt, strict=True):
            whole = [plan for plan in found if plan.sequence_number % ranks == deal.rank]
            assert [plan.sample_ids for plan in mine] == [plan.sample_ids for plan in whole]
            counts = [sum(plan.step == step for plan in mine) for step in steps]
            assert counts == [deal.rows_of_step(step) for step in steps]
            assert sum(plan.last_of_step for plan in mine) == sum(count > 0 for count in counts)
