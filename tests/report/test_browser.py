"""The page in a real browser: nothing fails, nothing leaves the machine, all is readable on a phone and in the dark."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from draftline.report.document import REPORT_SECTIONS, report_page
from tests.report.synthetic_run import AUDIT, evaluation, write_run

BROWSER = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="neither chromium nor google-chrome is installed")

PROBE = """<script>
const failed = [];
addEventListener("error", (event) => failed.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => failed.push(event.blockedURI));
</script>"""

REPORT = """<script>
addEventListener("load", () => {
  const sheet = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const canvas = sheet.getContext("2d", { willReadFrequently: true });
  function rgb(color) {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  }
  function luminance(color) {
    const linear = rgb(color).slice(0, 3).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  }
  function ground(element) {
    for (; element; element = element.parentElement) {
      const color = getComputedStyle(element).backgroundColor;
      if (rgb(color)[3] === 255) return color;
    }
    return "white";
  }
  for (const details of document.querySelectorAll("details")) details.open = true;
  const faint = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!text || !element.getClientRects().length || element.closest("script, style, svg, .skip")) continue;
    const [a, b] = [luminance(getComputedStyle(element).color), luminance(ground(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) faint.push(element.outerHTML.slice(0, 90));
  }
  const svg = document.querySelector("figure[data-x] svg"), frame = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", { clientX: frame.right - 1, clientY: frame.top + 5 }));
  const found = {
    failed,
    faint: faint.slice(0, 5),
    overflow: document.documentElement.scrollWidth - innerWidth,
    width: innerWidth,
    ground: rgb(getComputedStyle(document.body).backgroundColor).slice(0, 3),
    heights: [...document.querySelectorAll("section")].map((s) => [s.id, Math.round(s.getBoundingClientRect().height)]),
    lines: [...document.querySelectorAll("path.values")].filter((p) => p.getBoundingClientRect().width < 50).length,
    requests: performance.getEntriesByType("resource").map((entry) => entry.name),
    readout: document.querySelector(".readout").innerText,
    small: Math.min(...[...document.querySelectorAll("body *")].map((e) => parseFloat(getComputedStyle(e).fontSize))),
  };
  const pre = document.body.appendChild(document.createElement("pre"));
  pre.id = "probe";
  pre.textContent = JSON.stringify(found);
});
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with everything, and scripts that look at it."""
    above = tmp_path_factory.mktemp("browser")
    run = write_run(above / "run", lines=1000)
    (run / "audit.json").write_text(json.dumps(AUDIT))
    (above / "evaluate.json").write_text(json.dumps(evaluation()))
    text = report_page(run, [above / "evaluate.json"])
    path = above / "page.html"
    path.write_text(text.replace("</title>", "</title>" + PROBE, 1).replace("</body>", REPORT + "</body>"))
    return path


def open_page(path: Path, width: int, *flags: str) -> tuple[dict[str, Any], str]:
    """What the scripts found, and what the browser wrote to its console; a screenshot lies beside the page."""
    assert BROWSER is not None
    shot = path.with_name(f"page-{width}.png")
    words = [BROWSER, "--headless", "--disable-gpu", "--no-sandbox", "--hide-scrollbars", "--enable-logging=stderr"]
    words += [f"--user-data-dir={path.parent / 'profile'}", f"--window-size={width},900", "--virtual-time-budget=3000"]
    words += [f"--screenshot={shot}", "--dump-dom", *flags, path.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert shot.stat().st_size > 5000
    shot.unlink()
    probe = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert probe is not None, done.stdout[-500:]
    return json.loads(html.unescape(probe[1])), "\n".join(li for li in done.stderr.splitlines() if "CONSOLE" in li)


@pytest.mark.parametrize(
    ("width", "flags", "dark"), [(1280, (), False), (360, ("--blink-settings=preferredColorScheme=0",), True)]
)
def test_the_page_opens_and_is_readable(page: Path, width: int, flags: tuple[str, ...], dark: bool) -> None:
    found, console = open_page(page, width, *flags)
    assert console == ""
    assert found["failed"] == found["requests"] == found["faint"] == []
    assert found["overflow"] <= 0
    assert (max(found["ground"]) < 60) == dark
    assert [section for section, _ in found["heights"]] == [section for section, _ in REPORT_SECTIONS]
    assert min(height for _, height in found["heights"]) > 80
    assert found["lines"] == 0
    assert found["small"] >= 11
    place, value = found["readout"].splitlines()[:2]
    assert 990 <= float(place.removeprefix("step ").replace(",", "")) <= 1000
    assert 1.2 < float(value.removeprefix("training ")) < 1.8
