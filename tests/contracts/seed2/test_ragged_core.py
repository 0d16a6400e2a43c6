"""Seed 2, statements S2-03 to S2-07: the ragged core on the bundled model, CPU, float32."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from batching.packing import PackedBatch, check_cu_seqlens, pack, unpack
from deployments.forward import PaddedForward, RaggedForward
from deployments.model import find_folder
from deployments.ragged_attention import ATTENTION_NAME, register

Rows = list[NDArray[np.int32]]

LENGTHS = (10, 50, 100, 1, 256, 50, 7)
# S2-05: float32 on the CPU agrees to 1e-5 of values that have length one.
TOLERANCE = 1e-5
POISONED_ID = 20000


def _pipeline() -> SentenceTransformer:
    return SentenceTransformer(str(find_folder("bundled/all-MiniLM-L6-v2")), device="cpu").eval()


def _ragged(pipeline: SentenceTransformer) -> RaggedForward:
    register()
    pipeline[0].model.set_attn_implementation(ATTENTION_NAME)
    return RaggedForward(pipeline, backend="grouped_sdpa", dimension=384)


@pytest.fixture(scope="module")
def pipeline() -> SentenceTransformer:
    pipeline = _pipeline()
    _ragged(pipeline)
    return pipeline


@pytest.fixture(scope="module")
def ragged(pipeline: SentenceTransformer) -> RaggedForward:
    return RaggedForward(pipeline, backend="grouped_sdpa", dimension=384)


@pytest.fixture(scope="module")
def alone() -> NDArray[np.float32]:
    """The rows' values one by one, through the model's ordinary attention; [7, 384]."""
    forward = PaddedForward(_pipeline(), dimension=384)
    return np.concatenate([forward([row]).values for row in _rows()])


@pytest.fixture(scope="module")
def poisoned() -> RaggedForward:
    """The model with a token whose embedding is NaN."""
    pipeline = _pipeline()
    pipeline[0].model.embeddings.word_embeddings.weight.data[POISONED_ID] = float("nan")
    return _ragged(pipeline)


def _rows() -> Rows:
    generator = np.random.default_rng(2)
    return [generator.integers(1000, 20000, length).astype(np.int32) for length in LENGTHS]


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_s2_03_flat_values_and_offsets(lengths: list[int]) -> None:
    """S2-03: a packed batch is flat values and int32 offsets from 0 to T, and unpacking gives the rows back."""
    rows = [np.full(length, index, dtype=np.int32) for index, length in enumerate(lengths)]
    batch = pack(rows)
    assert (batch.cu_seqlens[0], batch.cu_seqlens[-1], len(batch.cu_seqlens)) == (0, sum(lengths), len(rows) + 1)
    assert batch.cu_seqlens.dtype == np.int32
    assert batch.cu_seqlens.flags.c_contiguous
    assert batch.max_seqlen == max(lengths)
    unpacked = unpack(batch.token_ids, batch.cu_seqlens)
    assert all(np.array_equal(row, back) for row, back in zip(rows, unpacked, strict=True))


def _with_offsets(cu_seqlens: NDArray[np.generic]) -> PackedBatch:
    good = pack([np.arange(1000, 1003, dtype=np.int32), np.arange(1000, 1002, dtype=np.int32)])
    return PackedBatch(
        token_ids=good.token_ids,
        position_ids=good.position_ids,
        cu_seqlens=cu_seqlens,  # type: ignore[arg-type]  # one case is the wrong type on purpose
        max_seqlen=good.max_seqlen,
    )


@pytest.mark.parametrize(
    "offsets",
    [
        np.array([0, 4, 3, 5], dtype=np.int32),
        np.array([0, 3, 4], dtype=np.int32),
        np.array([0, 3, 6], dtype=np.int32),
        np.array([0, 3, 5], dtype=np.int64),
        np.array([[0, 3, 5]], dtype=np.int32),
        np.array([0, -1, 5], dtype=np.int32),
        np.array([1, 3, 5], dtype=np.int32),
    ],
    ids=["decreasing", "ends-early", "ends-late", "wrong-dtype", "wrong-shape", "negative", "starts-late"],
)
def test_s2_04_malformed_offsets_never_reach_the_kernel(offsets: NDArray[np.generic], ragged: RaggedForward) -> None:
    """S2-04: malformed boundaries are refused by the check and by the forward, before the model runs."""
    batch = _with_offsets(offsets)
    with pytest.raises(ValueError, match="cu_seqlens"):
        check_cu_seqlens(batch.cu_seqlens, num_tokens=batch.num_tokens)
    with pytest.raises(ValueError, match="cu_seqlens"):
        ragged.run_packed(batch)


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["given", "reversed"])
def test_s2_05_packed_equals_one_by_one(order: slice, ragged: RaggedForward, alone: NDArray[np.float32]) -> None:
    """S2-05: packed rows equal the same rows run one by one, sorted by the forward or packed as they come."""
    rows = _rows()[order]
    assert np.abs(ragged(rows).values - alone[order]).max() <= TOLERANCE
    assert np.abs(ragged.run_packed(pack(rows)).values - alone[order]).max() <= TOLERANCE


@pytest.fixture
def activation_rows(pipeline: SentenceTransformer) -> Iterator[set[int]]:
    """The first-two-dimension sizes of every tensor that any module of the model returns."""
    seen: set[int] = set()

    def record(_module: torch.nn.Module, _inputs: object, output: object) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        seen.update(tensor.shape[:-1].numel() for tensor in tensors if isinstance(tensor, torch.Tensor))

    handles = [module.register_forward_hook(record) for module in pipeline[0].model.modules()]
    yield seen
    for handle in handles:
        handle.remove()


def test_s2_05_no_padded_intermediate(ragged: RaggedForward, activation_rows: set[int]) -> None:
    """S2-05: the largest activation has Σ len rows, where a rectangle would have 7 x 256."""
    result = ragged(_rows())
    assert result.computed_tokens == sum(LENGTHS)
    assert max(activation_rows) == sum(LENGTHS)


def _replace_row(rows: Rows, index: int, token_id: int) -> Rows:
    return [np.full_like(row, token_id) if position == index else row for position, row in enumerate(rows)]


@pytest.mark.parametrize("index", [0, 1, 3, 4], ids=["plain", "one-of-two-of-its-length", "shortest", "longest"])
def test_s2_06_other_tokens_in_one_row_change_no_other(index: int, ragged: RaggedForward) -> None:
    """S2-06: with one row's tokens replaced, every other row is exactly equal."""
    others = [position for position in range(len(LENGTHS)) if position != index]
    before, after = ragged(_rows()).values, ragged(_replace_row(_rows(), index, 1234)).values
    assert np.array_equal(before[others], after[others])
    assert not np.array_equal(before[index], after[index])


