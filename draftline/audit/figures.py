"""EVL010: is what `evaluate` reports what happened?

Made-up answers, of which is known what stood in each forward, go through the function that sums up an evaluation; every
field of its result is counted again, forward by forward, and every interval drawn again, prompt by prompt. The drafter
is a stand-in of known errors, so that walks have something to walk over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from draftline.audit.evaluation import OracleDrafter, one_round, own_answer
from draftline.audit.probe import Probe
from draftline.audit.reference import target_forward
from draftline.audit.report import Problem, check
from draftline.audit.subject import NotApplicable
from draftline.data.conversations import Conversation, Message
from draftline.data.prompts import Prompt
from draftline.data.render import text_pieces
from draftline.errors import TargetError
from draftline.evaluate import acceptance, benchmark
from draftline.evaluate.answer import DecodedTurn
from draftline.evaluate.generate import Generation
from draftline.options import EvaluationSettings, Sampling
from draftline.targets import model as model_module


@dataclass(frozen=True)
class _Made:
    """A made-up turn: its prompt, tokens that stood in each forward, and what is not as usual.

    Attributes:
        cut: tokens by which the output ends before its last block does.
        other: place of the token in which it is not the plain answer; none: it is.
    """

    prompt: int
    accepted: tuple[int, ...]
    cut: int = 0
    other: int | None = None


_TURNS = (
    _Made(0, (0, 2, 7, 1)),
    _Made(0, (3,), other=2),
    _Made(1, (1, 0, 0)),
    _Made(2, (9, 9, 9, 9, 0, 2, 9, 9, 9), other=1),
    _Made(3, (2, 9), cut=1),
    _Made(4, (0, 0, 1, 0)),
    *(_Made(5 + n, (1 + n % 2, 2, n % 3), other=1 if n == 4 else None) for n in range(8)),
)
"""Tokens that stood, as many as are checked at most. The first prompt is a dialogue, and has a turn more that is not
asked; one is the one before it again; files are two, and outputs fall into two ranges of lengths and places. There are
so many prompts that intervals do not reach the bounds."""

_FILES = ("first", "first", *("second",) * 11)
_MODULUS = 5
"""Of the stand-in's errors, so that its walks have jumps of many lengths."""

_DRAWS, _TAIL, _TAIL_OF_FEW, _LEAST_TAIL = 1000, 0.02, 0.1, 0.005
_BUCKETS = ((32, "1 to 32"), (128, "33 to 128"), (512, "129 to 512"))


_SAMPLED = Sampling(temperature=1.4)
_COUNT = "sums over forwards before the division; a place counts where all before it stood; macro: one vote a prompt"


@check("EVL010", "figures of an evaluation are not those of its answers", needs=("EVL003",))
def figures(probe: Probe) -> Problem | None:
    target = probe.subject.target
    if target.tokenizer is None or not target.tokenizer.chat_template:
        raise NotApplicable("the target has no chat template")
    drafter = OracleDrafter(probe, own_answer(probe), _MODULUS)
    few = max(1, drafter.config.num_speculative_tokens - 2)
    try:
        for settings in (
            EvaluationSettings(num_speculative_tokens=few, max_new_tokens=99),
            EvaluationSettings(sampling=_SAMPLED, template_options={"a": 1}, system_prompt="s"),
        ):
            with one_round():
                wrong = _wrong_figure(probe, drafter, settings)
            if wrong is not None:
                return Problem(f"with known answers, {wrong}", _COUNT)
    except TargetError as error:  # the cost of a round is measured by decoding
        raise NotApplicable(f"this target is not decoded here: {error}") from error
    return None


