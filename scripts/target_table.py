"""Writes docs/reference/targets.md: how far tiny random models of many families come in a whole life.

python -m scripts.target_table [FAMILY ...]     # from the root of the repository; half a minute for each
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.targets.families import FAMILIES
from tests.targets.lives import PAGE, line_of, live, page, read_lines


def main(families: list[str]) -> None:
    lines = read_lines()
    for family in families or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            lines[family] = line_of(family, live(family, Path(folder)))
        print(lines[family], flush=True)
        PAGE.write_text(page(lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
