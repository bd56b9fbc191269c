"""Rows and weights between processes of one machine, through memory that both have mapped; nothing is sent twice.

The process that makes rows has a file without a name, writes each row into a place of it and says where. The other maps
that place and reads tensors from it without a copy. When the last tensor of a row is gone there, the place is told back
and used again: a row can be held as long as any other tensor, and is never written over before.

Why a descriptor, and no names (`file_system` of torch.multiprocessing): what has no name cannot be left behind. The
kernel frees the memory when the last process that has it open is gone, killed or not. Why not torch's own
`file_descriptor`: it opens a new file in /dev/shm for each of the seven tensors of each row. Containers give /dev/shm
64 MB, and fresh pages are zeroed first; places that are used again cost neither.

Rows from and to an accelerator: the mapped memory is page-locked on both sides, so that copies into it and out of it
run by themselves, as with the pinned memory that rows of threads pass through.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftline.data.sampler import RowPlan
from draftline.records import PackedBatch

_ALIGNMENT = 64
"""Bytes that every tensor begins at a multiple of, as tensors of torch do."""


def anonymous_memory(name: str) -> int:
    """Descriptor of an empty file without a name, in memory where the system has such; closed by who asked for it.

    Args:
        name: shown by tools that list open files.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"draftline-{name}")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Mapping:
    """A part of a file, mapped: memory that another process sees.

    Args:
        descriptor: of the file, which is made long enough.
        offset, size: bytes; the offset is a multiple of `mmap.ALLOCATIONGRANULARITY`.
        pinned: page-locked, for copies from and to CUDA devices.
    """

    def __init__(self, descriptor: int, offset: int, size: int, pinned: bool = False) -> None:
        if os.fstat(descriptor).st_size < offset + size:
            os.ftruncate(descriptor, offset + size)
        self._map = mmap.mmap(descriptor, size, offset=offset)
        if pinned:
            address = np.frombuffer(self._map, np.uint8).ctypes.data
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, 0))

    def array(self) -> np.ndarray:
        """[size] uint8, a new object each time; what torch makes of it keeps it alive."""
        return np.frombuffer(self._map, np.uint8)

    def drop_pages(self) -> None:
        """Give the memory back; what is read next is zero."""
        if hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE)


@dataclass(frozen=True)
class RowPlace:
    """Where a row lies: bytes of the shared file, and dtype, shape and first byte of each of its tensors by name."""

    offset: int
    size: int
    fields: tuple[tuple[str, str, tuple[int, ...], int], ...]


class RowWriter:
    """Writes rows into shared memory, in places that it uses again.

    Args:
        descriptor: of the memory.
        idle_bytes: most bytes of unused places whose memory is kept for later rows.
        pinned: rows come from, or go to, a CUDA device.
    """

    def __init__(self, descriptor: int, idle_bytes: int, pinned: bool = False) -> None:
        self._descriptor, self._idle_bytes, self._pinned = descriptor, idle_bytes, pinned
        self._end = self._idle = 0
        self._places: dict[int, tuple[int, Mapping]] = {}
        self._free: dict[int, list[int]] = {}

    def write(self, batch: PackedBatch) -> RowPlace:
        """Copy a row into a free place; when this returns, it is there."""
        fields, size = [], 0
        for name, tensor in batch.tensors().items():
            fields.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), size))
            size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        offset, mapping = self._take(rounded(size))
        place = RowPlace(offset, rounded(size), tuple(fields))
        views = _tensors(mapping.array(), place)
        for name, tensor in batch.tensors().items():
            views[name].copy_(tensor, non_blocking=self._pinned)
        if batch.input_ids.device.type == "cuda":
            torch.cuda.current_stream(batch.input_ids.device).synchronize()
        return place

    def release(self, offsets: Iterable[int]) -> None:
        """Places whose rows are gone on the other side."""
        for offset in offsets:
            size, mapping = self._places[offset]
            self._free.setdefault(size, []).append(offset)
            self._idle += size
            if self._idle > self._idle_bytes and not self._pinned:
                mapping.drop_pages()

    def _take(self, size: int) -> tuple[int, Mapping]:
        if free := self._free.get(size):
            offset = free.pop()
            self._idle -= size
            return offset, self._places[offset][1]
        offset, self._end = self._end, self._end + size
        mapping = Mapping(self._descriptor, offset, size, self._pinned)
        self._places[offset] = (size, mapping)
        return offset, mapping


class RowReader:
    """Reads rows where another process has written them.

    Args:
        descriptor: of the memory.
        pinned: rows go to a CUDA device.

    Attributes:
        returned: places whose rows are gone, to be told to the writer; filled from whichever thread drops a row.
    """

    def __init__(self, descriptor: int, pinned: bool = False) -> None:
        self._descriptor, self._pinned = descriptor, pinned
        self._mapped: dict[int, Mapping] = {}
        self.returned: deque[int] = deque()

    def read(self, plan: RowPlan, place: RowPlace) -> PackedBatch:
        """The row of a plan; its tensors are the shared memory itself."""
        if place.offset not in self._mapped:
            self._mapped[place.offset] = Mapping(self._descriptor, place.offset, place.size, self._pinned)
        held = self._mapped[place.offset].array()
        weakref.finalize(held, self.returned.append, place.offset).atexit = False
        fields: dict[str, Any] = {**vars(plan), **_tensors(held, place)}
        return PackedBatch(**fields)


def rounded(size: int) -> int:
    """Bytes of a place for so many: at most an eighth more, so that rows of like size can have it after each other."""
    step = max(mmap.ALLOCATIONGRANULARITY, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def _tensors(array: np.ndarray, place: RowPlace) -> dict[str, Tensor]:
    memory, views = torch.from_numpy(array), {}
    for name, kind, shape, start in place.fields:
        dtype: torch.dtype = getattr(torch, kind)
        views[name] = memory[start : start + int(np.prod(shape)) * dtype.itemsize].view(dtype).view(shape)
    return views
