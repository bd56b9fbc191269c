"""EVL009 and EVL011: are sampled answers distributed as the target's own, and is what is asked what was to be asked?

From the filter of logits to the loop that decodes: filters against transformers' own, the rule of rejection over four
tokens, the drafter's proposals over a reduced vocabulary, and the decoding loop itself over a target of fixed logits;
each many times, expected counts within five standard deviations. Prompts are read from files of every kind, rendered by
the tokenizer alone, and their answers decoded again, each with the generator of its place.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import numpy as np
import torch
from jinja2 import meta
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftline.audit.evaluation import one_round
from draftline.audit.probe import Probe, relative_difference
from draftline.audit.report import Problem, check
from draftline.audit.subject import NotApplicable
from draftline.data import prompts as prompts_module
from draftline.errors import TargetError, TemplateError
from draftline.evaluate import answer as answer_module
from draftline.evaluate import benchmark, generate
from draftline.evaluate.result import TurnResult
from draftline.options import EvaluationSettings, Sampling
from draftline.targets import model as model_module

_DRAWS = 4000
"""Drafted tokens that are verified by sampling."""

_ANSWERS = 500
"""Sampled answers of the decoding loop over fixed logits."""

_SEED, _ANSWER_TOKENS = 11, 4
_ASK = "render all that was said with the options of the settings; decode with their sampling, a generator a turn"
_SAMPLED = Sampling(temperature=1.4)

_RULE = "accept with min(1, p / q); after a rejection draw from what p has more than q (arXiv 2211.17192)"


@check("EVL009", "sampled answers are not distributed as the target's own", needs=("EVL001",))
def sampled_as_target(probe: Probe) -> Problem | None:
    return _wrong_filters(probe) or _wrong_rule(probe) or _wrong_proposal(probe) or _wrong_loop(probe)


def _wrong_filters(probe: Probe) -> Problem | None:
    logits = torch.randn(6, 96, generator=probe.generator(41))
    for sampling in (Sampling(temperature=0.7, top_p=0.9, top_k=60), Sampling(temperature=1.3, top_p=0.2)):
        if relative_difference(generate.probabilities(sampling, logits), _filtered(sampling, logits)) > 1e-5:
            return Problem(
                f"{sampling.describe()} filters other tokens than transformers does, or weighs them in another way",
                "temperature, then top-k, then the smallest set whose probability reaches top-p",
            )
    return None


def _wrong_rule(probe: Probe) -> Problem | None:
    """One drafted token of four."""
    generator = probe.generator(42)
    draft = torch.tensor([[0.7, 0.2, 0.05, 0.05]], dtype=torch.float64)
    target = torch.tensor([[0.05, 0.05, 0.2, 0.7], [0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    first, second = torch.zeros(4), torch.zeros(4)
    for token in torch.multinomial(draft[0], _DRAWS, replacement=True, generator=generator).tolist():
        accepted, following = generate.verify_sampled(torch.tensor([token]), draft, target, generator)
        first[token if accepted else following] += 1
        if accepted:
            second[following] += 1
    return _unlike("first tokens", first, target[0]) or _unlike("second tokens", second, target[1])


def _unlike(what: str, counts: Tensor, wanted: Tensor) -> Problem | None:
    """Counts that are not those of a distribution."""
    number = counts.sum()
    off = (counts - number * wanted).abs() - 5 * (number * wanted * (1 - wanted)).sqrt()
    if not bool((off > 0).any()):
        return None
    return Problem(f"shares of {what} are {_shares(counts / number)}, the target's own {_shares(wanted)}", _RULE)


@torch.no_grad()
def _wrong_proposal(probe: Probe) -> Problem | None:
    """What the drafter draws its tokens from: its own filtered logits, each at the token that it stands for."""
    target, model, sampling = probe.subject.target, probe.subject.draft_model, Sampling(temperature=0.6, top_k=20)
    drafter = generate.BlockDrafter(target, model, sampling, torch.Generator(target.device).manual_seed(5))
    width = len(probe.layer_ids) * model.config.hidden_size
    drafter.extend(torch.randn(1, 5, width, generator=probe.generator(43)).to(target.device))
    anchor = int(probe.samples[0].input_ids[0])
    proposal, logits = drafter.propose(anchor), drafter.head.logits(drafter.block_states(anchor))
    of_rows = _filtered(sampling, logits.float().cpu())
    wanted = torch.zeros(len(of_rows), target.vocab_size, dtype=torch.float64).index_copy_(1, probe.kept_ids, of_rows)
    found = proposal.probabilities_KV
    if found is None or relative_difference(found.cpu(), wanted) > 1e-3:
        return Problem(
            f"with {sampling.describe()}, what the drafter draws from is not its own filtered distribution, or is of "
            "other tokens than its rows stand for",
            "probabilities of rows, each at the id of its token (kept_ids), zero elsewhere",
        )
    whole = drafter.head.to_whole(of_rows.to(logits.device)).cpu()
    drawn = wanted[torch.arange(len(wanted)), proposal.tokens_K.cpu()]
    if not torch.equal(whole[:, probe.kept_ids], of_rows) or not bool((drawn > 0).all()):
        return Problem(
            "rows of the drafter's head come back from the whole vocabulary as others, or tokens are drawn that it "
            "cannot say",
            "to_whole(x)[..., kept_ids] == x, and nothing elsewhere",
        )
    return None


def _wrong_loop(probe: Probe) -> Problem | None:
    """Answers of three tokens through the loop that decodes, over logits that depend on the place alone."""
    generator, sampling = probe.generator(44), Sampling(temperature=0.5, top_p=0.95)
    device = probe.subject.target.device
    logits = torch.randn(3, 6, generator=generator).to(device)
    wanted, counts = _filtered(sampling, logits.cpu()), torch.zeros(3, 6)
    source = torch.Generator(device).manual_seed(7)
    with _fixed_logits(logits):
        for _ in range(_ANSWERS):
            answer = generate.decode(
                probe.subject.target,
                _Guessing(device, source),
                torch.ones(1, 1, dtype=torch.int64),
                3,
                (),
                sampling,
                source,
            )
            for place, token in enumerate(answer.output_ids):
                counts[place, token] += 1
    problems = (_unlike(f"tokens {place} of answers", counts[place], wanted[place]) for place in range(3))
    return next((problem for problem in problems if problem is not None), None)


class _Guessing:
    """Drafts two tokens, each from a distribution that is the same everywhere."""

    target_layer_ids: tuple[int, ...] = ()

    def __init__(self, device: torch.device, source: torch.Generator) -> None:
        row = torch.tensor([0.3, 0.3, 0.1, 0.1, 0.1, 0.1], dtype=torch.float64, device=device)
        self._rows, self._source = row.expand(2, -1), source

    def extend(self, hidden_states: Tensor) -> None:
        """Nothing is read."""

    def propose(self, anchor_id: int) -> generate.Proposal:
        """Whatever came before."""
        del anchor_id
        return generate.Proposal(torch.multinomial(self._rows, 1, generator=self._source)[:, 0], self._rows)


@contextmanager
def _fixed_logits(logits: Tensor) -> Iterator[None]:
    """Decoding over a target that says the same at each place of every answer; the prompt has one token."""

    @contextmanager
    def opened(*_: object) -> Iterator[SimpleNamespace]:
        state = SimpleNamespace(kept=0, replayed_forwards=0)

        def forward(input_ids: Tensor) -> SimpleNamespace:
            places = (state.kept + torch.arange(input_ids.shape[1])).clamp(max=len(logits) - 1)
            return SimpleNamespace(logits_nV=logits[places.to(logits.device)], hidden_states=None)

        def keep(count: int) -> None:
            state.kept += count

        state.forward, state.keep = forward, keep
        yield state

    clean = generate.open_target_state
    generate.open_target_state = opened  # type: ignore[assignment]
    try:
        yield
    finally:
        generate.open_target_state = clean


def _filtered(sampling: Sampling, logits: Tensor) -> Tensor:
    """Distribution by transformers' own filters."""
    ids = torch.zeros(len(logits), 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(sampling.temperature)(ids, logits.clone())
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    return scores.double().softmax(-1)


def _shares(values: Tensor) -> str:
    return ", ".join(f"{value:.3f}" for value in values.tolist())


@check("EVL011", "prompts are put to the target otherwise than files and settings say", needs=("EVL001", "EVL008"))
def asked(probe: Probe) -> Problem | None:
    """Prompts of every kind from files, sampled, with a system prompt and an option that changes what is rendered."""
    target, tokenizer = probe.subject.target, probe.subject.target.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise NotApplicable("the target has no chat template")
    option = an_option(tokenizer, [{"role": "user", "content": "a"}])
    system = None if _refuses_system(tokenizer) else "Be brief."
    settings = EvaluationSettings(
        max_new_tokens=_ANSWER_TOKENS, sampling=_SAMPLED, seed=_SEED, system_prompt=system, template_options=option
    )
    rows: list[tuple[Any, tuple[str, ...]]] = [
        ({"turns": ["Name a colour."]}, ("Name a colour.",)),
        ({"turns": ["Name a colour.", "Name another one."]}, ("Name a colour.", "Name another one.")),
        ({"prompt": "Say why."}, ("Say why.",)),
    ]
    own = {name: not value for name, value in option.items()}
    said = [{"role": "user", "content": "And now?"}, {"role": "assistant", "content": "Not this."}]
    if system is not None:
        said.insert(0, {"role": "system", "content": "Own words."})
    if _is_taken(tokenizer, said[:-1], own):
        rows.append(({"messages": said, "chat_template_kwargs": own}, ("And now?",)))
    with tempfile.TemporaryDirectory() as scratch:
        wrong = _wrong_tasks(Path(scratch))
        file = Path(scratch) / "asked.jsonl"
        file.write_text("\n".join(json.dumps(row) for row, _ in rows), encoding="utf-8")
        prompts = prompts_module.read_prompts([str(file)])
    if wrong is not None:
        return Problem(wrong, "columns and wording of z-lab's benchmark; every line is asked")
    if [(prompt.file, prompt.number) for prompt in prompts] != [(str(file), line) for line in range(1, len(rows) + 1)]:
        return Problem(f"of {len(rows)} lines, the last without an end, {len(prompts)} are asked", _ASK)
    try:
        with one_round():
            result = benchmark.evaluate_prompts(target, probe.subject.draft_model, prompts, settings)
        answer = answer_module.answer_prompt(target, probe.subject.draft_model, "Name a colour.", settings)
    except (TargetError, TemplateError) as error:
        raise NotApplicable(f"this target is not asked here: {error}") from error
    found = iter(result.per_prompt)
    for index, (row, turns) in enumerate(rows):
        mine = "messages" in row
        start = ({"role": "system", "content": "Own words." if mine else system},) if system is not None else ()
        options = {**option, **own} if mine else option
        wrong_turn = _wrong_turns(probe, (index, turns), found, start, options)
        if wrong_turn is not None:
            return wrong_turn
    start = () if system is None else ({"role": "system", "content": system},)
    seeded = torch.Generator(target.device).manual_seed(_SEED)
    ids = _rendered(tokenizer, [*start, {"role": "user", "content": "Name a colour."}], option)
    wanted = _sampled(probe, ids, seeded)
    return None if answer.output_ids == wanted else _answered("a single prompt", answer.output_ids, wanted)


def _wrong_turns(
    probe: Probe,
    asked: tuple[int, Sequence[str]],
    results: Iterator[TurnResult],
    start: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> Problem | None:
    """The turns of one prompt, given its place and what its user says, against the template and the decoder."""
    tokenizer, (index, turns), heard = probe.subject.target.require_tokenizer(), asked, list(start)
    for turn, text in enumerate(turns):
        found, what = next(results, None), f"turn {turn + 1} of prompt {index + 1}"
        heard.append({"role": "user", "content": text})
        ids = _rendered(tokenizer, heard, options)
        if found is None or (found.number, found.turn, found.asked) != (index + 1, turn + 1, text):
            return Problem(f"{what} is not reported, or as another", _ASK)
        if found.input_ids != ids:
            return _otherwise(tokenizer, what, found.input_ids, ids)
        wanted = _sampled(probe, ids, _generator_of(probe, index, turn))
        if found.output_ids != wanted:
            return _answered(what, found.output_ids, wanted)
        said = str(tokenizer.decode([i for i in wanted if i not in _stops(probe)], clean_up_tokenization_spaces=False))
        if "</think>" in said:  # how reasoning goes into a history is the template's matter
            for _ in turns[turn + 1 :]:
                next(results, None)
            return None
        heard.append({"role": "assistant", "content": said})
    return None


_STEPS = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_PROGRAM = "Write a solution to the following problem and make sure that it passes the tests:\n```python\nQ\n```"
_TASKS: tuple[tuple[str, Mapping[str, Any], tuple[str, ...]], ...] = (
    ("gsm8k", {"question": "Q", "answer": "A"}, (f"Q{_STEPS}",)),
    ("math-500", {"problem": "Q", "solution": "A", "answer": "A"}, (f"Q{_STEPS}",)),
    ("aime", {"id": 1, "problem": "Q", "solution": "A"}, (f"Q{_STEPS}",)),
    ("aime24", {"Problem": "Q", "Solution": "A"}, (f"Q{_STEPS}",)),
    ("aime25", {"question": "Q", "answer": "A"}, (f"Q{_STEPS}",)),
    ("humaneval", {"task_id": "t", "prompt": "Q", "canonical_solution": "A", "test": "A"}, (_PROGRAM,)),
    ("mbpp", {"prompt": "Q", "code": "A", "test_list": ["A"]}, ("Q",)),
    ("mbpp", {"text": "Q", "code": "A"}, ("Q",)),
    ("mt-bench", {"prompt": ["Q", "R"], "reference": ["A"]}, ("Q", "R")),
    ("mt-bench", {"turns": ["Q", "R"]}, ("Q", "R")),
    ("alpaca", {"instruction": "Q", "input": "", "output": "A"}, ("Q",)),
    ("alpaca", {"instruction": "Q", "input": "I", "output": "A"}, ("Q\n\nInput:\nI",)),
)
"""Task sets as they lie on the hub: a row, and what is asked of it; what is an answer there says A."""


def _wrong_tasks(place: Path) -> str | None:
    """A task set of which something else is asked, in words."""
    for number, (name, row, wanted) in enumerate(_TASKS):
        file = place / f"{number}.jsonl"
        file.write_text("\n".join([json.dumps(row)] * 3), encoding="utf-8")
        found = [
            (prompt.file, prompt.number, *(message.content for message in prompt.conversation.messages))
            for prompt in prompts_module.read_task(f"{name}={file}", 2)
        ]
        if found != [(name, 1, *wanted), (name, 2, *wanted)]:
            return f"of {name} is asked {found}, two rows say {wanted}"
    return None


def _is_taken(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], options: Any) -> bool:
    try:
        _rendered(tokenizer, messages, options)
    except (jinja2.TemplateError, TypeError, ValueError):
        return False
    return True


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
    return not _is_taken(tokenizer, [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], {})


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
