"""Captured states on disk: captured once, read by every pass over the data and by every run that wants the same.

    manifest.json             what the states are: target, layers, dtypes, data, sizes; others are refused by it
    shard-000000.safetensors  the states of consecutive conversations, in any program that reads safetensors:
        hidden_states [T, L*D]   outputs of the captured layers, side by side, in the dtype that the manifest says
        scale [T, L]             with fp8: what the numbers of a token and a layer are to be multiplied with
        target_ids [T] or last_hidden [T, D]     as `send` says, never narrowed
        lengths [n], checksums [n]               tokens of each conversation, and CRC-32 of all that belongs to it
        and in its header the manifest, the layers by name, the hash of the ids, and the error of narrowing
    lock                      held by the process that fills it

A shard appears whole or not at all, so a fill that was killed at any moment goes on with what is missing, and several
writers need not know of each other. A conversation is compared with its checksum when it is read for the first time in
a session. The checksum begins at a number made of the manifest, the conversation's number and its ids, so states of
another target, other data or another conversation do not pass for these. Nothing that was captured is captured again in
silence: what is damaged is named, and captured again by `draftline capture --repair`.

Worth its disk where the target is expensive beside the drafter and the data is passed over several times: it saves all
target forwards but the first pass. It costs tokens * (L*D + ...) * bytes: 3 GB for a million tokens of a 135M target,
terabytes for a large one, which is why states travel in memory by default.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftline.config import StatesDtype
from draftline.errors import CheckpointError, StorageError
from draftline.progress import OnProgress
from draftline.records import CapturedSample, Sample, Samples
from draftline.storage import TEMPORARY_PREFIX, new_file, reason_of, remove_leftovers, storage_errors, write_text
from draftline.targets.loop import TargetForwardLoop

SAMPLES_PER_FILL = 32
"""Samples captured together. Fixed, because states depend in the last bit on what shares a forward: an interrupted and
repeated fill must give what an uninterrupted one gives."""

STORE_FORMAT = 3
_MANIFEST, _LOCK = "manifest.json", "lock"
_HEADER = "draftline"
"""Entry of a shard's metadata that holds all of it, as JSON."""
_STATES, _SCALE, _LENGTHS, _CHECKSUMS = "hidden_states", "scale", "lengths", "checksums"
_REMEDY = "capture it again with `draftline capture --repair`, or restore it from a copy"
_OTHERWISE = "restore it from a copy, or delete the folder to capture the states again"
_LARGEST_FP8 = 448.0
"""Of float8_e4m3fn."""


@dataclass(frozen=True)
class StoreIdentity:
    """What states are: two stores with the same identity hold the same numbers.

    Attributes:
        target: fingerprint of the target's weights.
        target_layer_ids: captured layers.
        hidden_size: D.
        dtype: of the states as the target gives them and a run gets them, by its torch name.
        send: what stands beside the captured layers.
        data: fingerprint of the prepared data.
        kept: how the states of the captured layers are kept: in `dtype`, or narrower.
    """

    target: str
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    send: Literal["target_ids", "last_hidden"]
    data: str
    kept: str

    @property
    def bytes_per_token(self) -> int:
        """On disk, without headers."""
        layers, item = len(self.target_layer_ids), getattr(torch, self.dtype).itemsize
        width = 1 if self.kept == "fp8" else getattr(torch, self.kept).itemsize
        scale = 4 * layers if self.kept == "fp8" else 0
        return layers * self.hidden_size * width + scale + (8 if self.send == "target_ids" else self.hidden_size * item)


