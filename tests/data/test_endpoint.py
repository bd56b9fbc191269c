"""How a server is reached."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from draftline.data.endpoint import IDLE_S, Endpoint


class ImpatientHandler(BaseHTTPRequestHandler):
    """Closes a connection just as a request arrives on it after a pause."""

    protocol_version = "HTTP/1.1"
    answered_at = 0.0

    def do_GET(self) -> None:
        if self.answered_at and time.monotonic() - self.answered_at > IDLE_S:
            self.close_connection = True
            return
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
        self.answered_at = time.monotonic()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def impatient_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ImpatientHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


async def ask_twice(client: httpx.AsyncClient, url: str) -> None:
    async with client:
        for pause in (IDLE_S + 0.2, 0.0):
            assert (await client.get(url)).status_code == 200
            await asyncio.sleep(pause)


def test_a_connection_is_given_up_before_the_server_does(impatient_url: str) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        asyncio.run(ask_twice(httpx.AsyncClient(), impatient_url))
    asyncio.run(ask_twice(Endpoint(impatient_url).client(1), impatient_url))
