"""Measure a running server: acceptance from its own counters, latency, and throughput at several concurrencies.

All prompts are answered greedily, once per level. A prompt of several turns runs as a dialogue whose history holds the
server's answers. Counters of the whole server are read before and after a level; with one request at a time, after
every answer, so that its forwards are known by prompt.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import numpy as np
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from draftline.data.answers import answer_slots, parse_answer
from draftline.data.conversations import Conversation, Message
from draftline.data.server import Endpoint, describe_failure
from draftline.data.template import render_prompt
from draftline.errors import ServerError
from draftline.evaluate.acceptance import (
    Acceptance,
    Interval,
    acceptance_interval,
    acceptance_rate_by_position,
    accepted_histogram,
    describe_figure,
    describe_interval,
)
from draftline.evaluate.engines import ENGINES, DraftCounts, Engine, Reply
from draftline.options import ServerMeasurement
from draftline.progress import table
from draftline.storage import without_nan

_WARM_UP_TOKENS = 16
"""Output of the request that is not measured: what a server does only once belongs to no level."""

_ANSWER_S = 30.0
"""Longest silence of a server that is only asked what it serves and what it has counted."""

_SETTLING_S = 5.0
"""Longest wait until the counters show an answer that has arrived; a server may count after it has sent."""


@dataclass(frozen=True)
class ServerTurn:
    """One answered turn.

    Attributes:
        prompt: index of its prompt.
        output_ids: as the server sent them; llama.cpp leaves out tokens that end inside a character.
        tokens: of the output, as the server counts them.
        target_forwards: after the prompt's own; None where the server counts only over all requests at once.
        first_token_s: from the request to the first token.
        seconds: from the request to the last token.
    """

    prompt: int
    input_ids: list[int]
    output_ids: list[int]
    tokens: int
    target_forwards: int | None
    first_token_s: float
    seconds: float


@dataclass(frozen=True)
class Latency:
    """Percentiles over answers, milliseconds; NaN where no answer had what is measured."""

    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Latency:
        """Percentiles of durations."""
        if not seconds:
            return Latency(*[float("nan")] * 3)
        return Latency(*(float(value) * 1000 for value in np.percentile(seconds, [50, 90, 99])))

    def __str__(self) -> str:
        return f"{self.p50:.0f} / {self.p90:.0f} / {self.p99:.0f}"


@dataclass(frozen=True)
class Level:
    """What was measured with so many requests under way at once.

    Attributes:
        acceptance_length: by the definition of `evaluate.acceptance`, from the server's counters.
        acceptance_length_interval: 95 %, clustered by prompt; None where forwards are not known by prompt.
        acceptance_rate_by_position: unconditional; empty where the server does not count places.
        accepted_histogram: drafts of which exactly 0, 1, .. tokens stood.
        tokens_per_second: output tokens of all answers over the time that they took together.
        first_token_ms: from the request to the first token, waiting in the server's queue included.
        per_token_ms: mean time between tokens of an answer after its first.
    """

    concurrency: int
    answers: int
    tokens: int
    target_forwards: int
    acceptance_length: float
    acceptance_length_interval: Interval | None
    acceptance_rate_by_position: list[float]
    conditional_acceptance_rate_by_position: list[float]
    accepted_histogram: list[int]
    tokens_per_second: float
    first_token_ms: Latency
    per_token_ms: Latency

    @staticmethod
    def of(concurrency: int, turns: Sequence[ServerTurn], counts: DraftCounts, seconds: float) -> Level:
        """Sum up the answers of one level; `seconds` is the time that they took together."""
        tokens = sum(turn.tokens for turn in turns)
        total = counts.acceptance(tokens, len(turns))
        per_forward, drafted = counts.accepted_per_forward(), len(counts.accepted_per_position)
        return Level(
            concurrency=concurrency,
            answers=len(turns),
            tokens=tokens,
            target_forwards=total.forwards,
            acceptance_length=total.length,
            acceptance_length_interval=_interval(turns, drafted + 1),
            acceptance_rate_by_position=acceptance_rate_by_position(per_forward, drafted, conditional=False),
            conditional_acceptance_rate_by_position=acceptance_rate_by_position(per_forward, drafted, conditional=True),
            accepted_histogram=accepted_histogram(per_forward, drafted) if drafted else [],
            tokens_per_second=tokens / seconds,
            first_token_ms=Latency.of([turn.first_token_s for turn in turns]),
            per_token_ms=Latency.of(
                [(turn.seconds - turn.first_token_s) / (turn.tokens - 1) for turn in turns if turn.tokens > 1]
            ),
        )


@dataclass(frozen=True)
class ServerResult:
    """What `draftline evaluate --base-url` reports.

    Attributes:
        program: vLLM, SGLang or llama.cpp.
        model: its name on the server.
        levels: one per concurrency, in the order asked for.
        per_prompt: the turns of the first level.
        notes: what to know about the numbers, one sentence each.
    """

    program: str
    model: str
    base_url: str
    levels: list[Level]
    per_prompt: list[ServerTurn]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values for JSON; what could not be measured is None, never NaN."""
        fields: dict[str, Any] = without_nan(asdict(self))
        return fields


