"""`draftline compare`: runs held against a baseline."""

from __future__ import annotations

from pathlib import Path

from draftline.options import CompareCommand
from draftline.storage import keep_apart, write_file, write_json


def compare(options: CompareCommand) -> None:
    """Which runs learned more, how many times sooner, and how sure that is: better, same or worse."""
    from rich.console import Console

    from draftline.compare import compare_groups, name_groups
    from draftline.compare.view import as_page, as_pictures, as_text

    groups = name_groups(options.runs, options.a, options.b)
    results = [options.html, options.png, options.json_file]
    keep_apart(results, [path for paths in groups.values() for path in paths])
    comparison = compare_groups(groups, options.settings)
    files: dict[Path, str | bytes] = {} if options.png is None else {**as_pictures(comparison, options.png)}
    if options.html is not None:
        files[options.html] = as_page(comparison)
    Console().print(as_text(comparison))
    write_json(options.json_file, comparison.to_json())
    for path, content in files.items():
        write_file(path, content)
