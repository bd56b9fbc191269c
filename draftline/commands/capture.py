"""`draftline capture`: the target's states of a data set, on disk, for any number of runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from draftline.commands.train import check_places, examine, train_settings
from draftline.errors import ConfigError, StorageError
from draftline.options import CaptureCommand

BORROWED_FILE = "target.json"


def capture(options: CaptureCommand) -> None:
    """Run the target over a data set and keep its states on disk; `draftline train --states` reads them."""
    words = [*options.flags.words(), *options.settings, f"pipeline.states_path={json.dumps(str(options.out))}"]
    if options.dtype is not None:
        words.append(f"pipeline.states_dtype={options.dtype}")
    config = train_settings(words, recipe=options.recipe, config=options.config)
    if config.pipeline.mode == "processes":
        raise ConfigError("pipeline.mode says how a run overlaps and does nothing here: give --loops, the writers")
    check_places(config)
    check_place(options.out)
    from draftline import run as runs  # slow to load: what can be refused without it is by now

    run = runs.load_run(config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"mode": "inline"})}))
    if run.target.has_layers:
        examine(run, options.allow, WHAT_CAPTURES)
    run.fill_stores(options.loops, repair=options.repair)
    print(json.dumps([store.describe() for store in run.stores.values()], ensure_ascii=False))


WHAT_CAPTURES: Sequence[str] = ("TGT", "DAT")
"""Areas of the audit that look at what a capture depends on."""


def check_place(out: Path) -> None:
    """Refuse a place that holds something else than states.

    Raises:
        StorageError: naming it.
    """
    if out.exists() and not out.is_dir():
        raise StorageError(f"{out} is a file: name a folder for states")
    strange = [
        path.name
        for path in (sorted(out.iterdir()) if out.exists() else [])
        if path.name != BORROWED_FILE and not path.name.startswith(".") and not (path / "manifest.json").is_file()
    ]
    if strange:
        raise StorageError(f"{out} holds {strange[0]}, which are no states: name another folder")