class StatesStore:
    """States of one prepared data set, by sample.

    Args:
        folder: created if it does not exist.
        identity: what the states are, or must be.
        lengths: [n] tokens of each sample.
        shard_bytes: size that a shard of a new store does not exceed, unless `SAMPLES_PER_FILL` samples do.

    Raises:
        CheckpointError: the folder holds other states, or its manifest is damaged.
    """

    def __init__(self, folder: Path, identity: StoreIdentity, lengths: NDArray[np.int64], shard_bytes: int) -> None:
        self.folder, self.identity = folder, identity
        self.lengths = np.asarray(lengths, dtype=np.int64)
        count, tokens = len(lengths), int(lengths.sum())
        groups = shard_bytes * count // max(1, SAMPLES_PER_FILL * tokens * identity.bytes_per_token)
        self._manifest = {"format": STORE_FORMAT, **asdict(identity), "samples": count, "tokens": tokens}
        self._manifest = json.loads(json.dumps({**self._manifest, "per_shard": SAMPLES_PER_FILL * max(1, groups)}))
        self.complete = self._open_manifest()
        self._manifest_text = json.dumps(self._manifest, sort_keys=True)
        self._seed = zlib.crc32(self._manifest_text.encode())
        self._open: dict[int, _Shard] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_shards(self) -> int:
        return -(-len(self) // self._manifest["per_shard"])

    def path(self, shard: int) -> Path:
        """File of a shard."""
        return self.folder / f"shard-{shard:06d}.safetensors"

    def members(self, shard: int) -> range:
        """Samples of a shard."""
        size = self._manifest["per_shard"]
        return range(shard * size, min((shard + 1) * size, len(self)))

    def describe(self) -> dict[str, Any]:
        """What it holds, as plain values."""
        found = {**self._manifest, "folder": str(self.folder), "shards": self.num_shards, "complete": self.complete}
        found["bytes"] = sum(self.shard_bytes(shard) for shard in range(self.num_shards))
        return {**found, "relative_error": self.error()} if self.complete else found

    def shard_bytes(self, shard: int) -> int:
        """Of a shard on disk, without its header."""
        members = self.members(shard)
        return int(self.lengths[list(members)].sum()) * self.identity.bytes_per_token + 16 * len(members)

    def refuse_gaps(self) -> None:
        """Raise a `CheckpointError` if states that were complete are not any more, by names and headers of shards."""
        for shard in range(self.num_shards if self.complete else 0):
            self._open_shard(shard)

    def missing(self) -> list[int]:
        """Shards that have not been written."""
        there = {path.name for path in self.folder.glob("shard-*")}
        return [shard for shard in range(self.num_shards) if self.path(shard).name not in there]

    def write(self, shard: int, captured: Sequence[CapturedSample]) -> None:
        """Keep the states of all samples of a shard; it is on the disk when this returns, or nothing of it is.

        Raises:
            StorageError: the disk refuses.
        """
        assert [item.sample.sample_id for item in captured] == list(self.members(shard)), "all of a shard, in order"
        states = torch.cat([item.hidden_states_SLD.cpu() for item in captured])
        beside = torch.cat([_beside(item).cpu() for item in captured])
        assert str(states.dtype) == f"torch.{self.identity.dtype}", (states.dtype, self.identity.dtype)
        tensors = {**narrowed(states, self.identity), self.identity.send: beside}
        error, size = (states.float() - widened(tensors, self.identity).float()), states.float()
        bounds = np.cumsum([0, *(len(item.sample) for item in captured)]).tolist()
        rows = [{name: t[a:b] for name, t in tensors.items()} for a, b in pairwise(bounds)]
        sums = [self._checksum(item.sample, row) for item, row in zip(captured, rows, strict=True)]
        lengths = [len(item.sample) for item in captured]
        tensors |= {_LENGTHS: torch.tensor(lengths), _CHECKSUMS: torch.tensor(sums)}
        ids = hashlib.sha256(b"".join(item.sample.input_ids.numpy().tobytes() for item in captured)).hexdigest()
        header = {
            "manifest": self._manifest_text,
            "layers": ", ".join(f"output of decoder layer {i}" for i in self.identity.target_layer_ids),
            "shard": str(shard),
            "input_ids_sha256": ids,
            "squared_error": repr(float(error.double().square().sum())),
            "squared_sum": repr(float(size.double().square().sum())),
        }
        with new_file(self.path(shard)) as unfinished:
            # one entry: of several, the file would have them in another order each time
            text = json.dumps(header, sort_keys=True)
            text = json.dumps([text, zlib.crc32(text.encode())])
            whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(whole, unfinished, metadata={_HEADER: text})

    def finish(self) -> None:
        """Say in the manifest that all shards are there; the states are complete from now on."""
        if not self.complete:
            self.complete = True
            self._write_manifest()

    def read(self, sample: Sample) -> CapturedSample:
        """States of a sample; views of the mapped file where they are kept as they are.

        Raises:
            CheckpointError: they were never written, or are not what was written.
        """
        number = sample.sample_id // self._manifest["per_shard"]
        if number not in self._open:
            self._open[number] = self._open_shard(number)
        shard = self._open[number]
        place = sample.sample_id - self.members(number).start
        rows = shard.rows(place)
        if not shard.checked[place]:
            if len(sample) != len(rows[_STATES]) or self._checksum(sample, rows) != shard.checksums[place]:
                raise CheckpointError(
                    f"{self.path(number)}: sample {sample.sample_id} is not what was captured (its checksum differs): "
                    f"{_REMEDY}"
                )
            shard.checked[place] = True
        states = widened(rows, self.identity)
        if self.identity.send == "target_ids":
            return CapturedSample(sample, states, target_ids_S=rows[self.identity.send])
        return CapturedSample(sample, states, verifier_last_hidden_SD=rows[self.identity.send])

    def capture(self, samples: Sequence[Sample]) -> list[CapturedSample]:
        """Stand in for a `TargetForwardLoop`: the same result, read instead of computed."""
        return [self.read(sample) for sample in samples]

    def beginnings(
        self, whole: Sequence[Sample], samples: Sequence[Sample], target_ids: Callable[[Tensor], Tensor]
    ) -> list[CapturedSample]:
        """States of samples that are beginnings of kept ones, with the target's ids.

        Args:
            whole: the kept ones.
            target_ids: [n, D] last states to the target's ids, where these are not kept.
        """
        found = []
        for item, sample in zip(self.capture(whole), samples, strict=True):
            length, ids, last = len(sample), item.target_ids_S, item.verifier_last_hidden_SD
            ids = target_ids(last[:length]) if ids is None and last is not None else ids
            assert ids is not None, "CapturedSample carries one of the two"
            found.append(CapturedSample(sample, item.hidden_states_SLD[:length], target_ids_S=ids[:length]))
        return found

    def damaged(self, samples: Samples, on_progress: OnProgress | None = None) -> dict[int, str]:
        """Shards that are there and not whole, by number, with what is wrong; reads everything."""
        found: dict[int, str] = {}
        missing = set(self.missing())
        for shard in range(self.num_shards):
            self._open.pop(shard, None)
            try:
                for number in self.members(shard) if shard not in missing else ():
                    self.read(samples[number])
            except CheckpointError as error:
                found[shard] = str(error)
            self._open.pop(shard, None)
            if on_progress is not None:
                on_progress(shard + 1, self.num_shards)
        return found

    def delete(self, shard: int) -> None:
        """Give up a shard that is to be captured again."""
        self._open.pop(shard, None)
        with storage_errors(self.path(shard)):
            self.path(shard).unlink(missing_ok=True)

    def error(self) -> float:
        """Root of the squared error of narrowing over that of the squared states, over all shards; 0 where kept whole.

        Raises:
            CheckpointError: a shard is missing or damaged.
        """
        if self.identity.kept == self.identity.dtype:
            return 0.0
        headers = [self._open_shard(shard).header for shard in range(self.num_shards)]
        wrong, all_of_it = (sum(float(header[name]) for header in headers) for name in ("squared_error", "squared_sum"))
        return float((wrong / all_of_it) ** 0.5) if all_of_it else 0.0

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only process that fills this store; the system lets go of it when the process ends, however.

        Raises:
            StorageError: another process fills it.
        """
        path = self.folder / _LOCK
        with storage_errors(path), path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                who = file.read().strip() or "another process"
                raise StorageError(f"{self.folder} is being filled by {who}: wait for it, or end it") from None
            file.truncate(0)
            file.write(f"process {os.getpid()}")
            file.flush()
            remove_leftovers(self.folder)
            yield

    def _checksum(self, sample: Sample, rows: Mapping[str, Tensor]) -> int:
        seed = zlib.crc32(sample.sample_id.to_bytes(8, "little"), self._seed)
        seed = zlib.crc32(sample.input_ids.contiguous().numpy().data, seed)
        for name in sorted({_STATES, _SCALE, self.identity.send} & rows.keys()):
            seed = zlib.crc32(rows[name].contiguous().view(torch.uint8).numpy().data, seed)
        return seed

    def _open_shard(self, number: int) -> _Shard:
        path = self.path(number)
        if not path.exists():
            raise CheckpointError(f"{path} is missing: {_REMEDY}")
        try:
            shard = _Shard(path)
        except (OSError, SafetensorError, RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read ({reason_of(error)}): {_REMEDY}") from error
        lengths = self.lengths[list(self.members(number))]
        wanted = {_STATES, self.identity.send} | ({_SCALE} if self.identity.kept == "fp8" else set())
        if shard.header.get("manifest") != self._manifest_text or shard.header.get("shard") != str(number):
            raise CheckpointError(f"{path} does not belong to these states (its header says others): {_REMEDY}")
        if shard.tensors.keys() != wanted or not np.array_equal(shard.lengths, lengths):
            raise CheckpointError(f"{path} does not hold what its header says: {_REMEDY}")
        return shard

    def _open_manifest(self) -> bool:
        """Read the manifest, or begin it in an empty folder; true if it says that the states are complete."""
        path = self.folder / _MANIFEST
        if not path.exists():
            kept = (TEMPORARY_PREFIX, _LOCK)
            if self.folder.is_dir() and any(not p.name.startswith(kept) for p in self.folder.iterdir()):
                raise CheckpointError(f"{path} is missing, and nothing else says what the states are: {_OTHERWISE}")
            self.complete = False
            self._write_manifest()
            return False
        found = read_manifest(self.folder)
        for name in (*self._manifest, "complete"):
            if name not in found:
                raise CheckpointError(f"{path} does not say {name}: {_OTHERWISE}")
            if name not in ("complete", "per_shard") and found[name] != self._manifest[name]:
                raise CheckpointError(
                    f"{self.folder} holds states with {name} {found[name]}, this run wants {self._manifest[name]}: "
                    "name another folder for them (pipeline.states_path)"
                )
        if not isinstance(found["per_shard"], int) or found["per_shard"] < 1:
            raise CheckpointError(f"{path} says per_shard {found['per_shard']!r}: {_OTHERWISE}")
        self._manifest["per_shard"] = found["per_shard"]
        return bool(found["complete"])

    def _write_manifest(self) -> None:
        with storage_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        content = {**self._manifest, "complete": self.complete}
        write_text(self.folder / _MANIFEST, json.dumps(content, indent=2) + "\n")


class _Shard:
    """One file of a store, mapped.

    Args:
        path: of the file.

    Attributes:
        header: what it says of itself.
        tensors: states and what stands beside them, by name, all conversations one after another.
        lengths, checksums: [n] of its conversations.
        checked: [n] whether they were compared with their checksums.
    """

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            text, checksum = json.loads((file.metadata() or {})[_HEADER])
            tensors: dict[str, Tensor] = {name: file.get_slice(name)[:] for name in file.keys()}  # noqa: SIM118
        if zlib.crc32(text.encode()) != checksum:
            raise ValueError("its header is not what was written")
        self.header: dict[str, str] = json.loads(text)
        self.lengths: NDArray[np.int64] = tensors.pop(_LENGTHS).numpy()
        self.checksums: list[int] = tensors.pop(_CHECKSUMS).tolist()
        self.tensors = tensors
        self.checked = np.zeros(len(self.lengths), dtype=bool)
        self._bounds = np.cumsum([0, *self.lengths.tolist()]).tolist()
        if any(len(tensor) != self._bounds[-1] for tensor in tensors.values()):
            raise ValueError("its tensors are not as long as its conversations")

    def rows(self, place: int) -> dict[str, Tensor]:
        """What belongs to one of its conversations, by name."""
        return {name: tensor[self._bounds[place] : self._bounds[place + 1]] for name, tensor in self.tensors.items()}


def narrowed(states: Tensor, identity: StoreIdentity) -> dict[str, Tensor]:
    """[T, L*D] as they are kept: rounded to the nearest; in fp8 with a scale for each token and layer, [T, L]."""
    if identity.kept != "fp8":
        return {_STATES: states.to(getattr(torch, identity.kept))}
    layers = states.float().unflatten(-1, (len(identity.target_layer_ids), -1))
    scale = layers.abs().amax(-1).clamp(min=1e-30) / _LARGEST_FP8
    return {_STATES: (layers / scale[..., None]).to(torch.float8_e4m3fn).flatten(-2), _SCALE: scale}


def widened(tensors: Mapping[str, Tensor], identity: StoreIdentity) -> Tensor:
    """[T, L*D] in the target's dtype, from how they are kept."""
    states, dtype = tensors[_STATES], getattr(torch, identity.dtype)
    if identity.kept == "fp8":
        layers = states.float().unflatten(-1, (len(identity.target_layer_ids), -1))
        return (layers * tensors[_SCALE][..., None]).flatten(-2).to(dtype)
    return states.to(dtype)


def _beside(captured: CapturedSample) -> Tensor:
    """What stands beside the captured layers."""
    found = captured.target_ids_S if captured.target_ids_S is not None else captured.verifier_last_hidden_SD
    assert found is not None, "CapturedSample carries one of the two"
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a store says that it holds.

    Raises:
        CheckpointError: it cannot be read, or is of another version.
    """
    path = folder / _MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({reason_of(error)}): {_OTHERWISE}") from error
    if not isinstance(found, dict) or "format" not in found:
        raise CheckpointError(f"{path} does not say what the states are: {_OTHERWISE}")
    if found["format"] != STORE_FORMAT:
        raise CheckpointError(
            f"{path} has format {found['format']}, known here is {STORE_FORMAT}: delete the folder to capture the "
            "states again, or use the version that wrote it"
        )
    return found


def refuse_other_data(place: Path, data: Sequence[str]) -> None:
    """Refuse a place with states of other data, and none of these; more than one data set may share it.

    Args:
        data: fingerprints.

    Raises:
        CheckpointError: naming what lies there.
    """
    there = {path.parent.name for path in place.glob(f"*/{_MANIFEST}")}
    if there and not there & {folder_name(one) for one in data}:
        raise CheckpointError(
            f"{place} holds states of other data ({sorted(there)[0]}), and none of what is given: give the data that "
            "they are of, or name another folder"
        )


def is_complete(folder: Path) -> bool:
    """Whether a folder holds all states of some data.

    Raises:
        CheckpointError: what is there cannot be read.
    """
    return (folder / _MANIFEST).exists() and read_manifest(folder).get("complete") is True


def how_kept(folder: Path, wanted: StatesDtype | None) -> str | None:
    """How the states of a folder are kept, or are to be: as wished for, else as they are; none: as the target's.

    Raises:
        CheckpointError: what is there cannot be read.
    """
    if wanted is None and (folder / _MANIFEST).exists():
        return str(read_manifest(folder).get("kept"))
    return None if wanted == "target" else wanted


def as_setting(kept: str | None, dtype: str) -> StatesDtype:
    """The setting that says how states of a target with a dtype are kept."""
    if kept == "fp8":
        return "fp8"
    return "bfloat16" if kept == "bfloat16" != dtype else "target"


def folder_name(data: str) -> str:
    """Name of the folder for the states of prepared data of a fingerprint, so that several data sets share a place."""
    return hashlib.sha256(data.encode()).hexdigest()[:16]


def loop_identity(loop: TargetForwardLoop, data: str, kept: str | None = None) -> StoreIdentity:
    """What a loop gives for prepared data of a fingerprint.

    Args:
        kept: how the states are kept; none: as the target gives them.
    """
    target = loop.target
    dtype = str(target.dtype).removeprefix("torch.")
    return StoreIdentity(
        target=target.fingerprint,
        target_layer_ids=loop.target_layer_ids,
        hidden_size=target.hidden_size,
        dtype=dtype,
        send=loop.send,
        data=data,
        kept=kept or dtype,
    )


def capture_shard(store: StatesStore, shard: int, loop: TargetForwardLoop, samples: Samples) -> None:
    """Capture and write one shard.

    Raises:
        StorageError: the disk refuses.
        TargetError: a sample does not fit the target.
    """
    members, captured = store.members(shard), list[CapturedSample]()
    for start in range(members.start, members.stop, SAMPLES_PER_FILL):
        group = range(start, min(start + SAMPLES_PER_FILL, members.stop))
        captured += loop.capture([samples[number] for number in group])
    store.write(shard, captured)


def fill_store(
    store: StatesStore,
    shards: Sequence[int],
    loop: TargetForwardLoop,
    samples: Samples,
    on_progress: OnProgress | None = None,
) -> None:
    """Capture some shards one after another; raises as `capture_shard`."""
    done = len(store) - sum(len(store.members(shard)) for shard in shards)
    for shard in shards:
        capture_shard(store, shard, loop, samples)
        done += len(store.members(shard))
        if on_progress is not None:
            on_progress(done, len(store))
