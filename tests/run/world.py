"""Several ranks in processes of their own, started as torchrun starts them, and what became of each."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from draftline.config import load_run_config
from draftline.engine import torchrun
from draftline.errors import DraftlineError
from draftline.run import RunResult, assemble, train, with_saved_threads
from draftline.train.ranks import Ranks
from draftline.train.run_folder import RunFolder
from tests.engine.tiny_target import tiny_target
from tests.run.small_run import SETTINGS, small_data

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.run.world"])

ROWS = ("train.rows_per_step=4", "train.max_steps=20", "data.heldout_fraction=0.2")
"""A run that one, two, or four ranks can share; with 20 steps of 4 rows it takes several passes."""


@dataclass(frozen=True)
class Ended:
    """How one rank ended.

    Attributes:
        status: of its process.
        said: on stderr.
        result: what its body gave.
    """

    status: int | None
    said: str
    result: Any


class World:
    """Ranks that have been started.

    Args:
        folder: for what they say.
        count: how many.
        body: called in each with its `Ranks` and `args`.
    """

    def __init__(self, folder: Path, count: int, body: Callable[..., Any], *args: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.processes: list[BaseProcess] = [
            PROCESSES.Process(target=_live, args=(folder, rank, count, port, body, args)) for rank in range(count)
        ]
        for process in self.processes:
            process.start()

    def ended(self, seconds: float = 90.0) -> list[Ended]:
        """Wait for all; a rank that hangs is killed, and the test fails."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        hanging = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for process in self.processes:
            process.kill()
            process.join()
        assert not hanging, f"ranks {hanging} hang: {[self._of(rank).said for rank in hanging]}"
        return [self._of(rank) for rank in range(len(self.processes))]

    def _of(self, rank: int) -> Ended:
        place = self.folder / f"{rank}.result"
        result = pickle.loads(place.read_bytes()) if place.exists() else None
        said = self.folder / f"{rank}.stderr"
        return Ended(self.processes[rank].exitcode, said.read_text() if said.exists() else "", result)


def on_ranks(folder: Path, count: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """What each rank gave, where none may fail."""
    ended = World(folder, count, body, *args).ended()
    assert [one.status for one in ended] == [0] * count, [one.said for one in ended]
    return [one.result for one in ended]


def _live(folder: Path, rank: int, count: int, port: int, body: Callable[..., Any], args: Sequence[Any]) -> None:
    place = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
    os.environ.update({**{key: str(value) for key, value in place.items()}, "OMP_NUM_THREADS": "1"})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.stderr = (folder / f"{rank}.stderr").open("w", buffering=1)
    torch.set_num_threads(1)
    torchrun.BEAT = 0.2
    status = 0
    try:
        with torchrun.ranks_of_torchrun() as ranks:
            result = body(ranks, *args)
        (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
    except DraftlineError as error:
        status = error.exit_status
        print(str(error), file=sys.stderr)
    except BaseException:
        status = 99
        traceback.print_exc(file=sys.stderr)
    sys.stderr.flush()
    os._exit(status)


def train_small(ranks: Ranks, out: Path, words: Sequence[str] = (), resume: bool = False) -> RunResult:
    """The small run, as one of the ranks."""
    config = load_run_config(None, [*SETTINGS, *ROWS, *words])
    ranks.check_settings(config, {})
    ranks.first(lambda: RunFolder(out).check_usable(config, resume))
    config = ranks.first(lambda: with_saved_threads(config, out))
    run = assemble(config, tiny_target(), small_data(None, words))
    return train(run, out, resume=resume, ranks=ranks)


def kill(process: BaseProcess) -> None:
    """As the machine does when memory is short."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
