"""Target and drafter take turns in one thread: for one device, for debugging, and as the measure of other engines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType

from draftline.data.sampler import RowPlan
from draftline.records import PackedBatch, Samples
from draftline.transfer.pack import CaptureLoop, make_row
from draftline.transfer.stage import PipelineStatistics


class InlineEngine:
    """Makes each row when the drafter asks for it.

    Args:
        loop: the target loop.
        samples: training data.
        plans: rows to make, in order.
    """

    def __init__(self, *, loop: CaptureLoop, samples: Samples, plans: Iterator[RowPlan]) -> None:
        self._loop = loop
        self._samples = samples
        self._plans = plans
        self._tokens = 0
        self._seconds = 0.0

    def __enter__(self) -> InlineEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing runs in the background."""

    def get(self) -> PackedBatch | None:
        """The next row, None at the end."""
        plan = next(self._plans, None)
        if plan is None:
            return None
        start = time.perf_counter()
        batch = make_row(plan, self._samples, self._loop)
        self._seconds += time.perf_counter() - start
        self._tokens += batch.input_ids.numel()
        return batch

    def get_nowait(self) -> PackedBatch | None:
        """None: nothing is made ahead."""
        return None

    def statistics(self) -> PipelineStatistics:
        """The drafter waits whenever the target works."""
        return PipelineStatistics(
            target_tokens=self._tokens,
            target_busy_seconds=self._seconds,
            drafter_wait_seconds=self._seconds,
        )
