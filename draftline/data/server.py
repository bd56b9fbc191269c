"""A server with the OpenAI interface: how it is reached, and how the target answers the prompts through it.

Requests run side by side up to a bound, are repeated with growing pauses (or when the server says) as long as it is
busy or away, and every answer is stored as soon as it arrives. One dialogue is sequential: a turn is asked once the
turn before is answered. Requests that are under way when the process is killed are asked again by the next one.

A server samples with defaults of the model's folder (a repetition penalty, for instance) wherever a request leaves
something open, so a request leaves nothing open. Servers that refuse what is beyond the OpenAI interface are asked
without it. Reasoning in the history is sent under both of its names, because servers read one or the other. The number
of tokens that a server says it has read is compared with the prompt that is trained: its template may leave reasoning
out, or be another one altogether.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from draftline.data.answers import Answer, AnswerStore, Dialogue, answer_key, counted, seed_of
from draftline.data.conversations import Conversation, Unusable
from draftline.data.messages import BadRow, parse_call
from draftline.data.template import ChatTemplate, Refused
from draftline.errors import ServerError
from draftline.options import ServerSettings
from draftline.progress import OnProgress, say

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_REFUSED = frozenset({400, 413, 422})
"""Said about one conversation: too long, roles or tools that the server does not take."""
_BUSY = frozenset({429, 503})
_REFUSALS_AT_FIRST = 20
_ENDED = frozenset({"stop", "tool_calls", "function_call"})
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
_EXTENSIONS: dict[str, Any] = {"repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0, "return_token_ids": True}
"""What servers know beyond the OpenAI interface: the rest of the sampling, and the ids that were generated."""


@dataclass(frozen=True)
class Endpoint:
    """Where requests go.

    Attributes:
        base_url: up to and with `/v1`.
        api_key: sent as a bearer token if given; never shown.
        timeout_s: seconds of silence until a request counts as failed.
    """

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0

    @property
    def url(self) -> str:
        """Address of the OpenAI interface, without a slash at its end."""
        return self.base_url.rstrip("/")

    @property
    def root(self) -> str:
        """Address of the server itself, where its own interface and its counters are."""
        return self.url.removesuffix("/v1")

    def client(self, connections: int) -> httpx.AsyncClient:
        """A client for up to `connections` requests at once; to be closed by the caller."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        # Servers close kept connections after some seconds or requests (llama.cpp: 5 and 100) without saying so, now
        # and then just as the next request is on its way. So none is kept.
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=0)
        return httpx.AsyncClient(timeout=self.timeout_s, headers=headers, limits=limits)


def describe_failure(failure: httpx.Response | Exception) -> str:
    """What went wrong, in a few words on one line."""
    if isinstance(failure, httpx.Response):
        return f"status {failure.status_code}: {server_message(failure)}"
    if isinstance(failure, httpx.TimeoutException):
        return "no reply in time"
    return " ".join(str(failure).split()) or "the connection broke"


def server_message(reply: httpx.Response) -> str:
    """What a server says about a failure, in one line."""
    try:
        text = reply.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        text = reply.text
    return " ".join(str(text).split())[:200]


