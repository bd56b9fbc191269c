"""Captured states on disk: captured once, read by every pass over the data and by every run that wants the same.

    manifest.json     what the states are: target, layers, dtype, data, sizes. A run that wants others is refused.
    hidden_states.bin [T, L*D], all samples one after another, in the dtype of the target
    target_ids.bin    [T] int64, the target's greedy next tokens; or
    last_hidden.bin   [T, D], its last states, as `send` says
    checksums.bin     [n, 2] uint32: CRC-32 of a sample's states and of what stands beside them
    done.bin          [n] uint8: a fill that was interrupted goes on where it stopped

A sample is compared with its checksums when it is read for the first time in a session, at the speed of memory. They
begin at a number made of the identity and the sample's number, so states of another target, other data or another
sample do not pass for these. Nothing that was captured is captured again in silence: what is damaged is named.

Worth its disk where the target is expensive beside the drafter and the data is passed over several times: it saves all
target forwards but the first pass. It costs tokens * (L*D + ...) * bytes: 3 GB for a million tokens of a 135M target,
terabytes for a large one, which is why states travel in memory by default.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftline.errors import CheckpointError
from draftline.progress import OnProgress
from draftline.records import CapturedSample, Sample, Samples
from draftline.storage import TEMPORARY_PREFIX, reason_of, storage_errors, write_bytes, write_text
from draftline.targets.loop import TargetForwardLoop
from draftline.targets.model import weights_fingerprint

SAMPLES_PER_FILL = 32
"""Samples captured together. Fixed, because states depend in the last bit on what shares a forward: an interrupted and
repeated fill must give what an uninterrupted one gives."""

STORE_FORMAT = 2
_MANIFEST, _STATES, _CHECKSUMS, _DONE = "manifest.json", "hidden_states.bin", "checksums.bin", "done.bin"
_BESIDE = {"target_ids": "target_ids.bin", "last_hidden": "last_hidden.bin"}
_REMEDY = "restore it from a copy, or delete the folder to capture the states again"


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

    Args:
        folder: created if it does not exist.
        identity: what the states are, or must be.
        lengths: [n] tokens of each sample.

    Raises:
        CheckpointError: the folder holds other states, or a file in it is damaged; the message names it.
        StorageError: they do not fit on the disk.
    """

    def __init__(self, folder: Path, identity: StoreIdentity, lengths: NDArray[np.int64]) -> None:
        self.folder, self.identity = folder, identity
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        count, tokens, width = len(lengths), int(self._starts[-1]), identity.hidden_size
        dtype: torch.dtype = getattr(torch, identity.dtype)
        self._manifest = json.loads(json.dumps({"format": STORE_FORMAT, **asdict(identity), "tokens": tokens}))
        self._seed = zlib.crc32(json.dumps(self._manifest, sort_keys=True).encode())
        self._complete = self._open_manifest()
        states, beside = (tokens, len(identity.target_layer_ids) * width), (tokens, width)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {_STATES: (states, dtype)}
        shapes[_BESIDE[identity.send]] = (beside, dtype) if identity.send == "last_hidden" else ((tokens,), torch.int64)
        self._make_files({name: math.prod(shape) * kind.itemsize for name, (shape, kind) in shapes.items()}, count)
        self._states, self._beside = (_map(folder / name, *shape) for name, shape in shapes.items())
        self._checksums = np.memmap(folder / _CHECKSUMS, np.uint32, "r+", shape=(count, 2)) if count else _NO_ROWS
        self._done = np.memmap(folder / _DONE, np.uint8, "r+", shape=(count,)) if count else _NO_ROWS[:, 0]
        self._check_done()
        self._checked = np.zeros(count, dtype=bool)
        self._unsynced: list[int] = []

    def __len__(self) -> int:
        return len(self._done)

    def missing(self) -> list[int]:
        """Samples whose states have not been written."""
        return np.flatnonzero(self._done == 0).tolist()

    def write(self, captured: CapturedSample) -> None:
        """Keep the states of a sample. They count, and survive the machine, from the next `sync` on."""
        number, where = captured.sample.sample_id, self._where(captured.sample)
        beside = captured.target_ids_S if self.identity.send == "target_ids" else captured.verifier_last_hidden_SD
        assert beside is not None, "a loop with this `send` fills the field"
        for place, (mapped, tensor) in enumerate(((self._states, captured.hidden_states_SLD), (self._beside, beside))):
            assert tensor.dtype == mapped.dtype, (tensor.dtype, mapped.dtype)
            mapped[where] = tensor.cpu()
            self._checksums[number, place] = self._checksum(number, tensor.cpu())
        self._unsynced.append(number)

    def sync(self) -> None:
        """Bring the states to the disk, and only then say that they are there."""
        if self._unsynced:
            self._flush(_STATES, _BESIDE[self.identity.send], _CHECKSUMS)
            self._done[self._unsynced] = 1
            self._flush(_DONE)
            self._unsynced.clear()
        if not self._complete and self._done.all():
            self._complete = True
            self._write_manifest()

    def read(self, sample: Sample) -> CapturedSample:
        """States of a sample, as views of the mapped files.

        Raises:
            CheckpointError: they were never written, or are not what was written.
        """
        number, where = sample.sample_id, self._where(sample)
        if not self._done[number]:
            raise CheckpointError(f"{self.folder} has no states of sample {number}: fill it again")
        states, beside = self._states[where], self._beside[where]
        if not self._checked[number]:
            self._check(number, states, beside)
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

    def _check(self, number: int, states: Tensor, beside: Tensor) -> None:
        names = (_STATES, _BESIDE[self.identity.send])
        for name, tensor, wanted in zip(names, (states, beside), self._checksums[number], strict=True):
            if self._checksum(number, tensor) != wanted:
                raise CheckpointError(
                    f"{self.folder / name}: sample {number} is not what was captured (its checksum differs): {_REMEDY}"
                )
        self._checked[number] = True

    def _checksum(self, number: int, tensor: Tensor) -> int:
        seed = zlib.crc32(number.to_bytes(8, "little"), self._seed)
        return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, seed)

    def _open_manifest(self) -> bool:
        """Read the manifest, or begin it in an empty folder; true if it says that the states are complete."""
        path = self.folder / _MANIFEST
        if not path.exists():
            if self.folder.is_dir() and any(not p.name.startswith(TEMPORARY_PREFIX) for p in self.folder.iterdir()):
                raise CheckpointError(f"{path} is missing, and nothing else says what the states are: {_REMEDY}")
            self._complete = False
            self._write_manifest()
            return False
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read ({reason_of(error)}): {_REMEDY}") from error
        if not isinstance(found, dict) or "format" not in found:
            raise CheckpointError(f"{path} does not say what the states are: {_REMEDY}")
        if found["format"] != STORE_FORMAT:
            raise CheckpointError(
                f"{path} has format {found['format']}, known here is {STORE_FORMAT}: delete the folder to capture the "
                "states again, or use the version that wrote it"
            )
        for name in (*self._manifest, "complete"):
            if name not in found:
                raise CheckpointError(f"{path} does not say {name}: {_REMEDY}")
            if name != "complete" and found[name] != self._manifest[name]:
                raise CheckpointError(
                    f"{self.folder} holds states with {name} {found[name]}, this run wants {self._manifest[name]}: "
                    "name another folder for them (pipeline.states_path)"
                )
        return bool(found["complete"])

    def _write_manifest(self) -> None:
        with storage_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        content = {**self._manifest, "complete": self._complete}
        write_text(self.folder / _MANIFEST, json.dumps(content, indent=2) + "\n")

    def _make_files(self, sizes: Mapping[str, int], count: int) -> None:
        """Refuse files that are not as long as they must be; make them where nothing was captured yet.

        The disk of the states is reserved at once, so that a full one shows now; what says that they are there comes
        last. A fill that was interrupted leaves every file at its full length once something was captured.
        """
        small = {_CHECKSUMS: 8 * count, _DONE: count}
        paths = [self.folder / name for name in small]
        begun = self._complete or any(path.exists() and np.fromfile(path, np.uint8).any() for path in paths)
        for name, size in (*sizes.items(), *small.items()):
            path = self.folder / name
            length = path.stat().st_size if path.exists() else None
            if length == size:
                continue
            if begun or (name in small and length is not None):
                said = "is missing" if length is None else f"has {length} bytes and not {size}"
                raise CheckpointError(f"{path} {said}: {_REMEDY}")
            if name in small:
                write_bytes(path, bytes(size))
                continue
            with storage_errors(path), path.open("wb") as file:
                if size:
                    os.posix_fallocate(file.fileno(), 0, size)

    def _check_done(self) -> None:
        path = self.folder / _DONE
        if self._done.max(initial=0) > 1:
            raise CheckpointError(f"{path} holds something else than 0 and 1: {_REMEDY}")
        if self._complete and not self._done.all():
            raise CheckpointError(f"{path} lacks {len(self.missing())} samples of states that were complete: {_REMEDY}")

    def _flush(self, *names: str) -> None:
        """Wait until what was written into mapped files is on the disk; `fsync` covers shared mappings."""
        for name in names:
            with storage_errors(self.folder / name), (self.folder / name).open("rb") as file:
                os.fsync(file.fileno())


_NO_ROWS = np.zeros((0, 2), dtype=np.uint32)


def _map(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A file of the given shape, mapped into memory."""
    size = math.prod(shape)
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(shape)


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
    store: StatesStore, loop: TargetForwardLoop, samples: Samples, on_progress: OnProgress | None = None
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
    store.sync()


def _groups_to_fill(missing: list[int]) -> Iterator[int]:
    return iter(sorted({sample_id // SAMPLES_PER_FILL for sample_id in missing}))
