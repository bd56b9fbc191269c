"""Target loops in processes of their own, the drafter loop in this one: two interpreters, so that neither waits for
the other's lock.

    here, a thread per loop:  take the next plan -> read its conversations -> ask -> wait -> queue.put
    there:                    capture -> pack -> shared memory
    drafter loop:             queue.get -> stage -> step

Plans are handed out in order and rows are consumed in order, through the queue of the threads: the same rows, and the
same weights. A loop is asked for a row more than it works on, so that it never waits for this process; beside what the
queue holds, two rows a loop exist. Data is read here: a loop knows nothing but its target.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from types import MappingProxyType, TracebackType

import numpy as np
import torch

from draftline.data.sampler import RowPlan
from draftline.engine.threads import ThreadsEngine
from draftline.engine.worker import Stopped, Worker, WorkerTerms, pickled
from draftline.records import PackedBatch, Sample
from draftline.transfer.pack import CaptureLoop, make_row
from draftline.transfer.shared import RowPlace, RowReader, RowWriter, anonymous_memory

_ROWS_AHEAD = 2
"""Rows that a loop is asked for before it has given the first of them."""

SentSample = tuple[int, np.ndarray, np.ndarray]
"""Number, ids and mask of a conversation, as arrays: tensors would go through memory of torch's own."""


class RowJob:
    """What a target loop does in its process.

    Args:
        loop: the target loop.
        idle_bytes: most bytes of unused places in shared memory.
        pinned: rows come from, or go to, a CUDA device.
    """

    def __init__(self, loop: CaptureLoop, idle_bytes: int, pinned: bool) -> None:
        self._loop, self._idle_bytes, self._pinned = loop, idle_bytes, pinned

    def open(self, connection: Connection) -> None:
        """The process has begun."""
        self._rows = RowWriter(recv_handle(connection), self._idle_bytes, self._pinned)

    def release(self, offsets: Sequence[int]) -> None:
        """Places that may be written again."""
        self._rows.release(offsets)

    def make(self, plan: RowPlan, sent: Sequence[SentSample]) -> tuple[RowPlace, float]:
        """Where a row lies, and the seconds that it took."""
        start = time.perf_counter()
        samples = {number: Sample(number, torch.from_numpy(ids), torch.from_numpy(mask)) for number, ids, mask in sent}
        place = self._rows.write(make_row(plan, samples, self._loop))
        return place, time.perf_counter() - start


class RowWorker(Worker):
    """A target loop in its process, seen from here."""

    def __init__(self, name: str, job: bytes, settings: WorkerTerms, pinned: bool) -> None:
        super().__init__(name, job, settings)
        self._pinned = pinned
        self._reader: RowReader | None = None

    def channels(self) -> tuple[int, ...]:
        """New memory for each process: what one has begun to write, no other goes on with."""
        descriptor = anonymous_memory("rows")
        self._reader = RowReader(descriptor, self._pinned)
        return (descriptor,)

    def request(self, plan: RowPlan, samples: Sequence[SentSample]) -> None:
        """Ask for a row, and give back places of rows that are gone."""
        returned, given = [], self._reader.returned if self._reader is not None else deque[int]()
        while given:
            returned.append(given.popleft())
        if returned:
            self.tell("release", returned)
        self.ask("make", plan, samples)

    def row(self, plan: RowPlan) -> tuple[PackedBatch, float]:
        """The row that was asked for first, and the seconds that it took there; raises as `answer`."""
        place, seconds = self.answer()
        assert self._reader is not None, "a process that answers was begun"
        return self._reader.read(plan, place), seconds


class ProcessesEngine(ThreadsEngine):
    """Runs one process per target loop while the block it is the context manager of runs.

    Args:
        loops: target loops; those on one device may share modules and weights.
        samples: training data; read here.
        plans, first_row, queue_bytes, destination: as of `ThreadsEngine`.
        worker: threads of each loop, and what is done about one that is lost or hangs.

    Raises:
        ConfigError: on entry, a loop cannot be handed to a process.
    """

    _workers: Mapping[int, RowWorker] = MappingProxyType({})

    def __enter__(self) -> ProcessesEngine:
        settings = self._settings
        pinned = "cuda" in (settings.device_type, self._destination.type)
        self._workers = {
            id(loop): RowWorker(
                f"target-loop-{number}", pickled(RowJob(loop, self._queue_bytes, pinned)), settings, pinned
            )
            for number, loop in enumerate(self._loops)
        }
        try:
            for worker in self._workers.values():
                worker.begin()
        except BaseException:
            self._stop()
            for worker in self._workers.values():
                worker.close()
            raise
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes, whatever they have in hand."""
        self._queue.close()
        self._stop()
        super().__exit__(kind, error, trace)
        for worker in self._workers.values():
            worker.close()

    @property
    def pids(self) -> list[int | None]:
        """Of the processes of the loops, as they are now; none of a loop that has ended."""
        return [worker.pid for worker in self._workers.values()]

    def _say_late(self) -> None:
        """Each loop has its own patience, and is replaced."""

    def _stop(self) -> None:
        for worker in self._workers.values():
            worker.stop()

    def _make_rows(self, loop: CaptureLoop) -> None:
        """Ask the loop's process for rows until there are no more plans, or nobody wants rows."""
        worker, asked = self._workers[id(loop)], deque[RowPlan]()
        try:
            while True:
                while len(asked) < _ROWS_AHEAD and (plan := self._next_plan()) is not None:
                    worker.request(plan, [sent(self._samples[number]) for number in plan.sample_ids])
                    asked.append(plan)
                if not asked:
                    return
                batch, seconds = worker.row(asked.popleft())
                self._count(batch, seconds)
                if not self._queue.put(batch):
                    return
        except Stopped:
            return


def sent(sample: Sample) -> SentSample:
    """A conversation as it goes to another process."""
    return sample.sample_id, sample.input_ids.numpy(), sample.loss_mask.numpy()
