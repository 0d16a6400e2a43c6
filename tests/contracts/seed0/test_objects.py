"""Seed 0, the contract's objects: TokenRequest, ModelBatch, output validation, TokenPrediction (S0-01 to S0-54)."""

import asyncio
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.errors import EmptyInput, ForwardFailed, InputTooLong, InvalidRequest, TokenIdOutOfRange
from batching.padding import MalformedOutput, ModelBatch, collate, unbatch
from batching.request import MAX_TOKEN_ID, TokenPrediction, TokenRequest
from tests.fakes import FakeModel, Harness, HeldExecutor, answer, doubled, in_loop, kinds, outcomes, requests, settle

ROOT = Path(__file__).parents[3]
FIRST = TokenRequest("first", "tenant-a", "demo-v1", [0, 2])
SECOND = TokenRequest("second", "tenant-a", "demo-v1", [7])
PAIR = [FIRST, SECOND]


def request(token_ids: Any, *, request_id: Any = "r", tenant: Any = "t", revision: Any = "v") -> TokenRequest:
    """A request with one field of interest."""
    return TokenRequest(request_id, tenant, revision, token_ids)


class ForeignInt:
    """An integer scalar of some array library."""

    def __index__(self) -> int:
        return 1

    __int__ = __index__


class ForeignArray:
    """A tensor of some array library."""

    def __iter__(self) -> Iterator[ForeignInt]:
        return iter([ForeignInt()])

    def tolist(self) -> list[int]:
        return [1]


# ---- request ---------------------------------------------------------------------------------------------------------


def test_s0_01_ids_are_stored_as_a_tuple() -> None:
    """S0-01: a list given by position is kept as a tuple."""
    assert TokenRequest("first", "tenant-a", "demo-v1", [1, 2, 3]).token_ids == (1, 2, 3)


def test_s0_02_later_changes_do_not_arrive() -> None:
    """S0-02: changing the caller's list changes nothing stored."""
    token_ids = [1, 2, 3]
    stored = request(token_ids)
    token_ids[0] = 9
    token_ids.clear()
    assert stored.token_ids == (1, 2, 3)


def test_s0_03_tuple_is_equal_to_list() -> None:
    """S0-03: a tuple is accepted and makes an equal request."""
    assert request((1, 2)) == request([1, 2])


@pytest.mark.parametrize("name", ["request_id", "tenant", "revision", "token_ids"])
def test_s0_04_fields_cannot_be_changed(name: str) -> None:
    """S0-04: no field can be assigned or deleted, and the ids cannot be changed in place."""
    stored = request([1, 2])
    with pytest.raises(AttributeError):
        setattr(stored, name, "other")
    with pytest.raises(AttributeError):
        delattr(stored, name)
    with pytest.raises(TypeError):
        stored.token_ids[0] = 3  # type: ignore[index]


@pytest.mark.parametrize("empty", [[], ()], ids=["list", "tuple"])
def test_s0_05_empty_sequence_is_refused(empty: Any) -> None:
    """S0-05: a request without tokens cannot be made, so no group or model ever sees it."""
    with pytest.raises(EmptyInput):
        request(empty)


@pytest.mark.parametrize("position", [0, 2])
@pytest.mark.parametrize("negative", [-1, -(2**63)])
def test_s0_06_negative_id_is_refused(position: int, negative: int) -> None:
    """S0-06: an id below 0 is refused wherever it stands."""
    token_ids = [1, 2, 3]
    token_ids[position] = negative
    with pytest.raises(TokenIdOutOfRange):
        request(token_ids)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(True, id="S0-07-true"),
        pytest.param(False, id="S0-07-false"),
        pytest.param(1.0, id="S0-08-float"),
        pytest.param("1", id="S0-08-text"),
        pytest.param(b"1", id="S0-08-bytes"),
        pytest.param(None, id="S0-08-none"),
        pytest.param(Decimal(1), id="S0-08-decimal"),
        pytest.param(math.nan, id="S0-08-nan"),
        pytest.param(np.int64(1), id="S0-09-numpy-int64"),
        pytest.param(np.int32(1), id="S0-09-numpy-int32"),
        pytest.param(ForeignInt(), id="S0-09-tensor-scalar"),
    ],
)
def test_s0_07_only_exact_ints_are_ids(value: Any) -> None:
    """S0-07, S0-08, S0-09: an id that is not exactly an int is refused, never converted."""
    with pytest.raises(InvalidRequest) as caught:
        request([1, value])
    assert caught.value.param == "token_ids[1]"


