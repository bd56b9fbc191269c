import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftline.data.answers import AnswerStore
from draftline.data.conversations import Conversation, Message, Unusable
from draftline.data.server import Endpoint, ServerAnswers
from draftline.data.template import ChatTemplate
from draftline.errors import ServerError
from draftline.options import Sampling, ServerSettings
from tests.data.chat_tokenizers import make_tokenizer


class ChatServer:
    """A local server with the OpenAI chat interface; it answers with the number of messages and the last text."""

    def __init__(self, port: int = 0) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.failures: list[int] = []
        self.retry_after = ""
        self.unknown_fields: set[str] = set()
        self.reply: dict[str, Any] | None = None
        self.status_by_text: dict[str, int] = {}
        self.broken_text = ""
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        self._gate = threading.Event()
        self._gate.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.handle(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1"

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        request = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            self.requests.append(request)
            self.keys.add(handler.headers.get("Authorization"))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            status = self.failures.pop() if self.failures else 200
            asked = request["messages"][-1]["content"]
            status = self.status_by_text.get(asked, status)
            refused = sorted(self.unknown_fields & request.keys())
            status = 400 if refused else status
        threading.Event().wait(0.01)
        content = f"{len(request['messages'])}: {request['messages'][-1]['content']}"
        choice = self.reply or {"message": {"content": content}, "finish_reason": "stop"}
        body = json.dumps(
            {"choices": [choice], **self.usage(request)}
            if status == 200
            else {"error": {"message": f"unknown {refused[0]}" if refused else "not this one"}}
        ).encode()
        body = body[: len(body) // 2] if asked == self.broken_text else body
        with self._lock:
            self.at_once -= 1
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        if self.retry_after and status != 200:
            handler.send_header("Retry-After", self.retry_after)
        handler.end_headers()
        handler.wfile.write(body)

    def usage(self, request: dict[str, Any]) -> dict[str, Any]:
        """What it says that it has read; nothing by itself."""
        del request
        return {}

    def close(self) -> None:
        """Stop to listen; may be repeated."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def server() -> Iterator[ChatServer]:
    running = ChatServer()
    yield running
    running.close()


def prompts(*texts: str) -> Conversation:
    return Conversation(messages=tuple(Message(role="user", content=text) for text in texts))


def ask(
    server: ChatServer,
    path: Path,
    conversations: list[Conversation],
    template: ChatTemplate | None = None,
    **settings: Any,
) -> list[Any]:
    with AnswerStore(path / "answers.jsonl") as store:
        asking = ServerSettings(model="m", **settings)
        answerer = ServerAnswers(store, Endpoint(server.url), asking, template=template, first_pause_s=0.01)
        return answerer(conversations)


def test_turns_follow_the_regenerated_history_and_concurrency_is_bounded(server: ChatServer, tmp_path: Path) -> None:
    asked = [prompts(f"a{n}", f"b{n}") for n in range(12)]
    answered = ask(server, tmp_path, asked, batch_size=3)
    assert [[message.content for message in chat.messages] for chat in answered] == [
        [f"a{n}", f"1: a{n}", f"b{n}", f"3: b{n}"] for n in range(12)
    ]
    assert server.most_at_once <= 3
    assert len(server.requests) == 24


def test_stored_answers_are_not_asked_again(server: ChatServer, tmp_path: Path) -> None:
    first = ask(server, tmp_path, [prompts("a"), prompts("b")])
    again = ask(server, tmp_path, [prompts("c"), prompts("b"), prompts("a")])
    assert len(server.requests) == 3
    assert again[:0:-1] == first


def test_a_key_is_sent_with_every_request(server: ChatServer, tmp_path: Path) -> None:
    with AnswerStore(tmp_path / "answers.jsonl") as store:
        ServerAnswers(store, Endpoint(server.url, "secret"), ServerSettings(model="m"))([prompts("a", "b")])
    assert server.keys == {"Bearer secret"}


def test_busy_server_is_asked_again(server: ChatServer, tmp_path: Path) -> None:
    server.failures = [503, 429, 500]
    (answered,) = ask(server, tmp_path, [prompts("a")], retries=3)
    assert answered.messages[-1].content == "1: a"
    assert len(server.requests) == 4


def test_giving_up_names_the_reason_and_keeps_answers(server: ChatServer, tmp_path: Path) -> None:
    ask(server, tmp_path, [prompts("a")])
    server.failures = [503] * 3
    with pytest.raises(ServerError, match=r"status 503.*stored answers are kept"):
        ask(server, tmp_path, [prompts("a"), prompts("b")], retries=2)
    server.failures = [404]
    with pytest.raises(ServerError, match="status 404"):
        ask(server, tmp_path, [prompts("b")], retries=5)
    assert len(server.requests) == 1 + 3 + 1
    assert ask(server, tmp_path, [prompts("a")])[0].messages[-1].content == "1: a"


def test_absent_server_is_one_clear_line(tmp_path: Path) -> None:
    with AnswerStore(tmp_path / "answers.jsonl") as store:
        settings = ServerSettings(model="m", retries=1)
        with pytest.raises(ServerError, match="did not answer"):
            ServerAnswers(store, Endpoint("http://127.0.0.1:9/v1"), settings, first_pause_s=0.01)([prompts("a")])


def test_reasoning_calls_and_finish_reason_are_kept(server: ChatServer, tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    server.reply = {
        "message": {"content": None, "reasoning_content": "why", "tool_calls": [call]},
        "finish_reason": "tool_calls",
    }
    tools = ({"type": "function", "function": {"name": "f", "parameters": {}}},)
    asked = prompts("a").model_copy(update={"tools": tools, "template_options": {"enable_thinking": True}})
    (answered,) = ask(server, tmp_path, [asked])
    answer = answered.messages[-1]
    assert (answer.content, answer.reasoning_content, answer.finish_reason) == ("", "why", "tool_calls")
    assert answer.tool_calls[0].function.arguments == {"a": 1}
    assert server.requests[0]["tools"] == list(tools)
    assert server.requests[0]["chat_template_kwargs"] == {"enable_thinking": True}
    server.reply = {"message": {"content": "cut"}, "finish_reason": "length"}
    assert ask(server, tmp_path, [prompts("b", "c")])[0].messages[-1].finish_reason == "length"


def test_calls_go_back_as_json_text(server: ChatServer, tmp_path: Path) -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    server.reply = {"message": {"content": "", "tool_calls": [call]}, "finish_reason": "tool_calls"}
    asked = prompts("a", "b").model_copy(
        update={
            "messages": (
                Message(role="user", content="a"),
                Message(role="assistant", content="old"),
                Message(role="tool", content="42"),
            )
        }
    )
    ask(server, tmp_path, [asked])
    assert server.requests[1]["messages"][1]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_conversation_that_the_server_refuses_is_dropped_alone(
    server: ChatServer, tmp_path: Path, status: int
) -> None:
    server.status_by_text = {"b": status}
    answered = ask(server, tmp_path, [prompts("a"), prompts("b"), prompts("c")])
    assert answered[1] == Unusable("server_refused: not this one")
    assert [chat.messages[-1].content for chat in answered[::2]] == ["1: a", "1: c"]
    assert len(server.requests) == 3  # asked once


@pytest.mark.parametrize("way", ["status", "truncated"])
def test_a_conversation_that_the_server_fails_on_is_dropped_while_it_answers_others(
    server: ChatServer, tmp_path: Path, way: str
) -> None:
    if way == "status":
        server.status_by_text = {"b": 500}
    else:
        server.broken_text = "b"
    answered = ask(server, tmp_path, [prompts("a"), prompts("b")], retries=2)
    assert isinstance(answered[1], Unusable)
    assert answered[1].reason.startswith("server_failed: ")
    assert len(server.requests) == 1 + 3
    with pytest.raises(ServerError):  # nothing but failures: the server is at fault
        ask(server, tmp_path, [prompts("b")], retries=1)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_of_everyone_ends_at_once(server: ChatServer, tmp_path: Path, status: int) -> None:
    server.status_by_text = {"a": status}
    with pytest.raises(ServerError, match=f"status {status}: not this one"):
        ask(server, tmp_path, [prompts("a")])
    assert len(server.requests) == 1


def test_a_server_that_refuses_all_conversations_is_not_asked_for_each(server: ChatServer, tmp_path: Path) -> None:
    asked = [prompts(str(n)) for n in range(60)]
    server.status_by_text = {str(n): 400 for n in range(60)}
    with pytest.raises(ServerError, match=r"took none of the first 20 conversations.*check --model"):
        ask(server, tmp_path, asked, batch_size=2)
    assert len(server.requests) < 30


@pytest.mark.parametrize(
    ("said", "kept"),
    [("stop", "stop"), ("length", "length"), ("abort", "length"), ("content_filter", "length"), (None, "length")],
)
def test_only_an_answer_that_the_target_ended_has_an_end(
    server: ChatServer, tmp_path: Path, said: str | None, kept: str
) -> None:
    server.reply = {"message": {"content": "yes"}, "finish_reason": said}
    assert ask(server, tmp_path, [prompts("a")])[0].messages[-1].finish_reason == kept


def test_a_reply_that_is_no_completion(server: ChatServer, tmp_path: Path) -> None:
    server.reply = {"text": "completion of another interface"}
    with pytest.raises(ServerError, match="not a chat completion"):
        ask(server, tmp_path, [prompts("a")], retries=1)


def test_the_servers_own_sampling_defaults_are_switched_off(server: ChatServer, tmp_path: Path) -> None:
    ask(server, tmp_path, [prompts("a")])
    neutral = {"top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    assert {name: server.requests[0][name] for name in neutral} == neutral
    assert (server.requests[0]["top_k"], server.requests[0]["min_p"]) == (-1, 0.0)


def test_sampling_is_sent_with_a_seed_for_each_sample(server: ChatServer, tmp_path: Path) -> None:
    asked = [prompts("a").model_copy(update={"sample": n}) for n in range(3)]
    sampling = Sampling(temperature=0.7, top_p=0.8, top_k=20)
    ask(server, tmp_path, asked * 2, sampling=sampling, seed=4)
    assert len(server.requests) == 3
    sent = {(r["temperature"], r["top_p"], r["top_k"], r["repetition_penalty"]) for r in server.requests}
    assert sent == {(0.7, 0.8, 20, 1.0)}
    assert len({r["seed"] for r in server.requests}) == 3
    server.unknown_fields = {"seed"}
    (answered,) = ask(server, tmp_path, [prompts("b")], sampling=sampling)
    assert answered.messages[-1].content == "1: b"
    server.unknown_fields = {"top_k"}
    with pytest.raises(ServerError, match="--top-k"):
        ask(server, tmp_path, [prompts("c")], sampling=sampling)


def test_greedy_requests_have_no_seed(server: ChatServer, tmp_path: Path) -> None:
    ask(server, tmp_path, [prompts("a")])
    assert "seed" not in server.requests[0]


def test_what_the_server_read_is_compared_with_what_is_trained(
    server: ChatServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers: with the target's template, without reasoning of the history, with another template, without a count."""
    turn = "<|im_start|>{{ m.role }}\n{{ m.reasoning_content }}{{ m.content }}<|im_end|>\n"
    template = ChatTemplate(make_tokenizer(f"{{% for m in messages %}}{turn}{{% endfor %}}"))

    def tokens(messages: list[dict[str, Any]]) -> dict[str, Any]:
        ids = template.tokenizer.apply_chat_template(messages, return_dict=False)
        return {"usage": {"prompt_tokens": len(ids)}}

    def without(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: m[key] for key in ("role", "content")} for m in messages]

    server.reply = {"message": {"content": "so", "reasoning": "why"}, "finish_reason": "stop"}
    for number, (reads, notes) in enumerate(
        [
            (lambda request: tokens(request["messages"]), [None, None]),
            (lambda request: tokens(without(request["messages"])), [None, "server_left_out_earlier_reasoning"]),
            (lambda request: tokens([*request["messages"], *request["messages"]]), ["server_read_another_prompt"] * 2),
            (lambda _: {}, [None, None]),
        ]
    ):
        server.usage = reads  # type: ignore[method-assign]
        (answered,) = ask(server, tmp_path / str(number), [prompts("a", "b")], template)
        assert [message.note for message in answered.messages if message.role == "assistant"] == notes
        assert capsys.readouterr().err.count("warning: the server read") == (notes[1] is not None)


def test_a_server_that_knows_only_the_openai_interface_is_asked_in_it(server: ChatServer, tmp_path: Path) -> None:
    server.unknown_fields = {"repetition_penalty", "top_k", "min_p", "return_token_ids"}
    answered = ask(server, tmp_path, [prompts("a"), prompts("b"), prompts("c")], batch_size=1)
    assert [chat.messages[-1].content for chat in answered] == ["1: a", "1: b", "1: c"]
    assert not server.unknown_fields & server.requests[-1].keys()
    assert len(server.requests) == 4 + 3  # one refusal for each field


def test_reasoning_of_the_history_goes_out_under_both_names(server: ChatServer, tmp_path: Path) -> None:
    server.reply = {"message": {"content": "so", "reasoning": "why"}, "finish_reason": "stop"}
    ask(server, tmp_path, [prompts("a", "b")])
    sent = server.requests[1]["messages"][1]
    assert (sent["reasoning"], sent["reasoning_content"]) == ("why", "why")


def test_equal_prompts_are_asked_once(server: ChatServer, tmp_path: Path) -> None:
    answered = ask(server, tmp_path, [prompts("a", f"b{n % 2}") for n in range(10)])
    assert len(server.requests) == 1 + 2
    assert [chat.messages[-1].content for chat in answered] == ["3: b0", "3: b1"] * 5


@pytest.mark.parametrize("said", ["0.05", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_a_busy_server_is_waited_for_as_long_as_patience_lasts(server: ChatServer, tmp_path: Path, said: str) -> None:
    server.failures, server.retry_after = [503] * 12, said
    (answered,) = ask(server, tmp_path, [prompts("a")], retries=1, patience=30.0)
    assert answered.messages[-1].content == "1: a"
    server.failures, server.retry_after = [429] * 3, "3600"
    with pytest.raises(ServerError, match="status 429"):
        ask(server, tmp_path, [prompts("b")], retries=0, patience=30.0)


def test_a_server_that_is_away_is_waited_for(server: ChatServer, tmp_path: Path) -> None:
    """Nobody listens at its port at first."""
    port = server.server.server_port
    server.close()
    later = threading.Timer(0.5, lambda: started.append(ChatServer(port)))
    started: list[ChatServer] = []
    later.start()
    try:
        (answered,) = ask(server, tmp_path, [prompts("a")], retries=0, patience=60.0)
        assert answered.messages[-1].content == "1: a"
    finally:
        later.join()
        started[0].close()


def test_half_a_character_in_an_answer_drops_its_row_alone(server: ChatServer, tmp_path: Path) -> None:
    server.reply = {"message": {"content": "x\ud800"}, "finish_reason": "stop"}
    assert ask(server, tmp_path, [prompts("a")]) == [Unusable("lone_surrogate_in_answer")]


def test_a_call_that_cannot_be_read_drops_its_row_alone(server: ChatServer, tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": '{"a": '}}
    server.reply = {"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}
    assert ask(server, tmp_path, [prompts("a")]) == [Unusable("answer_unreadable: arguments_not_an_object: f")]


class ClosingHandler(BaseHTTPRequestHandler):
    """Answers one request on each connection, and closes it without a word at the next."""

    protocol_version = "HTTP/1.1"
    answered = False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.answered:
            self.close_connection = True
            return
        self.answered = True
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def closing_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ClosingHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


async def replies(client: httpx.AsyncClient, url: str, *bodies: str) -> list[str]:
    async with client:
        return [(await client.post(url, json=body)).json() for body in bodies]


def test_a_server_that_closes_kept_connections_loses_no_request(closing_url: str) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        asyncio.run(replies(httpx.AsyncClient(), closing_url, "one", "two"))
    assert asyncio.run(replies(Endpoint(closing_url).client(1), closing_url, "one", "two", "three")) == [
        "one",
        "two",
        "three",
    ]
