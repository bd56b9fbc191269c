"""Shorter proofs: every export here writes one."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def few_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for what is tested about proofs, a third of what a user gets."""
    monkeypatch.setattr("draftline.formats.proof.ENOUGH_FORWARDS", 60)