def test_s0_09_converted_scalars_are_ids() -> None:
    """S0-09: after conversion to int they are accepted."""
    assert request([int(np.int64(1)), int(ForeignInt())]).token_ids == (1, 1)


@pytest.mark.parametrize(
    "container",
    [range(3), {1, 2}, {1: 2}, "12", b"12", np.array([1, 2]), ForeignArray(), None, 5],
    ids=["range", "set", "dict", "text", "bytes", "ndarray", "tensor", "none", "int"],
)
def test_s0_10_only_list_and_tuple_hold_ids(container: Any) -> None:
    """S0-10: any other container is refused."""
    with pytest.raises(InvalidRequest) as caught:
        request(container)
    assert caught.value.param == "token_ids"


def test_s0_10_generator_is_not_consumed() -> None:
    """S0-10: a refused generator still has all its items."""
    generator = (number for number in [1, 2])
    with pytest.raises(InvalidRequest):
        request(generator)
    assert list(generator) == [1, 2]


def test_s0_11_zero_is_an_id() -> None:
    """S0-11: id 0 is input like any other."""
    assert request([0]).token_ids == (0,)


@pytest.mark.parametrize("too_large", [MAX_TOKEN_ID + 1, 2**63, 10**400], ids=["2^31", "2^63", "10^400"])
@in_loop
async def test_s0_12_id_beyond_int32_never_reaches_a_batch(too_large: int) -> None:
    """S0-12: an id that an int32 tensor would wrap is refused for its request alone; a neighbour is answered."""
    with pytest.raises(TokenIdOutOfRange) as caught:
        request([1, too_large])
    neighbour = request([1, MAX_TOKEN_ID])
    (prediction,) = await Harness().outcomes([neighbour])
    assert (caught.value.param, prediction.values) == ("token_ids[1]", answer(neighbour))


@pytest.mark.parametrize("bad", ["", None, 7, b"t", ["t"]], ids=["empty", "none", "int", "bytes", "list"])
@pytest.mark.parametrize("name", ["request_id", "tenant", "revision"])
def test_s0_13_names_are_non_empty_text(name: str, bad: Any) -> None:
    """S0-13: request id, tenant and revision must be non-empty strings."""
    with pytest.raises(InvalidRequest) as caught:
        request([1], **{name: bad})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("token_ids", "param"),
    [
        pytest.param([1, "987654321"], "token_ids[1]", id="item"),
        pytest.param([987654321, -987654321], "token_ids[1]", id="negative"),
        pytest.param([987654321 * 10**6], "token_ids[0]", id="too-large"),
        pytest.param("987654321", "token_ids", id="container"),
    ],
)
def test_s0_14_error_names_the_place_not_the_value(token_ids: Any, param: str) -> None:
    """S0-14: field and index are named, the payload is not."""
    with pytest.raises(InvalidRequest) as caught:
        request(token_ids)
    assert caught.value.param == param
    assert "987654321" not in f"{caught.value} {caught.value.detail} {caught.value!r}"


@in_loop
async def test_s0_15_equal_request_ids_are_two_requests() -> None:
    """S0-15: results go by position, so two requests with one id get an answer each."""
    twins = [request([1], request_id="same"), request([2, 3], request_id="same")]
    harness = Harness()
    assert await harness.outcomes(twins) == [TokenPrediction("same", (2,)), TokenPrediction("same", (4, 6))]
    assert harness.model.shapes == [(2, 2)]


IMPORT_PROBE = """
import sys
sys.path.insert(0, sys.argv[1])
files = []
def watch(event, args):
    assert not event.startswith(("socket.", "subprocess.", "urllib.")), event
    if event == "open":
        files.append(str(args[0]))
sys.addaudithook(watch)
before = set(sys.modules)
import batching.request, batching.padding
new = set(sys.modules) - before
print(sorted(name for name in new if name.partition(".")[0] not in sys.stdlib_module_names))
print([name for name in files if not name.endswith((".py", ".pyc"))])
"""


def test_s0_16_contract_layer_needs_the_standard_library_only() -> None:
    """S0-16, S0-142, ACC-01: without site-packages the contract modules load, with no network and no data file."""
    probe = [sys.executable, "-I", "-S", "-B", "-c", IMPORT_PROBE, str(ROOT)]
    printed = subprocess.run(probe, capture_output=True, text=True, check=True, timeout=60).stdout
    expected = ["batching", "batching.errors", "batching.padding", "batching.request"]
    assert printed.splitlines() == [str(expected), "[]"]


