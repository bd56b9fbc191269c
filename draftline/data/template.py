"""The target's own chat template, and what has to be known about it to find the answers in what it renders.

Nothing here looks for the text of a role. What is learned comes from rendering a small chat of texts that occur
nowhere else, and from comparing renderings of it.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from draftline.data.conversations import Conversation, hash_json
from draftline.errors import TemplateError

# What a template can raise: its own `raise_exception`, undefined names, and Python errors of its expressions.
TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)

# How control tokens are written, for tokenizers that do not have all of the template's among their own.
_MARK = re.compile(r"<[^<>\s]+>")

WRAPPERS = ("q", "Z")
_USER, _ANSWER = "qzUSERzq{}qz", "qzANSWERzq{}qz"


class Refused(Exception):
    """The template itself refused a conversation; the message is the template's."""


@dataclass(frozen=True)
class Rendering:
    """A rendered conversation: its text, and the character spans of generation markers if the template has them."""

    text: str
    generation_spans: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class TurnEnds:
    """What the template writes around an answer.

    Attributes:
        generation_prompt: what is appended for the target to answer; empty if the template appends nothing.
        fillers: what the template itself writes between the generation prompt and plain content, such as an empty
            reasoning block.
        middle: what ends an answer that another turn follows.
        last: what ends the answer at the end of the conversation.
        always_opens: the template opens the next answer whether asked or not.
    """

    generation_prompt: str
    fillers: tuple[str, ...]
    middle: str
    last: str
    always_opens: bool = False


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
        self._turn_ends: dict[str, TurnEnds] = {}

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
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None

    @cached_property
    def wants_text_arguments(self) -> bool:
        """Whether the template joins the arguments of a tool call as text, or would print a Python dictionary.

        Told from a call whose argument is known: either the template fails on an object, or Python's own writing of
        a dictionary shows up in the rendering.
        """
        call = {"type": "function", "function": {"name": "f", "arguments": {"qzarg": "qzvalue"}}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call | {"id": "call00000"}]},
        ]
        try:
            return "'qzarg': 'qzvalue'" in self._render(messages, None, {}).text
        except TEMPLATE_FAULTS:
            return True

    def knows_role(self, role: str) -> bool:
        """Whether the template names this role."""
        return re.search(rf"['\"]{re.escape(role)}['\"]", self.source) is not None

    def messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """The messages with the arguments of tool calls in the type that this template reads."""
        calls = any(message.tool_calls for message in conversation.messages)
        return conversation.for_template(text_arguments=calls and self.wants_text_arguments)

    def render(self, messages: list[dict[str, Any]], conversation: Conversation, *, ask: bool = False) -> Rendering:
        """Render messages with the tools and options of `conversation`; `ask` appends the opening of an answer.

        Raises `Refused` with the template's message where the template does not take them.
        """
        options = {**self.options, **conversation.template_options}
        try:
            return self._render(messages, list(conversation.tools) or None, options, ask=ask)
        except TEMPLATE_FAULTS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            if not conversation.tools and self._takes_with_tools(messages, options):
                reason = f"the template takes no chat without tools ({reason})"
            raise Refused(reason) from error

    def _takes_with_tools(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> bool:
        tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"properties": {}}}}
        try:
            self._render(messages, [tool], options)
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

    def turn_ends(self, conversation: Conversation) -> TurnEnds:
        """What this template writes around an answer, given the conversation's tools and options; learned once."""
        key = hash_json([conversation.template_options, bool(conversation.tools)])
        if key not in self._turn_ends:
            self._turn_ends[key] = self._learn_turn_ends(conversation)
        return self._turn_ends[key]

    def _learn_turn_ends(self, conversation: Conversation) -> TurnEnds:
        chat = [
            {"role": role, "content": text.format(number)}
            for number in (1, 2)
            for role, text in (("user", _USER), ("assistant", _ANSWER))
        ]
        whole = self.render(chat, conversation).text
        pieces = _split_at(whole, [message["content"] for message in chat]) or self._split_altered(chat, conversation)
        if pieces is None:
            raise TemplateError(
                f"the loss mask cannot be found: the chat template does not show the turns {chat} one after another, "
                f"but renders them as {whole!r}; give a template that does (--chat-template)"
            )
        opening, before_first, after_first, before_second, after_second = pieces
        prompt = self._learn_generation_prompt(chat[:1], conversation)
        shared = self.whole_tokens(after_first, shared_start(after_first, after_second))
        always_opens = prompt is None and len(shared) < len(after_second)
        if always_opens:
            shared = without_last_mark(shared)
        prompt = prompt or ""
        headers = [text.partition(prompt) for text in (before_first, before_second) if prompt]
        fillers = tuple({filler for _, found, filler in headers if found})
        if end := shared.rstrip() or shared:
            return TurnEnds(prompt, fillers, end, end, always_opens)
        if after_second.strip():
            return TurnEnds(prompt, fillers, self._first_mark(after_first), after_second.rstrip(), always_opens)
        # The last turn has no end. An earlier one has what stands before the other role's header, as that is written
        # at the beginning of the conversation.
        end_length = len(after_first) - shared_start(opening[::-1], after_first[::-1])
        cut = [mark.end() for mark in _MARK.finditer(after_first) if mark.start() < end_length < mark.end()]
        return TurnEnds(prompt, fillers, after_first[: max([end_length, *cut])].rstrip(), "", always_opens)

    def _split_altered(self, chat: list[dict[str, Any]], conversation: Conversation) -> list[str] | None:
        """The pieces around the texts of a chat that the template alters, each found by wrapping it in two letters."""
        whole = self.render(chat, conversation).text
        pieces, at = [], 0
        for turn, message in enumerate(chat):
            first, second = (
                self.render(
                    [*chat[:turn], {**message, "content": letter + message["content"] + letter}, *chat[turn + 1 :]],
                    conversation,
                ).text
                for letter in WRAPPERS
            )
            place = place_between(first, second, whole)
            if place is None or place[0] < at:
                return None
            pieces.append(whole[at : place[0]])
            at = place[1]
        return [*pieces, whole[at:]]

    def _learn_generation_prompt(self, question: list[dict[str, Any]], conversation: Conversation) -> str | None:
        """What the template appends when asked to; None if it renders the same whether asked or not."""
        try:
            without = self.render(question, conversation).text
            with_prompt = self.render(question, conversation, ask=True).text
        except Refused:
            return ""
        shared = self.whole_tokens(with_prompt, shared_start(without, with_prompt))
        return with_prompt[len(shared) :] if with_prompt != without else None

    def whole_tokens(self, text: str, length: int) -> str:
        """The longest beginning of `text`, at most `length`, that ends where a token and a mark like `<|end|>` end."""
        for mark in _MARK.finditer(text):
            if mark.start() < length < mark.end():
                length = mark.start()
        if text[:length].endswith(">"):
            return text[:length]
        ends = [0, *(end for _, end in self.encode([text])[0].offsets)]
        return text[: ends[bisect.bisect_right(ends, length) - 1]]

    def _first_mark(self, text: str) -> str:
        """The text up to the end of its first special token, or of what is written like one; empty without any."""
        stripped = text.lstrip()
        mark = _MARK.match(stripped)
        if mark:
            return mark.group()
        encoding = self.encode([stripped])[0]
        added = self.tokenizer.get_added_vocab().values()
        return stripped[: encoding.offsets[0][1]] if encoding.ids and encoding.ids[0] in added else ""

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """Token ids of the conversation with the opening of an answer behind it; raises `Refused`."""
        text = self.render(self.messages(conversation), conversation, ask=True).text
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

    def encode(self, texts: Sequence[str]) -> list[Any]:
        """Encodings of rendered texts, each with `ids` and `offsets`; no special token is added.

        The same call that `apply_chat_template(tokenize=True)` makes, so the ids are the template's own. Raises as
        `require_offsets`.
        """
        if not texts:
            return []
        self.require_offsets()
        encodings = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False).encodings
        assert encodings is not None, "a fast tokenizer returns encodings"
        return list(encodings)


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


def place_between(first: str, second: str, text: str) -> tuple[int, int] | None:
    """Where `text` lies between what two renderings share at their beginnings and ends.

    The two differ in the letters (`WRAPPERS`) around one text, `text` is the rendering without them. None if they do
    not differ, or if `text` has not the same surroundings.
    """
    if first == second:
        return None
    before, after = shared_start(first, second), shared_start(first[::-1], second[::-1])
    fits = text.startswith(first[:before]) and text.endswith(first[len(first) - after :])
    return (before, len(text) - after) if fits and before + after <= len(text) else None


def without_last_mark(text: str) -> str:
    """The text up to its last control token: the headers of two roles begin with the same one."""
    marks = [mark.start() for mark in _MARK.finditer(text)]
    return text[: marks[-1]] if marks else text


def _split_at(text: str, separators: Sequence[str]) -> list[str] | None:
    """The pieces around the separators, which must occur once each and in this order; None otherwise."""
    pieces = []
    for separator in separators:
        if text.count(separator) != 1:
            return None
        piece, _, text = text.partition(separator)
        pieces.append(piece)
    return [*pieces, text]
