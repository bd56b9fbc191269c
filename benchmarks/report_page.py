"""How long the page of a long run takes to be made and to open, and how large it is.

python -m benchmarks.report_page [--lines 100000] [--runs 5]

A run of made-up numbers is written, one line per step. "Opens" is the time from the navigation in headless Chromium
until the page is parsed, its script has run and everything is laid out; "with the browser" is the whole process, its
start and end included, next to the same for an empty page.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from draftline.train.run_folder import RunFolder
from tests.report.synthetic_run import AUDIT, evaluation, write_run

CLOCK = """<script>addEventListener("load", () => {
  document.body.getBoundingClientRect();
  document.body.dataset.opened = performance.now();
});</script>"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("report_page: neither chromium nor google-chrome is installed")
    with tempfile.TemporaryDirectory() as name:
        page = make_page(Path(name), options.lines)
        timed = page.with_name("timed.html")
        timed.write_text(page.read_text(encoding="utf-8").replace("</body>", CLOCK + "</body>"), encoding="utf-8")
        empty = page.with_name("empty.html")
        empty.write_text("<!doctype html><title>empty</title><body>" + CLOCK)
        for path in (timed, empty):
            measured = [open_page(browser, path) for _ in range(options.runs)]
            opened, whole, busy = (statistics.median(column) for column in zip(*measured, strict=True))
            print(
                f"{path.stem}: opens in {opened:.2f} s; with the browser {whole:.2f} s, {busy:.2f} s of processor time "
                f"(medians of {options.runs})"
            )


def make_page(above: Path, lines: int) -> Path:
    """Let the command write the page of a run of that many lines, and say what it costs."""
    run = write_run(above / "run", lines=lines, evaluate_every=200)
    RunFolder(run).write_audit(AUDIT)
    (above / "evaluate.json").write_text(json.dumps(evaluation(answers=200)))
    page = above / "page.html"
    words = ["report", str(run), "--evaluation", str(above / "evaluate.json"), "--out", str(page)]
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", "from draftline.cli import main; main()", *words], check=True, stdout=subprocess.DEVNULL
    )
    wall = time.perf_counter() - started
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    size = RunFolder(run).metrics_path.stat().st_size / 1e6
    print(
        f"{lines:,} lines, {size:.0f} MB of metrics: made in {wall:.1f} s ({usage.ru_utime:.1f} s of processor time, "
        f"{usage.ru_maxrss / 1024:.0f} MB of memory), page of {page.stat().st_size / 1e6:.2f} MB"
    )
    return page


def open_page(browser: str, page: Path) -> tuple[float, float, float]:
    """Seconds until the page is laid out, of the whole process, and of processor time."""
    words = [browser, "--headless", "--disable-gpu", "--no-sandbox", f"--user-data-dir={page.parent / 'profile'}"]
    started, before = time.perf_counter(), processor_seconds()
    done = subprocess.run([*words, "--dump-dom", page.as_uri()], capture_output=True, text=True, check=True)
    whole = time.perf_counter() - started
    opened = re.search(r'data-opened="([\d.]+)"', done.stdout)
    assert opened is not None, done.stderr
    return float(opened[1]) / 1000, whole, processor_seconds() - before


def processor_seconds() -> float:
    """Of all processes that were started and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
