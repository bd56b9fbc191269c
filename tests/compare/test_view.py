"""What is shown of a comparison that is easily shown wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from draftline.compare import compare_groups
from draftline.compare.curves import Estimate
from draftline.compare.view import as_page, pair_tables, with_interval
from tests.compare.synthetic_runs import STEPS, write_csv


def test_a_group_that_only_partly_reaches_a_level_is_not_said_never_to(tmp_path: Path) -> None:
    curve = STEPS / 2000
    tops = {"before": [1.0, 1.0], "after": [0.7, 1.2]}
    groups = {
        name: [write_csv(tmp_path / f"{name}-{k}.csv", top * curve) for k, top in enumerate(each)]
        for name, each in tops.items()
    }
    *_, (_, _, rows) = pair_tables(compare_groups(groups).pairs[0], ["step"])
    assert [row[2] for row in rows][-1] == "over 913"  # one run at 833, the other not within its 1000 steps


def test_a_page_of_long_logs_stays_small(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    steps = np.arange(1, 20_001)
    paths = [write_csv(tmp_path / f"{k}.csv", 0.1 + 0.01 * rng.standard_normal(20_000), steps) for k in range(2)]
    assert len(as_page(compare_groups({str(path): [path] for path in paths}))) < 100_000


def test_a_ratio_is_shown_with_what_is_known_of_its_interval() -> None:
    assert with_interval(Estimate(1.25, 1.0, 1.5, "seeds")) == "1.250 (1.000 to 1.500)"
    assert with_interval(Estimate(1.25, 1.0, 1.5, "seeds"), 2) == "1.25 (1.00 to 1.50)"
    assert with_interval(Estimate(1.25)) == "1.250"
    assert with_interval(None) == "–"
