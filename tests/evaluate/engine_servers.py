"""Local servers that answer in the shapes of vLLM 0.32, llama.cpp b11434 and SGLang 0.5, with a made-up drafter.

An answer to a prompt of n tokens has 6 + n % 5 tokens unless it is cut; its forwards keep 2, 0, 3, 1, 3 drafted tokens
of 3, and so on. Counters hold whole blocks, also where an answer ends inside one, as those programs count. `script`
replaces that rule.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from typing import Any, Literal

Program = Literal["vllm", "llamacpp", "sglang"]
DRAFTED = 3
ACCEPTED = (2, 0, 3, 1, 3)


@dataclass(frozen=True)
class Answer:
    """Tokens of an answer in the pieces they arrive in, the first alone, and what each later forward kept.

    Attributes:
        text: of all tokens; none: a word a token.
    """

    pieces: list[list[int]]
    accepted: list[int]
    stopped: bool
    text: str | None = None

    @property
    def output_ids(self) -> list[int]:
        return [token for piece in self.pieces for token in piece]


def answer_to(prompt: list[int], limit: int, drafter: bool = True) -> Answer:
    """The answer by the rule at the head of this file."""
    natural = 6 + len(prompt) % 5
    ids = list(range(100, 100 + min(natural, limit)))
    pieces, accepted, place = [ids[:1]], [], 1
    for kept in cycle(ACCEPTED if drafter else (0,)):
        if place >= len(ids):
            break
        accepted.append(kept)
        pieces.append(ids[place : place + kept + 1])
        place += kept + 1
    return Answer(pieces, accepted, natural <= limit)


class EngineServer:
    """One of the three programs on a free port of this machine."""

    def __init__(
        self,
        program: Program,
        *,
        drafter: bool = True,
        metrics: bool = True,
        key: str | None = None,
        owner: str = "",
        serves: bool = True,
        restart_at: int | None = None,
    ) -> None:
        self.program, self.drafter, self.metrics, self.key, self.owner = program, drafter, metrics, key, owner
        self.prompts: list[list[int]] = []
        self.failure: tuple[int, str] | None = None
        self.serves, self.restart_at, self.readings = serves, restart_at, 0
        self.strangers = 0
        self.most_events: int | None = None
        self.edit_metrics: Callable[[str], str] = str
        self.script: Callable[[list[int], int], Answer] | None = None
        self.text_only, self.drafted = False, DRAFTED
        self.left_out: set[int] = set()
        self.at_once = self.most_at_once = 0
        self._accepted: list[int] = []
        self._tokens = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.get(self)

            def do_POST(self) -> None:
                outer.post(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def get(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/v1/models":
            allowed = self.key is None or handler.headers.get("Authorization") == f"Bearer {self.key}"
            models = [{"id": "target", "object": "model", "owned_by": self.owner or self.program}]
            body = {"object": "list", "data": models if self.serves else []} if allowed else {"error": "Unauthorized"}
            _send(handler, 200 if allowed else 401, json.dumps(body))
        elif handler.path == "/metrics" and self.metrics and self.program != "sglang":
            self.readings += 1
            if self.readings == self.restart_at:
                self._accepted, self._tokens = [], 0
            _send(handler, 200, self.edit_metrics(self._metrics()))
        else:
            _send(handler, 501, json.dumps({"error": {"message": "This server does not support metrics endpoint."}}))

    def post(self, handler: BaseHTTPRequestHandler) -> None:
        request = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        threading.Event().wait(0.005)
        try:
            if self.failure is not None:
                _send(handler, *self.failure)
                return
            events = {"vllm": self._vllm, "llamacpp": self._llama, "sglang": self._sglang}[self.program](request)
            events = events[: self.most_events]
            _send(handler, 200, "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")
        finally:
            with self._lock:
                self.at_once -= 1

    def _take(self, prompt: list[int], limit: int) -> Answer:
        answer = self.script(prompt, limit) if self.script else answer_to(prompt, limit, self.drafter)
        with self._lock:
            self.prompts.append(prompt)
            self._accepted += answer.accepted
            self._tokens += len(answer.output_ids) + self.strangers
        return answer

    def _metrics(self) -> str:
        prefix = {"vllm": "vllm:", "llamacpp": "llamacpp:"}[self.program]
        labels = {"vllm": 'engine="0",model_name="target"', "llamacpp": ""}[self.program]
        tokens = {"vllm": "vllm:generation_tokens_total", "llamacpp": "llamacpp:tokens_predicted_total"}[self.program]
        braces = f"{{{labels}}}" if labels else ""
        lines = [f"# HELP {tokens} Generated tokens.", f"# TYPE {tokens} counter", f"{tokens}{braces} {self._tokens}.0"]
        if self.drafter or self.program == "llamacpp":
            drafts = self._accepted if self.drafter else []
            spec = f"{prefix}spec_decode_num_"
            lines += [f"{spec}drafts_total{braces} {len(drafts)}.0"]
            lines += [f"{spec}draft_tokens_total{braces} {self.drafted * len(drafts)}.0"]
            lines += [f"{spec}accepted_tokens_total{braces} {sum(drafts)}.0"]
            for place in range(self.drafted):
                where = ",".join(filter(None, (labels, f'position="{place}"')))
                count = sum(kept > place for kept in drafts)
                lines.append(f"{spec}accepted_tokens_per_pos_total{{{where}}} {count}.0")
                lines.append(f"{spec}accepted_tokens_per_pos_created{{{where}}} 1.79e+09")
        return "\n".join(lines) + "\n"

    def _vllm(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        answer = self._take(request["prompt"], request["max_tokens"])
        assert request["temperature"] == 0.0
        assert request["return_token_ids"]
        events = []
        for number, piece in enumerate(answer.pieces, start=1):
            last = number == len(answer.pieces)
            reason = ("stop" if answer.stopped else "length") if last else None
            choice = {"index": 0, "text": _text(piece, answer, last), "finish_reason": reason}
            choice |= {} if self.text_only else {"token_ids": piece}
            events.append({"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": None})
        return events

    def _llama(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        answer = self._take(request["prompt"], request["n_predict"])
        tokens = answer.output_ids
        events: list[dict[str, Any]] = [
            {"index": 0, "content": _text([token], answer, place == len(tokens)), "stop": False}
            | ({} if self.text_only else {"tokens": [] if token in self.left_out else [token]})
            for place, token in enumerate(tokens, start=1)
        ]
        timings: dict[str, Any] = {"prompt_n": len(request["prompt"]), "predicted_n": len(tokens)}
        if self.drafter:
            counted = {"draft_n": self.drafted * len(answer.accepted), "draft_n_accepted": sum(answer.accepted)}
            timings |= counted
        stop_type = "eos" if answer.stopped else "limit"
        end = {"index": 0, "content": "", "tokens": [], "stop": True, "stop_type": stop_type, "timings": timings}
        return [*events, end]

    def _sglang(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        answer = self._take(request["input_ids"], request["sampling_params"]["max_new_tokens"])
        events = []
        for number in range(1, len(answer.pieces) + 1):
            ids = [token for piece in answer.pieces[:number] for token in piece]
            last = number == len(answer.pieces)
            finish = {"type": "stop" if answer.stopped else "length"} if last else None
            told: dict[str, Any] = {"id": "1", "finish_reason": finish, "completion_tokens": len(ids)}
            if last and self.drafter:
                told["spec_verify_ct"] = len(answer.accepted)
                told["spec_accept_histogram"] = [answer.accepted.count(kept) for kept in range(self.drafted + 1)]
            ids_told = {} if self.text_only else {"output_ids": ids}
            events.append({"text": _text(ids, answer, last), "meta_info": told} | ids_told)
        return events


def _text(ids: list[int], answer: Answer, last: bool) -> str:
    """A word a token; the token that ends an answer has none. A given text comes all at the end."""
    if answer.text is not None:
        return answer.text if last else ""
    return "".join(f"w{token} " for token in (ids[:-1] if last and answer.stopped else ids))


def _send(handler: BaseHTTPRequestHandler, status: int, text: str) -> None:
    body = text.encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
