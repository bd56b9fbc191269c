"""The target's own chat template, and how it wants to be given a conversation.

Nothing here looks for names in the template's text. What is learned about it comes from rendering a small chat of texts
that occur nowhere else, in each of the ways in which messages can be written.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_args

import jinja2
import jinja2.meta
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from draftline.data.conversations import Conversation, Message, ReasoningField, hash_json
from draftline.data.parts import split_reasoning, unclosed_reasoning
from draftline.data.tokens import Tokens, tokenise_all
from draftline.errors import TemplateError
from draftline.options import TEMPLATE_ARGUMENTS

# What a template can raise: its own `raise_exception`, undefined names, and Python errors of its expressions.
TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)

MARK = re.compile(r"<[^<>\s]+>")
"""How control tokens are written, for tokenizers that do not have all of the template's among their own."""

_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
_FUNCTIONS = ("raise_exception", "strftime_now")
"""What transformers gives every template to call."""

_QUESTION, _THOUGHT, _ANSWER = "qzUSERzq", "qzTHINKzq", "qzANSWERzq"
_FUNCTION = {"name": "f", "arguments": {"qzarg": "qzvalue"}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"qzarg": {"type": "string", "description": "d"}}},
    },
}
"""A function and a call of it, for templates that are to be seen to render one."""


class Refused(Exception):
    """The template itself refused a conversation; the message is the template's."""


@dataclass(frozen=True)
class Rendering:
    """A rendered conversation: its text, and the character spans of generation markers if the template has them."""

    text: str
    generation_spans: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class Dialect:
    """How a template wants to be given what messages can say in more than one way; learned by rendering each way.

    Attributes:
        text_arguments: it joins the arguments of a call as text, or would print a Python dictionary.
        reasoning_names: names of the field under which it shows reasoning.
        block_to_field: a reasoning block inside the content has to be put into that field, because the template takes
            it for a part of the answer, or shows only one of the two.
    """

    text_arguments: bool
    reasoning_names: tuple[ReasoningField, ...]
    block_to_field: bool


