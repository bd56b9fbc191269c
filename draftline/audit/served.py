"""EVL012 and EXP014: are the answers of a server counted as they were given, and is it started as was trained?

A stand-in for vLLM, llama.cpp and SGLang answers with tokens, forwards and counters that are known beforehand, through
the functions that `evaluate --base-url` and `verify` call. The printed commands are read word by word.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import httpx

from draftline.audit.probe import Probe
from draftline.audit.report import Problem, check
from draftline.audit.subject import NotApplicable
from draftline.config import DFlashConfig
from draftline.data.conversations import Conversation, Message
from draftline.errors import ExportError, ServerError
from draftline.evaluate import served, server
from draftline.evaluate.replay import KeptAnswer
from draftline.formats import programs
from draftline.options import Reader, ServerMeasurement

_DRAFTED = 12
"""Tokens of a block of the stand-in: places have two digits."""

_ACCEPTED: tuple[tuple[int, ...], ...] = ((12, 0, 3, 0), (1, 11), (0, 2))
"""What stood in each forward of its answers. For the last token of the first, vLLM and llama.cpp draft nothing."""

_COUNT = "sum counters over all their labels, subtract the reading before, forwards = drafts + tokens that none gave"


@check("EXP014", "the printed command starts a server that drafts otherwise", needs=("EXP007",))
def commands(probe: Probe) -> Problem | None:
    config = probe.subject.draft_model.config
    for reader in programs.PROGRAMS:
        if config.sample_from_anchor and reader != "speculators":
            continue
        serving = programs.Serving("the folder", "the target", "float32", config)
        try:
            command = programs.serving_command(reader, serving)
        except ExportError as error:
            return Problem(f"no command for {reader}: {error}", "every program that reads the format has one")
        wrong = wrong_command(reader, command, ("the folder", "the target"), config)
        if wrong:
            return Problem(
                f"the command for {reader} {wrong}", "as many drafted tokens as were trained, of this folder"
            )
    return None


def wrong_command(reader: Reader, command: str, places: Sequence[str], config: DFlashConfig) -> str | None:
    """What a command says otherwise than the drafter was trained.

    Args:
        places: folder of the drafter, and target.
    """
    words = shlex.split(command.replace("\\\n", " ").replace("\n", " "))
    drafted = config.block_size - (0 if config.sample_from_anchor else 1)
    options = {
        "sglang": ("--speculative-num-draft-tokens", config.block_size),
        "llama.cpp": ("--spec-draft-n-max", drafted),
    }
    named = {text for word in words for text in (word, *_values(word))}
    missing = [place for place in places if place not in named]
    if missing:
        return f"does not name {missing[0]}"
    if reader in options:
        option, wanted = options[reader]
        found = words[words.index(option) + 1] if option in words[:-1] else None
        return None if found == str(wanted) else f"has {option} {found}, trained are {wanted}"
    if reader == "vllm":
        tree = json.loads(words[words.index("--speculative-config") + 1])
        number = tree.get("num_speculative_tokens")
        return None if number == drafted else f"has num_speculative_tokens {number}, trained are {drafted}"
    return None


def _values(word: str) -> list[str]:
    """Texts in a word that is a JSON object."""
    return [str(value) for value in json.loads(word).values()] if word.startswith("{") else []


@check("EVL012", "answers of a server are counted otherwise than they were given", needs=("EVL003", "EVL010"))
def counted(probe: Probe) -> Problem | None:
    tokenizer = probe.subject.target.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise NotApplicable("the target has no chat template")
    prompts = [Conversation(messages=(Message(role="user", content=f"{i}"),)) for i in range(len(_ACCEPTED))]
    wanted = ServerMeasurement(model=None, max_new_tokens=64, concurrency=(1,))
    forwards, tokens = sum(map(len, _ACCEPTED)), sum(_length(accepted) for accepted in _ACCEPTED)
    for name in _OWNERS:
        try:
            (level,) = server.evaluate_server(StandIn(name), tokenizer, prompts, wanted).levels  # type: ignore[arg-type]
        except ServerError as error:
            return Problem(f"{name} answers as it does, and is refused: {error}", _COUNT)
        found = (level.answers, level.tokens, level.target_forwards, round(level.acceptance_length, 9))
        right = (len(_ACCEPTED), tokens, forwards, round((tokens - len(_ACCEPTED)) / forwards, 9))
        if found != right:
            return Problem(f"{name}: (answers, tokens, forwards, acceptance length) is {found}, it was {right}", _COUNT)
        if level.accepted_histogram and level.accepted_histogram != _histogram(name):
            shown = f"{level.accepted_histogram}, it was {_histogram(name)}"
            return Problem(f"{name}: drafts by accepted tokens {shown}", _COUNT)
    return _verdicts()


def _length(accepted: Sequence[int]) -> int:
    return 1 + sum(count + 1 for count in accepted)


def _drafts(name: str, number: int) -> list[int]:
    """What a program counts of the drafts of an answer."""
    accepted = list(_ACCEPTED[number])
    return accepted[:-1] if number == 0 and name != "SGLang" else accepted


def _histogram(name: str) -> list[int]:
    every = [count for number in range(len(_ACCEPTED)) for count in _drafts(name, number)]
    return [every.count(k) for k in range(_DRAFTED + 1)]


def _verdicts() -> Problem | None:
    """Servers that are right, draft otherwise, say other tokens, or do not draft."""
    for name in _OWNERS:
        right = StandIn(name)
        cases = {
            "serves as trained": (right, True),
            "needs a forward more": (replace(right, change="forwards"), False),
            "says another token": (replace(right, change="tokens"), False),
            "does not draft": (replace(right, change="nothing drafted"), False),
        }
        for what, (stand_in, yes) in cases.items():
            kept = [_kept(number) for number in range(len(_ACCEPTED))]
            question = served.Question(kept, 64, (), None, coarse=False)
            verdict = served.verify_server(stand_in, None, question)  # type: ignore[arg-type]
            if verdict.served_as_trained != yes:
                return Problem(
                    f"a {name} that {what} is judged: {verdict.sentence()}",
                    "compare each output with the proof, and its forwards",
                )
    return None


def _kept(number: int) -> KeptAnswer:
    """A written answer of which every choice was clear."""
    accepted, ids = _ACCEPTED[number], _output(number)
    blocks, place = [], 1
    for count in accepted:
        right = ids[place : place + count]
        blocks.append((*right, *[1] * (_DRAFTED - count)))
        place += count + 1
    return KeptAnswer(
        input_ids=(number + 1,),
        output_ids=tuple(ids),
        text=None,
        plain_text=None,
        target_forwards=len(accepted),
        drafted_blocks=tuple(blocks),
        output_gaps=(1.0,) * len(ids),
        draft_gaps=((1.0,) * _DRAFTED,) * len(accepted),
        largest_logit=10.0,
    )


def _output(number: int) -> list[int]:
    """Tokens of an answer, none of which occurs twice in it."""
    return list(range(3 + number, 3 + number + _length(_ACCEPTED[number])))


_OWNERS = {"vLLM": "vllm", "llama.cpp": "llamacpp", "SGLang": "sglang"}
_Change = Literal["", "forwards", "tokens", "nothing drafted"]


@dataclass
class StandIn:
    """Where a program seems to run: every prompt gets the next of the known answers, after one that nobody measures.

    Attributes:
        name: the program.
        change: what it does otherwise.
    """

    name: str
    change: _Change = ""
    url: str = "http://stand-in/v1"
    root: str = "http://stand-in"

    def __post_init__(self) -> None:
        self._asked, self._given = -1, list[int]()
        self._tokens = 0

    def client(self, connections: int) -> httpx.AsyncClient:
        """One that reaches nothing but this object."""
        del connections
        return httpx.AsyncClient(transport=httpx.MockTransport(self._respond))

    def _respond(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "owned_by": _OWNERS[self.name]}]})
        if request.url.path == "/metrics":
            return httpx.Response(501) if self.name == "SGLang" else httpx.Response(200, text=self._metrics())
        number = max(0, self._asked) % len(_ACCEPTED)
        self._asked += 1
        ids, accepted = _output(number), _drafts(self.name, number)
        if self.change == "tokens" and number == 1:
            ids[3] += 50
        if self.change == "forwards" and number == 1:  # its second block is needed twice
            accepted = [*accepted[:-1], 4, 6]
        if self.change == "nothing drafted":
            accepted = []
        self._given += accepted
        self._tokens += len(ids)
        events = "".join(f"data: {json.dumps(event)}\n\n" for event in self._events(ids, accepted))
        return httpx.Response(200, text=f"{events}data: [DONE]\n\n")

    def _events(self, ids: list[int], accepted: list[int]) -> list[dict[str, Any]]:
        first, rest, text = ids[:1], ids[1:], "a"
        if self.name == "vLLM":
            parts = ((first, None), (rest, "length"))
            return [{"choices": [{"token_ids": part, "text": text, "finish_reason": end}]} for part, end in parts]
        if self.name == "llama.cpp":
            timings: dict[str, Any] = {"predicted_n": len(ids)}
            if accepted:
                timings |= {"draft_n": _DRAFTED * len(accepted), "draft_n_accepted": sum(accepted)}
            end = {"tokens": [], "content": "", "stop": True, "stop_type": "limit", "timings": timings}
            return [*({"tokens": part, "content": text, "stop": False} for part in (first, rest)), end]
        told: dict[str, Any] = {"completion_tokens": len(ids), "finish_reason": {"type": "length"}}
        if accepted:
            histogram = [accepted.count(k) for k in range(_DRAFTED + 1)]
            told |= {"spec_verify_ct": len(accepted), "spec_correct_drafts_histogram": histogram}
        begun = {"completion_tokens": 1, "finish_reason": None}
        return [{"output_ids": part, "text": text, "meta_info": said} for part, said in ((first, begun), (ids, told))]

    def _metrics(self) -> str:
        """Counters of two engines behind one address, of which the second stands still, and others of the same name."""
        head = "vllm:" if self.name == "vLLM" else "llamacpp:"
        given, lines = self._given, ["# HELP counters", "# TYPE counters counter"]
        places = [sum(count > k for count in given) for k in range(_DRAFTED)]
        tokens = "generation_tokens_total" if self.name == "vLLM" else "tokens_predicted_total"
        for engine, factor, more in (("0", 1, 0), ("1", 0, 1_000_003)):
            label = f'{{engine="{engine}",model_name="a m"}}'
            numbers = {
                "spec_decode_num_drafts_total": len(given),
                "spec_decode_num_draft_tokens_total": _DRAFTED * len(given),
                "spec_decode_num_accepted_tokens_total": sum(given),
                tokens: self._tokens,
            }
            lines += [f"{head}{name}{label} {float(factor * value + more)}" for name, value in numbers.items()]
            lines += [
                f'{head}spec_decode_num_accepted_tokens_per_pos_total{{engine="{engine}",position="{k}"}} '
                f"{float(factor * value + more)}"
                for k, value in enumerate(places)
            ]
        return "\n".join([*lines, f"{head}spec_decode_num_drafts_created 1.7e9", ""])
