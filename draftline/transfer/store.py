"""Captured states on disk: captured once, read by every pass over the data and by every run that wants the same.

    manifest.json     what the states are: target, layers, dtype, data, sizes. A run that wants others is refused.
    hidden_states.bin [T, L*D], all samples one after another, in the dtype of the target
    target_ids.bin    [T] int64, the target's greedy next tokens; or
    last_hidden.bin   [T, D], its last states, as `send` says
    done.bin          one byte a sample: a fill that was interrupted goes on where it stopped

Worth its disk where the target is expensive beside the drafter and the data is passed over several times: it saves all
target forwards but the first pass. It costs tokens * (L*D + ...) * bytes: 3 GB for a million tokens of a 135M target,
terabytes for a large one, which is why states travel in memory by default.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftline.errors import CheckpointError
from draftline.records import CapturedSample, Sample, Samples
from draftline.storage import storage_errors, write_text
from draftline.targets.loop import TargetForwardLoop
from draftline.targets.model import weights_fingerprint

SAMPLES_PER_FILL = 32
"""Samples captured together. Fixed, because states depend in the last bit on what shares a forward: an interrupted and
repeated fill must give what an uninterrupted one gives."""

Progress = Callable[[int, int], None]
"""Called with samples done and samples of all."""


@dataclass(frozen=True)
class StoreIdentity:
    """What states are: two stores with the same identity hold the same numbers.

    Attributes:
        target: fingerprint of the target's weights.
        target_layer_ids: captured layers.
        hidden_size: D.
        dtype: of the states, by its torch name.
        send: what stands beside the captured layers.
        data: fingerprint of the prepared data.
    """

    target: str
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    send: Literal["target_ids", "last_hidden"]
    data: str


class StatesStore:
    """States of one prepared data set, by sample.

    Arguments:
        folder: created if it does not exist.
        identity: what the states are, or must be.
        lengths: [n] tokens of each sample.

    Raises:
        CheckpointError: the folder holds other states; the message names the first difference.
        StorageError: they do not fit on the disk.
    """

    def __init__(self, folder: Path, identity: StoreIdentity, lengths: NDArray[np.int64]) -> None:
        self.folder, self.identity = folder, identity
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        tokens, width = int(self._starts[-1]), identity.hidden_size
        self._dtype: torch.dtype = getattr(torch, identity.dtype)
        self._unsynced: list[int] = []
        self._write_manifest(tokens)
        self._states = self._open("hidden_states.bin", (tokens, len(identity.target_layer_ids) * width), self._dtype)
        self._beside_file = "target_ids.bin" if identity.send == "target_ids" else "last_hidden.bin"
        if identity.send == "target_ids":
            self._beside = self._open(self._beside_file, (tokens,), torch.int64)
        else:
            self._beside = self._open(self._beside_file, (tokens, width), self._dtype)
        self._done = self._open("done.bin", (len(lengths),), torch.uint8)

    def __len__(self) -> int:
        return len(self._done)

    def missing(self) -> list[int]:
        """Samples whose states have not been written."""
        return (self._done == 0).nonzero()[:, 0].tolist()

    def write(self, captured: CapturedSample) -> None:
        """Keep the states of a sample. They count, and survive the machine, from the next `sync` on."""
        where = self._where(captured.sample)
        self._states[where] = captured.hidden_states_SLD.cpu()
        beside = captured.target_ids_S if self.identity.send == "target_ids" else captured.verifier_last_hidden_SD
        assert beside is not None, "a loop with this `send` fills the field"
        self._beside[where] = beside.cpu()
        self._unsynced.append(captured.sample.sample_id)

    def sync(self) -> None:
        """Bring the states to the disk, and only then say that they are there."""
        if self._unsynced:
            self._flush("hidden_states.bin", self._beside_file)
            self._done[self._unsynced] = 1
            self._flush("done.bin")
            self._unsynced.clear()

    def read(self, sample: Sample) -> CapturedSample:
        """States of a sample, as views of the mapped files.

        Raises:
            CheckpointError: they were never written.
        """
        if not self._done[sample.sample_id]:
            raise CheckpointError(f"{self.folder} has no states of sample {sample.sample_id}: fill it again")
        where = self._where(sample)
        states, beside = self._states[where], self._beside[where]
        if self.identity.send == "target_ids":
            return CapturedSample(sample, states, target_ids_S=beside)
        return CapturedSample(sample, states, verifier_last_hidden_SD=beside)

    def capture(self, samples: Sequence[Sample]) -> list[CapturedSample]:
        """Stand in for a `TargetForwardLoop`: the same result, read instead of computed."""
        return [self.read(sample) for sample in samples]

    def _where(self, sample: Sample) -> slice:
        start, end = int(self._starts[sample.sample_id]), int(self._starts[sample.sample_id + 1])
        assert end - start == len(sample), (sample.sample_id, start, end, len(sample))
        return slice(start, end)

    def _write_manifest(self, tokens: int) -> None:
        path = self.folder / "manifest.json"
        wanted = json.loads(json.dumps({"format": 1, **asdict(self.identity), "tokens": tokens}))
        if not path.exists():
            with storage_errors(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(wanted, indent=2) + "\n")
            return
        found = json.loads(path.read_text(encoding="utf-8"))
        for name, value in wanted.items():
            if found.get(name) != value:
                raise CheckpointError(
                    f"{self.folder} holds states with {name} {found.get(name)}, this run wants {value}: "
                    "name another folder for them"
                )

    def _open(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Map a file of the given shape into memory; reserve its disk at once, so that a full disk shows now."""
        path = self.folder / name
        size = math.prod(shape) * dtype.itemsize
        with storage_errors(path):
            if not path.exists() or path.stat().st_size != size:
                (self.folder / "done.bin").unlink(missing_ok=True)  # opened last: nothing is done any more
                with path.open("wb") as file:
                    _reserve(file.fileno(), size)
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=dtype).view(shape)

    def _flush(self, *names: str) -> None:
        """Wait until what was written into mapped files is on the disk; `fsync` covers shared mappings."""
        for name in names:
            with storage_errors(self.folder / name), (self.folder / name).open("rb") as file:
                os.fsync(file.fileno())


