"""What a comparison of runs found, as `compare.compare_groups` returns it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from draftline.compare.curves import Curve, Estimate
from draftline.compare.differences import Difference
from draftline.compare.trajectory import Axis
from draftline.storage import without_nan

Verdict = Literal["better", "same", "worse"]

Bound = Literal["exactly", "at least", "at most"]


@dataclass(frozen=True)
class SamePlace:
    """Two groups at the same step, token or second.

    Attributes:
        place: where.
        baseline, candidate: mean values of the two groups.
        ratio: candidate over baseline; None where the baseline is not positive, or the candidate is negative.
    """

    place: float
    baseline: float
    candidate: float
    ratio: Estimate | None


@dataclass(frozen=True)
class Sooner:
    """Two groups at the same value.

    Attributes:
        level: the value.
        baseline, candidate: geometric mean of the positions where the runs first reach it; for a run that never does
            its last position, for one that has it at its first measurement that position.
        times: baseline over candidate: how many times sooner the candidate is there.
        bound: `exactly` if every run reaches the level between its first and last measurement; else the true ratio
            is `at least` or `at most` the one given, which has no interval.
        never: groups of which a run never reaches it.
    """

    level: float
    baseline: float
    candidate: float
    times: Estimate
    bound: Bound
    never: tuple[str, ...]


@dataclass(frozen=True)
class AxisComparison:
    """Two groups along one axis: at equal places, and at equal values, both in ascending order."""

    same_place: tuple[SamePlace, ...]
    sooner: tuple[Sooner, ...]

    @property
    def headline(self) -> Sooner | None:
        """The furthest level that all runs reach, else the furthest that one side reaches."""
        exact = [entry for entry in self.sooner if entry.bound == "exactly"]
        best_first = [*reversed(exact), *reversed(self.sooner)]
        return best_first[0] if best_first else None


@dataclass(frozen=True)
class MetricComparison:
    """Two groups in one value, along each axis that all runs record."""

    metric: str
    rising: bool
    axes: Mapping[Axis, AxisComparison]

    @property
    def ratio(self) -> Estimate | None:
        """Candidate over baseline at the last common step."""
        return self.axes["step"].same_place[-1].ratio


@dataclass(frozen=True)
class Speed:
    """Tokens per second of two groups, each run over its own length; means over runs, and candidate over baseline."""

    baseline: float
    candidate: float
    ratio: Estimate


@dataclass(frozen=True)
class Pair:
    """One group against the baseline.

    Attributes:
        baseline, candidate: names of the groups.
        verdict: of the candidate; None where nothing of quality can be compared, or not how sure the difference is.
        decided: false where "same" says no more than that the interval is too wide for another word.
        reason: the verdict in one sentence, with its uncertainty.
        metric: the value that the verdict is about; None where there is none.
        metrics: all values compared.
        tokens_per_second: of training; None where not all runs record tokens and seconds.
    """

    baseline: str
    candidate: str
    verdict: Verdict | None
    decided: bool
    reason: str
    metric: str | None
    metrics: Mapping[str, MetricComparison]
    tokens_per_second: Speed | None

    @property
    def words(self) -> str:
        """The verdict as people read it."""
        if self.verdict is None:
            return "no verdict"
        return self.verdict if self.decided else "same, as far as these runs show"

    @property
    def ratio(self) -> Estimate | None:
        """The value of the verdict at the last common step, candidate over baseline."""
        return None if self.metric is None else self.metrics[self.metric].ratio

    @property
    def steps_to_same_accuracy(self) -> Sooner | None:
        """How many times sooner, in steps, the candidate reaches what both reach in the value of the verdict."""
        return None if self.metric is None else self.metrics[self.metric].axes["step"].headline

    @property
    def streak_ratio(self) -> Estimate | None:
        """Streak at the last common step, candidate over baseline; None if it was not logged."""
        streak = self.metrics.get("heldout_streak") or self.metrics.get("streak")
        return None if streak is None else streak.ratio


@dataclass(frozen=True)
class Comparison:
    """Everything that `draftline compare` shows.

    Attributes:
        groups: paths of the runs by group; the first group is the baseline.
        margin: smallest relative difference that matters.
        pairs: each other group against the baseline.
        differences: of configuration, data and environment.
        notes: what limits the comparison, one sentence each.
        curves: value -> group -> one curve per run.
    """

    groups: Mapping[str, tuple[Path, ...]]
    margin: float
    pairs: tuple[Pair, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    curves: Mapping[str, Mapping[str, tuple[Curve, ...]]]

    def to_json(self) -> dict[str, Any]:
        """Everything but the curves as plain values; what could not be measured is None."""
        pairs = [
            {
                **asdict(pair),
                "ratio": pair.ratio and asdict(pair.ratio),
                "steps_to_same_accuracy": pair.steps_to_same_accuracy and asdict(pair.steps_to_same_accuracy),
                "streak_ratio": pair.streak_ratio and asdict(pair.streak_ratio),
            }
            for pair in self.pairs
        ]
        plain: dict[str, Any] = without_nan(
            {
                "groups": {name: [str(path) for path in paths] for name, paths in self.groups.items()},
                "margin": self.margin,
                "pairs": pairs,
                "differences": [asdict(difference) for difference in self.differences],
                "notes": self.notes,
            }
        )
        return plain
