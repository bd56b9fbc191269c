"""What the folder of a run says about it, as rows of tables."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from draftline.config import RunConfig, flatten
from draftline.train.run_folder import RunFolder

Row = list[str]


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
