"""The bounded hand-over between the target loops and the drafter loop.

Rows leave in the order of their sequence numbers, whoever made them and however fast, so a run gives the same weights
with one target loop or with four. Rows may arrive out of order; the bound is on bytes, because rows differ in length.

A row is let in if there is room, or if it is the row that the drafter takes next. The second rule is what excludes a
deadlock: were the queue full of later rows, the drafter would wait for a row that waits for the drafter. It also lets
a row pass that is larger than the whole bound, and means that the bound can be exceeded, by that one row.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from draftline.errors import PipelineError
from draftline.records import PackedBatch


@dataclass(frozen=True)
class QueueStatistics:
    """Where the pipeline stands and which side has been waiting.

    Attributes:
        rows: rows that wait in the queue.
        num_bytes: their size.
        put_wait_seconds: time that producers have spent waiting for room, summed over producers.
        get_wait_seconds: time that the consumer has spent waiting for a row.
    """

    rows: int = 0
    num_bytes: int = 0
    put_wait_seconds: float = 0.0
    get_wait_seconds: float = 0.0


class HiddenStatesQueue:
    """Rows in the order of the sampler, for any number of producers and one consumer.

    Args:
        max_bytes: most bytes that wait, see the module's docstring for the exception.
        first: sequence number of the first row that will leave.
        patience: seconds that `get` waits before it calls `late`, again and again; none: for ever.
    """

    def __init__(
        self, max_bytes: int, first: int = 0, patience: float | None = None, late: Callable[[], None] | None = None
    ) -> None:
        self._patience, self._late = patience, late
        self._max_bytes = max_bytes
        self._next = first
        self._rows: dict[int, PackedBatch] = {}
        self._bytes = 0
        self._closed = False
        self._error: BaseException | None = None
        self._put_wait = 0.0
        self._get_wait = 0.0
        self._changed = threading.Condition()

    def put(self, batch: PackedBatch) -> bool:
        """Hand a row over; waits for room.

        Returns:
            False if the queue was closed and the row was not taken: there is no use in making more.

        Raises:
            PipelineError: the other side, or another producer, has failed.
        """
        number, size = batch.sequence_number, batch.num_bytes()
        with self._changed:
            self._put_wait += self._wait_until(lambda: self._closed or self._admits(number, size))
            if self._closed:
                return False
            if number < self._next or number in self._rows:
                raise ValueError(f"row {number} was handed over twice")
            self._rows[number] = batch
            self._bytes += size
            self._changed.notify_all()
            return True

    def get(self) -> PackedBatch | None:
        """The next row in order; waits for it. None once the queue is closed and empty.

        Raises:
            PipelineError: a producer has failed, whose exception is the cause; or the queue was closed with a gap.
        """
        with self._changed:
            self._get_wait += self._wait_until(lambda: self._closed or self._next in self._rows, self._patience)
            return self._take()

    def get_nowait(self) -> PackedBatch | None:
        """The next row in order if it is already here, else None."""
        with self._changed:
            self._raise_failure()
            return self._take() if self._next in self._rows else None

    def close(self) -> None:
        """No more rows are wanted or will come: `put` refuses, `get` empties what is left."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make every present and later `put` and `get` raise a `PipelineError` caused by `error`, at once.

        The first failure is kept: later ones are most likely its consequences.
        """
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def statistics(self) -> QueueStatistics:
        """A consistent snapshot."""
        with self._changed:
            return QueueStatistics(len(self._rows), self._bytes, self._put_wait, self._get_wait)

    def _admits(self, number: int, size: int) -> bool:
        return number <= self._next or self._bytes + size <= self._max_bytes

    def _take(self) -> PackedBatch | None:
        batch = self._rows.pop(self._next, None)
        if batch is None:
            if self._rows:
                raise PipelineError(
                    f"row {self._next} never came although row {min(self._rows)} did: report this fault"
                )
            return None
        self._next += 1
        self._bytes -= batch.num_bytes()
        self._changed.notify_all()
        return batch

    def _wait_until(self, ready: Callable[[], bool], patience: float | None = None) -> float:
        """Sleep until `ready` or a failure, which is raised; returns the seconds slept."""
        start = time.perf_counter()
        while not self._changed.wait_for(lambda: self._error is not None or ready(), patience):
            if self._late is not None:
                self._late()
        self._raise_failure()
        return time.perf_counter() - start

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise PipelineError(_describe(self._error)) from self._error


def _describe(error: BaseException) -> str:
    lines = str(error).splitlines() or ["no message"]
    return f"a loop of the pipeline failed with {type(error).__name__}: {lines[0]}"