def evaluate_server(
    endpoint: Endpoint,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Conversation],
    wanted: ServerMeasurement,
    on_turn: Callable[[int, int], None] | None = None,
) -> ServerResult:
    """Answer the prompts at every concurrency.

    Args:
        tokenizer: the target's, with its chat template.
        on_turn: called with answered turns and all turns, over all levels.

    Raises:
        ServerError: the server does not answer, is none of the known programs, or drafts nothing.
        TemplateError: the template takes no such conversation.
    """
    return asyncio.run(_evaluate(endpoint, tokenizer, prompts, wanted, on_turn))


def server_table(result: ServerResult) -> Table:
    """The result for people, a column per concurrency."""
    levels = result.levels
    rows = [
        ("acceptance length (with bonus)", *(f"{level.acceptance_length:.2f}" for level in levels)),
        ("95 % by prompt", *(describe_interval(level.acceptance_length_interval) for level in levels)),
        ("acceptance rate by position", *(_listed(level.acceptance_rate_by_position) for level in levels)),
        (
            "the same, if all before stood",
            *(_listed(level.conditional_acceptance_rate_by_position) for level in levels),
        ),
        ("drafts with 0, 1, .. accepted", *(" ".join(map(str, level.accepted_histogram)) or "-" for level in levels)),
        ("answers, tokens", *(f"{level.answers}, {level.tokens}" for level in levels)),
        ("tokens per second", *(f"{level.tokens_per_second:.1f}" for level in levels)),
        ("first token, ms (50 / 90 / 99 %)", *(str(level.first_token_ms) for level in levels)),
        ("each further token, ms", *(str(level.per_token_ms) for level in levels)),
    ]
    head = ("measured", *(f"concurrency {level.concurrency}" for level in levels))
    return table(f"{result.program} at {result.base_url}, {result.model}", head, rows)


def _listed(rates: Sequence[float]) -> str:
    return " ".join(map(describe_figure, rates)) or "-"


async def _evaluate(
    endpoint: Endpoint,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Conversation],
    wanted: ServerMeasurement,
    on_turn: Callable[[int, int], None] | None,
) -> ServerResult:
    slots = [answer_slots(prompt) for prompt in prompts]
    total = len(wanted.concurrency) * sum(map(len, slots))
    done = 0

    def report() -> None:
        nonlocal done
        done += 1
        if on_turn is not None:
            on_turn(done, total)

    async with endpoint.client(max(wanted.concurrency)) as client:
        engine, model = await find_engine(client, endpoint, wanted.model)
        server = RunningServer(client, endpoint, engine, model)
        first = prompts[0].model_copy(update={"messages": slots[0][0]})
        await server.warm_up(render_prompt(tokenizer, first, {}))
        levels, turns = [], []
        for concurrency in wanted.concurrency:
            run = _LevelRun(server, tokenizer, prompts, wanted.max_new_tokens, concurrency, report)
            level, answered = await run.measure()
            levels.append(level)
            turns.append(answered)
    return ServerResult(engine.name, model, endpoint.url, levels, turns[0], server.notes)


async def find_engine(client: httpx.AsyncClient, endpoint: Endpoint, wanted: str | None) -> tuple[Engine, str]:
    """The program behind an address, and the name of the model there, from its list of models."""
    try:
        reply = await client.get(f"{endpoint.url}/models", timeout=_ANSWER_S)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ServerError(
            f"the server at {endpoint.url} does not answer ({describe_failure(error)}): start it, or fix --base-url"
        ) from error
    if reply.status_code in (401, 403):
        raise ServerError(
            f"the server at {endpoint.url} refuses the key (status {reply.status_code}): "
            "name the environment variable that holds it with --api-key-env"
        )
    try:
        owners = {str(model["id"]): str(model["owned_by"]) for model in reply.json()["data"]}
    except (ValueError, LookupError, TypeError) as error:
        raise ServerError(
            f"the server at {endpoint.url} lists no models ({describe_failure(reply)}): "
            "give an address of vLLM, SGLang or llama.cpp, up to and with /v1"
        ) from error
    model = wanted or next(iter(owners), None)
    if model is None:
        raise ServerError(f"the server at {endpoint.url} serves no model: start it with the target and its drafter")
    if model not in owners:
        raise ServerError(f"the server at {endpoint.url} has no model {model!r}: it serves {', '.join(owners)}")
    engine = next((engine for engine in ENGINES if engine.owner == owners[model]), None)
    if engine is None:
        raise ServerError(
            f"the server at {endpoint.url} is not vLLM, SGLang or llama.cpp (its models are of {owners[model]!r}): "
            "the counters of other programs are not known"
        )
    return engine, model


