"""Compare groups of runs: which one learned more, how much sooner, and how sure that is.

    comparison = compare_groups({"before": [Path("run-a")], "after": [Path("run-b")]})
    comparison.pairs[0].verdict                  'better', 'same' or 'worse'; of `after`, against `before`
    comparison.pairs[0].ratio                    its accuracy at the last common step, as a multiple, with an interval
    comparison.pairs[0].steps_to_same_accuracy   how many times sooner it reached what both reach
    comparison.pairs[0].streak_ratio             its streak at the last common step, as a multiple

The first group is the baseline of all others. **Verdict**: better if the whole 95 % interval of the ratio lies above
1 + margin, worse if it lies below 1 - margin, else same. So `better` and `worse` claim a difference that matters in
practice and is shown; `same` claims no more than that none is shown, and its sentence says whether the interval also
lies within the margin (then the runs are as good as equal) or is too wide to tell. How intervals are made: `curves`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from glob import glob
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draftline.compare.curves import Curve, Estimate, Reach, ratio_of_places, ratio_of_reaches, ratio_of_values
from draftline.compare.differences import BLOCK_KEYS, TARGET_KEYS, Difference, Identities
from draftline.compare.trajectory import AXES, Axis, Trajectory, own_name, read_trajectory
from draftline.errors import ConfigError, DataError
from draftline.options import CompareSettings
from draftline.storage import without_nan

Judgement = Literal["better", "same", "worse"]

Bound = Literal["exactly", "at least", "at most"]

HELDOUT_METRICS = ("heldout_accuracy", "heldout_streak", "heldout_teacher_forced_acceptance_length", "heldout_loss")
TRAINING = ("accuracy", "streak", "loss")
"""Values compared where both sides have them, the first one for the verdict. Held-out ones, if any, are enough."""

ANY_BLOCK = ("heldout_teacher_forced_acceptance_length",)
"""Values that mean the same whatever a block predicts, besides the accuracy of single slots."""

LOWER_IS_BETTER = ("loss", "perplexity", "ppl", "nll", "error")
"""Parts of names."""

FEW_POINTS = 5
PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where on the common range of an axis, and of the values, the two are held against each other."""

_BASES = {
    "seeds": "the spread of runs on both sides",
    "seeds of one side": "the spread of runs on one side",
    "scatter": "the scatter of the measurements of single runs",
}


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
    verdict: Judgement | None
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


def compare_groups(groups: Mapping[str, Sequence[Path]], settings: CompareSettings | None = None) -> Comparison:
    """Compare groups of runs (several seeds each, or one) with the first of them.

    Args:
        groups: run folders, CSV or JSONL files or TensorBoard folders by name of the group.
        settings: names in `metric` after the first are what other logs call it, and none means held-out accuracy,
            else what all runs have; `lower_is_better` None: if the name says loss or error.

    Raises:
        ConfigError: fewer than two groups, an empty one, or a margin that is not a share.
        DataError: something is not a run, is damaged, or there is no common value or step.
    """
    settings = settings or CompareSettings()
    metric, margin = settings.metric, settings.margin
    _check(groups, margin)
    runs = {name: tuple(read_trajectory(path) for path in paths) for name, paths in groups.items()}
    identities = Identities.of(runs)
    notes = [*(note for group in runs.values() for run in group for note in run.notes), *identities.notes()]
    chosen, metrics = _choose(runs, identities, [own_name(name) for name in metric], notes)
    curves = {name: _curves(runs, name, metric if name == chosen else (), settings.lower_is_better) for name in metrics}
    notes += _few_points(curves[chosen]) if chosen else []
    baseline, *others = groups
    pairs = [_pair(runs, curves, chosen, (baseline, candidate), margin) for candidate in others]
    notes += _single_runs([len(paths) for paths in groups.values()])
    return Comparison(
        {name: tuple(paths) for name, paths in groups.items()},
        margin,
        tuple(pairs),
        identities.differences(),
        tuple(dict.fromkeys(notes)),
        curves,
    )


