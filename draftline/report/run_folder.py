"""What the folder of a run says about it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from pydantic import ValidationError

from draftline.config import DFlashConfig, RunConfig, flatten
from draftline.errors import CheckpointError
from draftline.train.history import (
    CONFIG_FILE,
    IDENTITY_FILE,
    METRICS_FILE,
    SPEED_FILE,
    Columns,
    read_columns,
    read_identity,
)

Row = list[str]
State = Literal["finished", "running", "stopped", "started"]

PATIENCE = 60.0
"""Seconds beyond its usual pause after which a run that has written nothing more counts as stopped."""


@dataclass(frozen=True)
class RunFolder:
    """A run as its folder shows it.

    Attributes:
        settings: content of config.yaml.
        identity: content of run.json; empty if the run was stopped before it was written.
        metrics: what was learned.
        speed: how fast.
        last_written: when the newest line was written.
        now: when all this was read.
    """

    folder: Path
    settings: Mapping[str, Any]
    identity: Mapping[str, Any]
    metrics: Columns
    speed: Columns
    last_written: datetime
    now: datetime

    @property
    def step(self) -> int:
        """Last step of which there is a line."""
        return self.metrics.last_step

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, None if run.json does not say."""
        steps = self.identity.get("data", {}).get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def target_name(self) -> str:
        """As the settings name the target."""
        return str(self.settings.get("target", {}).get("name"))

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
                f"{self.folder / IDENTITY_FILE} describes the drafter as another version of Draftline does ({place}): "
                "leave out --evaluation, or use that version"
            ) from error

    @property
    def seconds(self) -> float:
        """Time that the run has taken up to its last line, earlier sessions included."""
        values = self.metrics["seconds"].values
        return float(values[-1]) if len(values) else 0.0

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
        return [
            sentence
            for name, columns in ((METRICS_FILE, self.metrics), (SPEED_FILE, self.speed))
            if (sentence := _damage(name, columns))
        ]


def read_run(folder: Path) -> RunFolder:
    """Read a run's folder; lines that are torn are counted, and end what is read of their file.

    Raises:
        CheckpointError: it is not a folder of a run, or its settings cannot be read.
    """
    if not (folder / CONFIG_FILE).is_file():
        reason = f"it has no {CONFIG_FILE}" if folder.is_dir() else "there is no such folder"
        raise CheckpointError(f"{folder} is not a run ({reason}): give the folder that `draftline train --out` wrote")
    metrics = folder / METRICS_FILE
    newest = metrics if metrics.exists() else folder / CONFIG_FILE
    return RunFolder(
        folder=folder,
        settings=_mapping(folder / CONFIG_FILE),
        identity=read_identity(folder),
        metrics=read_columns(metrics),
        speed=read_columns(folder / SPEED_FILE),
        last_written=datetime.fromtimestamp(newest.stat().st_mtime, UTC),
        now=datetime.fromtimestamp(time.time(), UTC),
    )


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


def _mapping(path: Path) -> dict[str, Any]:
    """Content of a YAML file that holds a mapping."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} cannot be read ({reason[:120]}): restore it from a copy") from error
    sections = [content.get(name, {}) for name in RunConfig.model_fields] if isinstance(content, dict) else [None]
    if not content or not all(isinstance(section, dict) for section in sections):
        raise CheckpointError(f"{path} holds no settings by name: restore it from a copy")
    return content


def configuration(run: RunFolder) -> tuple[list[Row], list[Row]]:
    """Settings that differ from the published recipe, with its value beside them; and all settings."""
    ours, published = flatten(run.settings), flatten(RunConfig().model_dump(mode="json"))
    changed = [
        [key, _text(value), _text(published[key])]
        for key, value in ours.items()
        if key in published and value != published[key] and key != "target.name"  # a recipe is for any target
    ]
    return changed, [[key, _text(value)] for key, value in ours.items()]


def environment(run: RunFolder) -> list[Row]:
    """What the run ran on, and what identifies its code, target and data; nothing without run.json."""
    identity = run.identity
    if not identity:
        return []
    code, machine = identity.get("code", {}), identity.get("machine", {})
    changes = f", with changes {str(code['diff_sha256'])[:12]}" if code.get("diff_sha256") else ""
    found = {
        "code": f"{code['commit']}{changes}" if code.get("commit") else "not a checkout",
        "versions": "\n".join(f"{name} {version}" for name, version in identity.get("versions", {}).items()),
        "Python": identity.get("python"),
        "system": machine.get("system"),
        "devices": "\n".join(map(str, machine.get("devices") or [])),
        "target's weights": identity.get("target"),
        "data": identity.get("data", {}).get("fingerprint"),
    }
    return [[name, str(value)] for name, value in found.items() if value]


def sessions(run: RunFolder) -> list[Row]:
    """One row per time the run was started or continued."""
    return [
        [
            str(session.get("started", "")),
            str(session.get("first_step", "")),
            f"{session.get('cores', '?')} / {session.get('threads_per_loop', '?')}",
            " ".join(map(str, session.get("command") or [])),
        ]
        for session in run.identity.get("sessions", [])
    ]


def drafter_shape(run: RunFolder) -> list[Row]:
    """The drafter's sizes."""
    return [[key.replace("_", " "), _text(value)] for key, value in run.identity.get("drafter", {}).items()]


def duration(seconds: float) -> str:
    """`44 min 31 s`, the two largest units."""
    whole = round(seconds)
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {name}"
    return f"{seconds:.3g} s"


def moment(when: datetime) -> str:
    """A time for people."""
    return when.strftime("%Y-%m-%d %H:%M:%S UTC")


def _text(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value)
