"""The ranks of a run that `torchrun` has started: how they find each other, sum, wait, and end together.

Tensors go through torch.distributed: gloo for those on a CPU, NCCL for those on an accelerator. Words go through gloo,
in a group that waits for as long as it takes: nobody knows how long the first rank audits. Why a sum or a wait breaks
is in the key-value store of torch.distributed:

    beat/R      rank R counts up, in a thread of its own, as long as its process lives
    failure     what the first rank to fail says; it alone prints its line, and all exit with its status
    left/R      rank R has ended on purpose

A rank that dies breaks the connection of those that wait for it, and beats no more. One whose process or machine stands
still is found by its beats alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from draftline.errors import ConfigError, DraftlineError, Interrupted, RankError, UpdateError
from draftline.train.ranks import ALONE, Ranks

T = TypeVar("T")

BEAT = 0.5
"""Seconds between two signs of life."""
PATIENCE = 60.0
"""Seconds without one after which a rank counts as lost."""
GRACE = 25.0
"""Seconds that a rank gets to save and to leave by itself once another has failed; torchrun kills after 30."""
_BEATS_TO_MISS = 6
_FIND, _EXCHANGE, _WORK = timedelta(minutes=5), timedelta(minutes=30), timedelta(days=30)
"""Longest wait for all ranks to start, for one at a sum, and for one that works."""
_DEAD = "died without a word (killed, or its machine is gone): continue from the last checkpoint with --resume"


@dataclass(frozen=True)
class Failure:
    """Why all ranks end.

    Attributes:
        speaker: the rank that prints the line.
        line: for people.
        status: with which all exit.
    """

    speaker: int
    line: str
    status: int


class TorchRanks(Ranks):
    """Ranks that exchange through torch.distributed.

    Args:
        rank, count: this process, and how many there are.
        store: of torch.distributed, for this run alone.
    """

    def __init__(self, rank: int, count: int, store: dist.Store) -> None:
        self.rank, self.count = rank, count
        self._store = store
        self._beating: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        self._words = dist.new_group(backend="gloo", timeout=_WORK)
        self._heard: Failure | None = None
        self._said = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    # What a run asks of its ranks.

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over all ranks."""
        with _broken_by_others():
            _wait_for([dist.all_reduce(tensor, async_op=True) for tensor in tensors])

    def share_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by those of the first rank."""
        with _broken_by_others():
            _wait_for([dist.broadcast(tensor, src=0, async_op=True) for tensor in tensors])

    def first(self, work: Callable[[], T]) -> T:
        """What the first rank finds."""
        found: list[Any] = [work() if self.leads else None]
        with _broken_by_others():
            dist.broadcast_object_list(found, src=0, group=self._words)
        result: T = found[0]
        return result

    def gather(self, value: T) -> list[T]:
        """What each rank has, by rank."""
        found: list[Any] = [None] * self.count
        with _broken_by_others():
            dist.all_gather_object(found, value, group=self._words)
        return found

    # How they end.

    def verdict(self, error: BaseException) -> DraftlineError:
        """What this rank ends with where something was raised on it: the same status as all, and one line of one rank.

        What others' failures bring about here, a broken sum, is no failure of this rank: it looks for theirs first.
        """
        if isinstance(error, Interrupted):  # all have stopped after the same step
            return RankError(str(error) if self.leads else "", error.exit_status)
        try:
            consequence = isinstance(error, RankError | UpdateError) or not isinstance(error, DraftlineError)
            failure = self._failure_of_others() if consequence else None
            failure = failure or self._claim(*_described(error, self.rank))
        except RuntimeError:
            failure = self._heard or self._without_store()
        mine = failure.speaker == self.rank and not self._said
        return RankError(failure.line if mine else "", failure.status)

    def close(self, *, wait: bool) -> None:
        """Leave; the first rank, which may hold the store, waits for the others, after a failure for some beats."""
        self._closing.set()
        self._thread.join(GRACE)
        with suppress(RuntimeError):
            self._store.set(f"left/{self.rank}", "")
            end = time.monotonic() + (GRACE if wait else BEAT * _BEATS_TO_MISS)
            while self.leads and not all(self._left(self._store, rank) for rank in range(self.count)):
                if time.monotonic() > end:
                    break
                time.sleep(BEAT / 10)

    def _failure_of_others(self) -> Failure | None:
        """What another rank has said, or will have within some beats, or that one of them beats no more."""
        before = [self._beats(self._store, rank) for rank in range(self.count)]
        for _ in range(_BEATS_TO_MISS):
            if (found := self._heard or self._failure(self._store)) is not None:
                return found
            time.sleep(BEAT)
        lost = [
            rank
            for rank in range(self.count)
            if rank != self.rank
            and self._beats(self._store, rank) == before[rank]
            and not self._left(self._store, rank)
        ]
        return self._claim(f"rank {lost[0]} {_DEAD}", RankError.exit_status) if lost else self._failure(self._store)

    def _claim(self, line: str, status: int, store: dist.Store | None = None) -> Failure:
        """The failure that all end with: this one if no other was first."""
        store = store or self._store
        if store.add("failures", 1) == 1:
            store.set("failure", json.dumps(asdict(Failure(self.rank, line, status))))
        end = time.monotonic() + GRACE
        while (found := self._failure(store)) is None and time.monotonic() < end:
            time.sleep(BEAT / 10)
        return found or Failure(self.rank, line, status)

    def _watch(self) -> None:
        """Body of the thread: beat, and end the process where it cannot learn that another has failed."""
        store = self._beating
        seen = {rank: (0, time.monotonic()) for rank in (range(1, self.count) if self.leads else [0])}
        failure: Failure | None = None
        while failure is None and not self._closing.wait(BEAT):
            try:
                store.add(f"beat/{self.rank}", 1)
                failure = self._heard = self._failure(store)
                for rank, (count, when) in seen.items():
                    beats = self._beats(store, rank)
                    if beats != count:
                        seen[rank] = (beats, time.monotonic())
                    elif time.monotonic() - when > PATIENCE and not self._left(store, rank) and failure is None:
                        failure = self._claim(f"rank {rank} {_DEAD}", RankError.exit_status, store)
                        self._said = failure.speaker == self.rank
            except RuntimeError:
                failure = self._heard = self._heard or self._without_store()
        if failure is None:
            return
        if self._said:
            print(f"draftline: {failure.line}", file=sys.stderr, flush=True)
        if not self._closing.wait(GRACE):
            os._exit(failure.status)

    @staticmethod
    def _without_store() -> Failure:
        """Where the store is gone, so is rank 0, which holds it if torchrun does not."""
        return Failure(1, f"rank 0 {_DEAD}", RankError.exit_status)

    @staticmethod
    def _failure(store: dist.Store) -> Failure | None:
        return Failure(**json.loads(store.get("failure"))) if store.check(["failure"]) else None

    @staticmethod
    def _beats(store: dist.Store, rank: int) -> int:
        return store.add(f"beat/{rank}", 0)

    @staticmethod
    def _left(store: dist.Store, rank: int) -> bool:
        return store.check([f"left/{rank}"])


@contextmanager
def _broken_by_others() -> Iterator[None]:
    """What torch reports where a rank is not there any more."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(f"the ranks have lost each other ({' '.join(str(error).split())[:120]})") from error


