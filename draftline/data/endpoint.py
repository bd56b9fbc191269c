"""A server with the OpenAI interface: where it is, which key it wants, how it is reached."""

from __future__ import annotations

from dataclasses import dataclass, field

import httpx


@dataclass(frozen=True)
class Endpoint:
    """Where requests go.

    Attributes:
        base_url: up to and with `/v1`.
        api_key: sent as a bearer token if given; never shown.
        timeout_s: seconds of silence until a request counts as failed.
    """

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0

    @property
    def url(self) -> str:
        """Address of the OpenAI interface, without a slash at its end."""
        return self.base_url.rstrip("/")

    @property
    def root(self) -> str:
        """Address of the server itself, where its own interface and its counters are."""
        return self.url.removesuffix("/v1")

    def client(self, connections: int) -> httpx.AsyncClient:
        """A client for up to `connections` requests at once; to be closed by the caller."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        # Servers close kept connections after some seconds or requests (llama.cpp: 5 and 100) without saying so, now
        # and then just as the next request is on its way. So none is kept.
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=0)
        return httpx.AsyncClient(timeout=self.timeout_s, headers=headers, limits=limits)


def describe_failure(failure: httpx.Response | Exception) -> str:
    """What went wrong, in a few words on one line."""
    if isinstance(failure, httpx.Response):
        return f"status {failure.status_code}: {server_message(failure)}"
    if isinstance(failure, httpx.TimeoutException):
        return "no reply in time"
    return " ".join(str(failure).split()) or "the connection broke"


def server_message(reply: httpx.Response) -> str:
    """What a server says about a failure, in one line."""
    try:
        text = reply.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        text = reply.text
    return " ".join(str(text).split())[:200]
