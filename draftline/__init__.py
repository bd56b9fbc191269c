"""Draftline: trains DFlash drafters and proves that what is trained is what will be served.

The names below are the public interface, in the order of the data flow; `docs/reference/api.md` describes them. They
are imported when they are first used, so that `draftline --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "RunConfig": "draftline.config",
    "load_run_config": "draftline.config",
    "DraftlineError": "draftline.errors",
    "PreparedDataset": "draftline.data.dataset",
    "load_target": "draftline.targets.model",
    "HookCapture": "draftline.targets.capture",
    "DFlashDraftModel": "draftline.draft.model",
    "train_run": "draftline.run",
    "load_drafter": "draftline.formats.load",
    "export_drafter": "draftline.formats.exporting",
    "generate": "draftline.evaluate.generate",
    "evaluate_prompts": "draftline.evaluate.benchmark",
    "audit_run_config": "draftline.audit.report",
    "audit_checkpoint": "draftline.audit.report",
}

__all__ = list(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"draftline has no public name {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
