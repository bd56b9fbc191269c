"""The prepared data on disk: flat arrays that are mapped into memory, not read.

    input_ids.bin   int32, all samples one after another
    loss_mask.bin   uint8, the same length
    rows.npy        one `ROW` per sample: where it starts and where it came from
    report.json     the accounting of `prepare`
    meta.json       what the samples were made with; written last, so a folder without it is not complete

Nothing but the row table is in memory, 40 bytes a sample, so a set of any size opens at once.

It is written so that nothing done is lost and nothing half done is taken for complete. Samples are appended to flat
files in `OUT/partial`; every few seconds they are synced and a state is written beside them. Going on after an
interruption means to cut the files back to that state. At the end everything else is written there too, so that a full
disk costs nothing; then the state is deleted and all files are renamed into OUT, `meta.json`, without which OUT counts
as incomplete, last. Killed during these renames, a run starts over instead of going on.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from draftline.config import RunConfig
from draftline.data.accounting import META_FILE, REPORT_FILE, incomplete, read_descriptions
from draftline.data.split import HeldoutPrompts
from draftline.errors import ConfigError, DataError
from draftline.records import Sample
from draftline.storage import (
    TEMPORARY_PREFIX,
    move,
    new_folder,
    remove_folder,
    remove_leftovers,
    storage_errors,
    write_text,
)

IDS_FILE, MASK_FILE, ROWS_FILE = "input_ids.bin", "loss_mask.bin", "rows.npy"
PROMPTS_FILE, ANSWERS_FILE = "prompts.jsonl", "answers.jsonl"
TOKENIZER_KEY = "tokenizer"
"""Entry of the meta data: the tokenizer's folder, relative to the data set's."""
TOKENS_FORM = "tokens"
"""What the meta data calls rows of token ids, beside `chat` and `text`, in its `forms` of every source."""
FORMAT = 1
_ROWS_BIN, _STATE = "rows.bin", "state.json"
SEEN_ROWS, SEEN_ANSWERS = "seen_rows.bin", "seen_answers.bin"
"""Hashes that recognise a row, or an answer, that occurred before."""
_FILES = (IDS_FILE, MASK_FILE, _ROWS_BIN, SEEN_ROWS, SEEN_ANSWERS)
PARTIAL, _HELDOUT, _FINISHED = "partial", "heldout", "finished"
_OWN_FILES = frozenset(
    {IDS_FILE, MASK_FILE, ROWS_FILE, REPORT_FILE, META_FILE, PARTIAL, _HELDOUT, ANSWERS_FILE, TOKENIZER_KEY}
)

HELDOUT_FOLDER = "heldout"
"""Where `draftline prepare` puts what it keeps out, inside the prepared folder."""

ROW = np.dtype(
    [
        ("start", np.int64),
        ("length", np.int32),
        ("supervised", np.int32),
        ("source", np.int32),
        ("line", np.int64),
        ("prompt_hash", np.uint64),
    ]
)


@dataclass(frozen=True)
class PreparedDataset:
    """Samples of one prepared folder.

    Attributes:
        folder: where it lies.
        rows: [n] of `ROW`.
        meta: `fingerprint`, `sources` and the `forms` of the rows in each, `template_hash`, `vocab_size`, `max_id`, and
            the options of `prepare`.
        report: what `prepare` counted.
    """

    folder: Path
    rows: NDArray[np.void]
    meta: dict[str, Any]
    report: dict[str, Any]
    _ids: NDArray[np.int32]
    _mask: NDArray[np.uint8]

    @staticmethod
    def open(folder: Path | str) -> PreparedDataset:
        """Map a folder that `draftline prepare` completed."""
        folder = Path(folder)
        try:
            meta, report = read_descriptions(folder)
            rows = np.load(folder / ROWS_FILE, mmap_mode="r")
            ids, mask = _map(folder / IDS_FILE, np.dtype(np.int32)), _map(folder / MASK_FILE, np.dtype(np.uint8))
        except (OSError, ValueError) as error:
            raise incomplete(folder) from error
        if meta.get("format") != FORMAT or len(ids) != len(mask):
            raise DataError(f"{folder} was prepared by another version of Draftline; run `draftline prepare` again")
        return PreparedDataset(folder, rows, meta, report, ids, mask)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        ids, mask = self.arrays(index)
        return Sample(
            sample_id=index % len(self),
            input_ids=torch.from_numpy(ids.astype(np.int64)),
            loss_mask=torch.from_numpy(mask.astype(bool)),
        )

    def arrays(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Ids and mask of a sample as views of the mapped files."""
        row = self.rows[index]
        where = slice(int(row["start"]), int(row["start"]) + int(row["length"]))
        return self._ids[where], self._mask[where]

    def origin(self, index: int) -> tuple[str, int]:
        """File and line that a sample came from."""
        row = self.rows[index]
        return self.meta["sources"][int(row["source"])], int(row["line"])

    def has_own_mask(self, index: int) -> bool:
        """Whether a sample comes from a file with rows of token ids, in which the file says what is supervised."""
        forms = self.meta.get("forms")
        return forms is not None and TOKENS_FORM in forms[int(self.rows[index]["source"])]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[n] tokens of each sample."""
        return self.rows["length"].astype(np.int64)

    @cached_property
    def supervised_lengths(self) -> NDArray[np.int64]:
        """[n] supervised tokens of each sample."""
        return self.rows["supervised"].astype(np.int64)

    @property
    def prompt_hashes(self) -> NDArray[np.uint64]:
        """[n] equal for samples whose prompts are the same."""
        return self.rows["prompt_hash"]

    @property
    def fingerprint(self) -> str:
        """Identity of the content: changes with the data, the template, the tokenizer and the options."""
        return str(self.meta["fingerprint"])

    def used_token_ids(self) -> torch.Tensor:
        """[max_id + 1] bool, true for ids that occur; reads the data once."""
        counts = np.zeros(int(self.meta["max_id"]) + 1, dtype=bool)
        for start in range(0, len(self._ids), 1 << 22):
            counts[self._ids[start : start + (1 << 22)]] = True
        return torch.from_numpy(counts)


def open_data(config: RunConfig) -> tuple[PreparedDataset, PreparedDataset | None]:
    """The prepared training data of a run, and the held-out data if it lies in a folder of its own.

    Raises:
        ConfigError: no folder is named.
        DataError: a folder is not complete.
    """
    if config.data.path is None:
        raise ConfigError("data.path is not set: give the folder that `draftline prepare` wrote")
    training = PreparedDataset.open(config.data.path)
    place = config.data.heldout_path or config.data.path / HELDOUT_FOLDER
    return training, PreparedDataset.open(place) if config.data.heldout_path or place.exists() else None


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=dtype)  # an empty file cannot be mapped
    # Copy on write: torch wants memory that it may write to, and nothing reaches the file.
    return np.memmap(path, dtype=dtype, mode="c")


def is_own_folder(out: Path) -> bool:
    """Whether a folder holds nothing but what an earlier or interrupted `prepare` left."""
    return all(path.name in _OWN_FILES or path.name.startswith(TEMPORARY_PREFIX) for path in out.iterdir())


def discard_partial(out: Path) -> None:
    """Delete the unfinished data of `out`, and `out` itself if nothing else is in it."""
    remove_folder(out / PARTIAL)
    remove_leftovers(out)
    with suppress(OSError):  # not empty
        out.rmdir()


class DatasetWriter:
    """Appends samples to `out/partial`, and completes `out` from them."""

    def __init__(self, out: Path, key: str) -> None:
        """Begin, or go on where a run with the same `key` stopped; the state of that run is `self.state`."""
        self.out, self.key, self._partial = out, key, out / PARTIAL
        if out.exists() and not out.is_dir():
            raise DataError(f"{out} is a file; give a folder with --out")
        self._files: dict[str, BinaryIO] = {}
        with storage_errors(out), ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._partial.mkdir(parents=True, exist_ok=True)
            self.state = self._load_state()
            for name in _FILES:
                path = self._partial / name
                path.touch()
                os.truncate(path, self.state["sizes"][name] if self.state else 0)
                self._files[name] = path.open("ab")
            self._length = self._size(MASK_FILE)
            on_failure.pop_all()

    def _load_state(self) -> dict[str, Any] | None:
        path = self._partial / _STATE
        state: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        if state is None or state["key"] != self.key:
            return None
        return state if all(self._size(name) >= state["sizes"][name] for name in _FILES) else None

    def _size(self, name: str) -> int:
        path = self._partial / name
        return path.stat().st_size if path.exists() else 0

    def seen(self, name: str) -> set[int]:
        """The hashes (`SEEN_ROWS` or `SEEN_ANSWERS`) that an interrupted run saw."""
        return set(np.fromfile(self._partial / name, dtype=np.uint64).tolist())

    def add_seen(self, name: str, content_hash: int) -> None:
        """Keep a hash for going on after an interruption."""
        self._write(name, np.uint64(content_hash).tobytes())

    def add(
        self, input_ids: NDArray[np.int32], loss_mask: NDArray[np.bool_], source: int, line: int, prompt_hash: int
    ) -> None:
        """Append one sample."""
        row = np.array((self._length, len(input_ids), int(loss_mask.sum()), source, line, prompt_hash), dtype=ROW)
        self._write(IDS_FILE, input_ids.tobytes())
        self._write(MASK_FILE, loss_mask.astype(np.uint8).tobytes())
        self._write(_ROWS_BIN, row.tobytes())
        self._length += len(input_ids)

    def _write(self, name: str, content: bytes) -> None:
        with storage_errors(self._partial):
            self._files[name].write(content)

    def checkpoint(self, state: dict[str, Any]) -> None:
        """Make everything so far survive; `state` is what the caller needs to go on."""
        with storage_errors(self._partial):
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
        sizes = {name: self._size(name) for name in _FILES}
        write_text(self._partial / _STATE, _as_json({**state, "key": self.key, "sizes": sizes}))

    def close(self) -> None:
        """Close the files; what was appended after the last checkpoint will not be read again."""
        with storage_errors(self._partial), ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)

    def complete(self, heldout: HeldoutPrompts, meta: dict[str, Any], report: dict[str, Any]) -> None:
        """Turn the files, appended and closed, into a data set at `out`, and the held-out rows into `out/heldout`.

        The files of `meta["tokenizer"]` must be in `out` already.

        Raises:
            DataError: nothing is left to train on.
        """
        rows = np.fromfile(self._partial / _ROWS_BIN, dtype=ROW)
        held = np.isin(rows["prompt_hash"], np.array(heldout.hashes, dtype=np.uint64))
        if held.all():
            raise DataError(
                f"--heldout keeps all {len(rows)} conversations out of training: lower it, or give more data"
            )
        remove_folder(self._partial / _FINISHED)
        with new_folder(self._partial / _FINISHED) as folder:
            _describe(folder, rows[~held], {**meta, "fingerprint": f"{self.key}-train"}, report)
        remove_folder(self._partial / _HELDOUT)
        if held.any():
            subset = {**meta, TOKENIZER_KEY: f"../{meta[TOKENIZER_KEY]}", "fingerprint": f"{self.key}-heldout"}
            with new_folder(self._partial / _HELDOUT) as folder:
                self._write_subset(rows[held], folder, subset, report)
                write_text(folder / PROMPTS_FILE, heldout.as_jsonl())
        self._publish()

    def _publish(self) -> None:
        """Move what is complete in `partial` into `out`."""
        with storage_errors(self.out):
            (self.out / META_FILE).unlink(missing_ok=True)
            (self._partial / _STATE).unlink()
        remove_folder(self.out / _HELDOUT)
        if (self._partial / _HELDOUT).exists():
            move(self._partial / _HELDOUT, self.out / _HELDOUT)
        for name in (IDS_FILE, MASK_FILE):
            move(self._partial / name, self.out / name)
        for name in (ROWS_FILE, REPORT_FILE, META_FILE):
            move(self._partial / _FINISHED / name, self.out / name)
        discard_partial(self.out)

    def _write_subset(self, rows: NDArray[np.void], folder: Path, meta: dict[str, Any], report: dict[str, Any]) -> None:
        ids = np.memmap(self._partial / IDS_FILE, dtype=np.int32, mode="r")
        mask = np.memmap(self._partial / MASK_FILE, dtype=np.uint8, mode="r")
        where = np.concatenate([np.arange(r["start"], r["start"] + r["length"]) for r in rows])
        ids[where].tofile(folder / IDS_FILE)
        mask[where].tofile(folder / MASK_FILE)
        moved = rows.copy()
        moved["start"] = np.concatenate([[0], np.cumsum(rows["length"].astype(np.int64))[:-1]])
        _describe(folder, moved, meta, report)


def _describe(folder: Path, rows: NDArray[np.void], meta: dict[str, Any], report: dict[str, Any]) -> None:
    np.save(folder / ROWS_FILE, rows)
    write_text(folder / REPORT_FILE, _as_json(report))
    write_text(folder / META_FILE, _as_json({"format": FORMAT, **meta}))


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
