"""The folder of a run: what lies in it, with the writer and the reader of every file side by side.

    RUN/config.yaml     resolved settings; `--config RUN/config.yaml` repeats or continues the run
    RUN/run.json        commit, versions, data, drafter shape, sessions: what one needs to trust the numbers
    RUN/audit.json      what the audit said before the first step, as `draftline audit --json` writes it
    RUN/metrics.jsonl   what was learned: the same, line by line, however often the run was interrupted (but for
                        `seconds`); a line averages over all steps since the line before
    RUN/speed.jsonl     how fast, and who waited for whom: different each time
    RUN/tensorboard/    the scalars of both
    RUN/checkpoints/step-000200/    see `checkpoint`
    RUN/last -> checkpoints/step-000200      RUN/best -> checkpoints/step-000150

No other file of the package opens a run folder by name. A run may be read while it still writes, and after a crash.
What cannot be used is named in one line. Does not import torch when it is loaded: `report` and `compare` start at once.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import yaml
from pydantic import ValidationError

import draftline
from draftline.config import DFlashConfig, RunConfig, flatten, parse_run_config
from draftline.errors import CheckpointError, ConfigError, DataError, StorageError
from draftline.storage import point_link, reason_of, remove_leftovers, storage_errors, write_text
from draftline.train.log import Columns, JsonLines, read_columns

if TYPE_CHECKING:
    from draftline.data.split import RunData
    from draftline.train.checkpoint import Checkpoint

CONFIG_FILE, IDENTITY_FILE, AUDIT_FILE = "config.yaml", "run.json", "audit.json"
METRICS_FILE, SPEED_FILE = "metrics.jsonl", "speed.jsonl"
TENSORBOARD_FOLDER, CHECKPOINTS_FOLDER = "tensorboard", "checkpoints"
STATE_FILE = "state.json"
"""Of a checkpoint; what makes a folder one."""

State = Literal["finished", "running", "stopped", "started"]

PATIENCE = 60.0
"""Seconds beyond its usual pause after which a run that has written nothing more counts as stopped."""

FREE_TO_CHANGE = (
    "data.path",
    "data.heldout_path",
    "target.name",
    "target.trust_remote_code",
    "target.device",
    "train.device",
    "train.sharding",
    "train.log_every",
    "train.trackers",
    "train.eval_every",
    "train.save_every",
    "train.keep_last",
    "pipeline.",
)
"""Settings that may differ on resume: they say where and how often, not what is learned. Data and target may have
moved; they are compared by their fingerprints. `train.max_steps` and `train.epochs` are not among them, because the
learning-rate schedule is laid over all steps."""

_LIBRARIES = ("draftline", "torch", "transformers", "safetensors", "numpy")
_SECTIONS = ("code", "versions", "machine", "data", "config", "drafter")
"""Parts of run.json that hold values by name."""
_STEP_FOLDER = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class RunFolder:
    """A folder that holds a run, or is to hold one.

    What is read is kept: make another object to see what a run has written meanwhile.

    Attributes:
        path: of the folder, which need not exist.
        now: when the object was made, against which `state` judges.
    """

    path: Path
    now: datetime = field(default_factory=lambda: datetime.fromtimestamp(time.time(), UTC))

    @staticmethod
    def open(path: Path) -> RunFolder:
        """A folder that holds a run whose settings and identity can be read.

        Raises:
            CheckpointError: it does not.
        """
        run = RunFolder(path)
        if not run.exists:
            reason = f"it has no {CONFIG_FILE}" if path.is_dir() else "there is no such folder"
            raise CheckpointError(f"{path} is not a run ({reason}): give the folder that `draftline train --out` wrote")
        run.settings, run.identity  # noqa: B018  # both are read now, so that what is wrong with them shows here
        return run

    # What a run is

    @property
    def exists(self) -> bool:
        """Whether a run has begun here: its settings are written before everything else."""
        return (self.path / CONFIG_FILE).exists()

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Content of config.yaml, which another version may have written: sections of values by name.

        Raises:
            CheckpointError: it cannot be read, or holds no settings.
        """
        path = self.path / CONFIG_FILE
        remedy = f"restore it from a copy, or from `config` in {IDENTITY_FILE}"
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise CheckpointError(f"{path} cannot be read ({reason_of(error)}): {remedy}") from error
        sections = [content.get(name, {}) for name in RunConfig.model_fields] if isinstance(content, dict) else [None]
        if not content or not all(isinstance(section, dict) for section in sections):
            raise CheckpointError(f"{path} holds no settings by name: {remedy}")
        return dict(content)

    def config(self) -> RunConfig | None:
        """Settings of the run, none if there is no run.

        Raises:
            CheckpointError: they cannot be read.
            ConfigError: they are not of this version.
        """
        if not self.exists:
            return None
        try:
            return parse_run_config(dict(self.settings))
        except ConfigError as error:
            raise ConfigError(f"{self.path / CONFIG_FILE}: {error}") from error

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        """Content of run.json; nothing if the run was stopped before it was written.

        Raises:
            CheckpointError: it cannot be read, or is built otherwise than `draftline train` does.
        """
        path = self.path / IDENTITY_FILE
        if not path.exists():
            return {}
        remedy = "restore it from a copy, or delete it: then nothing is known of earlier sessions, target and data"
        content = _json_object(path, remedy)
        sessions = content.get("sessions", [])
        parts = [content.get(name, {}) for name in _SECTIONS] + (sessions if isinstance(sessions, list) else [None])
        if not all(isinstance(part, dict) for part in parts) or not isinstance(content.get("target"), str | None):
            raise CheckpointError(f"{path} is not what `draftline train` writes: {remedy}")
        return content

    @cached_property
    def audit(self) -> Mapping[str, Any] | None:
        """What the audit said before the first step; None if there is no audit, as of earlier versions.

        Raises:
            CheckpointError: it cannot be read, or is not a result of an audit.
        """
        if not self.audit_path.exists():
            return None
        remedy = "restore it from a copy, or delete it"
        content = _json_object(self.audit_path, remedy)
        if not all(isinstance(content.get(name), list) for name in ("findings", "checks")):
            raise CheckpointError(f"{self.audit_path} is not what `draftline train` writes: {remedy}")
        return content

    @property
    def audit_path(self) -> Path:
        """File of `audit`, for messages about what is in it."""
        return self.path / AUDIT_FILE

    @property
    def allowed(self) -> tuple[str, ...]:
        """Codes of audit findings in spite of which a session of the run was started, sorted."""
        sessions = self.identity.get("sessions", [])
        return tuple(sorted({str(code) for session in sessions for code in session.get("allowed") or ()}))

    @property
    def target_name(self) -> str:
        """As the settings name the target."""
        return str(self.settings.get("target", {}).get("name"))

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, None if run.json does not say."""
        steps = self.identity.get("data", {}).get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def seams(self) -> tuple[int, ...]:
        """Steps that were done where each extension of the run begins."""
        return tuple(self.identity.get("data", {}).get("seams", ()))

    @property
    def drafter(self) -> DFlashConfig | None:
        """Shape of the drafter, None if run.json does not say.

        Raises:
            CheckpointError: run.json describes it in words of another version.
        """
        try:
            return DFlashConfig.model_validate(self.identity["drafter"]) if "drafter" in self.identity else None
        except ValidationError as error:
            place = ".".join(str(part) for part in error.errors()[0]["loc"])
            raise CheckpointError(
                f"{self.path / IDENTITY_FILE} describes the drafter as another version of Draftline does ({place}): "
                "leave out --evaluation, or use that version"
            ) from error

    def data(self) -> RunData:
        """What the run was trained on and measured with, if it still lies where the settings of the run say.

        Raises:
            CheckpointError: the folder holds no run, or its settings or identity cannot be read.
            ConfigError: the settings name no data.
            DataError: it is not there any more, damaged, or other data than then.
        """
        from draftline.data.dataset import open_data
        from draftline.data.split import choose_conversations

        config = RunFolder.open(self.path).config()
        assert config is not None, "open refuses a folder without settings"
        data = choose_conversations(config, *open_data(config))
        if self.identity.get("data", {}).get("fingerprint", data.fingerprint) != data.fingerprint:
            raise DataError(
                f"{config.data.path} holds other data now than the run of {self.path} was trained on: restore it"
            )
        return data

    # What it has learned

    @cached_property
    def metrics(self) -> Columns:
        """What was learned."""
        return read_columns(self.path / METRICS_FILE)

    @cached_property
    def speed(self) -> Columns:
        """How fast."""
        return read_columns(self.path / SPEED_FILE)

    @property
    def metrics_path(self) -> Path:
        """File of `metrics`, for messages about its lines."""
        return self.path / METRICS_FILE

    @property
    def has_metrics(self) -> bool:
        """Whether a session has begun to write lines."""
        return self.metrics_path.exists()

    @property
    def step(self) -> int:
        """Last step of which there is a line."""
        return self.metrics.last_step

    @property
    def seconds(self) -> float:
        """Time that the run has taken up to its last line, earlier sessions included."""
        values = self.metrics["seconds"].values
        return float(values[-1]) if len(values) else 0.0

    @cached_property
    def last_written(self) -> datetime:
        """When the newest line was written."""
        newest = self.path / (METRICS_FILE if self.has_metrics else CONFIG_FILE)
        return datetime.fromtimestamp(newest.stat().st_mtime, UTC)

    @property
    def state(self) -> State:
        """Whether the run is at its end; if not, whether it still writes lines as often as it did."""
        if self.total_steps is not None and self.step >= self.total_steps:
            return "finished"
        pauses = np.diff(self.metrics["seconds"].values, prepend=0.0)[-20:]
        patience = timedelta(seconds=PATIENCE + 3 * float(pauses.max(initial=0.0)))
        if self.now - self.last_written > patience:
            return "stopped"
        return "running" if self.metrics.whole else "started"

    @property
    def damage(self) -> list[str]:
        """A sentence for each file of lines that is missing, empty or torn."""
        files = ((METRICS_FILE, self.metrics), (SPEED_FILE, self.speed))
        return [sentence for name, columns in files if (sentence := _damage(name, columns))]

    @property
    def growing_files(self) -> tuple[Path, ...]:
        """Files that change while a run goes on, there or not."""
        return tuple(self.path / name for name in (METRICS_FILE, SPEED_FILE, IDENTITY_FILE, AUDIT_FILE))

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's event files."""
        return self.path / TENSORBOARD_FOLDER

    # Its checkpoints

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / CHECKPOINTS_FOLDER

    def checkpoint(self, which: Literal["best", "last", "newest"]) -> Path | None:
        """Folder of a checkpoint, none if there is none.

        `best` has the highest held-out streak. `last` and `newest` differ only where the process died between writing
        a checkpoint and pointing the link to it.
        """
        if which == "newest":
            steps = self.checkpoint_steps()
            return self.step_folder(steps[-1]) if steps else None
        link = self.path / which
        return link if link.is_dir() else None

    def checkpoint_steps(self) -> list[int]:
        """Steps of which there is a checkpoint, ascending."""
        matches = (_STEP_FOLDER.fullmatch(path.name) for path in self.checkpoints.glob("step-*"))
        return sorted(int(match[1]) for match in matches if match)

    def step_folder(self, step: int) -> Path:
        """Place of the checkpoint of a step."""
        return self.checkpoints / f"step-{step:06d}"

    def point(self, which: Literal["best", "last"], step: int) -> None:
        """Make a link name the checkpoint of a step.

        Raises:
            StorageError: the disk refuses, or there is no link but a folder, as copies make that follow links.
        """
        link = self.path / which
        if link.is_dir() and not link.is_symlink():
            raise StorageError(f"{link} is a folder and not a link into {CHECKPOINTS_FOLDER}/: delete it")
        point_link(link, self.step_folder(step))

    # Its writers, and what they refuse

    def check_usable(self, config: RunConfig, resume: bool) -> None:
        """Refuse a folder that holds something else, or is not ours to write, before anything expensive happens.

        Raises:
            StorageError: the folder is in use and `resume` is not set, or cannot be written.
            CheckpointError: on resume, the settings of the run cannot be read.
            ConfigError: on resume, a setting contradicts those of the run.
        """
        place = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not os.access(place, os.W_OK):
            raise StorageError(f"{self.path} cannot be written: name a folder of yours")
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return
        if not self.path.is_dir():
            raise StorageError(f"{self.path} is a file: name another folder")
        if not resume:
            raise StorageError(f"{self.path} is not empty: add --resume to continue its run, or name another folder")
        saved = self.config()
        if saved is not None:
            self.check_same_settings(saved, config)
        elif [path for path in self.path.iterdir() if not path.name.startswith(".")]:
            raise StorageError(f"{self.path} holds something that is not a run (no {CONFIG_FILE}): name another folder")

    def check_same_settings(self, saved: RunConfig, wanted: RunConfig) -> None:
        """Raise a `ConfigError` that names the first setting in which the run and the wish to continue it differ."""
        ours, theirs = flatten(saved.model_dump(mode="json")), flatten(wanted.model_dump(mode="json"))
        for key, value in ours.items():
            if key == "train.extensions" and theirs[key][: len(value)] == value:
                continue  # some more may follow
            if value != theirs[key] and not key.startswith(FREE_TO_CHANGE):
                raise ConfigError(
                    f"{key} is {value} in the run of {self.path} and {theirs[key]} now: give the same settings "
                    f"(--config {self.path / CONFIG_FILE}), or another --out"
                )

    def check_same_run(
        self, checkpoint: Checkpoint, config: RunConfig, drafter_config: DFlashConfig, data_fingerprint: str
    ) -> None:
        """Refuse a checkpoint of this folder that belongs to other settings, another target or other data.

        Raises:
            ConfigError: a setting differs.
            CheckpointError: data or drafter differ.
        """
        self.check_same_settings(checkpoint.run_config, config)
        if checkpoint.data_fingerprint != data_fingerprint:
            raise CheckpointError(
                f"{self.path} was trained on other data than is given now: give the same prepared folders"
            )
        ours, theirs = checkpoint.drafter_config.model_dump(mode="json"), drafter_config.model_dump(mode="json")
        for key, value in ours.items():
            if value != theirs[key]:
                raise CheckpointError(
                    f"{self.path} has a drafter with {key} {value}, target and data now give {theirs[key]}: "
                    "give the same target and data, or another --out"
                )

    def check_same_target(self, fingerprint: str) -> None:
        """Raise a `CheckpointError` if the run was begun with other weights of the target, or run.json is damaged."""
        if self.identity.get("target", fingerprint) != fingerprint:
            raise CheckpointError(
                f"{self.path} was trained for a target with other weights, or in another precision, than is given "
                "now: give the same checkpoint and target.dtype, or another --out"
            )

    def begin_session(
        self,
        config: RunConfig,
        drafter_config: DFlashConfig,
        target: str,
        data: Mapping[str, Any],
        session: Mapping[str, Any],
    ) -> None:
        """Create the folder if need be, and write config.yaml and run.json; sessions of a resumed run accumulate.

        Args:
            target: fingerprint of the target's weights.
            data: what identifies the training and held-out data.
            session: what is known of this session, such as its first step and its threads.

        Raises:
            StorageError: the disk is full or refuses.
        """
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.path)
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
            "sessions": [*self.identity.get("sessions", []), {**started, **session}],
        }
        write_text(self.path / CONFIG_FILE, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        _write_json(self.path / IDENTITY_FILE, content)

    def write_audit(self, report: Mapping[str, Any]) -> None:
        """Keep what the audit said, as its `to_json` gives it."""
        _write_json(self.audit_path, report)

    def continue_lines(self, last_step: int, logged_step: int) -> tuple[JsonLines, JsonLines]:
        """Open metrics.jsonl and speed.jsonl for lines of steps after `last_step`; see `JsonLines`."""
        with ExitStack() as undo:
            metrics = JsonLines(self.metrics_path, last_step, logged_step)
            undo.callback(metrics.close)
            speed = JsonLines(self.path / SPEED_FILE, last_step)
            undo.pop_all()
        return metrics, speed


def _damage(name: str, columns: Columns) -> str:
    if not columns.lines:
        return f"{name} is missing or empty: nothing of it can be shown yet."
    if columns.whole == columns.lines:
        return ""
    behind = columns.lines - columns.whole - 1
    rest = f", and the {behind:,} behind it are not shown" if behind else ""
    return (
        f"{columns.whole:,} of the {columns.lines:,} lines of {name} are whole; "
        f"line {columns.whole + 1:,} is torn{rest}. `draftline train --resume` cuts it off and goes on."
    )


def _json_object(path: Path, remedy: str) -> dict[str, Any]:
    """A JSON file that holds values by name, or a `CheckpointError` that ends with the remedy."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({reason_of(error)}): {remedy}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not what `draftline train` writes: {remedy}")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
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
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] or ["cpu"]


def checkpoint_folder(folder: Path) -> Path | None:
    """The checkpoint that a run of ours offers: its best, else its last; the folder itself if it is one; else None."""
    run = RunFolder(folder)
    for place in (folder, run.checkpoint("best"), run.checkpoint("last")):
        if place is not None and (
            (place / STATE_FILE).is_file() or place.resolve().parent == run.checkpoints.resolve()
        ):
            return place  # one of ours without its state is damaged; reading it says so
    return None
