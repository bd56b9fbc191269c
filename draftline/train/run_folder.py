"""The folder of a run: who may write into it, and what identifies the run.

RUN/config.yaml     resolved settings; `--config RUN/config.yaml` repeats or continues the run
RUN/run.json        commit, versions, data, drafter shape, sessions: what one needs to trust the numbers
RUN/audit.json      what the audit said before the first step
RUN/metrics.jsonl, speed.jsonl, tensorboard/        see `log`
RUN/checkpoints/, last, best                        see `checkpoint`
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml

import draftline
from draftline.config import DFlashConfig, RunConfig, flatten, load_run_config
from draftline.errors import CheckpointError, ConfigError, StorageError
from draftline.storage import remove_leftovers, storage_errors, write_text
from draftline.train.checkpoint import Checkpoint
from draftline.train.history import CONFIG_FILE, IDENTITY_FILE

FREE_TO_CHANGE = (
    "data.path",
    "data.heldout_path",
    "target.name",
    "target.trust_remote_code",
    "target.device",
    "train.device",
    "train.log_every",
    "train.eval_every",
    "train.save_every",
    "train.keep_last",
    "pipeline.",
)
"""Settings that may differ on resume: they say where and how often, not what is learned. Data and target may have
moved; they are compared by their fingerprints. `train.max_steps` and `train.epochs` are not among them, because the
learning-rate schedule is laid over all steps."""

_LIBRARIES = ("draftline", "torch", "transformers", "safetensors", "numpy")


def check_run_folder(folder: Path, config: RunConfig, resume: bool) -> None:
    """Refuse a folder that holds something else, before anything expensive happens.

    Raises:
        StorageError: the folder is in use and `resume` is not set.
        ConfigError: on resume, a setting contradicts those of the run.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise StorageError(f"{folder} is a file: name another folder")
    if not resume:
        raise StorageError(f"{folder} is not empty: add --resume to continue its run, or name another folder")
    saved = saved_config(folder)
    if saved is not None:
        check_same_settings(folder, saved, config)
    elif [path for path in folder.iterdir() if not path.name.startswith(".")]:
        raise StorageError(f"{folder} holds something that is not a run (no config.yaml): name another folder")


def saved_config(folder: Path) -> RunConfig | None:
    """Settings of the run in a folder, none if there is no run."""
    path = folder / CONFIG_FILE
    return load_run_config(path) if path.exists() else None


def check_same_settings(folder: Path, saved: RunConfig, wanted: RunConfig) -> None:
    """Raise a `ConfigError` that names the first setting in which a run and the wish to continue it differ."""
    ours, theirs = flatten(saved.model_dump(mode="json")), flatten(wanted.model_dump(mode="json"))
    for key, value in ours.items():
        if value != theirs[key] and not key.startswith(FREE_TO_CHANGE):
            raise ConfigError(
                f"{key} is {value} in the run of {folder} and {theirs[key]} now: give the same settings "
                f"(--config {folder / CONFIG_FILE}), or another --out"
            )


def check_same_run(
    folder: Path, checkpoint: Checkpoint, config: RunConfig, drafter_config: DFlashConfig, data_fingerprint: str
) -> None:
    """Raise a `CheckpointError` or `ConfigError` if a checkpoint belongs to other settings, another target or data."""
    check_same_settings(folder, checkpoint.run_config, config)
    if checkpoint.data_fingerprint != data_fingerprint:
        raise CheckpointError(f"{folder} was trained on other data than is given now: give the same prepared folders")
    ours, theirs = checkpoint.drafter_config.model_dump(mode="json"), drafter_config.model_dump(mode="json")
    for key, value in ours.items():
        if value != theirs[key]:
            raise CheckpointError(f"{folder} has a drafter with {key} {value}, target and data now give {theirs[key]}")


def check_same_target(folder: Path, fingerprint: str) -> None:
    """Raise a `CheckpointError` if the run in a folder was begun with other weights of the target."""
    path = folder / IDENTITY_FILE
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if known.get("target", fingerprint) != fingerprint:
        raise CheckpointError(
            f"{folder} was trained for a target with other weights, or in another precision, than is given now: "
            "give the same checkpoint and target.dtype, or another --out"
        )


def write_identity(
    folder: Path,
    config: RunConfig,
    drafter_config: DFlashConfig,
    target: str,
    data: Mapping[str, Any],
    session: Mapping[str, Any],
) -> None:
    """Create the folder if need be, and write `config.yaml` and `run.json`; sessions of a resumed run accumulate.

    Arguments:
        target: fingerprint of the target's weights.
        data: what identifies the training and held-out data.
        session: what is known of this session, such as its first step and its threads.

    Raises:
        StorageError: the disk is full or refuses.
    """
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    path = folder / IDENTITY_FILE
    earlier = json.loads(path.read_text(encoding="utf-8"))["sessions"] if path.exists() else []
    started = {"started": datetime.now(UTC).isoformat(timespec="seconds"), "command": sys.argv}
    content = {
        "code": code_identity(),
        "versions": {name: importlib.metadata.version(name) for name in _LIBRARIES},
        "python": platform.python_version(),
        "machine": {"system": platform.platform(), "devices": _device_names()},
        "target": target,
        "data": dict(data),
        "config": config.model_dump(mode="json"),
        "drafter": drafter_config.model_dump(mode="json"),
        "sessions": [*earlier, {**started, **session}],
    }
    write_text(folder / CONFIG_FILE, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    write_text(path, json.dumps(content, indent=2) + "\n")


def code_identity() -> dict[str, str | None]:
    """Commit of the checkout that this package runs from and a hash of what differs from it; None outside of one."""
    root = Path(draftline.__file__).resolve().parent.parent
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root:
        return {"commit": None, "diff_sha256": None}
    commit, difference = _git(root, "rev-parse", "HEAD"), _git(root, "diff", "HEAD")
    changed = hashlib.sha256(difference.encode()).hexdigest() if difference else None
    return {"commit": commit, "diff_sha256": changed}


def _git(folder: Path, *words: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _device_names() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] or ["cpu"]
