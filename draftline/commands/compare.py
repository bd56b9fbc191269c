"""`draftline compare`: runs held against a baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftline.commands.options import HtmlOut, JsonOut
from draftline.outputs import keep_apart, new_pictures, write_file, write_json


def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Run folders, CSV files or TensorBoard folders; the first is the baseline. Several seeds as a group: "
            "NAME=RUN,RUN,RUN or a quoted pattern 'runs/new-*'."
        ),
    ] = None,
    a: Annotated[list[str] | None, typer.Option("--a", help="A run of the baseline; repeat for each seed.")] = None,
    b: Annotated[list[str] | None, typer.Option("--b", help="A run of the other side; repeat for each seed.")] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", help="Value of the verdict; repeat for what other logs call it.")
    ] = None,
    margin: Annotated[float, typer.Option("--margin", help="Smallest relative difference that matters.")] = 0.03,
    lower_is_better: Annotated[
        bool | None, typer.Option("--lower-is-better/--higher-is-better", help="If the name does not tell.")
    ] = None,
    html: HtmlOut = None,
    png: Annotated[
        Path | None, typer.Option("--png", callback=new_pictures, help="Draw the curves: a .png file, or a folder.")
    ] = None,
    json_out: JsonOut = None,
) -> None:
    """Which runs learned more, how many times sooner, and how sure that is: better, same or worse."""
    from rich.console import Console

    from draftline.compare import compare_groups, name_groups
    from draftline.compare.view import as_page, as_pictures, as_text

    groups = name_groups(runs or [], a or [], b or [])
    keep_apart([html, png, json_out], [path for paths in groups.values() for path in paths])
    comparison = compare_groups(groups, metric=metric or (), margin=margin, lower_is_better=lower_is_better)
    files: dict[Path, str | bytes] = {} if png is None else {**as_pictures(comparison, png)}
    if html is not None:
        files[html] = as_page(comparison)
    Console().print(as_text(comparison))
    write_json(json_out, comparison.to_json())
    for path, content in files.items():
        write_file(path, content)