# ---- collation -------------------------------------------------------------------------------------------------------


def test_s0_20_published_example() -> None:
    """S0-20: rows (0, 2) and (7,) become the documented rectangle and mask."""
    assert collate(PAIR) == ModelBatch(((0, 2), (7, 0)), ((1, 1), (1, 0)))


@given(st.permutations(requests([1, 2, 3, 4])))
def test_s0_21_row_order_is_request_order(cohort: list[TokenRequest]) -> None:
    """S0-21: row i of the batch is request i."""
    assert [row[0] for row in collate(cohort).input_ids] == [one.token_ids[0] for one in cohort]


@in_loop
async def test_s0_22_width_is_the_longest_row_of_the_batch() -> None:
    """S0-22: lengths 3 and 5 of bucket 16 make width 5."""
    harness = Harness()
    await harness.outcomes(requests([3, 5]))
    assert harness.model.shapes == [(2, 5)]


@pytest.mark.parametrize(
    ("rows", "mask"),
    [
        pytest.param([[0], [5, 5]], ((1, 0), (1, 1)), id="real-zero"),
        pytest.param([[0, 0], [5]], ((1, 1), (1, 0)), id="all-zero"),
    ],
)
def test_s0_23_mask_comes_from_lengths(rows: list[list[int]], mask: tuple[tuple[int, ...], ...]) -> None:
    """S0-23: a real zero is marked as input, padding zero is not."""
    assert collate([request(row) for row in rows]).attention_mask == mask


def test_s0_24_one_request_is_not_padded() -> None:
    """S0-24: a batch of one has no padding and a mask of ones."""
    assert collate([request([4, 5, 6])]) == ModelBatch(((4, 5, 6),), ((1, 1, 1),))


def _assign_field(batch: ModelBatch) -> object:
    batch.input_ids = ()  # type: ignore[misc]
    return doubled(batch)


def _assign_row(batch: ModelBatch) -> object:
    batch.input_ids[0] = ()  # type: ignore[index]
    return doubled(batch)


def _assign_item(batch: ModelBatch) -> object:
    batch.attention_mask[0][0] = 9  # type: ignore[index]
    return doubled(batch)


@pytest.mark.parametrize(
    ("write", "error"),
    [(_assign_field, "FrozenInstanceError"), (_assign_row, "TypeError"), (_assign_item, "TypeError")],
    ids=["field", "row", "item"],
)
@in_loop
async def test_s0_25_model_cannot_write_to_its_batch(write: Callable[[ModelBatch], object], error: str) -> None:
    """S0-25: a model that writes to the batch gets an error instead of silent corruption."""
    (failed,) = await Harness(FakeModel(write)).outcomes([FIRST])
    assert (type(failed), failed.reason) == (ForwardFailed, error)


@in_loop
async def test_s0_26_model_is_called_once_per_batch() -> None:
    """S0-26: one call with one ModelBatch holds all rows of a batch."""
    harness = Harness()
    await harness.outcomes(PAIR)
    assert harness.model.batches == [collate(PAIR)]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=16))
def test_s0_27_mask_counts_tokens(lengths: list[int]) -> None:
    """S0-27: each row of the mask sums to the row's length."""
    assert [sum(row) for row in collate(requests(lengths)).attention_mask] == lengths


@pytest.mark.parametrize(
    "cohort",
    [
        pytest.param([], id="none"),
        pytest.param(requests([1, 1], tenants="ab"), id="two-tenants"),
        pytest.param(requests([1, 1], revisions=["v1", "v2"]), id="two-revisions"),
    ],
)
def test_s0_28_impossible_batches_are_refused(cohort: list[TokenRequest]) -> None:
    """S0-28: zero rows, or rows that must not meet, are an internal error."""
    with pytest.raises(ValueError, match="cannot collate"):
        collate(cohort)


@in_loop
async def test_s0_28_impossible_batches_cannot_be_reached() -> None:
    """S0-28: requests that must not meet do not meet when sent together, and all are answered."""
    cohort = requests([1] * 8, tenants="ab", revisions=["v1", "v1", "v2", "v2"])
    harness = Harness()
    predictions = await harness.outcomes(cohort)
    assert [prediction.values for prediction in predictions] == [answer(one) for one in cohort]
    assert harness.model.shapes == [(2, 1)] * 4