def folder_name(data: str) -> str:
    """Name of the folder for the states of prepared data of a fingerprint, so that several data sets share a place."""
    return hashlib.sha256(data.encode()).hexdigest()[:16]


def loop_identity(loop: TargetForwardLoop, data: str) -> StoreIdentity:
    """What a loop gives for prepared data of a fingerprint."""
    target = loop.target
    return StoreIdentity(
        target=weights_fingerprint(target.model),
        target_layer_ids=loop.target_layer_ids,
        hidden_size=target.hidden_size,
        dtype=str(target.dtype).removeprefix("torch."),
        send=loop.send,
        data=data,
    )


def fill_store(
    store: StatesStore, loop: TargetForwardLoop, samples: Samples, on_progress: Progress | None = None
) -> None:
    """Capture what a store lacks.

    Raises:
        StorageError: the disk refuses.
        TargetError: a sample does not fit the target.
    """
    total = len(store)
    for group in _groups_to_fill(store.missing()):
        members = range(group * SAMPLES_PER_FILL, min((group + 1) * SAMPLES_PER_FILL, total))
        for captured in loop.capture([samples[i] for i in members]):
            store.write(captured)
        store.sync()
        if on_progress is not None:
            on_progress(members.stop, total)


def _groups_to_fill(missing: list[int]) -> Iterator[int]:
    return iter(sorted({sample_id // SAMPLES_PER_FILL for sample_id in missing}))


def _reserve(descriptor: int, size: int) -> None:
    if size:
        os.posix_fallocate(descriptor, 0, size)
