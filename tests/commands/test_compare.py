"""`draftline compare` as it is called: tables, page, pictures, JSON, and one line for what is wrong."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from draftline import cli
from tests.compare.synthetic_runs import heldout_records, learning_curve, write_csv, write_run

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs a side, with names that a page has to escape."""
    folder, rng = tmp_path_factory.mktemp("pool"), np.random.default_rng(6)
    for name, top in (("old", 0.3), ("<b>new", 0.4)):
        for seed in range(3):
            identity = {"config": {"train": {"seed": seed}, "loss": {"decay_gamma": top}}}
            write_run(folder / f"{name}-{seed}", heldout_records(learning_curve(rng, top=top)), identity)
    return folder


class Reader(HTMLParser):
    """Collects the ids, links and texts of a page, and checks that what is opened is closed."""

    VOID = frozenset({"meta", "path", "input", "br", "rect", "wbr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open += [tag] if tag not in self.VOID else []
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.addresses += [value for name, value in attrs if name in {"src", "href"} and value]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Nothing stays open."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_everything_is_written(pool: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", f"[old]={pool}/old-*", f"new={pool}/<b>new-*", "--html", str(tmp_path / "page.html")]
    words += ["--json", str(tmp_path / "out.json"), "--png", str(tmp_path / "pictures")]
    assert cli.run(words) == 0
    printed = capsys.readouterr().out
    assert "new against [old]: better" in printed
    assert "After 100,000 tokens: ratio 1." in printed
    result = json.loads((tmp_path / "out.json").read_text())
    pair = result["pairs"][0]
    assert pair["verdict"] == "better"
    assert pair["ratio"]["low"] > 1.03
    assert pair["steps_to_same_accuracy"]["times"]["value"] > 1.2
    assert len(result["groups"]["new"]) == 3
    pictures = {path.name: path.read_bytes()[:8] for path in (tmp_path / "pictures").iterdir()}
    assert {f"heldout_accuracy-by-{axis}.png" for axis in ("step", "tokens", "seconds")} < set(pictures)
    assert set(pictures.values()) == {PNG}
    page = Reader()
    page.feed((tmp_path / "page.html").read_text())
    assert page.open == []
    assert {"curves", "place", "value", "differences", "runs"} <= set(page.ids)
    assert all(address.startswith("#") for address in page.addresses)
    assert "loss.decay_gamma" in page.text
    assert "<b>new-0" in page.text


def test_single_runs_and_one_picture(pool: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", str(pool / "old-0"), str(pool / "old-1"), "--png", str(tmp_path / "all.png")]
    assert cli.run(words) == 0
    assert (tmp_path / "all.png").read_bytes()[:8] == PNG
    assert "One run a side cannot show" in re.sub(r"\s+", " ", capsys.readouterr().out)


def test_a_run_without_a_verdict_has_a_page_too(tmp_path: Path) -> None:
    curve = learning_curve(np.random.default_rng(7))
    for name in ("one", "two"):
        write_run(tmp_path / name, heldout_records(curve), {"target": name})
    words = ["compare", str(tmp_path / "one"), str(tmp_path / "two"), "--html", str(tmp_path / "page.html")]
    assert cli.run([*words, "--png", str(tmp_path / "all.png")]) == 2
    assert cli.run(words) == 0
    assert "no verdict" in (tmp_path / "page.html").read_text()


def test_what_is_wrong_is_one_line_and_leaves_nothing(
    pool: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.csv").write_text("step,accuracy\n1,0.5\n2,oops\n")
    (tmp_path / "empty.csv").write_text("")
    good = str(write_csv(tmp_path / "good.csv", learning_curve(np.random.default_rng(8))))
    outputs = ["--html", str(tmp_path / "page.html"), "--json", str(tmp_path / "out.json")]
    for runs in (
        [good],
        [good, str(tmp_path / "bad.csv")],
        [good, str(tmp_path / "empty.csv")],
        [good, str(tmp_path)],
        [good, str(tmp_path / "missing")],
        [good, good],
        [good, "none=nothing-*"],
        [good, "--a", good, "--b", good],
        ["--a", good],
        [good, str(pool / "old-0")],
        [good, f"again={good}", "--margin", "2"],
        [good, f"again={good}", "--png", str(Path(good) / "picture.png")],
    ):
        assert cli.run(["compare", *runs, *outputs]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("draftline: ")
        assert said.err.count("\n") == 1
    assert not (tmp_path / "page.html").exists()
    assert not (tmp_path / "out.json").exists()
