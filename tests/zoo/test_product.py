"""Every planted fault changes what a run leaves behind: weights, log, files, answers or figures.

A fault that does not is none of the product, whatever the audit says of it. The slow suite lives through a run with
each fault; the quick one takes a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.zoo.fault import Fault
from tests.zoo.pipeline import Recipe
from tests.zoo.product import Product, differences, live, ready
from tests.zoo.test_zoo import IDS, ZOO

_CLEAN: dict[str, Product] = {}
"""Without a fault, by what the run is made of."""


@pytest.fixture
def clean(tmp_path: Path) -> Callable[[Recipe], Product]:
    """What a run leaves without a fault; to be asked before one is planted."""

    def of(recipe: Recipe) -> Product:
        key = repr(recipe)
        if key not in _CLEAN:
            with pytest.MonkeyPatch.context() as patch:
                _CLEAN[key] = live(ready(recipe, patch, tmp_path / "clean"))
        return _CLEAN[key]

    return of


def changed(planted: Fault, clean: Product, patch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """Places at which the product of a faulty run is another."""
    world = ready(planted.recipe, patch, folder)
    planted.plant(world)
    return differences(live(world), clean)


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(data="rows")], ids=["answers", "rows"])
def test_the_same_run_leaves_the_same(
    recipe: Recipe, clean: Callable[[Recipe], Product], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nothing = Fault("nothing", "", "", recipe, lambda _world: None)
    wanted = clean(recipe)
    assert changed(nothing, wanted, monkeypatch, tmp_path / "again") == []
    stages = ("data", "training", "export", "decoding", "rule", "evaluation")
    assert [name for name in stages if isinstance(wanted[name], str)] == []


def check(
    planted: Fault,
    clean: Callable[[Recipe], Product],
    patch: pytest.MonkeyPatch,
    folder: Path,
    record: Callable[[str, object], None],
) -> None:
    places = changed(planted, clean(planted.recipe), patch, folder)
    record("changed", " ".join(places))
    assert places, f"{planted.name} changes nothing that a run leaves"


@pytest.mark.parametrize("planted", ZOO[::58], ids=IDS[::58])
def test_some_faults_change_what_a_run_leaves(
    planted: Fault,
    clean: Callable[[Recipe], Product],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    check(planted, clean, monkeypatch, tmp_path / "faulty", record_property)


@pytest.mark.slow
@pytest.mark.parametrize("planted", ZOO, ids=IDS)
def test_every_fault_changes_what_a_run_leaves(
    planted: Fault,
    clean: Callable[[Recipe], Product],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    check(planted, clean, monkeypatch, tmp_path / "faulty", record_property)