def name_groups(words: Sequence[str], baseline: Sequence[str], candidate: Sequence[str]) -> dict[str, list[Path]]:
    """Groups of runs from words: a run, a pattern, or NAME=RUN,RUN; or those of two sides, named A and B.

    Raises:
        ConfigError: two groups have one name, both ways of naming are mixed, or a pattern finds nothing.
    """
    if words and (baseline or candidate):
        raise ConfigError(f"{words[0]} is given besides --a and --b: name the runs in one way")
    if baseline or candidate:
        return {name: _matching(side) for name, side in (("A", baseline), ("B", candidate))}
    groups: dict[str, list[Path]] = {}
    for word in words:
        name, sign, listed = word.partition("=")
        whole = not sign or Path(word).exists()
        key, members = (word.rstrip("/"), [word]) if whole else (name, listed.split(","))
        if not key or not all(members):
            raise ConfigError(f"{word!r} leaves out a name: write a group as NAME=RUN,RUN")
        if key in groups:
            example = f"first={members[0]} second={members[0]}"
            raise ConfigError(f"{key} is named twice: name each group once, for example {example}")
        groups[key] = _matching(members)
    return groups


def _matching(words: Sequence[str]) -> list[Path]:
    """Paths of runs; a word that is not a path may be a pattern."""
    if not all(words):
        raise ConfigError("a run has no name: name an existing folder or file")
    found: list[Path] = []
    for word in words:
        patterned = any(sign in word for sign in "*?[") and not Path(word).exists()
        paths = sorted(map(Path, glob(word))) if patterned else [Path(word)]
        if not paths:
            raise ConfigError(f"{word} matches nothing: name existing runs")
        found += paths
    return found


def _check(groups: Mapping[str, Sequence[Path]], margin: float) -> None:
    if len(groups) < 2:
        raise ConfigError(f"{len(groups)} group(s) of runs: name two or more to compare")
    for name, paths in groups.items():
        if not paths:
            raise ConfigError(f"group {name} has no run: name at least one")
    if not 0 <= margin < 1:
        raise ConfigError(f"margin is {margin}: give a share of at least 0 and below 1, for example 0.03")


def _choose(
    runs: Mapping[str, Sequence[Trajectory]], identities: Identities, wanted: Sequence[str], notes: list[str]
) -> tuple[str | None, list[str]]:
    """The value of the verdict and all values to compare; what is left out, and why, is added to `notes`."""
    every = [run for group in runs.values() for run in group]
    common = [name for name in every[0].names if all(name in run.names for run in every)]
    for run in every:
        if wanted and not set(wanted) & set(run.names):
            raise DataError(f"{run.path} has no {' or '.join(wanted)}: it has {_listed(run.names)}")
    known = [name for name in HELDOUT_METRICS if name in common]
    if not (known and _meet(every, known[0])):
        if known and not wanted:
            notes.append("The runs were never evaluated in a common stretch of steps: training values are compared")
        known = [name for name in TRAINING if name in common]
    targets, blocks = identities.differ_in(TARGET_KEYS), identities.differ_in(BLOCK_KEYS)
    if targets:
        notes.append(
            f"The runs have different targets ({', '.join(targets)}): accuracy, streak, acceptance and loss are about "
            "different predictions and cannot be compared"
        )
        known = []
    elif blocks:
        notes.append(
            f"The runs have different blocks ({', '.join(blocks)}): accuracy, streak and loss are averages over "
            "different slots and cannot be compared; acceptance length and the accuracy of single slots can"
        )
        single = [name for name in common if name.startswith("heldout_accuracy_by_position/")]
        known = [name for name in ANY_BLOCK if name in common] + single
    if wanted:
        return wanted[0], list(dict.fromkeys([wanted[0], *known]))
    if targets or blocks:
        return next((name for name in known if name in ANY_BLOCK), None), known
    if not known:
        known = [_only_one(every, common)]
    return known[0], known


def _meet(every: Sequence[Trajectory], name: str) -> bool:
    """Whether there is a step between the first and the last measurement of all runs."""
    spans = [run.span(name) for run in every]
    return max(first for first, _ in spans) <= min(last for _, last in spans)


