"""Chat templates in the style of many families, each with what its model writes in a turn, put together by hand.

`writes` is the oracle: from what an answer holds it builds the text that the model of this family generates behind the
generation prompt. It knows the template's text and nothing of how spans are found.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from draftline.data.conversations import Message, ToolCall


@dataclass(frozen=True)
class Answer:
    """What an assistant's turn holds, and whether it is the conversation's last message."""

    text: str
    calls: tuple[ToolCall, ...]
    thought: str
    last: bool
    after_question: bool
    """Whether no question follows it."""

    @staticmethod
    def of(messages: tuple[Message, ...], number: int) -> Answer:
        """The answer at a place of a conversation."""
        message = messages[number]
        later = [other.role for other in messages[number + 1 :]]
        return Answer(
            message.content, message.tool_calls, message.reasoning_content or "", not later, "user" not in later
        )


@dataclass(frozen=True)
class Family:
    """A template, its control tokens, and its oracle.

    Attributes:
        writes: the runs that an answer has; None where the turn cannot be supervised.
        tools: whether it takes results of tools.
    """

    name: str
    template: str
    writes: Callable[[Answer], list[str] | None]
    tokens: tuple[str, ...] = ()
    tools: bool = True


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _named(call: ToolCall) -> str:
    return f'{{"name": "{call.function.name}", "arguments": {_json(call.function.arguments)}}}'


_ROLE = "{{ '<|im_start|>' + m.role + '\\n' }}"
_ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_NAMED = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
_TOOLS = "{% for t in tools or [] %}{{ '<tool>' + (t | tojson) + '</tool>' }}{% endfor %}"


def _call_first() -> Family:
    template = (
        _TOOLS + "{% for m in messages %}" + _ROLE + "{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }} "
        "{{ c.function.arguments | tojson }}<|/call|>{% endfor %}{{ m.content }}<|im_end|>\n{% endfor %}" + _ASK
    )

    def writes(a: Answer) -> list[str]:
        calls = "".join(f"<|call|>{c.function.name} {_json(c.function.arguments)}<|/call|>" for c in a.calls)
        return [calls + a.text + "<|im_end|>"]

    return Family("call before text", template, writes, ("<|call|>", "<|/call|>"))


def _lines() -> Family:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }}\n\n{% elif m.role == 'tool' %}"
        "Result: {{ m.content }}\n\n{% elif m.role == 'system' %}{{ m.content }}\n\n{% else %}"
        "Assistant: {{ m.content }}"
        "{% for c in m.tool_calls or [] %} CALL " + _NAMED + "{% endfor %}\n\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    )

    def writes(a: Answer) -> list[str]:
        return [f" {a.text}" + "".join(f" CALL {_named(c)}" for c in a.calls) + "\n\n"]

    return Family("lines without a token", template, writes)


def _channels() -> Family:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking and (loop.last or m.tool_calls) %}"
        "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}{% if m.tool_calls %}"
        "{% set c = m.tool_calls[0] %}<|start|>assistant to={{ c.function.name }}<|channel|>commentary<|message|>"
        "{{ c.function.arguments | tojson }}<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>"
        "{{ m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
        "{% elif m.role == 'tool' %}<|start|>tool to=assistant<|message|>{{ m.content | tojson }}<|end|>{% else %}"
        "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )

    def writes(a: Answer) -> list[str] | None:
        thought = f"<|channel|>analysis<|message|>{a.thought}<|end|><|start|>assistant"
        thought = thought if a.thought and (a.last or a.calls) else ""
        if len(a.calls) > 1:
            return None
        if a.calls:
            function = a.calls[0].function
            said = f" to={function.name}<|channel|>commentary<|message|>{_json(function.arguments)}<|call|>"
            return [thought + said]
        end = "<|return|>" if a.last else "<|end|>"
        return [thought + "<|channel|>final<|message|>" + a.text + end if thought else a.text + end]

    tokens = ("<|channel|>", "<|message|>", "<|call|>", "<|return|>")
    return Family("channels, ends of three kinds", template, writes, tokens)


def _no_last_end() -> Family:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% if loop.first or "
        "messages[loop.index0 - 1].role != 'tool' %}<|assistant_start|>{% endif %}{{ m.content }}"
        "{% if m.tool_calls %}<|calls|>[{% for c in m.tool_calls %}{{ ', ' if not loop.first else '' }}"
        + _NAMED
        + "{% endfor %}]<|/calls|>{% endif %}{% if not loop.last and messages[loop.index].role != 'tool' %}"
        "<|assistant_end|>{% endif %}{% elif m.role == 'tool' %}[{{ m.content }}]{% else %}"
        "<|{{ m.role }}_start|>{{ m.content }}<|{{ m.role }}_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant_start|>{% endif %}"
    )

    def writes(a: Answer) -> list[str]:
        calls = "<|calls|>[" + ", ".join(map(_named, a.calls)) + "]<|/calls|>" if a.calls else ""
        return [a.text + calls + ("" if a.last or a.calls else "<|assistant_end|>")]

    tokens = ("<|assistant_start|>", "<|assistant_end|>", "<|calls|>", "<|/calls|>", "<|user_start|>", "<|user_end|>")
    return Family("no end at the end, results in the turn", template, writes, tokens)


def _thinks(*, kept: bool, prompt: str) -> Family:
    shown = "true" if kept else "loop.index0 > ns.last"
    template = (
        _TOOLS + "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
        + _ROLE
        + "{% if m.role == 'assistant' and "
        + shown
        + " and m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content"
        " + '\\n</think>\\n\\n' }}{% elif m.role == 'assistant' and " + shown + " %}{{ '<think>\\n\\n</think>\\n\\n' }}"
        "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first else '' }}"
        "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
        "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
        "</function>\n</tool_call>"
        "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n"
        + prompt
        + "' }}{% endif %}"
    )

    def writes(a: Answer) -> list[str]:
        opening = "" if prompt else "<think>\n"
        thought = f"{opening}{a.thought}\n</think>\n\n" if a.thought and (kept or a.after_question) else ""
        calls = ""
        for number, c in enumerate(a.calls):
            calls += "\n" if a.text or number else ""
            calls += f"<tool_call>\n<function={c.function.name}>\n"
            for key, value in c.function.arguments.items():
                calls += f"<parameter={key}>\n{value if isinstance(value, str) else _json(value)}\n</parameter>\n"
            calls += "</function>\n</tool_call>"
        return [thought + a.text + calls + "<|im_end|>"]

    kind = "kept" if kept else "dropped in history"
    return Family(f"reasoning {kind}, prompt {prompt!r}, calls in XML", template, writes, ("<think>", "</think>"))


def _python_tag() -> Family:
    template = (
        "{{ bos_token }}{% for m in messages %}<|head|>{{ 'ipython' if m.role == 'tool' else m.role }}<|/head|>\n\n"
        "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
        "{% set f = m.tool_calls[0].function %}<|python_tag|>{{ f.name }}.call({% for k, v in f.arguments | items %}"
        "{{ k }}={{ v | tojson }}{{ ', ' if not loop.last else '' }}{% endfor %})<|eom|>{% else %}"
        "{{ m.content | trim }}"
        "<|eot|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
    )

    def writes(a: Answer) -> list[str]:
        if not a.calls:
            return [a.text.strip() + "<|eot|>"]
        function = a.calls[0].function
        arguments = ", ".join(f"{key}={_json(value)}" for key, value in function.arguments.items())
        return [f"<|python_tag|>{function.name}.call({arguments})<|eom|>"]

    return Family("python tag, text beside a call dropped", template, writes, ("<|python_tag|>", "<|eom|>"))


def _ids() -> Family:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        '{% elif m.role == \'tool\' %}[RESULT]{"id": "{{ m.tool_call_id }}", "content": {{ m.content | tojson }}}'
        "[/RESULT]{% elif m.role == 'system' %}[SYS]{{ m.content }}[/SYS]{% elif m.tool_calls %}{{ m.content }}[CALLS]["
        '{% for c in m.tool_calls %}{"id": "{{ c.id }}", "name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments | tojson }}, \"of\": \"{{ c.id }}\"}{{ ', ' if not loop.last else '' }}"
        "{% endfor %}]</s>"
        "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
    )

    def writes(a: Answer) -> list[str]:
        if not a.calls:
            return [f" {a.text.strip()}</s>"]
        calls = ", ".join(
            f'{{"id": "{c.id}", "name": "{c.function.name}", '
            f'"arguments": {_json(c.function.arguments)}, "of": "{c.id}"}}'
            for c in a.calls
        )
        return [f"{a.text}[CALLS][{calls}]</s>"]

    return Family("ids on both sides of a call, no prompt", template, writes, ("[CALLS]", "[RESULT]", "[/RESULT]"))


def _rounds() -> Family:
    template = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}"
        "[Round {{ ns.n }}]\n\nQ: {{ m.content }}\n\nA:{% elif m.role == 'assistant' %} {{ m.content }}\n\n"
        "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
    )
    return Family("numbered rounds", template, lambda a: [f" {a.text}\n\n"], tools=False)


def _always_opens() -> Family:
    template = (
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<call>" + _NAMED + "</call>{% endfor %}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    )

    def writes(a: Answer) -> list[str]:
        return [a.text + "".join(f"<call>{_named(c)}</call>" for c in a.calls) + "<|im_end|>"]

    return Family("opens the next answer always", template, writes, ("<call>", "</call>"))


def _closes_always() -> Family:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% for c in m.tool_calls or [] %}<call>"
        + _NAMED
        + "</call>{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}"
        "{{ eos_token }}"
        "{% endif %}"
    )

    def writes(a: Answer) -> list[str]:
        return [a.text + "".join(f"<call>{_named(c)}</call>" for c in a.calls) + "<|end|>"]

    return Family("closes every conversation", template, writes, ("<call>", "</call>", "<|user|>", "<|assistant|>"))


def _results_inside() -> Family:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{% elif m.role == 'assistant' %}"
        "{% set prev = messages[loop.index0 - 1].role if loop.index0 else '' %}{% if prev != 'tool' %}"
        "<start_of_turn>model\n{% endif %}{% set i = loop.index0 %}{% for c in m.tool_calls or [] %}<call>"
        + _NAMED
        + "</call>{% endfor %}{% set ns = namespace(go=true) %}{% if m.tool_calls %}{% for r in messages[i + 1:] %}"
        "{% if ns.go and r.role == 'tool' %}<result>{{ r.content }}</result>{% else %}"
        "{% set ns.go = false %}{% endif %}"
        "{% endfor %}{% endif %}{{ m.content | trim }}{% if m.content or not m.tool_calls %}<end_of_turn>\n{% endif %}"
        "{% else %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<start_of_turn>model\n{% endif %}"
    )

    def writes(a: Answer) -> list[str]:
        calls = "".join(f"<call>{_named(c)}</call>" for c in a.calls)
        text = a.text.strip() + "<end_of_turn>" if a.text or not a.calls else ""
        return [part for part in ([calls, text] if not a.last else [calls + text]) if part]

    return Family("results and text behind the call", template, writes, ("<call>", "</call>", "<result>", "</result>"))


def _alpaca() -> Family:
    template = (
        "Below is a task.\n\n{% for m in messages %}{% if m.role == 'user' %}### Instruction:\n{{ m.content }}\n\n"
        "{% elif m.role == 'assistant' %}### Response:\n{{ m.content }}{{ eos_token }}\n\n{% else %}"
        "{{ raise_exception('no such role') }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "### Response:\n{% endif %}"
    )
    return Family("headings", template, lambda a: [f"{a.text}</s>"], tools=False)


def _no_prompt() -> Family:
    template = (
        "{% for m in messages %}"
        + _ROLE
        + "{{ m.content }}{% for c in m.tool_calls or [] %}<call>"
        + _NAMED
        + "</call>{% endfor %}<|im_end|>\n{% endfor %}"
    )

    def writes(a: Answer) -> list[str]:
        return [a.text + "".join(f"<call>{_named(c)}</call>" for c in a.calls) + "<|im_end|>"]

    return Family("no generation prompt", template, writes, ("<call>", "</call>"))


def _text_arguments() -> Family:
    template = (
        "{% for m in messages %}" + _ROLE + "{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ '<call>' + c.function.name + ' ' + (c.function.arguments | tojson) + '|' + c.function.arguments[:1] + "
        "'</call>' }}{% endfor %}<|im_end|>\n{% endfor %}" + _ASK
    )

    def writes(a: Answer) -> list[str]:
        calls = [(c.function.name, _json(c.function.arguments)) for c in a.calls]
        return [a.text + "".join(f"<call>{n} {_json(t)}|{t[:1]}</call>" for n, t in calls) + "<|im_end|>"]

    return Family("arguments as JSON in JSON", template, writes, ("<call>", "</call>"))


def _next_header_ends() -> Family:
    template = (
        "[gMASK]{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n"
        "{% if m.role == 'assistant' %}<think></think>{% if m.content %}\n{{ m.content }}{% endif %}"
        "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}"
        "\n{% for k, v in c.function.arguments | items %}"
        "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}"
        "</arg_value>\n{% endfor %}</tool_call>"
        "{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "<|assistant|>\n{% endif %}"
    )

    def writes(a: Answer) -> list[str]:
        calls = ""
        for number, c in enumerate(a.calls):
            calls += "\n" * bool(a.text or number) + f"<tool_call>{c.function.name}\n"
            for key, value in c.function.arguments.items():
                shown = value if isinstance(value, str) else _json(value)
                calls += f"<arg_key>{key}</arg_key>\n<arg_value>{shown}</arg_value>\n"
            calls += "</tool_call>"
        return [a.text + calls]

    tokens = ("<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
    return Family("the next header ends a turn", template, writes, tokens)


def _begins_every_turn() -> Family:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}{% else %}"
        "{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
    )
    return Family("begin of text before every question", template, lambda a: [f" {a.text} </s>"], tools=False)


def _shouted() -> Family:
    template = (
        "{% for m in messages %}"
        + _ROLE
        + "{{ m.content | replace('e', '3') }}{% for c in m.tool_calls or [] %}<call>"
        + _NAMED
        + "</call>{% endfor %}<|im_end|>\n{% endfor %}"
        + _ASK
    )

    def writes(a: Answer) -> list[str]:
        calls = "".join(f"<call>{_named(c)}</call>" for c in a.calls)
        return [a.text.replace("e", "3") + calls + "<|im_end|>"]

    return Family("alters texts", template, writes, ("<call>", "</call>"))


def _renamed() -> Family:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}<|head|>tool {{ m.name }}"
        "<|/head|>{{ m.content }}"
        "<|eot|>{% else %}<|head|>{{ m.role }}<|/head|>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<call:{{ c.function.name }}>{{ c.function.arguments | tojson }}</call:{{ c.function.name }}"
        ">{% endfor %}<|eot|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>{% endif %}"
    )

    def writes(a: Answer) -> list[str]:
        calls = [(c.function.name, _json(c.function.arguments)) for c in a.calls]
        return [a.text + "".join(f"<call:{name}>{text}</call:{name}>" for name, text in calls) + "<|eot|>"]

    return Family("names on both sides of a call", template, writes)


def _prompt_nowhere() -> Family:
    template = (
        "{% for m in messages %}" + _ROLE + "{% if m.tool_calls %}<|call|>[{% for c in m.tool_calls %}"
        "{{ ', ' if not loop.first else '' }}"
        + _NAMED
        + "{% endfor %}]{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
    )

    def writes(a: Answer) -> list[str]:
        return [(f"<|call|>[{', '.join(map(_named, a.calls))}]" if a.calls else a.text) + "<|im_end|>"]

    return Family("a prompt that the history lacks", template, writes, ("<|call|>", "<think>"))


def _wants_tools() -> Family:
    template = (
        "{% for t in tools %}<|tool|>{{ t.function.name }}{% endfor %}{% for m in messages %}"
        + _ROLE
        + "{{ m.content }}{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }} "
        "{{ c.function.arguments | tojson }}"
        "<|/call|>{% endfor %}<|im_end|>\n{% endfor %}" + _ASK
    )

    def writes(a: Answer) -> list[str]:
        calls = "".join(f"<|call|>{c.function.name} {_json(c.function.arguments)}<|/call|>" for c in a.calls)
        return [a.text + calls + "<|im_end|>"]

    return Family("no chat without tools", template, writes, ("<|call|>", "<|/call|>"))


def _drops_calls() -> Family:
    template = (
        "{% for t in tools or [] %}<|tool|>{{ t.function.name }}{% endfor %}{% for m in messages %}"
        + _ROLE
        + "{{ m.content }}<|im_end|>\n{% endfor %}"
        + _ASK
    )
    return Family("calls dropped, names listed", template, lambda a: None if a.calls else [a.text + "<|im_end|>"])


FAMILIES = (
    _prompt_nowhere(), _wants_tools(), _drops_calls(), _call_first(), _lines(), _channels(),
    _no_last_end(), _thinks(kept=False, prompt=""),
    _thinks(kept=True, prompt=""), _thinks(kept=True, prompt="<think>\\n"), _python_tag(), _ids(), _rounds(),
    _always_opens(), _closes_always(), _results_inside(), _alpaca(), _no_prompt(), _text_arguments(),
    _next_header_ends(), _begins_every_turn(), _shouted(), _renamed(),
)  # fmt: skip