def _wrong_figure(probe: Probe, drafter: OracleDrafter, settings: EvaluationSettings) -> str | None:
    """The first field of a result that is not what it is counted by hand, in words."""
    checked = settings.num_speculative_tokens or drafter.config.num_speculative_tokens
    prompts, turns = _made_up(probe, checked)
    result = benchmark.summarise(probe.subject.target, drafter, prompts, turns, settings, None)  # type: ignore[arg-type]
    found, wanted = result.to_json(), _by_hand(probe, drafter, prompts, turns, settings)
    for name in (*wanted, *found):
        if name in _BY_RULE:
            continue
        if name not in wanted or not _same(found.get(name), wanted[name]):
            return f"{name} is {found.get(name)}, counted by hand {wanted.get(name)}"
    rows = found["by_draft_length"]
    plain = [row["speedup"] * row["seconds_per_round"] / row["acceptance_length"] for row in rows]
    if not all(math.isclose(seconds, plain[0], rel_tol=1e-9) for seconds in plain):
        return f"speed-ups by number of checked tokens are to rounds of {plain} seconds"
    best = max(rows, key=lambda row: float(row["speedup"]))["num_speculative_tokens"]
    lengths = [(row["num_speculative_tokens"], row["acceptance_length"]) for row in rows]
    by_hand = list(enumerate(_lengths_by_checked(probe, drafter, turns, settings, found), start=1))
    if not _same(list(map(list, lengths)), list(map(list, by_hand))) or found["best_num_speculative_tokens"] != best:
        return f"by number of checked tokens the lengths are {lengths}, walked by hand {by_hand}"
    asked = 1 + (abs((wanted["teacher_forced_acceptance_length"] or math.nan) / wanted["acceptance_length"] - 1) > 0.05)
    if len(found["warnings"]) != asked + 1:
        return f"the warnings are {found['warnings']}: a turn was not asked, a prompt is there twice"
    return None


_BY_RULE = {"by_draft_length", "best_num_speculative_tokens", "warnings"}
"""Fields of which some part is the clock's, or words."""


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and found.keys() == wanted.keys() and all(
            _same(found[name], value) for name, value in wanted.items()
        )  # fmt: skip
    if isinstance(wanted, list | tuple):
        return isinstance(found, list | tuple) and len(found) == len(wanted) and all(map(_same, found, wanted))
    if isinstance(wanted, _Near):
        return isinstance(found, float) and abs(found - wanted) <= wanted.spread
    if isinstance(wanted, float):
        return isinstance(found, int | float) and math.isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-12)
    return bool(found == wanted)


def _made_up(probe: Probe, checked: int) -> tuple[list[Prompt], list[DecodedTurn]]:
    """Prompts, and both answers to each of their turns; the words of prompts are those of nobody."""
    ids, turns, said = own_answer(probe).ids, list[DecodedTurn](), dict[int, list[Message]]()
    for number, made in enumerate(_TURNS):
        accepted = [min(count, checked) for count in made.accepted]
        length = 1 + sum(count + 1 for count in accepted) - made.cut
        plain = [ids[(9 + number + i) % len(ids)] for i in range(length)]
        output = list(plain)
        if made.other is not None:
            output[made.other] = next(i for i in ids if i != plain[made.other])
        history, turn = said.setdefault(made.prompt, []), sum(one.prompt == made.prompt for one in _TURNS[:number])
        history += [
            Message(role="user", content=f"{_words(made.prompt)} {turn}"),
            Message(role="assistant", content="a"),
        ]
        blocks = [[0] * checked for _ in accepted]
        drafted = Generation(output, accepted, blocks, replayed_forwards=number)
        turns.append(
            DecodedTurn(
                made.prompt, turn, Conversation(messages=tuple(history)), ids[: 9 + number], drafted,
                Generation(plain), 2.0 + number, 5.0 + number,
            )
        )  # fmt: skip
    prompts = [
        Prompt(
            _FILES[i], i + 1, Conversation(messages=(*(m for m in words if m.role == "user"), *_not_asked(i)))
        )
        for i, words in said.items()
    ]  # fmt: skip
    return prompts, turns


def _words(prompt: int) -> int:
    """The fifth prompt is the fourth again."""
    return 3 if prompt == 4 else prompt


def _not_asked(prompt: int) -> tuple[Message, ...]:
    """A turn more of the first prompt."""
    return () if prompt else (Message(role="user", content="not asked"),)


