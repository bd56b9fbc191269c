"""Where the scalars of a run are shown besides its own files: TensorBoard, Weights & Biases, MLflow, trackio.

Each is spoken to by its own library, which obeys its own environment (WANDB_MODE=offline, MLFLOW_TRACKING_URI,
TRACKIO_DIR). The lines of metrics.jsonl are what counts: a tracker that is not installed, cannot log in or fails later
costs one warning, and the run goes on without it.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from draftline.config import TrackerName
from draftline.train.run_folder import RunFolder

PROJECT = "draftline"
"""Name under which trackers with projects collect runs."""


class Tracker(Protocol):
    """A place that scalars are sent to."""

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Send the finite scalars of one line."""

    def close(self) -> None:
        """The run has ended, whichever way."""


class TensorBoard:
    """Event files in the run folder; what they have of later steps is forgotten on resume."""

    def __init__(self, folder: Path, first_step: int, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        del settings  # they lie beside the folder
        self._writer = SummaryWriter(RunFolder(folder).tensorboard, purge_step=first_step)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        for tag, number in scalars.items():
            self._writer.add_scalar(tag, number, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, whose id follows from the folder, so that a resumed run goes on in it."""

    def __init__(self, folder: Path, first_step: int, settings: Mapping[str, Any]) -> None:
        del first_step
        self._run = importlib.import_module("wandb").init(
            project=PROJECT, name=folder.name, id=_identity(folder), resume="allow", dir=str(folder), config=settings
        )

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run of MLflow."""

    def __init__(self, folder: Path, first_step: int, settings: Mapping[str, Any]) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(PROJECT)
        self._mlflow.start_run(run_name=folder.name, tags={"folder": str(folder), "first_step": str(first_step)})
        self._mlflow.log_params({name: str(value)[:500] for name, value in settings.items()})

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(scalars), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class Trackio:
    """A run of trackio."""

    def __init__(self, folder: Path, first_step: int, settings: Mapping[str, Any]) -> None:
        del first_step
        self._trackio = importlib.import_module("trackio")
        plain = {name: str(value) for name, value in settings.items()}
        self._trackio.init(project=PROJECT, name=f"{folder.name}-{_identity(folder)}", resume="allow", config=plain)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(scalars), step=step)

    def close(self) -> None:
        self._trackio.finish()


TRACKERS: dict[TrackerName, Callable[[Path, int, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
}
"""How each is opened: run folder, number of the first step that is new, settings by name."""


class Trackers:
    """All trackers of a run. None of their failures gets out.

    Args:
        names: as `train.trackers` has them.
        folder: of the run.
        first_step: number of the first step that is new.
        settings: of the run, as `section.key`.
        warn: takes one line for a tracker that fails, which is not asked again.
    """

    def __init__(
        self,
        names: Sequence[TrackerName],
        folder: Path,
        first_step: int,
        settings: Mapping[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        self._warn = warn
        self._open: dict[TrackerName, Tracker] = {}
        for name in names:
            try:
                self._open[name] = TRACKERS[name](folder, first_step, settings)
            except ImportError:
                warn(f"warning: {name} is not installed, the run goes on without it: pip install 'draftline[{name}]'")
            except Exception as error:  # whatever a library raises: a tracker is no reason to stop
                self._failed(name, error)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Send the scalars of one line to all."""
        self._each(lambda tracker: tracker.log(scalars, step))

    def close(self) -> None:
        """End all."""
        self._each(lambda tracker: tracker.close())

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                act(tracker)
            except Exception as error:  # as above
                del self._open[name]
                self._failed(name, error)

    def _failed(self, name: TrackerName, error: Exception) -> None:
        line = " ".join(str(error).split()) or type(error).__name__
        self._warn(f"warning: {name} failed, the run goes on without it: {line}")


def _identity(folder: Path) -> str:
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
