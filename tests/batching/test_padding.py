"""The rectangle, for any rows; the recipe's own examples are in `contracts/seed0/test_objects.py`."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.padding import MalformedOutput, ModelBatch, collate, unbatch
from tests import strategies
from tests.fakes import doubled, requests

PAIR = requests([2, 1])


@given(strategies.token_rows, st.integers(0, 9))
def test_rows_come_back_with_their_own_lengths(token_rows: list[list[int]], pad_id: int) -> None:
    """Unbatching the identity model's output gives every row back, whatever the padding id."""
    cohort = [request for row in token_rows for request in requests([len(row)])]
    batch = collate(cohort, pad_id=pad_id)
    assert [prediction.values for prediction in unbatch(cohort, batch, batch.input_ids)] == [
        request.token_ids for request in cohort
    ]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_shape_is_rows_by_longest(lengths: list[int]) -> None:
    """Every row of ids and of the mask has the width of the longest request."""
    batch = collate(requests(lengths))
    widths = {len(row) for row in (*batch.input_ids, *batch.attention_mask)}
    assert (batch.num_rows, widths) == (len(lengths), {batch.width})


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        pytest.param(None, "expected a list or tuple of rows, got NoneType", id="none"),
        pytest.param([[1, 2]], "expected 2 rows, got 1", id="rows"),
        pytest.param([[1, 2], {1, 2}], "row 1 is not a list or tuple but set", id="row-type"),
        pytest.param([[1, 2], [1]], "row 1 has 1 values, expected 2", id="width"),
        pytest.param([[1, 2], [1, math.nan]], "row 1, position 1 is not a finite number", id="value"),
    ],
)
def test_reason_names_place_and_type(output: object, reason: str) -> None:
    """The error says where the output is wrong."""
    with pytest.raises(MalformedOutput) as caught:
        unbatch(PAIR, collate(PAIR), output)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "value", [2**1023, -(2**1023), 1.7e308, 0.0, -1], ids=["int-max", "int-min", "float-large", "zero", "negative"]
)
def test_extreme_numbers_pass(value: float) -> None:
    """Whatever converts to a finite float is a value."""
    request = requests([1])
    assert unbatch(request, collate(request), [[value]])[0].values == (value,)


@pytest.mark.parametrize("value", [2**1024, -(2**1024)], ids=["above", "below"])
def test_ints_beyond_float_fail(value: int) -> None:
    """An int that no float can hold is refused as malformed."""
    request = requests([1])
    with pytest.raises(MalformedOutput):
        unbatch(request, collate(request), [[value]])


def test_model_batch_is_plain_tuples() -> None:
    """The model sees ints in tuples and nothing else."""
    assert collate(PAIR) == ModelBatch(((0, 1), (1000, 0)), ((1, 1), (1, 0)))
    assert doubled(collate(PAIR)) == [[0, 2], [2000, 0]]
