"""Where the time of a pipeline goes, in sums that only grow; rates are differences of two snapshots."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineStatistics:
    """A snapshot of an engine.

    Attributes:
        target_loops: number of target loops.
        target_tokens: row positions captured so far.
        target_busy_seconds: time spent capturing, summed over loops.
        target_wait_seconds: time spent waiting for room in the queue, summed over loops.
        drafter_wait_seconds: time the drafter loop has spent waiting for a row.
        queue_rows: rows waiting now.
        queue_bytes: their size now.
    """

    target_loops: int = 1
    target_tokens: int = 0
    target_busy_seconds: float = 0.0
    target_wait_seconds: float = 0.0
    drafter_wait_seconds: float = 0.0
    queue_rows: int = 0
    queue_bytes: int = 0
