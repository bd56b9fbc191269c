"""The target answers the prompts through any server with the OpenAI chat interface.

Requests run side by side up to a bound, are repeated with growing pauses when the server is busy or away, and every
answer is stored as soon as it arrives. One dialogue is sequential: a turn is asked once the turn before is answered.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import ValidationError

from draftline.data.answers import Answer, AnswerStore, answer_key
from draftline.data.conversations import Conversation, dump_arguments
from draftline.data.dialogue import Dialogue
from draftline.data.endpoint import Endpoint, describe_failure
from draftline.data.messages import BadRow, parse_call
from draftline.data.rows import Unusable
from draftline.errors import ServerError

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0


@dataclass(frozen=True)
class ServerSettings:
    """Which server answers, and how it is asked.

    Attributes:
        endpoint: where the server is.
        model: name of the model on the server.
        max_new_tokens: longest answer, tokens.
        temperature: 0 for greedy answers.
        concurrency: requests under way at once.
        retries: repetitions of a request before giving up.
        template_options: sent as `chat_template_kwargs`; a row's own come on top.
    """

    endpoint: Endpoint
    model: str
    max_new_tokens: int = 1024
    temperature: float = 0.0
    concurrency: int = 16
    retries: int = 5
    template_options: dict[str, Any] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """The part that can change an answer, without the address: a target may move between machines."""
        return {
            "model": self.model,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "template_options": self.template_options,
        }


@dataclass(frozen=True)
class ServerAnswers:
    """Answers conversations through a server; what `prepare` takes as its answerer.

    Attributes:
        first_pause_s: pause before the first repetition of a failed request; each further one doubles.
    """

    store: AnswerStore
    settings: ServerSettings
    progress: Callable[[int, int], None] | None = None
    first_pause_s: float = _FIRST_PAUSE

    def identity(self) -> dict[str, Any]:
        """What determines the answers."""
        return self.settings.identity()

    def __call__(self, conversations: Sequence[Conversation]) -> list[Conversation | Unusable]:
        """The conversations with the target's own answers, in the order given.

        Raises `ServerError` when a request keeps failing; everything answered by then is stored.
        """
        return asyncio.run(self._answer_all(conversations))

    async def _answer_all(self, conversations: Sequence[Conversation]) -> list[Conversation | Unusable]:
        settings = self.settings
        dialogues = [Dialogue(conversation) for conversation in conversations]
        total = sum(dialogue.remaining for dialogue in dialogues)
        slots = asyncio.Semaphore(settings.concurrency)

        def report() -> None:
            if self.progress is not None:
                self.progress(total - sum(dialogue.remaining for dialogue in dialogues), total)

        async def converse(dialogue: Dialogue) -> None:
            while not dialogue.done:
                dialogue.add(await self._answer(client, slots, dialogue.prompt()))
                report()

        async with settings.endpoint.client(settings.concurrency) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    for dialogue in dialogues:
                        group.create_task(converse(dialogue))
            except* ServerError as errors:
                raise errors.exceptions[0] from None
        return [dialogue.result() for dialogue in dialogues]

    async def _answer(self, client: httpx.AsyncClient, slots: asyncio.Semaphore, prompt: Conversation) -> Answer:
        request = self._request(prompt)
        key = answer_key(request, self.settings.identity(), "server")
        known = self.store.get(key)
        if known is not None:
            return known
        async with slots:
            answer = _read_reply(await self._post(client, request), key)
        self.store.add(answer)
        return answer

    def _request(self, prompt: Conversation) -> dict[str, Any]:
        settings = self.settings
        request: dict[str, Any] = {
            "model": settings.model,
            "messages": [_as_openai(message) for message in prompt.for_template()],
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
        }
        options = {**settings.template_options, **prompt.template_options}
        if options:
            request["chat_template_kwargs"] = options
        if prompt.tools:
            request["tools"] = list(prompt.tools)
        return request

    async def _post(self, client: httpx.AsyncClient, request: dict[str, Any]) -> dict[str, Any]:
        url = f"{self.settings.endpoint.url}/chat/completions"
        pause, reason = self.first_pause_s, ""
        for attempt in range(self.settings.retries + 1):
            if attempt:
                # Spread over half the pause, so that many requests that failed together do not come back together.
                await asyncio.sleep(pause * (0.5 + random.random() / 2))
                pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                reply = await client.post(url, json=request)
            except (httpx.TransportError, httpx.InvalidURL) as error:
                reason = describe_failure(error)
                continue
            if reply.status_code == 200:
                try:
                    return dict(reply.json())
                except (ValueError, TypeError):
                    reason = "the reply is no JSON object"
                    continue
            reason = describe_failure(reply)
            if reply.status_code not in _RETRIED:
                break
        raise ServerError(
            f"the server at {self.settings.endpoint.url} did not answer ({reason}); "
            "check it and run the same command again: stored answers are kept"
        )


def _as_openai(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its calls as JSON text, as the OpenAI interface wants them."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else dump_arguments(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls}


def _read_reply(reply: dict[str, Any], key: str) -> Answer:
    """The answer in a chat completion. Servers name reasoning `reasoning_content` or `reasoning`."""
    try:
        choice = reply["choices"][0]
        message = choice["message"]
        calls = tuple(parse_call(call) for call in message.get("tool_calls") or ())
        reason = choice.get("finish_reason")
        return Answer(
            key=key,
            content=message.get("content") or "",
            reasoning_content=message.get("reasoning_content") or message.get("reasoning"),
            tool_calls=calls,
            finish_reason="length" if reason == "length" else "tool_calls" if calls else "stop",
        )
    except (LookupError, TypeError, AttributeError, ValidationError, BadRow) as error:
        raise ServerError(
            f"the server's reply is no chat completion ({type(error).__name__}: {str(reply)[:200]}); "
            "check --base-url, which ends in /v1 on most servers"
        ) from error
