"""The page served: to this machine only, made again when the run has written something."""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftline import cli
from draftline.report.watch import HOST, PageServer, WatchedPage
from tests.report.synthetic_run import write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", lines=20, total=40)


@pytest.fixture
def server(folder: Path) -> Iterator[PageServer]:
    """A server that answers."""
    with PageServer(WatchedPage(folder, (), None), 0) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.01,))
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def get(server: PageServer, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=20)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_the_page_is_made_again_when_the_run_has_written_a_line(server: PageServer, folder: Path) -> None:
    status, page = get(server, "/")
    assert status == 200
    assert "Still going on" in page
    _, state = get(server, "/state")
    assert f'data-follow="/state" data-known="{state}"' in page
    assert get(server, "/") == (200, page)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(lines[-1].replace('"step": 20', '"step": 21'))
    assert get(server, "/state")[1] != state
    assert "<dd>21<small>of 40" in get(server, "/")[1]


def test_silence_changes_the_state_so_that_a_dead_run_shows(server: PageServer, folder: Path) -> None:
    ages = {}
    for age in (10, 70, 300):
        then = time.time() - age
        for path in folder.iterdir():
            os.utime(path, (then, then))
        ages[age] = get(server, "/state")[1].rpartition("-")[2]
    assert ages == {10: "0", 70: "1", 300: "3"}
    assert "Stopped before its end" in get(server, "/")[1]


def test_only_those_who_ask_by_our_name_are_answered(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, "/", host="elsewhere.example")[0] == 403
    assert get(server, "/", host=f"localhost:{server.server_port}")[0] == 200
    assert get(server, "/../run.json")[0] == 404


def test_a_run_that_vanishes_does_not_end_the_server(server: PageServer, folder: Path) -> None:
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").unlink()
    status, text = get(server, "/")
    assert status == 503
    assert "is not a run" in text
    (folder / "config.yaml").write_text(config)
    assert get(server, "/")[0] == 200


def test_ctrl_c_ends_it_cleanly(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: PageServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "serve_forever", interrupted)
    assert cli.run(["report", str(folder), "--watch"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("http://127.0.0.1:")
    assert err.splitlines()[-1] == "ended"
    assert not (folder / "report.html").exists()


def test_a_busy_port_and_a_wrong_folder_are_one_line(
    server: PageServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["report", str(folder), "--watch", "--port", str(server.server_port)]) == 2
    assert cli.run(["report", str(folder.parent), "--watch"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    busy, wrong = err.splitlines()
    assert f"port {server.server_port} of 127.0.0.1 cannot be used" in busy
    assert "is not a run" in wrong
