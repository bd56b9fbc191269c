"""From a template to one file that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

import draftline
from draftline.page.chart import number

TEMPLATES = Path(__file__).parent / "templates"


def render(
    template: str,
    *,
    title: str,
    sections: Sequence[tuple[str, str]],
    context: Mapping[str, Any],
    follow: tuple[str, str] | None = None,
) -> str:
    """The page as text.

    Args:
        template: name of a file in `templates/` that extends `base.html`.
        title: heading, and name of the browser's tab.
        sections: id and heading of each, for the links at the top.
        context: what the template itself reads.
        follow: an address on the same server and the text that it gives now; the page asks there every two seconds,
            and loads itself again when it gets another text. Without `follow` the page can make no request at all.
    """
    values = {**context, "title": title, "sections": sections, "follow": follow, "version": draftline.__version__}
    return _environment().get_template(template).render(values)


def with_code(text: str) -> Markup:
    """Escaped text in which `words between backticks` are code."""
    parts = [escape(part) for part in text.split("`")]
    return Markup().join(Markup("<code>{}</code>").format(p) if i % 2 else p for i, p in enumerate(parts))


def breakable(text: str) -> Markup:
    """Escaped text that a narrow column may break behind the signs that join words; numbers stay whole."""
    parts = re.split(r"(?<=[/_])|(?<=\.)(?=[A-Za-z])", text)
    return Markup("<wbr>").join(escape(part) for part in parts)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    environment.filters["with_code"] = with_code
    environment.filters["breakable"] = breakable
    return environment