def _wait_for(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _described(error: BaseException, rank: int) -> tuple[str, int]:
    """Line and exit status of an error on a rank."""
    line, status = " ".join(str(error).split()), 1
    if isinstance(error, KeyboardInterrupt):
        line, status = "interrupted", Interrupted.exit_status
    elif isinstance(error, DraftlineError):
        status = error.exit_status
    else:
        line = f"unexpected {type(error).__name__}: {line} (add --debug for the traceback)"
    return (line if line.startswith("rank ") else f"rank {rank}: {line}"), status


@contextmanager
def ranks_of_torchrun() -> Iterator[Ranks]:
    """The ranks that torchrun has started, of which this process is one; without it, this process alone.

    Raises:
        RankError: one of the ranks failed, this one or another; its message is empty where another tells it.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield ALONE
        return
    wrong = _use_local_devices(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    ranks = _joined()
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        if wrong:
            raise ConfigError(wrong)
        yield ranks
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others once one has ended
        verdict = ranks.verdict(error)
        ranks.close(wait=False)
        raise verdict from error
    ranks.close(wait=True)
    dist.destroy_process_group()
    signal.signal(signal.SIGTERM, before)


def _terminated(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _joined() -> TorchRanks:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        store, rank, count = next(dist.rendezvous("env://", timeout=_FIND))
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=_EXCHANGE)
    except (ValueError, RuntimeError) as error:
        raise RankError(
            f"the ranks do not find each other ({' '.join(str(error).split())[:120]}): start all with `torchrun "
            "--nproc-per-node N -m draftline train ..`, and several machines with one --rdzv-endpoint"
        ) from error
    return TorchRanks(rank, count, dist.PrefixStore("draftline", store))


def _use_local_devices(rank: int, count: int) -> str | None:
    """Leave this process its share of the machine's cores and accelerators; what is wrong where they do not suffice.

    Within its share the rules of one process hold: the first accelerator is the target's, the last the drafter's.
    """
    if count > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(number) for number in range(torch.cuda.device_count())]
    share = device_share(names, rank, count)
    if share:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(share)
    elif names and "TORCHELASTIC_RUN_ID" in os.environ:  # other launchers show each process its own alone
        return f"{count} ranks on a machine with {len(names)} accelerator(s): start at most one for each"
    return None


def device_share(names: Sequence[str], rank: int, count: int) -> Sequence[str]:
    """The accelerators of one of the ranks of a machine: as many for each, and none where there are too few."""
    each = len(names) // count
    return names[rank * each : (rank + 1) * each]
