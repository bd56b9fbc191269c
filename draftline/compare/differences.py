"""In what groups of runs differ besides their curves, and what that forbids to compare. Read from run.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftline.compare.trajectory import Trajectory
from draftline.config import flatten

Area = Literal["configuration", "data", "target and drafter", "environment"]

AREAS: Mapping[str, Area] = {
    "config": "configuration",
    "data": "data",
    "target": "target and drafter",
    "drafter": "target and drafter",
    "code": "environment",
    "versions": "environment",
    "python": "environment",
    "machine": "environment",
    "session": "environment",
}
"""Part of run.json -> where it is listed."""

SEED = "config.train.seed"

BLOCK_KEYS = ("drafter.block_size", "drafter.sample_from_anchor")
"""Which slots a block predicts. Averages over slots, and streaks, mean something else where these differ."""

TARGET_KEYS = ("target", "drafter.vocab_size", "drafter.hidden_size", "drafter.num_target_layers")
"""Whose predictions are to be met. No figure of quality can be compared where these differ."""

HELDOUT_KEYS = ("data.fingerprint", "data.heldout_conversations")


@dataclass(frozen=True)
class Difference:
    """One thing in which groups differ.

    Attributes:
        area: kind of thing.
        key: its name in run.json.
        values: per group, its distinct values, as JSON; empty where run.json does not say.
    """

    area: Area
    key: str
    values: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Identities:
    """What run.json says about groups of runs.

    Attributes:
        names: of the groups.
        facts: per group, per run: flat key -> value as JSON.
    """

    names: tuple[str, ...]
    facts: tuple[tuple[Mapping[str, str], ...], ...]

    @staticmethod
    def of(groups: Mapping[str, Sequence[Trajectory]]) -> Identities:
        """Flatten the identities of all runs."""
        facts = tuple(tuple(_facts(run.identity) for run in runs) for runs in groups.values())
        return Identities(tuple(groups), facts)

    def differences(self) -> tuple[Difference, ...]:
        """Everything in which two groups differ, in the order of `AREAS`."""
        keys = list(dict.fromkeys(key for group in self.facts for run in group for key in run))
        found = [Difference(_area(key), key, tuple(self._values(group, key) for group in self.facts)) for key in keys]
        order = list(dict.fromkeys(AREAS.values()))
        differing = [item for item in found if len(set(item.values)) > 1]
        return tuple(sorted(differing, key=lambda item: order.index(item.area)))

    def differ_in(self, keys: Sequence[str]) -> list[str]:
        """Those keys that have more than one value among all runs that know them."""
        return [key for key in keys if len({run[key] for group in self.facts for run in group if key in run}) > 1]

    def notes(self) -> list[str]:
        """What limits the comparison."""
        notes = []
        if self.differ_in(HELDOUT_KEYS):
            notes.append("The runs have different data: held-out values were measured on different text")
        if self.differ_in(["machine.system", "machine.devices"]):
            notes.append("The runs had different machines: what is compared at the same second compares these as well")
        for name, group in zip(self.names, self.facts, strict=True):
            notes += self._group_notes(name, group)
        return notes

    def _group_notes(self, name: str, group: Sequence[Mapping[str, str]]) -> list[str]:
        notes = []
        seeds = [run[SEED] for run in group if SEED in run]
        if len(set(seeds)) < len(seeds):
            notes.append(f"Runs of {name} share a seed: they show less than what seeds change")
        mixed = [key for key in dict.fromkeys(key for run in group for key in run) if _area(key) == "configuration"]
        mixed = [key for key in mixed if key != SEED and len(self._values(group, key)) > 1]
        if mixed:
            notes.append(f"Runs of {name} differ among themselves in {', '.join(_short(key) for key in mixed)}")
        return notes

    def _values(self, group: Sequence[Mapping[str, str]], key: str) -> tuple[str, ...]:
        return tuple(sorted({run[key] for run in group if key in run}))


def _facts(identity: Mapping[str, Any]) -> dict[str, str]:
    """Flat key -> JSON text; of the sessions only how the last one ran."""
    tree: dict[str, Any] = {key: identity[key] for key in AREAS if key in identity}
    sessions = identity.get("sessions") or [{}]
    known = ("cores", "threads_per_loop", "allowed")
    tree["session"] = {key: sessions[-1][key] for key in known if key in sessions[-1]}
    return {key: json.dumps(value, ensure_ascii=False) for key, value in flatten(tree).items()}


def _area(key: str) -> Area:
    return AREAS[key.partition(".")[0]]


def _short(key: str) -> str:
    return key.removeprefix("config.")