@dataclass(frozen=True)
class ServerAnswers:
    """Answers conversations through a server; what `prepare` takes as its answerer.

    Attributes:
        template: of the target, to be compared with what the server reads; none: nothing is compared.
        first_pause_s: pause before the first repetition of a failed request; each further one doubles.
    """

    store: AnswerStore
    endpoint: Endpoint
    settings: ServerSettings
    progress: OnProgress | None = None
    template: ChatTemplate | None = None
    first_pause_s: float = _FIRST_PAUSE
    _refused_extensions: set[str] = field(default_factory=set)
    _said: set[str] = field(default_factory=set)

    def identity(self) -> dict[str, Any]:
        """What determines the answers."""
        return self.settings.identity()

    def __call__(self, conversations: Sequence[Conversation]) -> list[Conversation | Unusable]:
        """The conversations with the target's own answers, in the order given.

        A conversation that the server does not take, or fails on, is `Unusable` with its reason. Raises
        `ServerError` when the server itself keeps failing; everything answered by then is stored.
        """
        return asyncio.run(self._answer_all(conversations))

    async def _answer_all(self, conversations: Sequence[Conversation]) -> list[Conversation | Unusable]:
        settings = self.settings
        dialogues = [Dialogue(conversation) for conversation in conversations]
        report = counted(dialogues, self.progress)

        async def converse(dialogue: Dialogue) -> None:
            while not dialogue.done:
                try:
                    prompt = dialogue.prompt()
                    answer = await self._answer(asking, prompt, dialogue.sample)
                    dialogue.add(answer, self._other_prompt(prompt, answer))
                except _Unanswerable as unanswerable:
                    refused.append(str(unanswerable))
                    dialogue.drop(str(unanswerable))
                    self._check_refusals(refused)
                report()

        refused: list[str] = []
        async with self.endpoint.client(settings.batch_size) as client:
            asking = _Asking(client, asyncio.Semaphore(settings.batch_size))
            try:
                async with asyncio.TaskGroup() as group:
                    for dialogue in dialogues:
                        group.create_task(converse(dialogue))
            except* ServerError as errors:
                raise errors.exceptions[0] from None
        return [dialogue.result() for dialogue in dialogues]

    async def _answer(self, asking: _Asking, prompt: Conversation, sample: int) -> Answer:
        request = self._request(prompt)
        key = answer_key(request, self.settings.identity(), "server", sample)
        if not self.settings.sampling.greedy:
            request["seed"] = seed_of(key)
        async with asking.same.setdefault(key, asyncio.Lock()):
            known = self.store.get(key)
            if known is not None:
                return known
            async with asking.slots:
                answer = await self._ask(asking.client, request, key)
            self.store.add(answer)
        return answer

    def _other_prompt(self, prompt: Conversation, answer: Answer) -> str | None:
        """The reason of the report where the server read another number of tokens than is trained; None if not."""
        if self.template is None or answer.prompt_tokens is None:
            return None
        try:
            expected = len(self.template.prompt_ids(prompt))
            if expected == answer.prompt_tokens:
                return None
            bare = [message.model_copy(update={"reasoning_content": None}) for message in prompt.messages]
            without = len(self.template.prompt_ids(prompt.model_copy(update={"messages": tuple(bare)})))
        except Refused:
            return None
        left_out = without == answer.prompt_tokens
        reason = "server_left_out_earlier_reasoning" if left_out else "server_read_another_prompt"
        if reason not in self._said:
            self._said.add(reason)
            what = "leaves out reasoning of earlier answers" if left_out else "has another template or system prompt"
            say(
                f"warning: the server read {answer.prompt_tokens} tokens of a prompt that has {expected} here: it "
                f"{what}. What is trained is not what it answered; such rows are counted as {reason}"
            )
        return reason

    def _check_refusals(self, refused: Sequence[str]) -> None:
        """A server that takes no conversation at all is set up wrongly; this is not the conversations' fault."""
        if len(refused) >= _REFUSALS_AT_FIRST and not len(self.store):
            raise ServerError(
                f"the server at {self.endpoint.url} took none of the first {len(refused)} conversations "
                f"({refused[-1]}); check --model and the server's settings"
            )

    def _request(self, prompt: Conversation) -> dict[str, Any]:
        settings = self.settings
        messages = prompt.for_template(text_arguments=True)
        for message in messages:
            if "reasoning_content" in message:
                message["reasoning"] = message["reasoning_content"]
        request: dict[str, Any] = {
            "model": settings.model,
            "messages": messages,
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.sampling.temperature,
            "top_p": settings.sampling.top_p,
            **_NEUTRAL,
        }
        options = {**settings.template_options, **prompt.template_options}
        if options:
            request["chat_template_kwargs"] = options
        if prompt.tools:
            request["tools"] = list(prompt.tools)
        return request

    def _extended(self, request: dict[str, Any]) -> dict[str, Any]:
        """The request with what this server is not known to refuse."""
        wanted = _EXTENSIONS | ({"top_k": self.settings.sampling.top_k} if self.settings.sampling.top_k else {})
        return {name: each for name, each in {**request, **wanted}.items() if name not in self._refused_extensions}

    async def _ask(self, client: httpx.AsyncClient, request: dict[str, Any], key: str) -> Answer:
        """The answer to one request, which is repeated where that may help.

        Raises `_Unanswerable` where only this conversation is at fault: the server says so, or fails on it each time
        while it answers others. Raises `ServerError` where the server is.
        """
        url = f"{self.endpoint.url}/chat/completions"
        pause, answered_before, begun = self.first_pause_s, len(self.store), time.monotonic()
        fault, attempt = _Fault(""), 0
        while attempt <= self.settings.retries or (
            fault.passing and time.monotonic() + (fault.retry_after or 0) - begun < self.settings.patience
        ):
            if attempt:
                # Spread over half the pause, so that many requests that failed together do not come back together.
                await asyncio.sleep(fault.retry_after or pause * (0.5 + random.random() / 2))
                pause = min(2 * pause, _LONGEST_PAUSE)
            attempt += 1
            try:
                reply = await client.post(url, json=self._extended(request))
            except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
                fault = _Fault(str(error))
                break
            except httpx.RequestError as error:
                connected = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
                fault = _Fault(describe_failure(error), by_conversation=connected, passing=not connected)
                continue
            if reply.status_code == 200:
                try:
                    return _read_reply(reply, key)
                except _Unreadable as unreadable:
                    fault = _Fault(str(unreadable), by_conversation=True)
                    continue
            busy = reply.status_code in _BUSY
            fault = _Fault(
                describe_failure(reply),
                by_conversation=reply.status_code == 500,
                passing=busy,
                retry_after=_retry_after(reply) if busy else None,
            )
            if reply.status_code in _REFUSED:
                if self._gives_up_extensions(server_message(reply)):
                    attempt -= 1
                    continue
                raise _Unanswerable(f"server_refused: {server_message(reply)}")
            if reply.status_code not in _RETRIED:
                break
        if fault.by_conversation and len(self.store) > answered_before:
            raise _Unanswerable(f"server_failed: {fault.reason}")
        raise ServerError(
            f"the server at {self.endpoint.url} did not answer ({fault.reason}); "
            "check it and run the same command again: stored answers are kept"
        )

    def _gives_up_extensions(self, said: str) -> bool:
        """Whether a refusal is of something beyond the OpenAI interface, which is not sent again then."""
        known = {*_EXTENSIONS, "seed"}
        named = {name for name in known if name in said and name not in self._refused_extensions}
        if "top_k" in named and self.settings.sampling.top_k:
            raise ServerError(f"the server at {self.endpoint.url} does not take --top-k ({said}): leave it out")
        self._refused_extensions.update(named)
        return bool(named)


