"""Prepares a data set: the call behind `draftline prepare`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftline.data.cache import dataset_key, tokenizer_hash
from draftline.data.dataset import TOKENIZER_KEY, PreparedDataset
from draftline.data.pipeline import Answerer, Preparation, PrepareOptions, Progress
from draftline.data.readers import is_dataset, resolve_sources
from draftline.data.report import refuse_bad_data
from draftline.data.writer import PARTIAL, DatasetWriter, discard_partial, is_own_folder
from draftline.errors import DataError, Interrupted, StorageError, TemplateError
from draftline.storage import storage_errors


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
        DataError: no row can be used, too many are unreadable, (`strict`) any is dropped, or `out` holds other data.
        StorageError: the disk is full or refuses; what was done is kept.
        Interrupted: Ctrl-C; what was done is kept.
    """
    sources = resolve_sources(data)
    if options.split is not None and not any(is_dataset(source) for source in sources):
        raise DataError(f"--split {options.split} is for Hugging Face data sets, and the data has none: leave it out")
    tokenizer_identity = tokenizer_hash(tokenizer)
    key = dataset_key(tokenizer_identity, sources, asdict(options), answerer.identity() if answerer else None)
    done = _finished_report(out, key)
    if done is not None:
        discard_partial(out)
        return done
    try:
        with closing(DatasetWriter(out, key)) as writer:
            preparation = Preparation(tokenizer, options, answerer, writer)
            _go_through(preparation, sources, progress)
        report = preparation.report()
        with storage_errors(out / TOKENIZER_KEY):
            tokenizer.save_pretrained(out / TOKENIZER_KEY)
        meta = {"key": key, TOKENIZER_KEY: TOKENIZER_KEY, "tokenizer_hash": tokenizer_identity, **preparation.meta()}
        writer.complete(preparation.heldout, meta, report)
    except DataError:
        discard_partial(out)
        raise
    except StorageError as error:
        if not (out / PARTIAL).exists():
            raise
        raise StorageError(
            f"{error}; what is done is kept in {out / PARTIAL}, and the same command goes on from there"
        ) from error
    return report


def _go_through(preparation: Preparation, sources: Sequence[str | Path], progress: Progress | None) -> None:
    """Run to the end of the data, and refuse data that is not fit to be trained on."""
    try:
        preparation.run(sources, progress)
    except KeyboardInterrupt as interrupt:
        raise Interrupted(
            f"stopped; {preparation.saved_rows} prepared rows and all finished answers are kept, "
            "and the same command goes on from there"
        ) from interrupt
    if preparation.accounting.rows_out == 0 and preparation.first_refusal:
        raise TemplateError(preparation.first_refusal)
    options = preparation.options
    refuse_bad_data(preparation.accounting, strict=options.strict, max_unreadable=options.max_unreadable)


def _finished_report(out: Path, key: str) -> dict[str, Any] | None:
    """The report of an earlier call with this key; None if `out` may be written.

    A data set of another format, which no command can read, may be replaced.
    """
    if not out.is_dir() or not any(out.iterdir()):
        return None
    if not is_own_folder(out):
        raise DataError(f"{out} is not empty and holds no prepared data; give a new folder with --out")
    try:
        done = PreparedDataset.open(out)
    except DataError:
        return None
    if done.meta["key"] != key:
        raise DataError(
            f"{out} holds data that was prepared from other files, with other options or by another version; "
            "delete it, or give a new folder with --out"
        )
    return done.report
