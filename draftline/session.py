"""What a session of a run does in its folder before the first step: look, continue, estimate, write down what trains.

All of it is the first rank's; the others take over the checkpoint that it has found.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftline.engine.process import available_cores
from draftline.errors import ConfigError
from draftline.plan.devices import memory_of
from draftline.plan.estimate import check_disk, check_memory, estimate_run
from draftline.plan.sizes import TargetSizes
from draftline.plan.work import Workload
from draftline.train.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from draftline.train.ranks import Ranks
from draftline.train.run_folder import RunFolder
from draftline.train.step import HELDOUT_SEED

if TYPE_CHECKING:
    from draftline.run import Examination, Run, Watcher


def begin_session(
    run: Run, folder: Path, watcher: Watcher, ranks: Ranks, resume: bool, examination: Examination | None
) -> Checkpoint | None:
    """What the first rank does before the first step; gives the checkpoint that was restored, if there is one.

    Raises:
        CheckpointError: what is in the folder is damaged, or belongs to another run.
        ConfigError: a setting contradicts it, or the run does not fit into memory.
        StorageError: the checkpoints do not fit on the disk, or the folder cannot be written.
    """
    RunFolder(folder).check_same_target(run.target.fingerprint)
    checkpoint = _restore(run, folder, watcher) if resume else None
    _estimate(run, folder, watcher, ranks)
    _write_identity(run, folder, checkpoint.state.step if checkpoint else 0, examination, ranks)
    return checkpoint


def _estimate(run: Run, folder: Path, watcher: Watcher, ranks: Ranks) -> None:
    """Say what the run will take, and refuse what cannot fit into memory or on the disk."""
    work = Workload.of_data(run.data, run.config)
    sizes, together = TargetSizes.of(run.target), run.drafter.device == run.target.device
    estimate = estimate_run(run.config, run.shape, sizes, work, ranks.count)
    estimate = estimate if together else estimate.apart(sizes)
    watcher.say(estimate.sentence())
    needs = (*estimate.drafter, *estimate.target) if together else estimate.drafter
    check_memory(needs, memory_of(run.drafter.device), str(run.drafter.device))
    check_disk(folder, estimate)
    if ranks.count > 1:
        watcher.say(ranks.sentence(run.config.train))
    loops, cores = len(run.target_devices()), available_cores()
    shared = f"{run.threads} thread(s) for each of them and for the drafter"
    watcher.say(f"{cores} core(s), {loops} target loop(s): {shared}; {run.overlap}")
    if run.threads > 1 and run.threads * (loops + 1) > cores:
        watcher.say("that is more threads than cores: lower pipeline.threads_per_loop if the run is slow")
    if run.vocabulary is not None:
        watcher.say(run.vocabulary.sentence())


def _restore(run: Run, folder: Path, watcher: Watcher) -> Checkpoint | None:
    """Continue from the newest checkpoint; without one, start at the beginning.

    Raises:
        CheckpointError: it is damaged, or of another run.
        ConfigError: a setting contradicts it.
    """
    checkpoints = CheckpointStore(folder, run.config.train.keep_last)
    newest = checkpoints.newest()
    if newest is None:
        watcher.say(f"{folder} has no checkpoint yet: starting at step 0")
        return None
    checkpoint = read_checkpoint(newest)
    RunFolder(folder).check_same_run(checkpoint, run.config, run.shape, run.data.fingerprint)
    run.drafter.restore(checkpoint, newest)
    checkpoints.tidy(checkpoint.state)
    watcher.say(_going_on(run, checkpoint, folder))
    return checkpoint


def _going_on(run: Run, checkpoint: Checkpoint, folder: Path) -> str:
    """Where a run goes on, in words.

    Raises:
        ConfigError: it is to be extended, and has not come to its end.
    """
    step, extensions = checkpoint.state.step, run.config.train.extensions
    done = len(checkpoint.run_config.train.extensions)
    if done == len(extensions):
        return f"continuing after step {step} of {run.sampler.total_steps}"
    if step != run.drafter.seams[done]:
        raise ConfigError(
            f"{folder} has done {step} of {run.drafter.seams[done]} steps: finish it with --resume, then --extend"
        )
    passes, rate = sum(extensions[done:]), run.config.optim.schedule
    kind = {"cosine": "rises again", "wsd": "goes on, and falls at the end", "constant": "goes on"}[rate]
    return f"extending after step {step} by {passes} pass(es), to step {run.sampler.total_steps}: the rate {kind}"


def _write_identity(run: Run, folder: Path, step: int, examination: Examination | None, ranks: Ranks) -> None:
    session: dict[str, Any] = {
        "first_step": step,
        "cores": available_cores(),
        "threads_per_loop": run.threads,
        "ranks": ranks.count,
    }
    if examination is not None and examination.allowed:
        session["allowed"] = list(examination.allowed)
    data: dict[str, Any] = {
        "fingerprint": run.data.fingerprint,
        "conversations": len(run.data.training_ids),
        "heldout_conversations": len(run.data.heldout_ids),
        "heldout_anchors_seed": HELDOUT_SEED,
        "rows": run.sampler.total_rows,
        "steps": run.sampler.total_steps,
    }
    if run.sampler.seams:
        data["seams"] = list(run.sampler.seams)
    if run.vocabulary is not None:
        data["draft_vocab_coverage"] = run.vocabulary.coverage
    place = RunFolder(folder)
    place.begin_session(run.config, run.shape, run.target.fingerprint, data, session)
    if examination is not None:
        place.write_audit(examination.report)
