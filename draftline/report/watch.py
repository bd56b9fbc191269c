"""The page of a run, served to the browsers of this machine, and made again when the run has written something."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from draftline.errors import ConfigError, DraftlineError
from draftline.report.document import report_page
from draftline.train.run_folder import RunFolder

HOST = "127.0.0.1"
STATE_ADDRESS = "/state"


def serve_page(folder: Path, evaluations: Sequence[Path], audit: Path | None, port: int) -> None:
    """Serve until Ctrl-C; the address is printed on stdout.

    Args:
        port: 0 takes one that is free.

    Raises:
        ConfigError: the port is taken, or not for us.
        CheckpointError, DataError: see `document.report_page`.
    """
    page = WatchedPage(folder, evaluations, audit)
    page.html()  # what is wrong is said before anything is served
    try:
        server = PageServer(page, port)
    except OSError as error:
        raise ConfigError(f"port {port} of {HOST} cannot be used ({error.strerror}): leave out --port") from error
    print(f"http://{HOST}:{server.server_port}/", flush=True)
    print("the page follows the run; Ctrl-C ends this", file=sys.stderr, flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended", file=sys.stderr, flush=True)


class WatchedPage:
    """The page, made anew only when something has changed. Safe to be used by several threads.

    Args: see `document.report_page`.
    """

    def __init__(self, folder: Path, evaluations: Sequence[Path], audit: Path | None) -> None:
        self._folder, self._evaluations, self._audit = folder, evaluations, audit
        self._files = [*RunFolder(folder).growing_files, *evaluations, *([] if audit is None else [audit])]
        self._lock = Lock()
        self._made = ("", "")

    def state(self) -> str:
        """A text that changes when a file does, and after 1, 2, 4, .. minutes without change: the run may be dead."""
        found = [path.stat() for path in self._files if path.exists()]
        silence = time.time() - max((one.st_mtime for one in found), default=0.0)
        parts = [f"{one.st_mtime_ns:x}.{one.st_size:x}" for one in found]
        return "-".join([*parts, str((max(int(silence), 0) // 60).bit_length())])

    def html(self) -> str:
        """The page as of now."""
        with self._lock:
            state = self.state()
            if self._made[0] != state:
                follow = (STATE_ADDRESS, state)
                self._made = (state, report_page(self._folder, self._evaluations, self._audit, follow=follow))
            return self._made[1]


class PageServer(ThreadingHTTPServer):
    """Answers this machine only, and only those who ask for it by its own name.

    The second condition keeps out foreign pages whose name was made to point here.
    """

    daemon_threads = True

    def __init__(self, page: WatchedPage, port: int) -> None:
        super().__init__((HOST, port), _Handler)
        self.page = page
        self.names = {f"{host}:{self.server_port}" for host in (HOST, "localhost")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away while it is answered is not an error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        status, kind, text = self._answer()
        body = text.encode("utf-8")
        self.send_response(status)
        self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """One line per request is of no use to anybody."""

    def _answer(self) -> tuple[HTTPStatus, str, str]:
        if self.headers.get("Host") not in self.server.names:
            return HTTPStatus.FORBIDDEN, "plain", "ask for this page by its own address\n"
        try:
            if self.path == "/":
                return HTTPStatus.OK, "html", self.server.page.html()
            if self.path == STATE_ADDRESS:
                return HTTPStatus.OK, "plain", self.server.page.state()
        except (DraftlineError, OSError) as error:  # of a run that is being changed; the next request asks again
            return HTTPStatus.SERVICE_UNAVAILABLE, "plain", f"{error}\n"
        return HTTPStatus.NOT_FOUND, "plain", "there is only one page here\n"
