"""Rows on their way between devices: off the target's device, and onto the drafter's one row ahead.

Between two accelerators a row travels through page-locked host memory: the target's device is free as soon as its row
is copied out, the queue's bytes are host bytes, and the copy in runs on a stream of its own while the drafter works on
the row before. On one device, and on CPU, nothing is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from draftline.records import PackedBatch


class RowSource(Protocol):
    """Where rows come from, in order: an engine."""

    def get(self) -> PackedBatch | None:
        """The next row; waits for it. None at the end."""

    def get_nowait(self) -> PackedBatch | None:
        """The next row if there is one already."""


@dataclass(frozen=True)
class PipelineStatistics:
    """Where the time of an engine goes, in sums that only grow; rates are differences of two snapshots.

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


def leave_device(batch: PackedBatch, destination: torch.device) -> PackedBatch:
    """Copy a row from an accelerator to page-locked memory, unless it is to be used where it is."""
    if batch.input_ids.device.type != "cuda" or batch.input_ids.device == destination:
        return batch
    copied = _map_tensors(batch, _to_pinned)
    torch.cuda.current_stream(batch.input_ids.device).synchronize()
    return copied


def to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """A row on a device; the tensors that are there already are not copied."""
    return _map_tensors(batch, lambda tensor: tensor.to(device))


@dataclass(frozen=True)
class _InFlight:
    """A row whose copy has been started. `ready` fires when it is complete; until then its source must stay."""

    batch: PackedBatch
    ready: torch.cuda.Event
    source: PackedBatch


class DeviceStage:
    """Iterates over the rows of a source on the drafter's device; on CUDA the next row is copied meanwhile.

    The row ahead is only taken if it is already there: waiting for it would hold back the row in hand.
    """

    def __init__(self, source: RowSource, device: torch.device) -> None:
        self._source = source
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: _InFlight | None = None
        self._copied: deque[_InFlight] = deque()

    def __iter__(self) -> DeviceStage:
        return self

    def __next__(self) -> PackedBatch:
        if self._stream is None:
            batch = self._source.get()
            if batch is None:
                raise StopIteration
            return to_device(batch, self._device)
        current = self._ahead or self._start_copy(self._source.get(), self._stream)
        if current is None:
            raise StopIteration
        self._ahead = self._start_copy(self._source.get_nowait(), self._stream)
        consumer = torch.cuda.current_stream(self._device)
        consumer.wait_event(current.ready)
        for tensor in current.batch.tensors().values():
            tensor.record_stream(consumer)
        # torch keeps pinned memory of its own until a copy out of it is done, but not memory shared with a target loop,
        # whose next row would go there
        self._copied.append(current)
        while self._copied and self._copied[0].ready.query():
            self._copied.popleft()
        return current.batch

    def _start_copy(self, batch: PackedBatch | None, stream: torch.cuda.Stream) -> _InFlight | None:
        if batch is None:
            return None
        # A row made on this very device may still be in the making on the producer's stream.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            moved = _map_tensors(batch, lambda tensor: tensor.to(self._device, non_blocking=True))
            return _InFlight(moved, stream.record_event(), batch)


def _map_tensors(batch: PackedBatch, function: Callable[[Tensor], Tensor]) -> PackedBatch:
    changed: dict[str, Any] = {name: function(tensor) for name, tensor in batch.tensors().items()}
    return replace(batch, **changed)


def _to_pinned(tensor: Tensor) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