def _only_one(every: Sequence[Trajectory], common: Sequence[str]) -> str:
    """The value to compare in logs of other programs, if there is no choice."""
    if len(common) == 1:
        return common[0]
    if common:
        raise DataError(f"the runs have several common values, {_listed(common)}: choose with --metric")
    first, other = every[0], next(run for run in every if not set(run.names) & set(every[0].names))
    raise DataError(
        f"no common metric: {first.path} has {_listed(first.names)}, {other.path} has {_listed(other.names)}; "
        "name both with --metric"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "no value"


def _curves(
    runs: Mapping[str, Sequence[Trajectory]], name: str, other_names: Sequence[str], lower_is_better: bool | None
) -> dict[str, tuple[Curve, ...]]:
    """One value of all runs; `other_names` are what it may be called."""
    if lower_is_better is None or not other_names:
        lower_is_better = any(part in name.lower() for part in LOWER_IS_BETTER)
    found: dict[str, tuple[Curve, ...]] = {}
    for group, members in runs.items():
        names = [next((own for own in map(own_name, other_names) if own in run.names), name) for run in members]
        series = [run.series(own) for run, own in zip(members, names, strict=True)]
        found[group] = tuple(Curve.of(entry, rising=not lower_is_better) for entry in series)
    return found


def _single_runs(sizes: Sequence[int]) -> list[str]:
    if max(sizes) == 1:
        return [
            "One run a side cannot show what another seed would give: the interval covers what was measured, "
            "not what would come again; three runs a side can"
        ]
    return ["A single run borrows the spread of the runs on the other side"] if min(sizes) == 1 else []


def _few_points(curves: Mapping[str, Sequence[Curve]]) -> list[str]:
    fewest = min(len(curve.values) for group in curves.values() for curve in group)
    if fewest >= FEW_POINTS:
        return []
    return [
        f"The value of the verdict was measured only {fewest} time(s) in a run: levels in between are interpolated; "
        "a smaller train.eval_every, or --metric accuracy, shows more"
    ]


def _pair(
    runs: Mapping[str, Sequence[Trajectory]],
    curves: Mapping[str, Mapping[str, Sequence[Curve]]],
    chosen: str | None,
    names: tuple[str, str],
    margin: float,
) -> Pair:
    baseline, candidate = names
    metrics: dict[str, MetricComparison] = {}
    for metric, by_group in curves.items():
        axes = {axis: _along(axis, names, by_group) for axis in AXES}
        known: dict[Axis, AxisComparison] = {axis: entry for axis, entry in axes.items() if entry is not None}
        if "step" in known:
            metrics[metric] = MetricComparison(metric, by_group[baseline][0].rising, known)
        elif metric == chosen:
            raise DataError(f"{baseline} and {candidate} have {metric} at no common step: nothing can be compared")
    speed = _speed(runs[baseline], runs[candidate])
    if chosen is None:
        return Pair(baseline, candidate, None, False, "No verdict: see the notes.", None, metrics, speed)
    verdict, decided, reason = _judge(metrics[chosen], margin)
    return Pair(baseline, candidate, verdict, decided, reason, chosen, metrics, speed)


def _along(axis: Axis, names: tuple[str, str], curves: Mapping[str, Sequence[Curve]]) -> AxisComparison | None:
    """Compare along one axis; None if a run does not record it, or if there is no common stretch."""
    baseline, candidate = curves[names[0]], curves[names[1]]
    both = [*baseline, *candidate]
    if any(axis not in curve.axes for curve in both):
        return None
    start, end = max(curve.axes[axis][0] for curve in both), min(curve.axes[axis][-1] for curve in both)
    if start > end:
        return None
    places = dict.fromkeys(float(start + part * (end - start)) for part in PARTS)
    same = tuple(_same_place(axis, place, baseline, candidate) for place in places)
    found = (_sooner(axis, level, names, curves) for level in _levels(baseline, candidate))
    return AxisComparison(same, tuple(entry for entry in found if entry is not None))


def _same_place(axis: Axis, place: float, baseline: Sequence[Curve], candidate: Sequence[Curve]) -> SamePlace:
    below, above = (float(np.mean([curve.at(axis, place) for curve in side])) for side in (baseline, candidate))
    ratio = ratio_of_values(candidate, baseline, axis, place) if below > 0 and above >= 0 else None
    return SamePlace(place, below, above, ratio)


def _levels(baseline: Sequence[Curve], candidate: Sequence[Curve]) -> list[float]:
    """Values to reach: parts of the way that all runs go, then the best that all runs of one side reach."""
    sign = 1.0 if baseline[0].rising else -1.0
    first = max(sign * curve.monotone[0] for curve in (*baseline, *candidate))
    tops = [min(sign * curve.monotone[-1] for curve in side) for side in (baseline, candidate)]
    common = min(tops)
    levels = [first + part * (common - first) for part in PARTS[1:]] if common > first else [common]
    return [float(sign * level) for level in dict.fromkeys([*levels, max(tops)])]


def _sooner(axis: Axis, level: float, names: tuple[str, str], curves: Mapping[str, Sequence[Curve]]) -> Sooner | None:
    """Compare where a level is reached; None if what is missing on the two sides pulls both ways."""
    baseline, candidate = ([curve.reach(axis, level) for curve in curves[name]] for name in names)
    if any(reach.place <= 0 for reach in (*baseline, *candidate)):
        return None
    more = _any(baseline, "never") or _any(candidate, "before")
    less = _any(candidate, "never") or _any(baseline, "before")
    if more and less:
        return None
    places = [[reach.place for reach in side] for side in (baseline, candidate)]
    both = (curves[names[0]], curves[names[1]])
    times = Estimate(ratio_of_places(*places).value) if more or less else ratio_of_reaches(*both, axis, level)
    slow, fast = (float(np.exp(np.mean(np.log(side)))) for side in places)
    never = tuple(name for name, side in zip(names, (baseline, candidate), strict=True) if _any(side, "never"))
    bound: Bound = "at least" if more else "at most" if less else "exactly"
    return Sooner(level, slow, fast, times, bound, never)


def _any(reaches: Sequence[Reach], state: str) -> bool:
    return any(reach.state == state for reach in reaches)


def _speed(baseline: Sequence[Trajectory], candidate: Sequence[Trajectory]) -> Speed | None:
    rates = [[run.tokens_per_second for run in side] for side in (baseline, candidate)]
    below, above = ([rate for rate in side if rate is not None] for side in rates)
    if len(below) < len(baseline) or len(above) < len(candidate):
        return None
    return Speed(float(np.mean(below)), float(np.mean(above)), ratio_of_places(above, below))


def _judge(found: MetricComparison, margin: float) -> tuple[Judgement | None, bool, str]:
    """The verdict, whether it is decided, and its sentence; no verdict without an interval.

    Raises:
        DataError: the ratio of the two values means nothing.
    """
    last = found.axes["step"].same_place[-1]
    where = f"{found.metric} at step {last.place:,.0f}"
    if last.ratio is None:
        values = f"{last.baseline:.3g} in the baseline and {last.candidate:.3g} in the other"
        raise DataError(f"{where} is {values}: a ratio needs more than 0 and nothing below it; choose --metric")
    ratio = last.ratio
    low, high = ratio.low, ratio.high
    if low is None or high is None:
        unsure = "too few measurements were made to say how sure that is: no verdict"
        fix = "measure more often (train.eval_every), or give several runs a side"
        return None, False, f"{where} is {_change(ratio.value)}, but {unsure}; {fix}."
    above, below = low > 1 + margin, high < 1 - margin
    verdict: Judgement = "same" if not (above or below) else "better" if above == found.rising else "worse"
    sure = f"95 % interval {_change(low)} to {_change(high)}, from {_BASES[ratio.basis]}"
    decided = verdict != "same" or (1 - margin <= low and high <= 1 + margin)
    if verdict != "same":
        claim = ""
    elif decided:
        claim = f"; any difference lies within the margin of {margin:.0%}"
    elif low > 1 or high < 1:
        claim = f"; there is a difference, but one beyond the margin of {margin:.0%} is not shown, nor excluded"
    else:
        claim = f"; a difference beyond the margin of {margin:.0%} is not shown, nor excluded"
    return verdict, decided, f"{where} is {_change(ratio.value)} ({sure}){claim}."


def _change(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"
