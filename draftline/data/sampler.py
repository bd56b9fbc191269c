"""Which conversations make up which row, and which rows make up which optimiser step.

Every pass over the data has its own seeded order. The conversations are taken in that order and put into the open row
until the next one does not fit; a conversation longer than a row gets a row of its own. `rows_per_step` consecutive
rows are one optimiser step, across the border between two passes if need be; only the last step of a run may be short.
A run that was extended goes on in the same sequence of rows, behind a seam: no step reaches across it.

There is no state but the sequence number: the plan of row n is computed from the seed and n, so a resumed run, or a
second process, sees exactly the rows of the uninterrupted one. Cost: one permutation and one cumulative sum per pass.

Several processes share the rows of a step in turn (`Deal`), so that the order, and with it the run, is the same however
many there are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from draftline.errors import DataError

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class RowPlan:
    """What one packed row will hold, before anything has been read or computed.

    The fields are those of `PackedBatch`, see there.
    """

    sequence_number: int
    step: int
    last_of_step: bool
    epoch: int
    sample_ids: tuple[int, ...]


class Sampler:
    """The rows of a whole training run, in order.

    Args:
        sample_ids: the conversations to train on, as positions in the prepared data set.
        lengths: tokens of each of them.
        tokens_per_row: most tokens of a row that holds more than one conversation.
        rows_per_step: rows per optimiser step.
        epochs: passes over the data, if `max_steps` is none.
        max_steps: number of optimiser steps, whatever `epochs` says.
        seed: determines the order of every pass.

    Attributes:
        total_rows, total_steps: of the run, with its extensions.
        parts: of the run and of each of its extensions, the first row and the first step.

    Raises:
        DataError: there is no conversation, or one has no token.
    """

    def __init__(
        self,
        *,
        sample_ids: Sequence[int] | IntArray,
        lengths: Sequence[int] | IntArray,
        tokens_per_row: int,
        rows_per_step: int,
        epochs: int,
        max_steps: int | None,
        seed: int,
    ) -> None:
        self._sample_ids = np.asarray(sample_ids, dtype=np.int64)
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._tokens_per_row = tokens_per_row
        self._rows_per_step = rows_per_step
        self._seed = seed
        self._cached_epoch: tuple[int, list[tuple[int, ...]]] | None = None
        _check_lengths(self._sample_ids, self._lengths)
        self._first_rows = [0]
        wanted = None if max_steps is None else max_steps * rows_per_step
        while (len(self._first_rows) <= epochs) if wanted is None else (self._first_rows[-1] < wanted):
            self._begin_pass()
        self.parts = [(0, 0)]
        self._end_at(self._first_rows[-1] if wanted is None else wanted)

    def extend(self, passes: int) -> None:
        """Go on behind the end: the rest of a pass that `max_steps` cut, then so many whole ones."""
        self.parts.append((self.total_rows, self.total_steps))
        for _ in range(passes):
            self._begin_pass()
        self._end_at(self._first_rows[-1])

    @property
    def seams(self) -> tuple[int, ...]:
        """Steps that were done where each extension begins."""
        return tuple(step for _, step in self.parts[1:])

    def _begin_pass(self) -> None:
        epoch = len(self._first_rows) - 1
        self._first_rows.append(self._first_rows[-1] + len(self._rows_of_epoch(epoch)))

    def _end_at(self, row: int) -> None:
        first_row, first_step = self.parts[-1]
        self.total_rows = row
        self.total_steps = first_step + -(-(row - first_row) // self._rows_per_step)

    def plan(self, sequence_number: int) -> RowPlan:
        """The row at one place of the order."""
        if not 0 <= sequence_number < self.total_rows:
            raise IndexError(f"row {sequence_number} of a run of {self.total_rows} rows")
        epoch = bisect_right(self._first_rows, sequence_number) - 1
        part = bisect_right(self.parts, sequence_number, key=lambda seam: seam[0]) - 1
        first_row, first_step = self.parts[part]
        step, place = divmod(sequence_number - first_row, self._rows_per_step)
        ends = {self.total_rows, *(row for row, _ in self.parts[part + 1 :])}
        return RowPlan(
            sequence_number=sequence_number,
            step=first_step + step,
            last_of_step=place == self._rows_per_step - 1 or sequence_number + 1 in ends,
            epoch=epoch,
            sample_ids=self._rows_of_epoch(epoch)[sequence_number - self._first_rows[epoch]],
        )

    def plans(self, first: int = 0) -> Iterator[RowPlan]:
        """All rows from one place of the order to the end."""
        return (self.plan(number) for number in range(first, self.total_rows))

    def _rows_of_epoch(self, epoch: int) -> list[tuple[int, ...]]:
        if self._cached_epoch is None or self._cached_epoch[0] != epoch:
            order = np.random.default_rng([self._seed % 2**63, epoch]).permutation(len(self._lengths))
            rows = fill_rows(self._sample_ids[order], self._lengths[order], self._tokens_per_row)
            self._cached_epoch = (epoch, rows)
        return self._cached_epoch[1]


@dataclass(frozen=True)
class Deal:
    """Which rows of a run one of its ranks takes: of N ranks, rank r takes the rows r, r + N, r + 2N, ... of the order.

    Attributes:
        total_rows: of the run.
        rows_per_step: of all ranks together.
        rank: from 0.
        ranks: how many there are.
        parts: of the run and of each of its extensions, the first row and the first step.
    """

    total_rows: int
    rows_per_step: int
    rank: int = 0
    ranks: int = 1
    parts: tuple[tuple[int, int], ...] = ((0, 0),)

    def first_row(self, step: int) -> int:
        """Sequence number, in the order of the run, of the first row of a step; behind the last step all rows."""
        part = max(number for number, (_, first_step) in enumerate(self.parts) if first_step <= step)
        row, first_step = self.parts[part]
        end = self.parts[part + 1][0] if part + 1 < len(self.parts) else self.total_rows
        return min(row + (step - first_step) * self.rows_per_step, end)

    def rows_of_step(self, step: int) -> int:
        """How many rows of a step are this rank's: none where the last step has fewer rows than there are ranks."""
        return self._before(self.first_row(step + 1)) - self._before(self.first_row(step))

    def plans(self, plans: Iterator[RowPlan]) -> Iterator[RowPlan]:
        """This rank's rows of a run, or of the rest of it from a step on, numbered from 0 where others take some."""
        if self.ranks == 1:
            yield from plans
            return
        mine = (plan for plan in plans if plan.sequence_number % self.ranks == self.rank)
        for number, plan in enumerate(mine):
            last = plan.sequence_number + self.ranks >= self.first_row(plan.step + 1)
            yield replace(plan, sequence_number=number, last_of_step=last)

    def _before(self, row: int) -> int:
        """How many of the rows before one are this rank's."""
        return (row - self.rank + self.ranks - 1) // self.ranks


