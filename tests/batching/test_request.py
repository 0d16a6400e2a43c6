"""TokenRequest beyond the recipe's statements, which `contracts/seed0/test_objects.py` holds."""

import pickle

import pytest
from hypothesis import given

from batching.errors import EmptyInput, InvalidRequest, TokenIdOutOfRange
from batching.request import MAX_TOKEN_ID, TokenPrediction, TokenRequest
from tests import strategies


def test_largest_id_is_accepted() -> None:
    """The int32 maximum is still an id."""
    assert TokenRequest("r", "t", "v", [MAX_TOKEN_ID]).token_ids == (MAX_TOKEN_ID,)


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        pytest.param(("", "t", "v", [1]), InvalidRequest, "request_id", id="empty-request-id"),
        pytest.param(("r", None, "v", [1]), InvalidRequest, "tenant", id="tenant-none"),
        pytest.param(("r", "t", 3, [1]), InvalidRequest, "revision", id="revision-int"),
        pytest.param(("r", "t", "v", "12"), InvalidRequest, "token_ids", id="ids-text"),
        pytest.param(("r", "t", "v", []), EmptyInput, "token_ids", id="ids-empty"),
        pytest.param(("r", "t", "v", [1, 2.0]), InvalidRequest, "token_ids[1]", id="id-float"),
        pytest.param(("r", "t", "v", [1, 2, -1]), TokenIdOutOfRange, "token_ids[2]", id="id-negative"),
        pytest.param(("r", "t", "v", [MAX_TOKEN_ID + 1]), TokenIdOutOfRange, "token_ids[0]", id="id-above-int32"),
    ],
)
def test_error_names_field_and_index(fields: tuple, error: type[InvalidRequest], param: str) -> None:
    """`param` is the path of the offending value and the type is exact."""
    with pytest.raises(InvalidRequest) as caught:
        TokenRequest(*fields)
    assert (type(caught.value), caught.value.param) == (error, param)


@given(strategies.token_rows)
def test_request_survives_pickling(token_rows: list[list[int]]) -> None:
    """A request crosses processes unchanged."""
    request = TokenRequest("r", "t", "v", token_rows[0])
    assert pickle.loads(pickle.dumps(request)) == request


def test_prediction_is_a_value() -> None:
    """Predictions compare and hash by content."""
    assert {TokenPrediction("r", (1.0,)), TokenPrediction("r", (1.0,))} == {TokenPrediction("r", (1.0,))}
