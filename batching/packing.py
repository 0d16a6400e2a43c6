"""Rows laid end to end, and back again.

A packed batch is one flat array and the boundaries of its rows; nothing in it is padding. Three rows of 2, 1 and 3
tokens:

    token_ids     a a b c c c        [T = 6]
    position_ids  0 1 0 0 1 2        [T], restarts at every row
    cu_seqlens    0   2 3     6      [B + 1 = 4]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """B rows of T tokens in all, without padding.

    Shapes: `token_ids` [T] int32, `position_ids` [T] int32 from 0 in every row, `cu_seqlens` [B + 1] int32.
    """

    token_ids: NDArray[np.int32]
    position_ids: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]
    max_seqlen: int

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)


def pack(rows: Sequence[NDArray[np.int32]]) -> PackedBatch:
    """Lay rows ([n_i] int32 each, n_i >= 1) end to end, in their order.

    Raises ValueError for no rows and for an empty row: a zero-length sequence is undefined in several varlen kernels.
    """
    if not rows:
        raise ValueError("cannot pack zero rows")
    lengths = np.fromiter((len(row) for row in rows), dtype=np.int32, count=len(rows))  # [B]
    if lengths.min() < 1:
        raise ValueError("cannot pack an empty row")
    cu_seqlens = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    token_ids = np.concatenate(rows).astype(np.int32, copy=False)  # [T]
    position_ids = np.arange(len(token_ids), dtype=np.int32) - np.repeat(cu_seqlens[:-1], lengths)  # [T]
    return PackedBatch(
        token_ids=token_ids, position_ids=position_ids, cu_seqlens=cu_seqlens, max_seqlen=int(lengths.max())
    )


def unpack(values: NDArray[np.generic], cu_seqlens: NDArray[np.int32]) -> list[NDArray[np.generic]]:
    """Cut `values` ([T, ...], one entry per token) at the row boundaries: B views, in order.

    Raises ValueError when the boundaries do not describe `values` (see `check_cu_seqlens`).
    """
    check_cu_seqlens(cu_seqlens, num_tokens=len(values))
    return [values[start:end] for start, end in pairwise(cu_seqlens)]


def check_cu_seqlens(cu_seqlens: NDArray[np.int32], *, num_tokens: int) -> None:
    """Raise ValueError unless `cu_seqlens` is [B + 1] int32, starts at 0, strictly rises and ends at `num_tokens`.

    A kernel that gets wrong boundaries reads other rows' memory or leaves garbage behind without an error
    (flash-attention issue 1661), so they are checked before every use.
    """
    if cu_seqlens.dtype != np.int32 or cu_seqlens.ndim != 1:
        raise ValueError(f"cu_seqlens must be one-dimensional int32, got {cu_seqlens.ndim}-d {cu_seqlens.dtype}")
    if len(cu_seqlens) < 2 or cu_seqlens[0] != 0:
        raise ValueError("cu_seqlens must start at 0 and describe at least one row")
    if np.any(np.diff(cu_seqlens) < 1):
        raise ValueError("cu_seqlens must rise at every row")
    if int(cu_seqlens[-1]) != num_tokens:
        raise ValueError(f"cu_seqlens ends at {int(cu_seqlens[-1])} but there are {num_tokens} tokens")