@in_loop
async def test_s0_29_pad_id_can_be_chosen() -> None:
    """S0-29: with pad id 1 the padding is 1 and a real 1 is still input."""
    harness = Harness(pad_id=1)
    await harness.outcomes([request([5, 6]), request([1])])
    assert harness.model.batches == [ModelBatch(((5, 6), (1, 1)), ((1, 1), (1, 0)))]


# ---- model output ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "output",
    [
        pytest.param([[0, 4], [14, 0]], id="S0-30-lists"),
        pytest.param(((0, 4), (14, 0)), id="S0-31-tuples"),
        pytest.param([(0, 4), [14, 0]], id="S0-31-mixed"),
        pytest.param(([0.0, 4.0], (14.0, 0.0)), id="S0-31-floats"),
    ],
)
def test_s0_30_lists_and_tuples_are_accepted(output: object) -> None:
    """S0-30, S0-31, S0-50: the doubled example comes back as (0, 4) and (14,)."""
    assert unbatch(PAIR, collate(PAIR), output) == [
        TokenPrediction("first", (0, 4)),
        TokenPrediction("second", (14,)),
    ]


def _never() -> Iterator[list[int]]:
    raise AssertionError("a refused generator is not consumed")
    yield []


BAD_OUTPUTS = [
    pytest.param(lambda: [[0, 4]], id="S0-32-fewer-rows"),
    pytest.param(lambda: [[0, 4], [14, 0], [0, 0]], id="S0-32-more-rows"),
    pytest.param(lambda: [], id="S0-32-no-rows"),
    pytest.param(lambda: [[0, 4], [14]], id="S0-33-narrower"),
    pytest.param(lambda: [[0, 4], [14, 0, 0]], id="S0-33-wider"),
    pytest.param(lambda: [[0, math.nan], [14, 0]], id="S0-34-nan"),
    pytest.param(lambda: [[0, math.inf], [14, 0]], id="S0-34-inf"),
    pytest.param(lambda: [[0, -math.inf], [14, 0]], id="S0-34-minus-inf"),
    pytest.param(lambda: [[0, 4], [14, math.nan]], id="S0-35-nan-in-padding"),
    pytest.param(lambda: [[0, 4], [14, math.inf]], id="S0-35-inf-in-padding"),
    pytest.param(lambda: [[0, 4], [14, -math.inf]], id="S0-35-minus-inf-in-padding"),
    pytest.param(lambda: [[0, 4], [14, "0"]], id="S0-36-text-in-padding"),
    pytest.param(lambda: [[0, 4], [14, None]], id="S0-36-none-in-padding"),
    pytest.param(lambda: [[0, 4], [14, object()]], id="S0-36-object-in-padding"),
    pytest.param(lambda: [[0, True], [14, 0]], id="S0-37-bool"),
    pytest.param(lambda: [[0, 4j], [14, 0]], id="S0-37-complex"),
    pytest.param(lambda: [[0, 10**400], [14, 0]], id="S0-38-huge-int"),
    pytest.param(lambda: [[0, 4], [14, -(10**400)]], id="S0-38-huge-int-in-padding"),
    pytest.param(lambda: np.zeros((2, 2)), id="S0-39-ndarray"),
    pytest.param(lambda: list(np.zeros((2, 2))), id="S0-39-ndarray-rows"),
    pytest.param(lambda: [[np.float64(0), 4.0], [14.0, 0.0]], id="S0-39-numpy-scalar"),
    pytest.param(ForeignArray, id="S0-39-tensor"),
    pytest.param(_never, id="S0-39-generator"),
    pytest.param(lambda: [_never(), _never()], id="S0-39-generator-rows"),
    pytest.param(lambda: {0: [0, 4], 1: [14, 0]}, id="S0-39-dict"),
    pytest.param(lambda: ["04", "14"], id="S0-39-text-rows"),
    pytest.param(lambda: "04", id="S0-39-text"),
    pytest.param(lambda: [[0, 4], [14, "x"]], id="S0-42-second-row-invalid"),
    pytest.param(lambda: None, id="S0-43-none"),
    pytest.param(lambda: [3, 5], id="S0-54-label-per-sequence"),
    pytest.param(lambda: [[[0.1], [0.2]], [[0.3], [0.4]]], id="S0-54-vector-per-token"),
]


