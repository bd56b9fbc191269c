"""What can be said of a drafter's folder without a tensor: commands refuse a wrong one before torch is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftline.errors import CheckpointError
from draftline.train.run_folder import RunFolder, checkpoint_folder

PROOF_FILE = "draftline_proof.json"


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a drafter's folder.

    Raises:
        CheckpointError: there is none, or it is not JSON.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: its config.json cannot be read; give a drafter's folder")
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): {folder} is not a drafter, or only half of one was copied"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): copy or export the drafter again") from error
    if not isinstance(tree, dict) or not isinstance(tree.get("dflash_config", {}), dict):
        raise CheckpointError(f"{path} does not describe a drafter: give a folder written by `draftline export`")
    return tree


def check_drafter(folder: Path) -> Path:
    """The folder, if it is a run, a checkpoint or has a configuration; what is in them is read later.

    Raises:
        CheckpointError: it is none of these.
    """
    if checkpoint_folder(folder) is None and not RunFolder(folder).exists:
        read_config(folder)
    return folder


def check_proof(folder: Path) -> Path:
    """The folder, if it has a proof.

    Raises:
        CheckpointError: it has none.
    """
    if not (folder / PROOF_FILE).exists():
        raise CheckpointError(f"{folder} has no proof, as folders of other programs and older ones: export it again")
    return folder