class RunningServer:
    """One server while it is asked.

    Attributes:
        engine: the program.
        notes: what to know about its counts, one sentence each.
    """

    def __init__(self, client: httpx.AsyncClient, endpoint: Endpoint, engine: Engine, model: str) -> None:
        self.engine = engine
        self.notes: list[str] = []
        self._client, self._endpoint, self._model = client, endpoint, model

    async def warm_up(self, input_ids: Sequence[int]) -> None:
        """One answer that is not measured, and the question whether it was drafted.

        Raises:
            ServerError: it was not.
        """
        if not await self.drafts(input_ids):
            raise ServerError(f"the {self.engine.name} at {self._endpoint.url} {self.without_a_drafter}")

    @property
    def without_a_drafter(self) -> str:
        """What is wrong with a server that does not draft, and how it is started so that it does."""
        return f"counts no drafted tokens: it was started without a drafter; {self.engine.fix}"

    async def drafts(self, input_ids: Sequence[int]) -> bool:
        """Whether an answer, which is not measured, was drafted; true where it is too short to tell."""
        before = await self.counts()
        reply, _, _ = await self.ask(input_ids, _WARM_UP_TOKENS, text_is_enough=True)
        after = await self.counts_after(before, reply.tokens or None, answers=1)
        return 0 < reply.tokens <= 2 or reply.counts is not None or (after is not None and after.drafts > 0)

    async def ask(
        self, input_ids: Sequence[int], max_new_tokens: int, *, text_is_enough: bool = False
    ) -> tuple[Reply, float, float]:
        """A whole answer, the seconds to its first token and to its last.

        Args:
            text_is_enough: take an answer without token ids, whose length is then unknown (0).

        Raises:
            ServerError: the request fails; it is not repeated, because a repetition would be measured too.
        """
        reply, first, last = Reply(), 0.0, 0.0
        body = self.engine.request(self._model, list(input_ids), max_new_tokens)
        started = time.perf_counter()
        try:
            async with self._client.stream("POST", self._endpoint.root + self.engine.path, json=body) as stream:
                if stream.status_code != 200:
                    await stream.aread()
                    raise ServerError(self._failed(describe_failure(stream)))
                async for line in stream.aiter_lines():
                    event = _event(line)
                    if event is None:
                        continue
                    known = reply.tokens
                    self.engine.read(event, reply)
                    if reply.tokens > known:
                        last = time.perf_counter() - started
                        first = first or last
        except httpx.TransportError as error:
            raise ServerError(self._failed(describe_failure(error))) from error
        except (LookupError, TypeError, ValueError) as error:
            reason = f"its answer is not understood, {type(error).__name__} {error}"
            raise ServerError(self._failed(reason)) from error
        if not reply.tokens and not (text_is_enough and reply.text):
            raise ServerError(self._failed("its answer has no tokens"))
        if not reply.finished:
            raise ServerError(self._failed(f"its answer broke off after {reply.tokens} tokens"))
        return reply, first, last

    def check_tokens(self, reply: Reply, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuse an answer in the tokens of another tokenizer: the prompts meant something else to its model.

        Raises:
            ServerError: a token has no meaning in the target's, or there is only text.
        """
        if not reply.output_ids:
            raise ServerError(self._failed("it answers with text only, without token ids; update it"))
        strange = next((token for token in reply.output_ids if not 0 <= token < len(tokenizer)), None)
        if strange is not None:
            raise ServerError(
                f"the {self.engine.name} at {self._endpoint.url} answers with token {strange}, "
                f"the target's tokenizer has {len(tokenizer)}: it serves another model ({self._model}); "
                "name that with --target"
            )

    def _failed(self, reason: str) -> str:
        return (
            f"the {self.engine.name} at {self._endpoint.url} failed on a request ({reason}): "
            "look at its log, and measure again"
        )

    async def counts(self) -> DraftCounts | None:
        """Counters of the whole server; None where it keeps none, or none that can be read.

        Raises:
            ServerError: the connection fails, or they are not those of a known version.
        """
        if self.engine.metrics is None:
            return None
        try:
            reply = await self._client.get(f"{self._endpoint.root}/metrics", timeout=_ANSWER_S)
            return self.engine.counts(reply.text) if reply.status_code == 200 else None
        except httpx.TransportError as error:
            raise ServerError(self._failed(describe_failure(error))) from error
        except (LookupError, ValueError) as error:
            raise ServerError(self._failed(f"its counters are not understood, {error}")) from error

    async def counts_after(self, before: DraftCounts | None, tokens: int | None, answers: int) -> DraftCounts | None:
        """Counters once they hold `tokens` more than before, in so many answers; what was counted since then.

        Args:
            before: an earlier reading; None if the server keeps none.
            tokens: of the answers; None where the server does not say how many, and then any are enough.
            answers: how many.

        Raises:
            ServerError: they went back, or miss more than the first or last token of each answer.
        """
        if before is None:
            return None
        deadline = time.perf_counter() + _SETTLING_S
        while True:
            now = await self.counts()
            if now is None:
                raise ServerError(self._failed("its counters are gone"))
            counted = now - before
            wanted = answers if tokens is None else tokens
            if counted.tokens >= wanted or time.perf_counter() > deadline:
                if counted.tokens < wanted - answers or counted.drafts < 0:
                    shown = f"its counters show {counted.tokens} of {wanted} tokens"
                    raise ServerError(self._failed(f"{shown}: it was restarted, or is one of several"))
                if tokens is not None:
                    self._check_strangers(counted, tokens)
                return counted
            await asyncio.sleep(0.02)

    def _check_strangers(self, counted: DraftCounts, tokens: int) -> None:
        note = "Others used the server meanwhile: its counters, and so the acceptance, include their answers."
        if counted.tokens > tokens and note not in self.notes:
            self.notes.append(note)


@dataclass
class _LevelRun:
    """All prompts once, so many at a time."""

    server: RunningServer
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Conversation]
    max_new_tokens: int
    concurrency: int
    report: Callable[[], None]

    async def measure(self) -> tuple[Level, list[ServerTurn]]:
        """The level, and its turns in the order of the prompts."""
        gate = asyncio.Semaphore(self.concurrency)
        before, started = await self.server.counts(), time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._converse(index, gate)) for index in range(len(self.prompts))]
        except* ServerError as errors:
            raise errors.exceptions[0] from None
        seconds = time.perf_counter() - started
        answered = [turn for task in tasks for turn in task.result()]
        turns = [turn for turn, _ in answered]
        total = await self.server.counts_after(before, sum(turn.tokens for turn in turns), len(turns))
        if total is None:
            total = sum((counts for _, counts in answered if counts is not None), DraftCounts())
        if self.concurrency == 1:
            seconds = sum(turn.seconds for turn in turns)  # without the reading of counters between answers
        return Level.of(self.concurrency, turns, total, seconds), turns

    async def _converse(self, index: int, gate: asyncio.Semaphore) -> list[tuple[ServerTurn, DraftCounts | None]]:
        """The turns of one prompt, one after the other."""
        turns: list[tuple[ServerTurn, DraftCounts | None]] = []
        history: list[Message] = []
        for slot in answer_slots(self.prompts[index]):
            history += slot
            conversation = self.prompts[index].model_copy(update={"messages": tuple(history)})
            input_ids = render_prompt(self.tokenizer, conversation, {})
            async with gate:
                turn, counts, reply = await self._answer(index, input_ids)
            turns.append((turn, counts))
            history.append(_as_message(reply, with_tools=bool(conversation.tools)))
            self.report()
        return turns

    async def _answer(self, index: int, input_ids: list[int]) -> tuple[ServerTurn, DraftCounts | None, Reply]:
        alone = self.concurrency == 1
        before = await self.server.counts() if alone else None
        reply, first, last = await self.server.ask(input_ids, self.max_new_tokens)
        self.server.check_tokens(reply, self.tokenizer)
        counts = await self.server.counts_after(before, reply.tokens, 1) if before is not None else reply.counts
        forwards = None if counts is None else counts.acceptance(reply.tokens, 1).forwards
        turn = ServerTurn(index, input_ids, reply.output_ids, reply.tokens, forwards, first, last)
        return turn, counts, reply


def _event(line: str) -> dict[str, Any] | None:
    """One event of a streamed answer; None for what is between them and for the end mark."""
    if not line.startswith("data:") or line[5:].strip() == "[DONE]":
        return None
    event = json.loads(line[5:])
    if not isinstance(event, dict):
        raise TypeError("an event is not an object")
    if "error" in event:
        raise ValueError(str(event["error"])[:200])
    return event


def _as_message(reply: Reply, *, with_tools: bool) -> Message:
    content, reasoning, calls = parse_answer(reply.text, with_tools=with_tools and reply.stopped)
    return Message(role="assistant", content=content, reasoning_content=reasoning, tool_calls=calls)


def _interval(turns: Sequence[ServerTurn], longest: int) -> Interval | None:
    counted = [(t.prompt, Acceptance(t.tokens - 1, t.target_forwards)) for t in turns if t.target_forwards is not None]
    clusters = Acceptance.by_prompt(counted)
    return acceptance_interval(clusters, longest) if len(clusters) > 1 and len(counted) == len(turns) else None
