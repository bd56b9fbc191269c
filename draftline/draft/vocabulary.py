"""The reduced vocabulary of a drafter: which of the target's tokens it can say, and how files write that down.

    kept ids   [Vd] int64, increasing: target id of each row of the drafter's head
    d2t        [Vd] int64, offsets: target id = row + d2t[row]      (speculators 0.9, vLLM, EAGLE-3)
    t2d        [V] bool, true where a target id is kept

The drafter carries `d2t`; `t2d` says the same once more and is written for readers that want it. A file that stores
absolute ids as `d2t` raises no error in any reader and is never accepted, so what is read is checked here.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