@pytest.mark.parametrize("index", [0, 1, 3, 4], ids=["plain", "one-of-two-of-its-length", "shortest", "longest"])
def test_s2_06_nan_stays_in_its_row(index: int, poisoned: RaggedForward, alone: NDArray[np.float32]) -> None:
    """S2-06: NaN in one row makes that row NaN and no other."""
    others = [position for position in range(len(LENGTHS)) if position != index]
    values = poisoned(_replace_row(_rows(), index, POISONED_ID)).values
    assert np.isnan(values[index]).all()
    assert np.abs(values[others] - alone[others]).max() <= TOLERANCE


@pytest.mark.parametrize("place", [0, 3, 6], ids=["first", "middle", "last"])
def test_s2_07_positions_restart(place: int, ragged: RaggedForward, alone: NDArray[np.float32]) -> None:
    """S2-07: a row gives the same values alone and as the first, a middle or the last row of the pack."""
    rows = _rows()
    row = rows.pop(1)
    rows.insert(place, row)
    beside_others, by_itself = ragged.run_packed(pack(rows)).values[place], ragged.run_packed(pack([row])).values[0]
    assert np.abs(beside_others - alone[1]).max() <= TOLERANCE
    assert np.abs(by_itself - alone[1]).max() <= TOLERANCE
