"""Every error of the package: it crosses processes, and its text never holds a payload."""

import asyncio
import importlib
import math
import pickle
import pkgutil
from collections.abc import Callable, Iterator

import pytest

import batching
from batching.batcher import Batcher
from batching.buckets import Buckets
from batching.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    DeviceLost,
    Draining,
    EmptyInput,
    ForwardFailed,
    GroupLimit,
    InputTooLong,
    InvalidRequest,
    OutOfMemory,
    Overloaded,
    QueueFull,
    QuotaExceeded,
    QuotaStoreDown,
    ReplicaLost,
    RequestTooLarge,
    RevisionUnavailable,
    TenantOverShare,
    TokenIdOutOfRange,
    TokenServeError,
    UnknownRevision,
    WaitTooLong,
)
from batching.padding import MalformedOutput, collate, unbatch
from batching.request import TokenRequest
from tests.fakes import FakeClock, FakeForward, batch_limits, outcomes, queue_limits, rows

SAMPLES: list[tuple[TokenServeError, str]] = [
    (InvalidRequest("model", "must be a string"), "`model` must be a string"),
    (EmptyInput("input"), "`input` is empty"),
    (EmptyInput("input", "holds no rows"), "`input` holds no rows"),
    (InputTooLong("input[2]", 600, 512), "`input[2]` has 600 tokens; the limit is 512"),
    (
        TokenIdOutOfRange("input[0][1]", 30522),
        "`input[0][1]` must be a token id from 0 to 30521, "
        "made by this model's tokenizer; a client that uses another must send text",
    ),
    (RequestTooLarge("input", "rows", 99, 64), "`input` holds 99 rows; the limit for one request is 64"),
    (UnknownRevision("model"), "`model` names no revision that this key may use"),
    (RevisionUnavailable("rev-1", 2.0), "revision rev-1 is not up; try again"),
    (Overloaded(2.5), "the backlog of this revision is full; try again after the time in Retry-After"),
    (QueueFull(64, 2.5), "64 rows of this group are waiting already, which is the limit; try again later"),
    (GroupLimit(8, 2.5), "8 groups have work already, which is the limit; try again later"),
    (
        WaitTooLong(0.25, 1.5, 2.5),
        "the answer would take about 1500 ms, longer than the 250 ms that this request was given; "
        "try again after the time in Retry-After",
    ),
    (
        TenantOverShare(2.5),
        "too much work of this tenant is waiting already; try again after the time in Retry-After",
    ),
    (
        DeadlineUnreachable(0.25, 1.5),
        "this request takes about 1500 ms even on an idle replica, longer than the 250 ms that it was given",
    ),
    (
        QuotaExceeded("tokens_per_s", 2000.0, 1.5),
        "this tenant's quota for this revision is used up: tokens_per_s is 2000; "
        "try again after the time in Retry-After",
    ),
    (
        QuotaStoreDown("quota_on_store_failure", 1.0),
        "this tenant's quota cannot be checked at present, and quota_on_store_failure is closed; try again",
    ),
    (DeadlineExceeded(0.25), "no answer within the 250 ms that this request was given"),
    (Draining(), "this replica is stopping; try again"),
    (ReplicaLost(1.0), "the replica that held this request stopped, and no other could take it; try again"),
    (ForwardFailed("ValueError"), "the model failed on this batch: ValueError"),
    (
        OutOfMemory(600),
        "a row of 600 tokens does not fit into the memory of the model's device; send shorter rows",
    ),
    (DeviceLost(1.0), "the device of this replica failed and is being replaced; try again"),
    (MalformedOutput("row 1 has 1 values"), "the model returned a malformed output: row 1 has 1 values"),
]
SAMPLE_TABLE = [pytest.param(error, detail, id=type(error).__name__) for error, detail in SAMPLES]


def _subclasses(error: type[TokenServeError]) -> Iterator[type[TokenServeError]]:
    for subclass in error.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def test_every_error_has_a_sample() -> None:
    """A new error class without a row in this file's table fails."""
    for module in pkgutil.iter_modules(batching.__path__, "batching."):
        importlib.import_module(module.name)
    ours = {error for error in _subclasses(TokenServeError) if error.__module__.startswith("batching.")}
    assert ours == {type(error) for error, _ in SAMPLES}