def fill_rows(sample_ids: IntArray, lengths: IntArray, tokens_per_row: int) -> list[tuple[int, ...]]:
    """Cut a sequence of conversations into consecutive rows of at most `tokens_per_row` tokens."""
    ends, ids = np.cumsum(lengths).tolist(), sample_ids.tolist()  # lists: numpy is slow at one number at a time
    rows: list[tuple[int, ...]] = []
    start = 0
    while start < len(ids):
        used = ends[start - 1] if start else 0
        stop = max(start + 1, bisect_right(ends, used + tokens_per_row))
        rows.append(tuple(ids[start:stop]))
        start = stop
    return rows


def heldout_rows(sample_ids: IntArray, lengths: IntArray, tokens_per_row: int) -> list[RowPlan]:
    """Rows of a held-out set: in the given order, one pass, each row complete in itself."""
    rows = fill_rows(sample_ids, lengths, tokens_per_row)
    return [
        RowPlan(sequence_number=number, step=number, last_of_step=True, epoch=0, sample_ids=row)
        for number, row in enumerate(rows)
    ]


def _check_lengths(sample_ids: IntArray, lengths: IntArray) -> None:
    if sample_ids.shape != lengths.shape:
        raise ValueError(f"{len(sample_ids)} sample ids for {len(lengths)} lengths")
    if not len(lengths):
        raise DataError("the training data holds no conversation: prepare a file with at least one answer")
    if lengths.min() < 1:
        empty = int(sample_ids[int(lengths.argmin())])
        raise DataError(f"conversation {empty} of the training data has no token: prepare the data again")
