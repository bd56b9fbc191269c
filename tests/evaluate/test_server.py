import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftline.cli import run
from draftline.commands.evaluate import parse_concurrency
from draftline.config import TargetConfig
from draftline.data.conversations import Conversation, Message
from draftline.data.server import Endpoint
from draftline.errors import ConfigError, ServerError
from draftline.evaluate.server import Level, ServerResult, evaluate_server, server_table
from draftline.options import ServerMeasurement
from draftline.targets.model import load_tokenizer
from tests.evaluate.engine_servers import DRAFTED, EngineServer, Program, answer_to

TEXTS = ["Sort: 5 2 9", "What is 12 + 7?", "Reverse: a b c d", "Count to ten", "Say it again, please", "Hello"]
LIMIT = 9
ONCE = ServerMeasurement(model=None, max_new_tokens=LIMIT, concurrency=(1,))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(TargetConfig(name="tiny"))


@pytest.fixture
def start() -> Iterator[Any]:
    started: list[EngineServer] = []

    def new(program: Program, **settings: Any) -> EngineServer:
        started.append(EngineServer(program, **settings))
        return started[-1]

    yield new
    for server in started:
        server.close()


def chat(*turns: str) -> Conversation:
    return Conversation(messages=tuple(Message(role="user", content=turn) for turn in turns))


def measure(server: EngineServer, tokenizer: PreTrainedTokenizerBase, *concurrency: int, **words: Any) -> ServerResult:
    wanted = ServerMeasurement(model=None, max_new_tokens=LIMIT, concurrency=concurrency or (1,))
    prompts = words.pop("prompts", [chat(text) for text in TEXTS])
    return evaluate_server(Endpoint(server.url, **words), tokenizer, prompts, wanted)


def naive(prompts: list[list[int]]) -> tuple[float, list[float]]:
    """Acceptance length and rates by position, counted one forward at a time."""
    answers = [answer_to(prompt, LIMIT) for prompt in prompts]
    forwards = [kept for answer in answers for kept in answer.accepted]
    tokens = sum(len(answer.output_ids) - 1 for answer in answers)
    return tokens / len(forwards), [sum(kept >= k for kept in forwards) / len(forwards) for k in (1, 2, 3)]


