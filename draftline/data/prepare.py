"""Prepares a data set: the call behind `draftline prepare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftline.data.cache import dataset_key
from draftline.data.dataset import META_FILE, TOKENIZER_KEY, PreparedDataset
from draftline.data.pipeline import Answerer, Preparation, PrepareOptions, Progress
from draftline.data.readers import resolve_sources
from draftline.data.report import refuse_bad_data
from draftline.data.writer import OWN_FILES, DatasetWriter
from draftline.errors import DataError, Interrupted, TemplateError


def prepare(
    tokenizer: PreTrainedTokenizerBase,
    data: Sequence[str],
    out: Path,
    options: PrepareOptions,
    answerer: Answerer | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Prepare `data` into the folder `out`, and return the report that is also written there.

    A folder that holds the result of the same call already is left as it is. An interrupted call goes on where it
    stopped when it is repeated. With an `answerer`, its answers replace those of the data.

    Raises:
        DataError: no row can be used, too many are unreadable, or (`strict`) any is dropped.
        Interrupted: Ctrl-C; what was done is kept.
    """
    sources = resolve_sources(data)
    key = dataset_key(tokenizer, sources, asdict(options), answerer.identity() if answerer else None)
    if (out / META_FILE).exists():
        done = PreparedDataset.open(out)
        if done.meta["key"] == key:
            return done.report
    elif out.is_dir() and any(out.iterdir()) and not _may_replace(out):
        raise DataError(f"{out} is not empty and holds no prepared data; give a new folder with --out")
    writer = DatasetWriter(out, key)
    preparation = Preparation(tokenizer, options, answerer, writer)
    try:
        preparation.run(sources, progress)
    except KeyboardInterrupt as interrupt:
        raise Interrupted(
            f"stopped after {preparation.saved_rows} rows; they are kept, and the same command goes on from there"
        ) from interrupt
    finally:
        writer.close()
    if preparation.accounting.rows_out == 0 and preparation.first_refusal:
        raise TemplateError(preparation.first_refusal)
    refuse_bad_data(preparation.accounting, strict=options.strict, max_unreadable=options.max_unreadable)
    report = preparation.report()
    tokenizer.save_pretrained(out / TOKENIZER_KEY)
    writer.complete(preparation.heldout, {"key": key, TOKENIZER_KEY: TOKENIZER_KEY, **preparation.meta()}, report)
    return report


def _may_replace(out: Path) -> bool:
    """Whether a folder holds nothing but what an earlier or interrupted `prepare` left."""
    return all(path.name in OWN_FILES for path in out.iterdir())
