"""In which modes a drafter was trained: from the prepared data of a run, or from the card of an exported folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from draftline.data.chat_mode import ChatMode
from draftline.data.dataset import PreparedDataset
from draftline.errors import DataError
from draftline.train.checkpoint import StateFile, checkpoint_folder, read_state

CARD_KEY = "draftline"
"""Entry of the card's front matter that programs of Draftline read; other readers of cards ignore it."""

_CARD = "README.md"


def card_entry(mode: ChatMode) -> dict[str, Any]:
    """What the front matter of a card says of the modes."""
    return {CARD_KEY: {"chat_mode": asdict(mode)}}


def trained_mode(folder: Path) -> ChatMode | None:
    """The modes of the data that the drafter in a folder was trained on; None if nothing says them.

    A run or checkpoint knows its data, which must still lie there unchanged; an exported folder has its card.
    """
    checkpoint = checkpoint_folder(folder)
    if checkpoint is not None:
        return _of_run(read_state(checkpoint))
    return _of_card(folder / _CARD)


def _of_run(state: StateFile) -> ChatMode | None:
    path = state["run_config"].get("data", {}).get("path")
    try:
        data = PreparedDataset.open(path) if path is not None else None
    except DataError:  # moved or deleted: then nothing is known
        return None
    if data is None or data.fingerprint not in state["data_fingerprint"].split("+"):
        return None
    return ChatMode.of_prepared(data.meta, data.report)


def _of_card(path: Path) -> ChatMode | None:
    try:
        _, front_matter, _ = path.read_text(encoding="utf-8").split("---\n", 2)
        return ChatMode.from_json(yaml.safe_load(front_matter)[CARD_KEY]["chat_mode"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):  # no card, or somebody else's
        return None
