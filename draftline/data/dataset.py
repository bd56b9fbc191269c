"""The prepared data on disk: flat arrays that are mapped into memory, not read.

    input_ids.bin   int32, all samples one after another
    loss_mask.bin   uint8, the same length
    rows.npy        one `ROW` per sample: where it starts and where it came from
    report.json     the accounting of `prepare`
    meta.json       what the samples were made with; written last, so a folder without it is not complete

Nothing but the row table is in memory, 40 bytes a sample, so a set of any size opens at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draftline.data.files import IDS_FILE, MASK_FILE, META_FILE, REPORT_FILE, ROWS_FILE
from draftline.errors import DataError
from draftline.records import Sample

TOKENIZER_KEY = "tokenizer"
"""Entry of the meta data: the tokenizer's folder, relative to the data set's."""
FORMAT = 1

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
        meta: `fingerprint`, `sources`, `template_hash`, `vocab_size`, `max_id`, and the options of `prepare`.
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
            meta = json.loads((folder / META_FILE).read_text())
            report = json.loads((folder / REPORT_FILE).read_text())
            rows = np.load(folder / ROWS_FILE, mmap_mode="r")
            ids, mask = _map(folder / IDS_FILE, np.dtype(np.int32)), _map(folder / MASK_FILE, np.dtype(np.uint8))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{folder} is not a complete prepared data set; run `draftline prepare ... --out` with this folder"
            ) from error
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


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=dtype)  # an empty file cannot be mapped
    # Copy on write: torch wants memory that it may write to, and nothing reaches the file.
    return np.memmap(path, dtype=dtype, mode="c")