@pytest.mark.parametrize("program", ["vllm", "llamacpp", "sglang"])
def test_counts_are_those_of_a_naive_count(program: Program, start: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    server = start(program)
    result = measure(server, tokenizer, 1, 4)
    asked = server.prompts[1 : 1 + len(TEXTS)]  # the first is the warm-up
    length, rates = naive(asked)
    assert [turn.input_ids for turn in result.per_prompt] == asked
    for turn in result.per_prompt:
        expected = answer_to(turn.input_ids, LIMIT)
        assert turn.output_ids == expected.output_ids
        assert (turn.tokens, turn.target_forwards) == (len(expected.output_ids), len(expected.accepted))
        assert 0 < turn.first_token_s <= turn.seconds
    for level in result.levels:
        assert level.acceptance_length == pytest.approx(length)
        assert level.acceptance_rate_by_position == pytest.approx(rates)
        assert len(level.accepted_histogram) == DRAFTED + 1
        assert level.answers == len(TEXTS)
        assert level.tokens_per_second > 0
    low, high = result.levels[0].acceptance_length_interval or (0.0, 0.0)
    assert low <= length <= high
    assert server.most_at_once in (2, 3, 4)
    assert result.notes == []


def test_llama_cpp_without_metrics_is_read_from_timings(start: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    result = measure(start("llamacpp", metrics=False), tokenizer)
    for turn in result.per_prompt:
        answer = answer_to(turn.input_ids, LIMIT)
        assert turn.target_forwards == max(0, len(answer.output_ids) - 1 - sum(answer.accepted))
    assert result.levels[0].accepted_histogram == []
    assert json.loads(json.dumps(result.to_json()))["levels"][0]["acceptance_rate_by_position"] == []


def test_a_dialogue_goes_on_from_the_servers_answer(start: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    server = start("vllm")
    result = measure(server, tokenizer, prompts=[chat("Hello", "And now?")])
    first, second = (tokenizer.decode(turn.input_ids) for turn in result.per_prompt)
    assert second.startswith(first)
    assert "w100 w101" in second
    assert "w109" not in second
    assert result.levels[0].answers == 2


def test_answers_to_others_are_noticed(start: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    server = start("vllm")
    server.strangers = 5
    assert "Others used the server" in measure(server, tokenizer).notes[0]


def test_key_is_sent_and_asked_for(start: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    server = start("vllm", key="secret")
    assert measure(server, tokenizer, api_key="secret").levels[0].answers == len(TEXTS)
    with pytest.raises(ServerError, match=r"refuses the key \(status 401\).*--api-key-env"):
        measure(server, tokenizer, api_key="wrong")
    assert "secret" not in repr(Endpoint(server.url, "secret"))


@pytest.mark.parametrize("program", ["vllm", "llamacpp", "sglang"])
def test_a_server_without_drafter_is_refused(program: Program, start: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ServerError, match=r"counts no drafted tokens.*started without a drafter; start it with"):
        measure(start(program, drafter=False), tokenizer)


def test_other_programs_and_models_are_refused(start: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ServerError, match=r"is not vLLM, SGLang or llama.cpp .its models are of 'somebody'"):
        measure(start("vllm", owner="somebody"), tokenizer)
    server = start("vllm")
    with pytest.raises(ServerError, match="has no model 'other': it serves target"):
        evaluate_server(Endpoint(server.url), tokenizer, [chat("Hello")], ONCE.model_copy(update={"model": "other"}))
    with pytest.raises(ServerError, match="serves no model"):
        measure(start("vllm", serves=False), tokenizer)
    with pytest.raises(ServerError, match=r"lists no models \(status 501.*up to and with /v1"):
        evaluate_server(Endpoint(server.url + "/v2"), tokenizer, [chat("Hello")], ONCE)


def test_an_absent_server_is_one_line(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ServerError, match=r"127.0.0.1:9/v1 does not answer .*start it, or fix --base-url"):
        evaluate_server(Endpoint("http://127.0.0.1:9/v1"), tokenizer, [chat("Hello")], ONCE)
    with pytest.raises(ServerError, match="does not answer"):
        evaluate_server(Endpoint("no address"), tokenizer, [chat("Hello")], ONCE)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ((400, '{"error": "prompt too long"}'), "status 400: .*prompt too long"),
        ((200, "data: no json\n\n"), "its answer is not understood"),
        ((200, 'data: {"choices": [{"index": 0}]}\n\n'), "its answer is not understood, KeyError"),
        ((200, 'data: {"error": {"message": "engine died"}}\n\n'), "engine died"),
        ((200, "data: [DONE]\n\n"), "its answer has no tokens"),
    ],
)
def test_a_failing_request_ends_the_measurement(
    failure: tuple[int, str], reason: str, start: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    server = start("vllm")
    server.failure = failure
    with pytest.raises(ServerError, match=reason):
        measure(server, tokenizer)


@pytest.mark.parametrize("program", ["vllm", "llamacpp", "sglang"])
def test_an_answer_that_breaks_off_is_none(program: Program, start: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    server = start(program)
    server.most_events = 2
    with pytest.raises(ServerError, match=r"its answer broke off after \d tokens"):
        measure(server, tokenizer)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("vllm:generation_tokens_total", "vllm:renamed_total", "not understood, .*generation_tokens_total"),
        ("accepted_tokens_total", "accepted_total", "not understood, .*accepted_tokens_total"),
        ('drafts_total{engine="0",model_name="target"}', 'drafts_total{engine="0"} NaN', "not understood, .*NaN"),
    ],
)
def test_counters_of_another_version_are_refused(
    old: str, new: str, reason: str, start: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    server = start("vllm")
    server.edit_metrics = lambda text: text.replace(old, new)
    with pytest.raises(ServerError, match=reason):
        measure(server, tokenizer)


@pytest.mark.parametrize("restart_at", [4, 9])
def test_counters_that_go_back_are_noticed(
    restart_at: int, start: Any, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftline.evaluate.server._SETTLING_S", 0.1)
    with pytest.raises(ServerError, match="it was restarted, or is one of several"):
        measure(start("vllm", restart_at=restart_at), tokenizer)


def test_an_answer_in_tokens_of_another_model_is_refused(start: Any) -> None:
    few = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"[UNK]": 0, "Hello": 1}, unk_token="[UNK]")))
    few.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(ServerError, match="token 100, the target's tokenizer has 2: it serves another model"):
        measure(start("vllm"), few)


def test_a_silent_server_is_not_waited_for(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftline.evaluate.server._ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = Endpoint(f"http://127.0.0.1:{silent.getsockname()[1]}/v1")
        with pytest.raises(ServerError, match=r"does not answer .no reply in time.: start it"):
            evaluate_server(endpoint, tokenizer, [chat("Hello")], ONCE)


def test_table_has_a_column_per_concurrency(start: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    result = measure(start("vllm"), tokenizer, 1, 2)
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(server_table(result))
    text = console.export_text()
    for words in (
        "concurrency 1",
        "concurrency 2",
        "acceptance length (with bonus)",
        "first token, ms",
        "vLLM at http",
    ):
        assert words in text
    assert isinstance(result.levels[1], Level)
    assert result.levels[1].acceptance_length_interval is None


def test_command_measures_and_writes_json(start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in TEXTS))
    words = ["evaluate", "--target", "tiny", "--prompts", str(prompts), "--max-new-tokens", str(LIMIT)]
    server = start("sglang")
    at_server = [*words, "--base-url", server.url]
    assert run([*at_server, "--concurrency", "1,3", "--limit", "4", "--json", str(out)]) == 0
    assert "acceptance length (with bonus)" in capsys.readouterr().out
    tree = json.loads(out.read_text())
    assert (tree["program"], tree["model"]) == ("SGLang", "target")
    assert [level["concurrency"] for level in tree["levels"]] == [1, 3]
    assert len(tree["per_prompt"]) == 4
    for wrong, said in (
        ([*words], "give --draft to measure in process, or --base-url"),
        ([*at_server, "--draft", "x"], "exactly one"),
        ([*at_server, "--concurrency", "1,x"], "--concurrency '1,x' is not a list of positive numbers"),
        ([*at_server, "--api-key-env", "NO_SUCH_KEY_HERE"], "the environment has no NO_SUCH_KEY_HERE"),
        ([*words, "--base-url", "http://127.0.0.1:9/v1"], "does not answer"),
    ):
        assert run(wrong) == 2
        shown = capsys.readouterr().err
        assert said in shown
        assert shown.count("\n") == 1


def test_concurrency_words() -> None:
    assert parse_concurrency("1, 4,16") == (1, 4, 16)
    for wrong in ("", "0", "1,,2", "-1"):
        with pytest.raises(ConfigError):
            parse_concurrency(wrong)