@pytest.mark.parametrize("output", BAD_OUTPUTS)
@in_loop
async def test_s0_32_malformed_output_fails_the_whole_batch(output: Callable[[], object]) -> None:
    """S0-32 to S0-39, S0-42, S0-43, S0-54: both requests fail by name, and none of the batch is answered."""
    harness = Harness(FakeModel(lambda _: output()))
    assert kinds(await harness.outcomes(PAIR)) == ["MalformedOutput", "MalformedOutput"]


def test_s0_38_largest_float_is_still_a_number() -> None:
    """S0-38: what a float can hold passes, so the refusal is about size alone."""
    assert unbatch([SECOND], collate([SECOND]), [[10**300]])[0].values == (10**300,)


@in_loop
async def test_s0_40_borrowed_future_is_left_alone() -> None:
    """S0-40: a future as output fails the batch and is neither awaited nor cancelled."""
    borrowed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    (failed,) = await Harness(FakeModel(lambda _: borrowed)).outcomes([SECOND])
    assert (type(failed), borrowed.done()) == (MalformedOutput, False)
    borrowed.set_result(5)
    assert await borrowed == 5


@in_loop
async def test_s0_40_coroutine_is_left_alone() -> None:
    """S0-40: a coroutine as output, whole or as a row, is not closed and can still be awaited."""

    async def later() -> int:
        return 5

    whole, row = later(), later()
    answers: Iterator[object] = iter([whole, [row]])
    model = FakeModel(lambda _: next(answers))
    first = await Harness(model).outcomes([SECOND])
    second = await Harness(model).outcomes([SECOND])
    assert (kinds(first + second), await whole, await row) == (["MalformedOutput"] * 2, 5, 5)


@in_loop
async def test_s0_41_next_batch_of_the_group_succeeds() -> None:
    """S0-41: a raising model fails its own batch; the same group's next batch is answered."""
    answers: Iterator[Callable[[ModelBatch], object]] = iter([lambda batch: 1 // 0, doubled])
    harness = Harness(FakeModel(lambda batch: next(answers)(batch)), max_rows=2)
    results = await harness.outcomes(requests([1, 1, 1]))
    assert kinds(results) == ["ForwardFailed", "ForwardFailed", "TokenPrediction"]
    assert isinstance(results[0].__cause__, ZeroDivisionError)


# ---- predictions -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 64), min_size=1, max_size=12))
@in_loop
async def test_s0_51_length_and_id_are_restored(lengths: list[int]) -> None:
    """S0-51, S0-75: every request gets back its own id and one value per token."""
    cohort = requests(lengths)
    predictions = await Harness().outcomes(cohort)
    assert predictions == [TokenPrediction(one.request_id, answer(one)) for one in cohort]


@pytest.mark.parametrize("name", ["request_id", "values"])
def test_s0_52_prediction_is_immutable(name: str) -> None:
    """S0-52: fields cannot be assigned and values cannot be changed in place."""
    (prediction,) = unbatch([SECOND], collate([SECOND]), [[14]])
    with pytest.raises(AttributeError):
        setattr(prediction, name, ())
    with pytest.raises(TypeError):
        prediction.values[0] = 1  # type: ignore[index]


@in_loop
async def test_s0_53_everybody_gets_his_own_row_in_any_order() -> None:
    """S0-53: 1,200 requests, batches finished in random order, and each caller has his own values."""
    draw = random.Random(0)
    cohort = requests([draw.choice([1, 9, 30, 64, 200]) for _ in range(1200)], tenants="abc", revisions=["v1", "v2"])
    pool = HeldExecutor()
    harness = Harness(executor=pool, max_concurrent_calls=12, max_queued_rows_per_group=1200, max_wait_s=0.0)
    tasks = await harness.start(cohort)
    while pool.waiting:
        pool.run(draw.randrange(len(pool.waiting)))
        await settle()
    assert [one.values for one in await outcomes(tasks)] == [answer(one) for one in cohort]


def test_s0_54_too_long_is_no_other_head() -> None:
    """S0-54: a second column of values, as another head would give, does not fit the width."""
    with pytest.raises(MalformedOutput):
        unbatch([SECOND], collate([SECOND]), [[0.5, 0.5]])


@in_loop
async def test_s0_05_refused_request_reaches_no_model() -> None:
    """S0-05: a request above the last bucket, too, ends before any model call."""
    harness = Harness()
    (refused,) = await harness.outcomes([request([1] * 257)])
    assert (type(refused), harness.model.batches) == (InputTooLong, [])