@dataclass
class ChatTemplate:
    """A tokenizer's chat template with fixed options.

    Attributes:
        tokenizer: gives the template, and the ids of what it renders.
        options: keyword arguments of the template for every conversation (`enable_thinking`, for instance).
    """

    tokenizer: PreTrainedTokenizerBase
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._dialects: dict[str, Dialect] = {}
        self._prompts: dict[str, str] = {}
        self.learned: dict[Any, Any] = {}
        """What `spans` has found out about this template."""

    @cached_property
    def source(self) -> str:
        """Text of the template, the one for tools if there are several."""
        if not self.tokenizer.chat_template:
            raise TemplateError(
                "the target's tokenizer has no chat template; "
                "prepare data of the form {'text': ...} or {'input_ids': ...}, or use an instruct model"
            )
        return self.select(with_tools=True)

    def select(self, *, with_tools: bool) -> str:
        """Text of the template used with or without tools."""
        return self.tokenizer.get_chat_template(tools=[{}] if with_tools else None)

    @cached_property
    def has_generation_markers(self) -> bool:
        """Whether the template says itself which text the assistant generates."""
        return _GENERATION_MARKER.search(self.source) is not None

    def knows_role(self, role: str) -> bool:
        """Whether the template names this role."""
        return re.search(rf"['\"]{re.escape(role)}['\"]", self.source) is not None

    @cached_property
    def reads(self) -> frozenset[str]:
        """Options that the template looks at: names that it takes from outside and that not every template is given.

        Raises:
            TemplateError: it is no template.
        """
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
        given = {*TEMPLATE_ARGUMENTS, *self.tokenizer.SPECIAL_TOKENS_ATTRIBUTES, *environment.globals, *_FUNCTIONS}
        try:
            trees = [
                environment.parse(_GENERATION_MARKER.sub("", self.select(with_tools=tools))) for tools in (False, True)
            ]
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template is none: line {error.lineno}: {error.message}") from error
        return frozenset().union(*map(jinja2.meta.find_undeclared_variables, trees)) - given

    def unread_options(self) -> str | None:
        """A warning that names the options which the template does not look at, and those that it does."""
        unread = sorted(self.options.keys() - self.reads)
        if not unread:
            return None
        known = f"it reads {', '.join(sorted(self.reads))}" if self.reads else "it reads none"
        return f"the chat template does not read {', '.join(unread)}, which changes nothing: {known}"

    def situation(self, conversation: Conversation) -> str:
        """What of a conversation beside its messages changes how the template works: its options, tools or none."""
        return hash_json([conversation.template_options, bool(conversation.tools)])

    def dialect(self, conversation: Conversation) -> Dialect:
        """How the template wants calls and reasoning of such a conversation."""
        key = self.situation(conversation)
        if key not in self._dialects:
            self._dialects[key] = self._learn_dialect(conversation)
        return self._dialects[key]

    def _learn_dialect(self, conversation: Conversation) -> Dialect:
        def shown(answer: dict[str, Any]) -> str:
            """What the template makes of an answer; with a tool where it wants one, empty where it takes none."""
            chat = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER} | answer]
            for tools in (list(conversation.tools) or None, [_TOOL]):
                try:
                    return self._render(chat, tools, {**self.options, **conversation.template_options}).text
                except TEMPLATE_FAULTS:
                    continue
            return ""

        def call(arguments: Any) -> dict[str, Any]:
            function = {**_FUNCTION, "arguments": arguments}
            return {"content": "", "tool_calls": [{"id": "call00000", "type": "function", "function": function}]}

        given = shown(call(_FUNCTION["arguments"]))
        as_text = "'qzarg': 'qzvalue'" in given or (not given and shown(call(json.dumps(_FUNCTION["arguments"]))) != "")
        with_call = call(json.dumps(_FUNCTION["arguments"]) if as_text else _FUNCTION["arguments"])
        names = tuple(
            name
            for name in get_args(ReasoningField)
            if _THOUGHT in shown({name: _THOUGHT}) or _THOUGHT in shown(with_call | {name: _THOUGHT})
        )
        in_field = shown({names[0]: _THOUGHT}) if names else ""
        inside = shown({"content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"})
        return Dialect(as_text, names, _THOUGHT in in_field and in_field != inside)

    def adapted(self, conversation: Conversation) -> Conversation:
        """The conversation with reasoning where this template looks for it: one block, wherever the row kept it."""
        if not any("<think>" in m.content or "</think>" in m.content for m in conversation.messages):
            return conversation
        if not self.dialect(conversation).block_to_field:
            return conversation
        messages = [_with_field(m) if m.role == "assistant" else m for m in conversation.messages]
        return conversation.model_copy(update={"messages": tuple(messages)})

    def messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """The messages as this template reads them."""
        conversation = self.adapted(conversation)
        return self._translated(conversation.for_template(), conversation)

    def _translated(self, messages: list[dict[str, Any]], conversation: Conversation) -> list[dict[str, Any]]:
        """Messages of `Conversation.for_template`, with reasoning and arguments as the template reads them."""
        translated = []
        for number, message in enumerate(messages):
            new = message
            if "reasoning_content" in message:
                names = self.dialect(conversation).reasoning_names
                own = conversation.messages[number].reasoning_field if number < len(conversation.messages) else None
                name = names[0] if names and own not in names else own or "reasoning_content"
                new = {name if key == "reasoning_content" else key: value for key, value in message.items()}
            if message.get("tool_calls") and self.dialect(conversation).text_arguments:
                new = {**new, "tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}
            translated.append(new)
        return translated

    def render(self, messages: list[dict[str, Any]], conversation: Conversation, *, ask: bool = False) -> Rendering:
        """Render messages with the tools and options of `conversation`; `ask` appends the opening of an answer.

        The messages are in the form of `Conversation.for_template`. Raises `Refused` with the template's message
        where the template does not take them.
        """
        options = {**self.options, **conversation.template_options}
        messages = self._translated(messages, conversation)
        try:
            return self._render(messages, list(conversation.tools) or None, options, ask=ask)
        except TEMPLATE_FAULTS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            if not conversation.tools and self._takes_with_tools(messages, options):
                reason = f"the template takes no chat without tools ({reason})"
            raise Refused(reason) from error

    def _takes_with_tools(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> bool:
        try:
            self._render(messages, [_TOOL], options)
        except TEMPLATE_FAULTS:
            return False
        return True

    def _render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, options: dict[str, Any], *, ask: bool = False
    ) -> Rendering:
        if not self.has_generation_markers:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=ask, **options
            )
            return Rendering(str(text))
        # The spans behind `apply_chat_template(return_assistant_tokens_mask=True)`, in characters: one span a turn,
        # where the public call gives one mask for all turns.
        rendered: Any = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self.select(with_tools=tools is not None),
            return_assistant_tokens_mask=True,
            add_generation_prompt=ask,
            **{**self.tokenizer.special_tokens_map, **options},
        )
        texts, spans = rendered
        return Rendering(texts[0], tuple((start, end) for start, end in spans[0]))

    def generation_prompt(self, conversation: Conversation) -> str:
        """What the template appends behind a question for the target to answer; empty if nothing."""
        key = self.situation(conversation)
        if key not in self._prompts:
            question = [{"role": "user", "content": _QUESTION}]
            try:
                without = self.render(question, conversation).text
                asked = self.render(question, conversation, ask=True).text
            except Refused:
                without = asked = ""
            self._prompts[key] = asked[self.whole_tokens(asked, shared_start(without, asked)) :]
        return self._prompts[key]

    def whole_tokens(self, text: str, length: int) -> int:
        """The longest length, at most `length`, at which a token of `text` and a mark like `<|end|>` end."""
        if length >= len(text):
            return len(text)
        for mark in MARK.finditer(text):
            if mark.start() < length < mark.end():
                length = mark.start()
        if text[:length].endswith(">"):
            return length
        ends = [0, *self.encode([text])[0].offsets[:, 1].tolist()]
        return ends[bisect.bisect_right(ends, length) - 1]

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """Token ids of the conversation with the opening of an answer behind it; raises `Refused`."""
        conversation = self.adapted(conversation)
        text = self.render(conversation.for_template(), conversation, ask=True).text
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def require_offsets(self) -> None:
        """Refuse a tokenizer that does not say which characters a token stands for; prompts need no such.

        Raises:
            TemplateError: the tokenizer is not a fast one.
        """
        if not self.tokenizer.is_fast:
            raise TemplateError(
                f"the tokenizer {type(self.tokenizer).__name__} gives no character offsets; "
                "load the fast tokenizer of this target (a tokenizer.json)"
            )

    def encode(self, texts: Sequence[str], most: int | None = None) -> list[Tokens]:
        """Tokens of rendered texts; no special token is added. Of a long text, no more are made than `most` asks for.

        The same call that `apply_chat_template(tokenize=True)` makes, so the ids are the template's own. Raises as
        `require_offsets`.
        """
        self.require_offsets()
        return tokenise_all(texts, self._tokenise, most)

    def _tokenise(self, texts: list[str]) -> list[Any]:
        encodings = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False).encodings
        assert encodings is not None, "a fast tokenizer returns encodings"
        return list(encodings)