class _Forward(NamedTuple):
    """A forward: its prompt, where in the output its first token stands, how many it gave, drafted tokens that stood,
    and the length of the whole output."""

    prompt: int
    place: int
    given: int
    stood: int
    length: int


def _forwards(turns: Sequence[DecodedTurn]) -> list[_Forward]:
    """Every forward of every turn; the last of an output may end inside its block."""
    forwards = list[_Forward]()
    for turn in turns:
        place, length = 2, len(turn.drafted.output_ids)
        for stood in turn.drafted.accepted_per_forward:
            given = min(stood + 1, length - place + 1)
            forwards.append(_Forward(turn.prompt, place, given, stood, length))
            place += given
    return forwards


def _by_prompt(forwards: Sequence[_Forward], prompts: Iterable[int]) -> list[tuple[int, int]]:
    """Tokens and forwards of each prompt."""
    mine = [[one.given for one in forwards if one.prompt == prompt] for prompt in prompts]
    return [(sum(given), len(given)) for given in mine]


def _by_hand(
    probe: Probe,
    drafter: OracleDrafter,
    prompts: Sequence[Prompt],
    turns: Sequence[DecodedTurn],
    settings: EvaluationSettings,
) -> dict[str, Any]:
    """Every field of a result, forward by forward."""
    greedy = settings.sampling.greedy
    checked = settings.num_speculative_tokens or drafter.config.num_speculative_tokens
    bounds = (1.0, checked + 1.0)
    forwards = _forwards(turns)
    numbers = range(len(prompts))
    pairs = _by_prompt(forwards, numbers)
    lengths = [tokens / count for tokens, count in pairs]

    def parts(name_of: Callable[[_Forward], str], order: Callable[[_Forward], int]) -> list[dict[str, Any]]:
        groups = dict[str, list[_Forward]]()
        for one in sorted(forwards, key=order):
            groups.setdefault(name_of(one), []).append(one)
        made = []
        for name, mine in groups.items():
            counted = _by_prompt(mine, dict.fromkeys(one.prompt for one in mine))
            tokens, count = sum(t for t, _ in counted), len(mine)
            figures = {"name": name, "prompts": len(counted), "tokens": tokens, "forwards": count}
            interval = _interval(counted, bounds)
            made.append({**figures, "acceptance_length": tokens / count, "acceptance_length_interval": interval})
        return made

    differing = [i for i, turn in enumerate(turns) if turn.drafted.output_ids != turn.plain.output_ids]
    equal = [(int(all(turns[i].prompt != p for i in differing)), 1) for p in numbers]
    walks = _walked(probe, drafter, turns, checked) if greedy else []
    kept = [one.stood for one in forwards]
    return {
        "acceptance_length": sum(t for t, _ in pairs) / sum(n for _, n in pairs),
        "acceptance_length_interval": _interval(pairs, bounds),
        "acceptance_length_macro": sum(lengths) / len(lengths),
        "acceptance_length_macro_interval": _interval([(length, 1) for length in lengths], bounds),
        **_rates(forwards, numbers, checked),
        "accepted_histogram": [kept.count(k) for k in range(checked + 1)],
        "counts": {
            "output_tokens": sum(len(turn.drafted.output_ids) for turn in turns),
            "target_forwards": len(forwards),
            "replayed_forwards": sum(range(len(turns))),
            "drafted_tokens": checked * len(forwards),
            "verified_tokens": sum(min(count + 1, checked) for count in kept),
            "accepted_tokens": sum(kept),
        },
        "by_file": parts(lambda one: _FILES[one.prompt], lambda _: 0),
        "by_output_length": parts(lambda one: _bucket(one.length), lambda one: one.length),
        "by_output_position": parts(lambda one: _bucket(one.place), lambda one: one.place),
        "greedy_equal": sum(a for a, _ in equal) / len(equal) if greedy else None,
        "greedy_equal_interval": _interval(equal, (0.0, 1.0)) if greedy else (None, None),
        "prompts": len(prompts),
        "decoded_prompts": len(prompts),
        "differences": [_difference(probe, i, turns[i]) for i in differing] if greedy else [],
        "teacher_forced_acceptance_length": sum(t for t, _ in walks) / sum(n for _, n in walks) if greedy else None,
        "teacher_forced_acceptance_length_interval": _interval(walks, bounds) if greedy else (None, None),
        **_told(probe, drafter, turns, settings),
    }


