"""One run of the model on one batch: rows of token ids in, one vector per row out.

Two layouts with one interface. `RaggedForward` lays rows end to end and computes no padding; `PaddedForward` fills a
rectangle, for models that need one. Rows carry their special tokens already; nothing is added, cut or checked here, and
values may be not finite: who calls decides what that means. Both are synchronous, for a worker thread.

Letters: B rows, T tokens in all, W the longest row of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from batching.packing import PackedBatch, pack
from deployments.ragged_attention import Backend, PackedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """`values` [B, dimension] float32, in the order of the rows; `computed_tokens` is what the device worked on."""

    values: NDArray[np.float32]
    computed_tokens: int


class Forward(Protocol):
    """Runs the model once on rows of token ids ([n_i] int32 each, n_i >= 1)."""

    def __call__(self, rows: Sequence[NDArray[np.int32]]) -> ForwardResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionTable:
    """A learned position table of `num_positions` usable rows.

    RoBERTa-like families start at `padding_idx + 1` and leave pad tokens at `padding_idx`, so the first rows of their
    table are never positions of text (sentence-transformers issue 3879). Others have no `padding_idx` and start at 0.
    """

    num_positions: int
    padding_idx: int | None


def find_position_table(model: torch.nn.Module) -> PositionTable | None:
    """Return the table behind a module's `position_embeddings`, or None (rotary and other positions need none)."""
    for module in model.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, torch.nn.Embedding):
            padding_idx = getattr(module, "padding_idx", None)
            if not isinstance(padding_idx, int):
                return PositionTable(num_positions=table.num_embeddings, padding_idx=None)
            return PositionTable(num_positions=table.num_embeddings - padding_idx - 1, padding_idx=padding_idx)
    return None


def table_positions(batch: PackedBatch, padding_idx: int | None) -> NDArray[np.int32]:
    """Return the position [T] of each token as the model counts it; see `PositionTable`."""
    if padding_idx is None:
        return batch.position_ids
    is_pad = batch.token_ids == padding_idx  # [T]
    if not is_pad.any():
        return batch.position_ids + np.int32(padding_idx + 1)
    # A text may spell the pad token; it takes no position and those after it move up by one.
    num_pads = np.concatenate(([0], np.cumsum(is_pad)))  # [T + 1], pads before each token
    starts = np.repeat(batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens))  # [T], where each token's row starts
    positions = batch.position_ids + 1 - (num_pads[:-1] - num_pads[starts])
    return np.where(is_pad, 0, positions).astype(np.int32) + np.int32(padding_idx)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRun:
    """`values` [B, dimension] float32 in the order of the packed batch, and how often `ragged` attention was called."""

    values: NDArray[np.float32]
    attention_calls: int


class RaggedForward:
    """Runs rows end to end. The model's attention must be `ragged` (see `ragged_attention.register`)."""

    def __init__(self, pipeline: SentenceTransformer, *, backend: Backend, dimension: int) -> None:
        self._pipeline = pipeline
        self._backend = backend
        self._dimension = dimension
        table = find_position_table(pipeline[0].model)
        self._padding_idx = None if table is None else table.padding_idx

    def __call__(self, rows: Sequence[NDArray[np.int32]]) -> ForwardResult:
        """Run `rows` sorted by length, so that rows of one length share attention calls; the result is in their order.

        Raises ValueError for no rows and for an empty row.
        """
        order = np.argsort([len(row) for row in rows], kind="stable")  # [B]
        batch = pack([rows[index] for index in order])
        values = np.empty((batch.num_rows, self._dimension), dtype=np.float32)
        values[order] = self.run_packed(batch).values
        return ForwardResult(values=values, computed_tokens=batch.num_tokens)

    def run_packed(self, batch: PackedBatch) -> PackedRun:
        """Run a batch as it is packed. Raises ValueError for boundaries that do not describe its tokens."""
        device = self._pipeline.device
        packed_rows = PackedRows(batch, backend=self._backend, device=device)
        features: dict[str, Any] = {
            "input_ids": _to_device(batch.token_ids[None], device),  # [1, T]
            "position_ids": _to_device(table_positions(batch, self._padding_idx)[None], device),  # [1, T]
            # The names by which transformers and the pooling of sentence-transformers know row boundaries.
            "cu_seq_lens_q": packed_rows.cu_seqlens,
            "cu_seq_lens_k": packed_rows.cu_seqlens,
            "max_length_q": packed_rows.max_seqlen,
            "max_length_k": packed_rows.max_seqlen,
            "packed_rows": packed_rows,
        }
        values = _run(self._pipeline, features, self._dimension)
        return PackedRun(values=values, attention_calls=packed_rows.num_calls)


class PaddedForward:
    """Runs rows as a rectangle of the longest of them, through the attention that the model came with."""

    def __init__(self, pipeline: SentenceTransformer, *, dimension: int) -> None:
        self._pipeline = pipeline
        self._dimension = dimension
        pad_token_id = pipeline.tokenizer.pad_token_id
        # Any id will do where the tokenizer names none: the mask decides.
        self._pad_token_id = 0 if pad_token_id is None else int(pad_token_id)

    def __call__(self, rows: Sequence[NDArray[np.int32]]) -> ForwardResult:
        """Run `rows` side by side. Raises ValueError for no rows and for an empty row."""
        if not rows or min(len(row) for row in rows) < 1:
            raise ValueError("cannot pad zero rows or an empty row")
        width = max(len(row) for row in rows)
        token_ids = np.full((len(rows), width), self._pad_token_id, dtype=np.int32)  # [B, W]
        mask = np.zeros((len(rows), width), dtype=np.int32)  # [B, W], 1 where a token stands
        for index, row in enumerate(rows):
            token_ids[index, : len(row)] = row
            mask[index, : len(row)] = 1
        device = self._pipeline.device
        features = {"input_ids": _to_device(token_ids, device), "attention_mask": _to_device(mask, device)}
        values = _run(self._pipeline, features, self._dimension)
        return ForwardResult(values=values, computed_tokens=token_ids.size)


def _to_device(ids: NDArray[np.int32], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(ids).to(device).long()


def _run(pipeline: SentenceTransformer, features: dict[str, Any], dimension: int) -> NDArray[np.float32]:
    """Run the whole pipeline; [B, dimension] float32, contiguous, on the host."""
    with torch.inference_mode():
        embedding = pipeline(features)["sentence_embedding"]  # [B, at least dimension]
        values: NDArray[np.float32] = embedding[:, :dimension].float().cpu().numpy()
    return np.ascontiguousarray(values)