@pytest.mark.parametrize(("error", "detail"), SAMPLE_TABLE)
def test_error_survives_pickling(error: TokenServeError, detail: str) -> None:
    """Type, arguments, attributes and text are the same in another process."""
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.args, vars(copy), copy.detail) == (type(error), error.args, vars(error), detail)


@pytest.mark.parametrize(("error", "detail"), SAMPLE_TABLE)
def test_detail_is_one_sentence(error: TokenServeError, detail: str) -> None:
    """The caller's text is the documented one."""
    assert error.detail == detail


@pytest.mark.parametrize(
    ("error", "parent"),
    [
        (EmptyInput, InvalidRequest),
        (InputTooLong, InvalidRequest),
        (TokenIdOutOfRange, InvalidRequest),
        (RequestTooLarge, InvalidRequest),
        (QueueFull, Overloaded),
        (GroupLimit, Overloaded),
        (WaitTooLong, Overloaded),
        (DeadlineUnreachable, DeadlineExceeded),
    ],
)
def test_families_are_caught_together(error: type, parent: type) -> None:
    """Whoever handles the family handles its members."""
    assert issubclass(error, parent)


def test_base_has_no_text() -> None:
    """The base is never raised; a subclass that forgets its text is noticed."""
    with pytest.raises(NotImplementedError):
        _ = TokenServeError().detail


CANARY = 987654321
CANARY_REQUEST = TokenRequest("r", "t", "v", [CANARY])


def _submitted(error: BaseException | None = None, length: int = 1, timeout_s: float | None = None) -> TokenServeError:
    """What a row that carries the canary ends in."""

    async def run() -> list[object]:
        forward = FakeForward(fail_on={0: error} if error else None)
        batcher = Batcher(
            forward, limits=batch_limits(), queue_limits=queue_limits(max_queued_cost=50), clock=FakeClock()
        )
        (row,) = rows([length], timeout_s=timeout_s)
        row.payload = CANARY
        return await outcomes(batcher.submit([row]))

    (result,) = asyncio.run(run())
    assert isinstance(result, TokenServeError)
    return result


def _raised(action: Callable[[], object]) -> TokenServeError:
    with pytest.raises(TokenServeError) as caught:
        action()
    return caught.value


@pytest.mark.parametrize(
    "action",
    [
        pytest.param(lambda: TokenRequest("r", "t", "v", [f"{CANARY}"]), id="wrong-type"),
        pytest.param(lambda: TokenRequest("r", "t", "v", f"{CANARY}"), id="wrong-container"),
        pytest.param(lambda: TokenRequest("r", "t", "v", [-CANARY]), id="negative"),
        pytest.param(lambda: TokenRequest("r", "t", "v", [CANARY * 10**6]), id="too-large"),
        pytest.param(lambda: Buckets((16,)).ceiling_of(len([CANARY] * 17)), id="too-long"),
        pytest.param(
            lambda: unbatch([CANARY_REQUEST], collate([CANARY_REQUEST]), [[f"{CANARY}"]]), id="malformed-value"
        ),
        pytest.param(lambda: unbatch([CANARY_REQUEST], collate([CANARY_REQUEST]), f"{CANARY}"), id="malformed-output"),
        pytest.param(
            lambda: unbatch([CANARY_REQUEST], collate([CANARY_REQUEST]), [[CANARY, math.inf]]), id="malformed-width"
        ),
        pytest.param(lambda: _submitted(length=51), id="request-too-large"),
        pytest.param(lambda: _submitted(timeout_s=0.0), id="deadline-unreachable"),
    ],
)
def test_refusal_holds_no_payload(action: Callable[[], object]) -> None:
    """Neither the text nor the arguments of a refusal repeat a token id."""
    error = _raised(action)
    assert f"{CANARY}" not in f"{error.detail} {error!r} {vars(error)}"


def test_failure_holds_no_payload() -> None:
    """Neither the text nor the arguments of a failed row repeat a token id."""
    failed = _submitted(ValueError(f"bad ids [{CANARY}]"))
    assert f"{CANARY}" not in f"{failed.detail} {failed!r} {vars(failed)}"