def _rates(forwards: Sequence[_Forward], prompts: Sequence[int], checked: int) -> dict[str, Any]:
    """Shares of forwards in which the first, second, .. drafted token stood, with all before it."""

    def reached(place: int, prompt: int | None = None) -> int:
        return sum(one.stood >= place for one in forwards if prompt in (None, one.prompt))

    def share(conditional: bool) -> tuple[list[float | None], list[tuple[float, float]]]:
        rates, intervals = list[float | None](), list[tuple[float, float]]()
        for k in range(1, checked + 1):
            before = k - 1 if conditional else 0
            rates.append(reached(k) / reached(before) if reached(before) else None)
            intervals.append(_interval([(reached(k, p), reached(before, p)) for p in prompts], (0.0, 1.0)))
        return rates, intervals

    (rates, intervals), (conditional, conditional_intervals) = share(conditional=False), share(conditional=True)
    return {
        "acceptance_rate_by_position": rates,
        "acceptance_rate_by_position_interval": intervals,
        "conditional_acceptance_rate_by_position": conditional,
        "conditional_acceptance_rate_by_position_interval": conditional_intervals,
    }


def _told(
    probe: Probe, drafter: OracleDrafter, turns: Sequence[DecodedTurn], settings: EvaluationSettings
) -> dict[str, Any]:
    """Speeds, what is said of target, drafter and mode, and the turns one by one."""
    target, told, prompts = probe.subject.target, dict(settings.template_options), len({t.prompt for t in turns})
    drafted_tokens, seconds = sum(len(t.drafted.output_ids) for t in turns), sum(t.drafted_seconds for t in turns)
    plain_tokens, plain_seconds = sum(len(t.plain.output_ids) for t in turns), sum(t.plain_seconds for t in turns)
    speeds = (drafted_tokens / seconds, plain_tokens / plain_seconds)
    return {
        "tokens_per_second": speeds[0],
        "baseline_tokens_per_second": speeds[1],
        "speedup": speeds[0] / speeds[1],
        "target": target.name,
        "target_dtype": str(target.dtype).partition(".")[2],
        "target_weights": model_module.weights_fingerprint(target.model),
        "drafter": None,
        "drafter_weights": model_module.weights_fingerprint(drafter),
        "settings": settings.model_dump(),
        "mode": {
            "thinking": {"without_reasoning": prompts},
            "system_prompts": {"none": prompts},
            "template_options": {json.dumps(told, sort_keys=True): prompts},
        },
        "trained_mode": None,
        "per_prompt": [
            {
                "file": _FILES[turn.prompt],
                "number": turn.prompt + 1,
                "turn": 1 + sum(other.prompt == turn.prompt for other in turns[:i]),
                "asked": f"{_words(turn.prompt)} {turn.turn}",
                "input_ids": turn.input_ids,
                "output_ids": turn.drafted.output_ids,
                "text_pieces": text_pieces(target.require_tokenizer(), turn.drafted.output_ids),
                "target_forwards": len(turn.drafted.accepted_per_forward),
                "accepted_per_forward": turn.drafted.accepted_per_forward,
            }
            for i, turn in enumerate(turns)
        ],
    }


def _bucket(length: int) -> str:
    return next(name for bound, name in _BUCKETS if length <= bound)


def _difference(probe: Probe, number: int, turn: DecodedTurn) -> dict[str, Any]:
    """Where an output parts from the plain one, and how far the logits of the two tokens are apart."""
    found, plain = turn.drafted.output_ids, turn.plain.output_ids
    place = next(i for i, (a, b) in enumerate(zip(found, plain, strict=True)) if a != b)
    ids = torch.tensor([*turn.input_ids, *plain[:place]])
    logits = target_forward(probe.subject.target, ids).logits[-1].float()
    gap = float((logits[found[place]] - logits[plain[place]]).abs())
    return {"turn": number, "token": place, "logit_gap": _Near(gap, 0.02 * float(logits.abs().max()))}


