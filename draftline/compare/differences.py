"""In what groups of runs differ besides their curves, and what that forbids to compare. Read from run.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftline.compare.trajectory import Trajectory
from draftline.config import flatten

Area = Literal["configuration", "data", "target and drafter", "environment"]

AREA_OF_KEY: Mapping[str, Area] = {
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

ANCHORS_KEY, ANCHORS_SEED_KEY = "config.train.num_anchors", "data.heldout_anchors_seed"
"""What the places depend on at which held-out text is measured."""


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
        """All in which two groups differ, in the order of `AREA_OF_KEY`; nothing of a group without any run.json."""
        known = [any(group) for group in self.facts]
        keys = list(dict.fromkeys(key for group in self.facts for run in group for key in run))
        found = [Difference(_area(key), key, tuple(self._values(group, key) for group in self.facts)) for key in keys]
        order = list(dict.fromkeys(AREA_OF_KEY.values()))
        differing = [item for item in found if len({v for v, said in zip(item.values, known, strict=True) if said}) > 1]
        return tuple(sorted(differing, key=lambda item: order.index(item.area)))

    def differ_in(self, keys: Sequence[str]) -> list[str]:
        """Those keys that have more than one value among all runs that know them."""
        return [key for key in keys if len({run[key] for group in self.facts for run in group if key in run}) > 1]

    def notes(self) -> list[str]:
        """What limits the comparison."""
        notes = self._heldout_notes()
        if self.differ_in(["machine.system", "machine.devices"]):
            notes.append("The runs had different machines: what is compared at the same second compares these as well")
        for name, group in zip(self.names, self.facts, strict=True):
            notes += self._group_notes(name, group)
        return notes

    def _heldout_notes(self) -> list[str]:
        """Whether held-out values answer the same questions."""
        runs = [run for group in self.facts for run in group if run]
        if len({_heldout_text(run) for run in runs if "data.fingerprint" in run}) > 1:
            return ["The runs have different held-out data: held-out values were measured on different text"]
        reasons = []
        if self.differ_in([ANCHORS_KEY]):
            reasons.append(f"{_short(ANCHORS_KEY)} differs")
        if len({_heldout_seed(run) for run in runs} - {None}) > 1:
            reasons.append("an earlier version of Draftline drew them by train.seed")
        if not reasons:
            return []
        return [
            f"Held-out values were measured at different anchors of the same text ({', and '.join(reasons)}): part "
            "of the difference is not what was learned; the teacher-forced acceptance length does not depend on anchors"
        ]

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
    tree: dict[str, Any] = {key: identity[key] for key in AREA_OF_KEY if key in identity}
    sessions = identity.get("sessions") or [{}]
    known = ("cores", "threads_per_loop", "allowed")
    tree["session"] = {key: sessions[-1][key] for key in known if key in sessions[-1]}
    return {key: json.dumps(value, ensure_ascii=False) for key, value in flatten(tree).items()}


def _heldout_text(run: Mapping[str, str]) -> tuple[str | None, ...]:
    """What decides which conversations are held out: their own data set, else the share kept back of the training's."""
    _, plus, heldout = run.get("data.fingerprint", "").strip('"').rpartition("+")
    share = None if plus else run.get("config.data.heldout_fraction")
    return (heldout, share, run.get("data.heldout_conversations"))


def _heldout_seed(run: Mapping[str, str]) -> str | None:
    return run.get(ANCHORS_SEED_KEY, run.get(SEED))


def _area(key: str) -> Area:
    return AREA_OF_KEY[key.partition(".")[0]]


def _short(key: str) -> str:
    return key.removeprefix("config.")
