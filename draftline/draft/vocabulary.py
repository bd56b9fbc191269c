"""The reduced vocabulary of a drafter: which of the target's tokens it can say, and how files write that down.

They are the most frequent ones of the answers that it is trained on. The head is often the drafter's largest matrix
product. What is left out can never be drafted, so each left-out token of an answer costs a rejected block: `coverage`
bounds what the drafter can reach.

    kept ids   [Vd] int64, increasing: target id of each row of the drafter's head
    d2t        [Vd] int64, offsets: target id = row + d2t[row]      (speculators 0.9, vLLM, EAGLE-3)
    t2d        [V] bool, true where a target id is kept

The drafter carries `d2t`; `t2d` says the same once more and is written for readers that want it. A file that stores
absolute ids as `d2t` raises no error in any reader and is never accepted, so what is read is checked here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftline.errors import ConfigError, DataError
from draftline.records import Samples

_SAMPLES_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class ReducedVocabulary:
    """Tokens that a drafter can say.

    Attributes:
        kept_ids: [Vd] int64, increasing.
        coverage: share of the supervised tokens of the training data that are among them.
    """

    kept_ids: Tensor
    coverage: float

    def sentence(self) -> str:
        """One line for people."""
        return f"the drafter can say {len(self.kept_ids)} tokens, {self.coverage:.2%} of those in the training answers"


def count_supervised(samples: Samples, sample_ids: Sequence[int] | NDArray[np.int64], vocab_size: int) -> Tensor:
    """How often each token is supervised in some conversations, [V] int64; reads them once.

    Raises:
        DataError: a token is not a row of the target's table.
    """
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for start in range(0, len(sample_ids), _SAMPLES_AT_ONCE):
        group = [samples[int(sample_id)] for sample_id in sample_ids[start : start + _SAMPLES_AT_ONCE]]
        supervised = torch.cat([sample.input_ids[sample.loss_mask] for sample in group])
        if supervised.numel() and int(supervised.max()) >= vocab_size:
            raise DataError(
                f"the data has token {int(supervised.max())}, the target knows 0..{vocab_size - 1}: "
                "prepare the data with this target"
            )
        counts_V += torch.bincount(supervised, minlength=vocab_size)
    return counts_V


def reduce_vocabulary(counts_V: Tensor, size: int, always: Collection[int]) -> ReducedVocabulary:
    """The `size` most frequent tokens, the smaller id first where two are equally frequent, and those of `always`.

    Tokens that never occur fill up from id 0, as in speculators 0.9.

    Args:
        counts_V: how often each token occurs.
        always: kept whatever their count: an answer whose end cannot be drafted ends in a rejected block each time.

    Raises:
        ConfigError: `always` alone is more than `size`.
    """
    if len(always) > size:
        raise ConfigError(
            f"drafter.draft_vocab_size {size} is less than the {len(always)} tokens that end an answer: raise it"
        )
    rank_V = counts_V.clone()
    rank_V[torch.tensor(sorted(always), dtype=torch.int64)] = counts_V.sum() + 1
    kept_ids = rank_V.sort(descending=True, stable=True).indices[:size].sort().values
    return ReducedVocabulary(kept_ids, coverage_of(counts_V, kept_ids))


def coverage_of(counts_V: Tensor, kept_ids: Tensor) -> float:
    """Share of counted tokens that are among the kept ones; NaN where nothing was counted."""
    total = int(counts_V.sum())
    return int(counts_V[kept_ids].sum()) / total if total else float("nan")


def offsets_of(kept_ids: Tensor) -> Tensor:
    """`d2t` of kept ids."""
    return kept_ids - torch.arange(len(kept_ids), device=kept_ids.device)


def kept_ids_of(d2t: Tensor) -> Tensor:
    """Kept ids of `d2t`."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def membership_of(d2t: Tensor, vocab_size: int) -> Tensor:
    """`t2d` of `d2t`."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device=d2t.device)
    t2d[kept_ids_of(d2t)] = True
    return t2d


def mapping_fault(d2t: Tensor, draft_vocab_size: int, vocab_size: int) -> str | None:
    """What is wrong with a `d2t`, or None: one offset per row, to increasing ids of the target's table."""
    if d2t.shape != (draft_vocab_size,) or d2t.dtype != torch.int64:
        return f"d2t is {list(d2t.shape)} {str(d2t.dtype).removeprefix('torch.')}, expected [{draft_vocab_size}] int64"
    kept_ids = kept_ids_of(d2t)
    rows_out = ((kept_ids < 0) | (kept_ids >= vocab_size)).nonzero()[:, 0].tolist()
    falls = (kept_ids.diff() <= 0).nonzero()[:, 0].tolist()
    if not rows_out and not falls:
        return None
    absolute = bool(((d2t >= 0) & (d2t < vocab_size)).all() and (d2t.diff() > 0).all())
    hint = "; its values are increasing ids themselves, where offsets id - row are wanted" if absolute else ""
    if rows_out:
        row = rows_out[0]
        return f"d2t maps row {row} to token {int(kept_ids[row])} of a table of {vocab_size}{hint}"
    row = falls[0]
    pair = f"{int(kept_ids[row])} and {int(kept_ids[row + 1])}"
    return f"d2t maps rows {row} and {row + 1} to tokens {pair}, which do not increase{hint}"
