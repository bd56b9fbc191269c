"""The package works from its wheel, away from the repository."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def say(words: list[str], folder: Path) -> str:
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`draftline` of the wheel in a fresh environment, which finds the packages that it needs in this one."""
    folder = tmp_path_factory.mktemp("wheel")
    say([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(REPOSITORY)], folder)
    venv.create(folder / "fresh", with_pip=True)
    python = folder / "fresh" / "bin" / "python"
    say([str(python), "-m", "pip", "install", "--quiet", "--no-deps", *map(str, folder.glob("*.whl"))], folder)
    own = Path(say([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    (own / "needs.pth").write_text(sysconfig.get_path("purelib") + "\n")
    place = say([str(python), "-c", "import draftline; print(draftline.__file__)"], folder)
    assert place.startswith(str(folder))
    return folder / "fresh" / "bin" / "draftline"


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_quickstart_runs_from_a_wheel(command: Path, tmp_path: Path) -> None:
    say([str(command), "quickstart", "--out", "quickstart"], tmp_path)
    result = json.loads((tmp_path / "quickstart" / "evaluate.json").read_text())
    assert result["acceptance_length"] > 3


@pytest.mark.slow
def test_pages_and_recipes_are_in_the_wheel(command: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    say([str(command), "prepare", "--target", "tiny", "--data", "a.jsonl", "--out", "data"], tmp_path)
    say([str(command), "inspect", "data", "--html", "page.html"], tmp_path)
    assert (tmp_path / "page.html").stat().st_size > 1000
