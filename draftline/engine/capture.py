"""Fill stores of captured states: in this process, or with several writers, each a process with a target loop of its
own that writes whole shards."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray

from draftline.config import PipelineConfig
from draftline.data.split import Conversations
from draftline.engine.processes import SentSample, sent
from draftline.engine.worker import Stopped, Worker, WorkerTerms, pickled
from draftline.errors import StorageError
from draftline.plan.estimate import size
from draftline.progress import OnProgress, counting
from draftline.records import Sample, Samples
from draftline.targets.loop import TargetForwardLoop
from draftline.transfer.store import (
    StatesStore,
    StoreIdentity,
    capture_shard,
    fill_store,
    folder_name,
    how_kept,
    loop_identity,
    refuse_other_data,
)


class ShardJob:
    """What a writer does in its process.

    Args:
        loop: the target loop.
        folder, identity, lengths: of the store, which exists.
    """

    def __init__(
        self, loop: TargetForwardLoop, folder: Path, identity: StoreIdentity, lengths: NDArray[np.int64]
    ) -> None:
        self._loop, self._store_of = loop, (folder, identity, lengths)

    def open(self, _connection: Connection) -> None:
        """The process has begun."""
        self._store = StatesStore(*self._store_of, shard_bytes=1)

    def write(self, shard: int, samples: Sequence[SentSample]) -> int:
        """Capture and write a shard; how many conversations it has."""
        members = {
            number: Sample(number, torch.from_numpy(ids), torch.from_numpy(mask)) for number, ids, mask in samples
        }
        capture_shard(self._store, shard, self._loop, members)
        return len(members)


def open_stores(
    pipeline: PipelineConfig, loop: TargetForwardLoop, data: Sequence[Conversations]
) -> dict[StatesStore, Conversations]:
    """The stores of some data in `pipeline.states_path`, with their conversations; each data set once.

    Raises:
        CheckpointError: what is there is of another target, of other layers, or only of other data.
    """
    place = pipeline.states_path
    assert place is not None, "asked where states are kept"
    by_fingerprint = {one.fingerprint: one for one in data}
    if by_fingerprint:
        refuse_other_data(place, list(by_fingerprint))
    stores: dict[StatesStore, Conversations] = {}
    for fingerprint, conversations in by_fingerprint.items():
        folder = place / folder_name(fingerprint)
        identity = loop_identity(loop, fingerprint, how_kept(folder, pipeline.states_dtype))
        store = StatesStore(folder, identity, conversations.lengths, pipeline.states_shard_bytes)
        stores[store] = conversations
    return stores


def fill_states(
    stores: Mapping[StatesStore, Samples],
    loop: TargetForwardLoop,
    *,
    writers: int,
    repair: bool,
    settings: WorkerTerms,
) -> None:
    """Capture what stores lack, and say what that takes before it begins.

    Args:
        stores: each with its conversations.
        writers: with one, this process does it.
        repair: read everything that is there, and capture again what is damaged or missing.
        settings: of the processes; its `say` gets all lines.

    Raises:
        StorageError: the disk is too small or refuses, or another process fills a store.
        CheckpointError: a store was complete, and is not any more.
        TargetError: a conversation does not fit the target.
        PipelineError: a writer was killed too often.
    """
    with ExitStack() as locks:
        left: dict[StatesStore, list[int]] = {}
        for store, samples in stores.items():
            if store.complete and not repair:
                store.refuse_gaps()
                continue
            locks.enter_context(store.lock())
            if repair:
                _delete_damaged(store, samples, settings)
            left[store] = store.missing()
        _check_room(left, settings)
        for store, shards in left.items():
            with counting("capturing") as on_progress:
                if writers > 1 and len(shards) > 1:
                    _fill_with_writers(store, loop, stores[store], shards, writers, settings, on_progress)
                else:
                    fill_store(store, shards, loop, stores[store], on_progress)
            store.finish()
    for store in stores:
        if store.identity.kept != store.identity.dtype and len(store):
            off = f"off by {store.error():.2%} (root mean square)"
            settings.say(f"states in {store.folder} are kept in {store.identity.kept}: {off}")


def _delete_damaged(store: StatesStore, samples: Samples, settings: WorkerTerms) -> None:
    with counting("checking") as on_progress:
        damaged = store.damaged(samples, on_progress)
    for shard, wrong in damaged.items():
        settings.say(wrong.partition(": capture it again")[0])
        store.delete(shard)
    gone = [shard for shard in store.missing() if shard not in damaged] if store.complete else []
    for shard in gone:
        settings.say(f"{store.path(shard)} is missing")
    whole = store.num_shards - len(store.missing())
    settings.say(f"{store.folder}: {whole} of {store.num_shards} shards are whole")


def _check_room(left: Mapping[StatesStore, Sequence[int]], settings: WorkerTerms) -> None:
    """Say what is to be captured, and refuse a disk that is too small for it."""
    wanted = {store: sum(store.shard_bytes(shard) for shard in shards) for store, shards in left.items()}
    for store, shards in left.items():
        if not shards:
            continue
        free = shutil.disk_usage(store.folder).free
        count, all_wanted = sum(len(store.members(shard)) for shard in shards), sum(wanted.values())
        settings.say(
            f"{store.folder}: states of {count:,} conversations in {len(shards)} shards, {size(wanted[store])} in "
            f"{store.identity.kept}; {size(free)} are free"
        )
        if all_wanted > free:
            raise StorageError(
                f"{store.folder} needs {size(all_wanted)} for states and {size(free)} are free: free space, name "
                "another disk, or keep them narrower (pipeline.states_dtype)"
            )


def _fill_with_writers(
    store: StatesStore,
    loop: TargetForwardLoop,
    samples: Samples,
    shards: Sequence[int],
    writers: int,
    settings: WorkerTerms,
    on_progress: OnProgress,
) -> None:
    """Capture some shards; a writer that is killed is replaced."""
    left, lock, done = iter(shards), Lock(), [len(store) - sum(len(store.members(shard)) for shard in shards)]
    job = pickled(ShardJob(loop, store.folder, store.identity, store.lengths))
    workers = [Worker(f"writer-{number}", job, settings) for number in range(min(writers, len(shards)))]

    def write(worker: Worker) -> None:
        try:
            worker.begin()
            while True:
                with lock:
                    shard = next(left, None)
                if shard is None:
                    return
                worker.ask("write", shard, [sent(samples[number]) for number in store.members(shard)])
                count = worker.answer()
                with lock:
                    done[0] += count
                    on_progress(done[0], len(store))
        except Stopped:
            return

    with ThreadPoolExecutor(len(workers)) as threads:
        running = [threads.submit(write, worker) for worker in workers]
        try:
            for one in wait(running, return_when=FIRST_EXCEPTION).done:
                one.result()
        finally:
            for worker in workers:
                worker.stop()
    for worker in workers:
        worker.close()