def _retry_after(reply: httpx.Response) -> float | None:
    """Seconds after which a busy server wants to be asked again, if it says so as a number or a date."""
    said = reply.headers.get("Retry-After", "").strip()
    try:
        return max(0.0, float(said))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(said).timestamp() - time.time())
    except ValueError:
        return None


@dataclass(frozen=True)
class _Asking:
    """One round of requests: the client, the bound on how many run at once, and a lock for equal ones, by their key."""

    client: httpx.AsyncClient
    slots: asyncio.Semaphore
    same: dict[str, asyncio.Lock] = field(default_factory=dict)


class _Unanswerable(Exception):
    """The server does not answer one conversation; the message is the reason's name in the report."""


class _Unreadable(Exception):
    """A reply is not a chat completion."""


@dataclass(frozen=True)
class _Fault:
    """Why a request failed.

    Attributes:
        by_conversation: its conversation alone may be the cause.
        passing: the server is busy or away, and may come back.
        retry_after: seconds after which it wants to be asked again.
    """

    reason: str
    by_conversation: bool = False
    passing: bool = False
    retry_after: float | None = None


def _refuse_surrogates(text: str) -> None:
    """Raise `_Unanswerable` for half a character, which no tokenizer takes and no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _Unanswerable("lone_surrogate_in_answer") from None


def _read_reply(reply: httpx.Response, key: str) -> Answer:
    """The answer in a chat completion. Servers name reasoning `reasoning_content` or `reasoning`.

    An answer counts as ended only if the server says that the target ended it: one that was aborted or filtered is
    cut like one that ran into the limit.
    """
    try:
        body = reply.json()
        choice, read = body["choices"][0], (body.get("usage") or {}).get("prompt_tokens")
        message = choice["message"]
        calls = tuple(parse_call(call) for call in message.get("tool_calls") or ())
        ended = choice.get("finish_reason") in _ENDED
        _refuse_surrogates(json.dumps(message, ensure_ascii=False))
        return Answer(
            key=key,
            content=message.get("content") or "",
            reasoning_content=message.get("reasoning_content") or message.get("reasoning"),
            tool_calls=calls,
            finish_reason="length" if not ended else "tool_calls" if calls else "stop",
            output_ids=tuple(choice.get("token_ids") or ()),
            prompt_tokens=read if isinstance(read, int) and read > 0 else None,
        )
    except BadRow as bad:
        raise _Unanswerable(f"answer_unreadable: {bad}") from None
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        said = " ".join(reply.text.split())[:200]
        raise _Unreadable(
            f"the reply is not a chat completion: {said!r}; --base-url ends in /v1 on most servers"
        ) from error
