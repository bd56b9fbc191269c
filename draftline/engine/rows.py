"""From a plan to a packed row: what every engine does, wherever it does it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from draftline.data.sampler import RowPlan
from draftline.records import CapturedSample, PackedBatch, Sample, Samples
from draftline.transfer.pack import pack


class CaptureLoop(Protocol):
    """The target's half of the pipeline, as `TargetForwardLoop` provides it."""

    def capture(self, samples: Sequence[Sample]) -> list[CapturedSample]:
        """States of each sample, in the order given."""


def make_row(plan: RowPlan, samples: Samples, loop: CaptureLoop) -> PackedBatch:
    """Read, capture and pack one row.

    A row never shares a target forward with another row, so it is the same whichever loop makes it.
    """
    return pack(plan, loop.capture([samples[sample_id] for sample_id in plan.sample_ids]))


def make_rows(plans: Iterable[RowPlan], samples: Samples, loop: CaptureLoop) -> Iterator[PackedBatch]:
    """Rows one after another, each made when it is asked for."""
    return (make_row(plan, samples, loop) for plan in plans)
