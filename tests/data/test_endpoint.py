"""How a server is reached."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from draftline.data.endpoint import Endpoint


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
def url() -> Iterator[str]:
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


def test_a_server_that_closes_kept_connections_loses_no_request(url: str) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        asyncio.run(replies(httpx.AsyncClient(), url, "one", "two"))
    assert asyncio.run(replies(Endpoint(url).client(1), url, "one", "two", "three")) == ["one", "two", "three"]
