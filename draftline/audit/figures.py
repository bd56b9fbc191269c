"""EVL010 and EVL011: is what `evaluate` reports what happened, and does it ask what its settings say?

Figures are compared with counts by hand over answers whose accepted tokens are made up. Prompts of several turns are
rendered by the tokenizer alone, and their answers decoded again, each with the generator of its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
import torch
from jinja2 import meta
from transformers import PreTrainedTokenizerBase

from draftline.audit.probe import Probe
from draftline.audit.report import Problem, check
from draftline.audit.subject import NotApplicable
from draftline.data.conversations import Conversation, Message
from draftline.data.prompts import Prompt
from draftline.errors import TargetError, TemplateError
from draftline.evaluate import answer as answer_module
from draftline.evaluate import benchmark, generate
from draftline.evaluate.answer import DecodedTurn
from draftline.evaluate.generate import Generation
from draftline.evaluate.result import EvaluationResult
from draftline.options import EvaluationSettings, Sampling
from draftline.targets import model as model_module

_ACCEPTED = ([[0, 2, 7, 1], [3]], [[1, 0, 0]], [[9, 9, 9, 9, 0, 2, 9, 9, 9]])
"""Drafted tokens that stood, by prompt, turn and forward; as many as a block has, at most."""

_SAMPLED = Sampling(temperature=1.4)
_SEED, _ANSWER_TOKENS = 11, 4
_COUNT = "sums over forwards before the division; a place counts where all before it stood; macro: one vote a prompt"
_ASK = "render all that was said with the options of the settings; decode with their sampling, a generator a turn"


@check("EVL010", "figures of an evaluation are not those of its answers", needs=("EVL003",))
def figures(probe: Probe) -> Problem | None:
    drafted = probe.subject.draft_model.config.num_speculative_tokens
    result = _summarised(probe, drafted)
    wanted, found = _by_hand(drafted), result.to_json()
    for name, value in wanted.items():
        if not _same(found.get(name), value):
            return Problem(f"with known answers, {name} is {found.get(name)}, counted by hand {value}", _COUNT)
    low, high = result.acceptance_length_interval
    if not low <= result.acceptance_length <= high:
        return Problem(
            f"the interval {low:.3f} to {high:.3f} leaves out its value {result.acceptance_length:.3f}", _COUNT
        )
    return None


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(_same(found.get(name), value) for name, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(_same, found, wanted))
    if isinstance(wanted, float):
        return isinstance(found, int | float) and math.isclose(found, wanted, rel_tol=1e-9)
    return bool(found == wanted)


def _stood(drafted: int) -> list[list[list[int]]]:
    """`_ACCEPTED` for blocks of so many drafted tokens."""
    return [[[min(count, drafted) for count in turn] for turn in turns] for turns in _ACCEPTED]


def _summarised(probe: Probe, drafted: int) -> EvaluationResult:
    """Made-up turns through the function that sums up an evaluation; sampled, so that nothing is decoded again."""
    target = probe.subject.target
    if target.tokenizer is None or not target.tokenizer.chat_template:
        raise NotApplicable("the target has no chat template")
    token, turns, prompts = int(probe.samples[0].input_ids[0]), [], []
    for index, answers in enumerate(_stood(drafted)):
        said: list[Message] = []
        for turn, accepted in enumerate(answers):
            said += [Message(role="user", content=f"{index} {turn}"), Message(role="assistant", content="a")]
            output = [token] * (1 + sum(count + 1 for count in accepted))
            generation = Generation(output, accepted, [[token] * drafted] * len(accepted))
            dialogue = Conversation(messages=tuple(said))
            turns.append(DecodedTurn(index, turn, dialogue, [token], generation, Generation(output[:-1]), 2.0, 5.0))
        asked = tuple(message for message in said if message.role == "user")
        prompts.append(Prompt("first" if index < 2 else "second", index + 1, Conversation(messages=asked)))
    settings = EvaluationSettings(sampling=_SAMPLED)
    try:
        return benchmark.summarise(target, probe.subject.draft_model, prompts, turns, settings, None)
    except TargetError as error:  # the cost of a round is measured by decoding
        raise NotApplicable(f"this target is not decoded here: {error}") from error


def _by_hand(drafted: int) -> dict[str, Any]:
    """What is to be reported of `_ACCEPTED`, forward by forward."""
    prompts = [[count for turn in turns for count in turn] for turns in _stood(drafted)]
    every = [count for counts in prompts for count in counts]
    turns = [turn for each in _stood(drafted) for turn in each]
    lengths = [sum(count + 1 for count in counts) / len(counts) for counts in prompts]

    def share(number: Callable[[int], int], of: Callable[[int], int]) -> list[float | None]:
        return [number(k) / of(k) if of(k) else None for k in range(1, drafted + 1)]

    def reached(place: int) -> int:
        return sum(count >= place for count in every)

    tokens = sum(count + 1 for count in every)
    parts = [(name, sum(of), len(of)) for name, of in _parts(prompts).items()]
    return {
        "acceptance_length": tokens / len(every),
        "acceptance_length_macro": sum(lengths) / len(lengths),
        "acceptance_rate_by_position": share(reached, lambda _: len(every)),
        "conditional_acceptance_rate_by_position": share(reached, lambda k: reached(k - 1)),
        "accepted_histogram": [every.count(k) for k in range(drafted + 1)],
        "counts": {
            "output_tokens": tokens + len(turns),
            "target_forwards": len(every),
            "replayed_forwards": 0,
            "drafted_tokens": drafted * len(every),
            "verified_tokens": sum(min(count + 1, drafted) for count in every),
            "accepted_tokens": sum(every),
        },
        "by_file": [
            {"name": name, "tokens": given, "forwards": forwards, "acceptance_length": given / forwards}
            for name, given, forwards in parts
        ],
        "prompts": len(prompts),
        "tokens_per_second": (tokens + len(turns)) / (2.0 * len(turns)),
        "baseline_tokens_per_second": tokens / (5.0 * len(turns)),
    }


def _parts(prompts: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """Tokens given by each forward, by file."""
    given = [[count + 1 for count in counts] for counts in prompts]
    return {"first": given[0] + given[1], "second": given[2]}


@check("EVL011", "prompts are put to the target otherwise than the settings say", needs=("EVL001", "EVL008"))
def asked(probe: Probe) -> Problem | None:
    """A dialogue of two turns and a single prompt, sampled, with a template option that changes what is rendered."""
    target, model, tokenizer = probe.subject.target, probe.subject.draft_model, probe.subject.target.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise NotApplicable("the target has no chat template")
    words = [Message(role="user", content=text) for text in ("Name a colour.", "Name another one.")]
    options = an_option(tokenizer, [word.for_template() for word in words[:1]])
    system = None if _refuses_system(tokenizer) else "Be brief."
    settings = EvaluationSettings(
        max_new_tokens=_ANSWER_TOKENS, sampling=_SAMPLED, seed=_SEED, system_prompt=system, template_options=options
    )
    before = Prompt("audit", 1, Conversation(messages=tuple(words[:1])))
    try:
        result = benchmark.evaluate_prompts(
            target, model, [before, Prompt("audit", 2, Conversation(messages=tuple(words)))], settings
        )
        answer = answer_module.answer_prompt(
            target,
            model,
            words[0].content,
            EvaluationSettings(max_new_tokens=_ANSWER_TOKENS, sampling=_SAMPLED, seed=_SEED),
        )
    except (TargetError, TemplateError) as error:
        raise NotApplicable(f"this target is not asked here: {error}") from error
    heard: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    for turn, found in enumerate(result.per_prompt[1:]):
        heard.append({"role": "user", "content": words[turn].content})
        ids = _rendered(tokenizer, heard, options)
        if found.input_ids != ids:
            return _otherwise(tokenizer, f"turn {turn + 1} of a dialogue", found.input_ids, ids)
        wanted = _sampled(probe, ids, _generator_of(probe, 1, turn))
        if found.output_ids != wanted:
            return _answered(f"turn {turn + 1} of a dialogue", found.output_ids, wanted)
        said = str(tokenizer.decode([i for i in wanted if i not in _stops(probe)], clean_up_tokenization_spaces=False))
        if "</think>" in said:
            break  # how reasoning goes into a history is the template's matter
        heard.append({"role": "assistant", "content": said})
    seeded = torch.Generator(target.device).manual_seed(_SEED)
    wanted = _sampled(probe, _rendered(tokenizer, [{"role": "user", "content": words[0].content}], {}), seeded)
    return None if answer.output_ids == wanted else _answered("a single prompt", answer.output_ids, wanted)


def _otherwise(tokenizer: PreTrainedTokenizerBase, what: str, found: Sequence[int], wanted: Sequence[int]) -> Problem:
    texts = (str(tokenizer.decode(list(ids)))[-80:] for ids in (found, wanted))
    return Problem("{} is asked as ..{!r}, by the template and the settings ..{!r}".format(what, *texts), _ASK)


def _answered(what: str, found: Sequence[int], wanted: Sequence[int]) -> Problem:
    how = f"sampled at temperature {_SAMPLED.temperature:g}"
    return Problem(f"{what}, {how}, is answered {list(found)}, decoding says {list(wanted)}", _ASK)


def _sampled(probe: Probe, ids: Sequence[int], generator: torch.Generator) -> list[int]:
    """The answer of the decoder to a rendered prompt."""
    target = probe.subject.target
    made = generate.generate(
        target,
        probe.subject.draft_model,
        torch.tensor([list(ids)], device=target.device),
        max_new_tokens=_ANSWER_TOKENS,
        stop_token_ids=_stops(probe),
        sampling=_SAMPLED,
        generator=generator,
    )
    return made.output_ids


def _generator_of(probe: Probe, prompt: int, turn: int) -> torch.Generator:
    """Each turn has a generator of its own, seeded by the settings and its place."""
    seed = int(np.random.SeedSequence([_SEED, prompt, turn]).generate_state(1)[0])
    return torch.Generator(probe.subject.target.device).manual_seed(seed)


def _stops(probe: Probe) -> frozenset[int]:
    target = probe.subject.target
    return model_module.stop_token_ids(target.model, target.require_tokenizer())


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> list[int]:
    """By the tokenizer alone."""
    text = tokenizer.apply_chat_template(
        [dict(m) for m in messages], tokenize=False, add_generation_prompt=True, **options
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _refuses_system(tokenizer: PreTrainedTokenizerBase) -> bool:
    try:
        _rendered(tokenizer, [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], {})
    except (jinja2.TemplateError, TypeError, ValueError):
        return True
    return False


def an_option(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A keyword of the chat template with a value that changes a prompt; none where there is no such word."""
    template, plain = tokenizer.chat_template, _rendered(tokenizer, messages, {})
    names = meta.find_undeclared_variables(
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_text_of(template))
    )
    for name in sorted(names - {"messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token"}):
        for value in (True, False):
            try:
                if _rendered(tokenizer, messages, {name: value}) != plain:
                    return {name: value}
            except (jinja2.TemplateError, TypeError, ValueError):
                continue
    return {}


def _text_of(template: Any) -> str:
    """Without the markers that transformers adds to templates, which jinja2 alone does not read."""
    text = str(template if isinstance(template, str) else template.get("default", ""))
    for word in ("generation", "endgeneration"):
        for left, right in (("{%", "%}"), ("{%-", "%}"), ("{%", "-%}"), ("{%-", "-%}")):
            text = text.replace(f"{left} {word} {right}", "")
    return text
