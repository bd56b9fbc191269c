"""The acceptance length in parts: by file of prompts, by length of the output, by place in the output.

Two kinds of length, because they answer two questions. *By length of the output*: what will answers as long as mine
give? An answer counts whole. *By place in the output*: does the drafter hold up further into an answer, or does it
fall behind past the lengths it was trained on? Each forward counts where it began, so a long answer counts in several
places, and short answers do not hide what happens late in long ones. In every breakdown tokens and forwards add up to
those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from draftline.evaluate.acceptance import Acceptance, acceptance_interval
from draftline.evaluate.interval import Interval

_BOUNDS = (32, 128, 512, 2048, 8192)
"""Upper ends of the buckets, output tokens; wide, so that each holds enough prompts for an interval."""


@dataclass(frozen=True)
class Part:
    """What one part of the evaluation gives.

    Attributes:
        name: file, or range of output tokens.
        prompts: how many have forwards in it.
        tokens: output tokens that the forwards gave.
        acceptance_length: bonus included; NaN without a forward.
        acceptance_length_interval: 95 %, clustered by prompt.
    """

    name: str
    prompts: int
    tokens: int
    forwards: int
    acceptance_length: float
    acceptance_length_interval: Interval


@dataclass(frozen=True)
class CountedAnswer:
    """One answer as far as it is counted.

    Attributes:
        prompt: index of its prompt among all; several turns of a dialogue share it.
        file: where the prompt comes from.
        output_length: tokens, the first one included.
    """

    prompt: int
    file: str
    output_length: int
    accepted_per_forward: Sequence[int]

    @property
    def acceptance(self) -> Acceptance:
        """Tokens after the first, and the forwards that gave them."""
        return Acceptance(self.output_length - 1, len(self.accepted_per_forward))


def by_prompt(answers: Sequence[CountedAnswer]) -> list[Acceptance]:
    """Sums over the turns of each prompt, in the order of the prompts."""
    sums: dict[int, Acceptance] = {}
    for answer in answers:
        sums[answer.prompt] = sums.get(answer.prompt, Acceptance(0, 0)) + answer.acceptance
    return list(sums.values())


def by_file(answers: Sequence[CountedAnswer], longest: int) -> list[Part]:
    """One part per file, in the order of their first prompts; `longest` is drafted tokens + 1."""
    return _parts(((answer.file, answer.prompt, answer.acceptance) for answer in answers), longest)


def by_output_length(answers: Sequence[CountedAnswer], longest: int) -> list[Part]:
    """One part per bucket of output lengths that occurs."""
    ordered = sorted(answers, key=lambda answer: answer.output_length)
    return _parts(((_bucket(answer.output_length), answer.prompt, answer.acceptance) for answer in ordered), longest)


def by_output_position(answers: Sequence[CountedAnswer], longest: int) -> list[Part]:
    """One part per bucket of places in the output, counted from 1; a forward counts where its first token stands."""
    placed = sorted(
        ((place, answer.prompt, given) for answer in answers for place, given in _forwards(answer)),
        key=lambda item: item[0],
    )
    return _parts(((_bucket(place), prompt, Acceptance(given, 1)) for place, prompt, given in placed), longest)


def _forwards(answer: CountedAnswer) -> Iterable[tuple[int, int]]:
    """Place of the first token that each forward gave, and how many it gave; the last may end inside its block."""
    place = 2  # the first token comes from the prompt's own forward
    for accepted in answer.accepted_per_forward:
        given = min(accepted + 1, answer.output_length - place + 1)
        yield place, given
        place += given


def _bucket(length: int) -> str:
    below = 0
    for bound in _BOUNDS:
        if length <= bound:
            return f"{below + 1} to {bound}"
        below = bound
    return f"over {below}"


def _parts(counted: Iterable[tuple[str, int, Acceptance]], longest: int) -> list[Part]:
    """Group by name, and within a name by prompt, in the order in which they come."""
    groups: dict[str, dict[int, Acceptance]] = {}
    for name, prompt, acceptance in counted:
        prompts = groups.setdefault(name, {})
        prompts[prompt] = prompts.get(prompt, Acceptance(0, 0)) + acceptance
    return [_part(name, list(prompts.values()), longest) for name, prompts in groups.items()]


def _part(name: str, clusters: Sequence[Acceptance], longest: int) -> Part:
    clusters = [cluster for cluster in clusters if cluster.forwards]
    total = Acceptance.total(clusters)
    interval = acceptance_interval(clusters, longest)
    return Part(name, len(clusters), total.tokens, total.forwards, total.length, interval)
