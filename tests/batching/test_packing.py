"""Packing: the identity round trip and the guard before the kernel (seed 2: S2-03, S2-04)."""

import random
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given

from batching.packing import check_cu_seqlens, pack, unpack
from tests import strategies


def _arrays(token_rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.int32) for row in token_rows]


@given(strategies.token_rows)
def test_unpack_restores_what_pack_joined(token_rows: list[list[int]]) -> None:
    """S2-03: unpack(pack(x)) == x."""
    packed = pack(_arrays(token_rows))
    assert [row.tolist() for row in unpack(packed.token_ids, packed.cu_seqlens)] == token_rows


def test_a_thousand_random_batches_come_back() -> None:
    """S2-03: the identity holds on 1,000 random batches, rows of length 1 included."""
    draw = random.Random(0)
    batches = [[[draw.randrange(9)] * draw.randint(1, 6) for _ in range(draw.randint(1, 5))] for _ in range(1000)]
    packed = [pack(_arrays(batch)) for batch in batches]
    assert [[row.tolist() for row in unpack(one.token_ids, one.cu_seqlens)] for one in packed] == batches


@given(strategies.token_rows)
def test_boundaries_describe_the_rows(token_rows: list[list[int]]) -> None:
    """S2-03: cu_seqlens is contiguous int32 from 0 to T, and max_seqlen is its largest step."""
    packed = pack(_arrays(token_rows))
    lengths = [len(row) for row in token_rows]
    assert packed.cu_seqlens.tolist() == [0, *accumulate(lengths)]
    assert (packed.cu_seqlens.dtype, packed.cu_seqlens.flags.c_contiguous) == (np.int32, True)
    assert (packed.num_rows, packed.num_tokens, packed.max_seqlen) == (len(lengths), sum(lengths), max(lengths))


@given(strategies.token_rows)
def test_positions_restart_at_every_row(token_rows: list[list[int]]) -> None:
    """Position ids count from 0 inside each row."""
    packed = pack(_arrays(token_rows))
    assert packed.position_ids.tolist() == [position for row in token_rows for position in range(len(row))]
    assert {packed.position_ids.dtype, packed.token_ids.dtype} == {np.dtype(np.int32)}


@pytest.mark.parametrize(
    ("token_rows", "message"),
    [
        pytest.param([], "cannot pack zero rows", id="no-rows"),
        pytest.param([[1], []], "cannot pack an empty row", id="empty-row"),
    ],
)
def test_nothing_is_not_packed(token_rows: list[list[int]], message: str) -> None:
    """Zero rows and zero tokens are refused."""
    with pytest.raises(ValueError, match=message):
        pack(_arrays(token_rows))


def test_vectors_are_cut_like_scalars() -> None:
    """Values with further dimensions are cut along the first, without a copy."""
    values = np.arange(12).reshape(6, 2)
    cut = unpack(values, np.array([0, 2, 6], dtype=np.int32))
    assert [part.tolist() for part in cut] == [values[:2].tolist(), values[2:].tolist()]
    assert all(np.shares_memory(part, values) for part in cut)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        pytest.param(np.array([0, 3, 2, 6], dtype=np.int32), "must rise", id="decreasing"),
        pytest.param(np.array([0, 3, 3, 6], dtype=np.int32), "must rise", id="empty-row"),
        pytest.param(np.array([0, 3, 5], dtype=np.int32), "ends at 5 but there are 6", id="short"),
        pytest.param(np.array([0, 3, 7], dtype=np.int32), "ends at 7 but there are 6", id="long"),
        pytest.param(np.array([1, 6], dtype=np.int32), "must start at 0", id="late-start"),
        pytest.param(np.array([-1, 6], dtype=np.int32), "must start at 0", id="negative"),
        pytest.param(np.array([0], dtype=np.int32), "at least one row", id="no-row"),
        pytest.param(np.array([], dtype=np.int32), "at least one row", id="empty"),
        pytest.param(np.array([0, 3, 6]), "got 1-d int64", id="int64"),
        pytest.param(np.array([0.0, 6.0], dtype=np.float32), "got 1-d float32", id="float"),
        pytest.param(np.array([[0, 6]], dtype=np.int32), "got 2-d int32", id="two-dimensional"),
    ],
)
def test_wrong_boundaries_stop_before_the_kernel(boundaries: np.ndarray, message: str) -> None:
    """S2-04: boundaries that do not describe the values are refused."""
    with pytest.raises(ValueError, match=message):
        check_cu_seqlens(boundaries, num_tokens=6)
    with pytest.raises(ValueError, match=message):
        unpack(np.arange(6), boundaries)