class _Near(float):
    """A number that is computed in another way, so that it is the same but for rounding."""

    spread: float

    def __new__(cls, value: float, spread: float) -> _Near:
        made = super().__new__(cls, value)
        made.spread = spread
        return made


def _walked(probe: Probe, drafter: OracleDrafter, turns: Sequence[DecodedTurn], checked: int) -> list[tuple[int, int]]:
    """Tokens and jumps of each prompt, from the streaks at every token of its plain answers."""
    sums = dict[int, tuple[int, int]]()
    for turn, streaks in zip(turns, _streaks(probe, drafter, turns), strict=True):
        place = jumps = 0
        while place < len(streaks):
            place, jumps = place + min(streaks[place], checked) + 1, jumps + 1
        tokens, before = sums.get(turn.prompt, (0, 0))
        sums[turn.prompt] = (tokens + len(turn.plain.output_ids) - 1, before + jumps)
    return list(sums.values())


def _streaks(probe: Probe, drafter: OracleDrafter, turns: Sequence[DecodedTurn]) -> list[list[int]]:
    """Right tokens in a row, from each token of the plain answers; EVL005 looks at how they are had."""
    pairs = [(turn.input_ids, turn.plain.output_ids) for turn in turns]
    return acceptance.teacher_forced_streaks(probe.subject.target, drafter, pairs)  # type: ignore[arg-type]


def _lengths_by_checked(
    probe: Probe,
    drafter: OracleDrafter,
    turns: Sequence[DecodedTurn],
    settings: EvaluationSettings,
    found: Mapping[str, Any],
) -> list[float]:
    """Acceptance length with 1, 2, .. checked tokens: walked where decoding is greedy, else from the rates."""
    if not settings.sampling.greedy:
        rates = found["acceptance_rate_by_position"]
        return [1.0 + sum(rates[:k]) for k in range(1, len(rates) + 1)]
    lengths = []
    for k in range(1, drafter.config.num_speculative_tokens + 1):
        walks = _walked(probe, drafter, turns, k)
        lengths.append(sum(t for t, _ in walks) / sum(n for _, n in walks))
    return lengths


def _interval(pairs: Sequence[tuple[float, float]], bounds: tuple[float, float]) -> tuple[float, float]:
    """The bootstrap-t of a ratio of sums over prompts, drawn prompt by prompt; see `evaluate/acceptance.py`."""
    some = np.array([pair for pair in pairs if pair[1]], dtype=np.float64).reshape(-1, 2)
    n = len(some)
    if n < 2:
        return bounds
    ratio, error = (float(each[0]) for each in _ratio_and_error(some[None]))
    if error == 0.0:
        unseen = min(1.0, 3.0 / n)
        return ratio - unseen * (ratio - bounds[0]), ratio + unseen * (bounds[1] - ratio)
    ratios, errors = _ratio_and_error(some[np.random.default_rng(0).integers(n, size=(_DRAWS, n))])
    far = ratios - ratio
    with np.errstate(divide="ignore", invalid="ignore"):
        distances = np.where(errors > 0, far / errors, np.copysign(np.inf, far))
    tail = max(_TAIL - _TAIL_OF_FEW / n, _LEAST_TAIL)
    left, right = np.quantile(distances, [tail, 1 - tail], method="nearest")
    return max(bounds[0], ratio - float(right) * error), min(bounds[1], ratio - float(left) * error)


def _ratio_and_error(drawn_DN2: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[D] ratios of drawn prompts, and their standard errors from what is left of each prompt."""
    a, b = drawn_DN2[..., 0], drawn_DN2[..., 1]
    n, ratios = a.shape[1], a.sum(1) / b.sum(1)
    squares = ((a - ratios[:, None] * b) ** 2).sum(1)
    squares[squares < 1e-12 * (a**2).sum(1)] = 0.0
    return ratios, np.sqrt(squares * n / (n - 1)) / b.sum(1)