def _with_field(message: Message) -> Message:
    """An answer whose reasoning block, whole or cut, is taken out of its content."""
    if message.reasoning_content:
        return message
    cut = unclosed_reasoning(message.content)
    if cut:
        return message.model_copy(update={"reasoning_content": cut, "content": ""})
    found = split_reasoning(message.content)
    if cut is not None or found is None:
        return message
    return message.model_copy(update={"reasoning_content": found[1] or None, "content": found[3]})


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, template_options: dict[str, Any]
) -> list[int]:
    """Token ids of the conversation with the opening of an answer behind it.

    Raises:
        TemplateError: the chat template takes no such conversation.
    """
    try:
        return ChatTemplate(tokenizer, template_options).prompt_ids(conversation)
    except Refused as refused:
        roles = ", ".join(message.role for message in conversation.messages)
        raise TemplateError(
            f"the target's chat template refuses the roles {roles} ({refused}): change the conversation"
        ) from refused


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Identity of vocabulary, merges, normalisation, special tokens and chat template."""
    backend: Any = tokenizer.backend_tokenizer
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return hash_json([backend.to_str(), special, tokenizer.chat_template])


def shared_start(first: str, second: str) -> int:
    """Length of what two texts have in common at their beginning; by bisection, so at the speed of comparing them."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
