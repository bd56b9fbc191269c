"""The frame around every page."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from draftline.page import frame
from draftline.page.chart import Bars, Chart, ChartCurve, hue

PAGE = """{% extends "base.html" %}{% import "parts.html" as parts %}
{% block content %}{% call parts.section("one", "First <one>") %}
{{ parts.chart(chart) }}{{ parts.bars(bars) }}{{ parts.notice("warning", "run `a <b>`") }}
{{ parts.cards([("name", "value", "remark")]) }}
{% endcall %}{% endblock %}"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of templates with one page in it."""
    for path in frame.TEMPLATES.iterdir():
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "page.html").write_text(PAGE)
    monkeypatch.setattr(frame, "TEMPLATES", tmp_path)
    frame._environment.cache_clear()
    return tmp_path


def render(follow: tuple[str, str] | None = None) -> str:
    line = ChartCurve("<script>alert(1)</script>", np.arange(3.0), np.arange(3.0), hue(0))
    context = {"chart": Chart("Loss & more", [line]), "bars": Bars("B", ["1"], [("g", hue(0), [1.0])], x_name="k")}
    return frame.render(
        "page.html", title="A <title>", sections=[("one", "First <one>")], context=context, follow=follow
    )


@pytest.mark.usefixtures("page")
def test_whatever_is_shown_is_escaped_and_nothing_is_asked_of_the_network() -> None:
    html = render()
    assert "<script>alert" not in html
    assert "A &lt;title&gt;" in html
    assert "run <code>a &lt;b&gt;</code>" in html
    assert "connect-src" not in html
    assert not re.search(r"""(src|href)=["'](?!#)""", html)
    assert "url(" not in html


@pytest.mark.usefixtures("page")
def test_links_lead_to_sections_and_charts_have_words_and_numbers() -> None:
    html = render()
    assert '<a href="#one">First &lt;one&gt;</a>' in html
    assert '<section id="one"' in html
    assert 'aria-label="Loss &amp; more by step.' in html
    assert html.count("<summary>Numbers</summary>") == 2


@pytest.mark.usefixtures("page")
def test_a_followed_page_may_ask_its_own_server() -> None:
    html = render(follow=("/state", 'a"b'))
    assert 'data-follow="/state" data-known="a&#34;b"' in html
    assert "connect-src 'self'" in html


def test_long_names_may_break_and_numbers_may_not() -> None:
    assert frame.breakable("a/b_c.d<e> 0.5 -1") == "a/<wbr>b_<wbr>c.<wbr>d&lt;e&gt; 0.5 -1"
