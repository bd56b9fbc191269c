"""PRF: is a finished folder still what was exported, and does it still draft what it drafted then?

Every export carries `draftline_proof.json`. It is asked here: for the tensors and settings that were written, and for
the drafted blocks of some prompts, which are decoded again.
"""

from __future__ import annotations

from pathlib import Path

from draftline.audit.probe import Probe, once_per_audit
from draftline.audit.report import Problem, check
from draftline.audit.subject import NotApplicable
from draftline.errors import CheckpointError, TargetError
from draftline.formats.proof import (
    PROOF_FILE,
    FileDifferences,
    Proof,
    decoding_differences,
    file_differences,
    other_target,
    read_proof,
    replay_decoding,
)

_AS_EXPORTED = "take the folder as it was exported, or export the drafter again"


@check("PRF001", "tensors or settings are not those of the proof")
def unchanged(probe: Probe) -> Problem | None:
    found = _files(probe)
    probe.notes += found.notes
    if not found.lines:
        return None
    others = f"; {len(found.lines) - 1} further differences" if len(found.lines) > 1 else ""
    return Problem(f"{found.lines[0]}{others}", _AS_EXPORTED)


@check("PRF002", "the folder drafts other blocks than its proof says")
def drafts_the_same(probe: Probe) -> Problem | None:
    proof, target = _proof(probe), probe.subject.target
    files = _files(probe)
    try:
        replay = replay_decoding(proof, _folder(probe), target)
    except TargetError as error:
        raise NotApplicable(f"this target is not decoded here: {error}") from error
    lines = decoding_differences(proof, replay, target, lossy=files.lossy)
    if lines:
        others = f"; {len(lines) - 1} further differences" if len(lines) > 1 else ""
        return Problem(f"{lines[0]}{others}", _AS_EXPORTED)
    probe.notes.append(replay.sentence())
    return None


@check("PRF003", "the proof is damaged, or of another target or tokenizer")
def of_this_target(probe: Probe) -> Problem | None:
    try:
        proof = read_proof(_folder(probe))
    except CheckpointError as error:
        return Problem(str(error), "export the drafter again")
    if proof is None:
        raise NotApplicable(_NO_PROOF)
    fault = other_target(proof, probe.subject.target)
    return None if fault is None else Problem(fault, "name the target that the drafter was exported for")


_NO_PROOF = (
    f"the folder has no {PROOF_FILE}: it is of another program or older than proofs; export it again to have one"
)


def _folder(probe: Probe) -> Path:
    if probe.subject.folder is None:
        raise NotApplicable("only a finished folder carries a proof")
    return probe.subject.folder


def _proof(probe: Probe) -> Proof:
    """The proof, if it says something about this target; what is wrong with it is reported once."""
    try:
        proof = read_proof(_folder(probe))
    except CheckpointError as error:
        raise NotApplicable("the proof cannot be used, see PRF003") from error
    if proof is None:
        raise NotApplicable(_NO_PROOF)
    if other_target(proof, probe.subject.target) is not None:
        raise NotApplicable("the proof cannot be used, see PRF003")
    return proof


@once_per_audit
def _files(probe: Probe) -> FileDifferences:
    return file_differences(_proof(probe), _folder(probe), probe.subject.draft_model.config)
