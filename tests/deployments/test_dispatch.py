"""Calls to replicas: what is tried again, what each failure becomes, what is cancelled."""

import asyncio
import logging
from collections.abc import Sequence

import numpy as np
import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectLostError,
    RayActorError,
    RaySystemError,
    TaskCancelledError,
)
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
    RequestCancelledError,
)

from batching.buckets import Buckets
from batching.errors import (
    DeadlineExceeded,
    Draining,
    EmptyInput,
    ForwardFailed,
    InputTooLong,
    Overloaded,
    QueueFull,
    ReplicaLost,
    RequestTooLarge,
    RevisionUnavailable,
    TokenIdOutOfRange,
    TokenServeError,
)
from batching.padding import MalformedOutput
from deployments.dispatch import RETRY_AFTER_S, BucketPart, Caller, all_or_cancel, call_bucket, cut_by_bucket
from deployments.revisions import LiveRevision
from deployments.tokenization import EncodedInput, InputEncoder
from deployments.wire import InferReply
from tests.deployments.fakes import (
    REMOTE_TEXT,
    VOCAB_SIZE,
    FakeBucket,
    as_ray_raises,
    current_loop,
    in_skewed_loop,
    revision_info,
    rows_of,
    small_tokenizer,
    vector,
)

CALLER = Caller(tenant="acme", batch_group="shared")


@pytest.fixture(scope="module")
def encoder() -> InputEncoder:
    """Not used by dispatch, but part of a snapshot."""
    return InputEncoder(small_tokenizer(), max_tokens=64, vocab_size=VOCAB_SIZE)


@pytest.fixture
def live(encoder: InputEncoder) -> LiveRevision:
    """A revision with the buckets 16 and 64."""
    return LiveRevision(
        application="minilm-v1",
        fingerprint="f",
        info=revision_info(),
        encoder=encoder,
        buckets=Buckets((16, 64)),
        handles=(FakeBucket(), FakeBucket()),
    )


def bucket(live: LiveRevision, index: int = 0) -> FakeBucket:
    """A handle to look at."""
    handle = live.handles[index]
    assert isinstance(handle, FakeBucket)
    return handle


def part(*rows: Sequence[int], index: int = 0) -> BucketPart:
    """Rows for one bucket."""
    token_ids = tuple(np.array(row, dtype=np.int32) for row in rows)
    return BucketPart(bucket=index, indices=tuple(range(len(rows))), token_ids=token_ids)


async def call(live: LiveRevision, timeout_s: float = 60.0) -> InferReply:
    """One row, with a minute to run."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    return await call_bucket(live, part([5, 6]), CALLER, deadline=deadline)


# ---- replicas that are lost ------------------------------------------------------------------------------------------

GONE = [
    pytest.param(ActorDiedError(), id="actor died"),
    pytest.param(RayActorError(), id="actor error"),
    pytest.param(ActorUnavailableError("gone", None), id="actor unavailable"),
    pytest.param(ReplicaUnavailableError("replica"), id="replica unavailable"),
    pytest.param(TaskCancelledError(), id="task cancelled"),
    pytest.param(RequestCancelledError("id"), id="request cancelled over there"),
    pytest.param(ObjectLostError("00", "o", REMOTE_TEXT), id="answer lost with its node"),
    pytest.param(Draining(), id="stopping"),
    pytest.param(as_ray_raises(Draining()), id="stopping, through Ray"),
]


@pytest.mark.parametrize("error", GONE)
@in_skewed_loop
async def test_lost_replica_is_tried_once_more(error: BaseException, live: LiveRevision) -> None:
    """A part whose replica is gone is sent once more, unchanged, and answered."""
    bucket(live).failures.append(error)
    reply = await call(live)
    first, second = bucket(live).calls
    assert np.array_equal(reply.values, [vector([5, 6])])
    assert (rows_of(first), rows_of(second)) == ([[5, 6]], [[5, 6]])


@pytest.mark.parametrize("error", GONE)
@in_skewed_loop
async def test_lost_twice_is_replica_lost(error: BaseException, live: LiveRevision) -> None:
    """There is no third try: the caller learns that its replica is lost and when to come again."""
    bucket(live).failures += [error, error, error]
    with pytest.raises(ReplicaLost) as caught:
        await call(live)
    assert caught.value.retry_after_s == RETRY_AFTER_S
    assert len(bucket(live).calls) == 2


@in_skewed_loop
async def test_second_try_has_the_time_that_is_left(live: LiveRevision) -> None:
    """The retry does not get the whole time again, and never a time that is over."""
    bucket(live).failures.append(ActorDiedError())
    loop = current_loop()
    deadline = loop.time() + 60
    first = bucket(live)
    original = first.infer

    async def slow_death(infer_call: object) -> InferReply:
        if not first.calls:
            loop.skew_s += 45
        return await original(infer_call)  # type: ignore[arg-type]

    first.infer = slow_death  # type: ignore[method-assign, assignment]
    await call_bucket(live, part([5, 6]), CALLER, deadline=deadline)
    times = [round(sent.timeout_s) for sent in first.calls]
    assert times == [60, 15]


@in_skewed_loop
async def test_time_sent_is_never_negative(live: LiveRevision) -> None:
    """A call that leaves after its deadline says so with a tiny duration."""
    await call(live, timeout_s=-5.0)
    assert bucket(live).calls[0].timeout_s == 0.001


# ---- what failures become --------------------------------------------------------------------------------------------

OURS = [
    InputTooLong("inputs", 300, 256),
    TokenIdOutOfRange("inputs", 30522),
    RequestTooLarge("inputs", "rows", 9, 8),
    Overloaded(2.5),
    QueueFull(8, 2.5),
    DeadlineExceeded(2.0),
    ForwardFailed("ValueError"),
    MalformedOutput("a value is not finite"),
]


@pytest.mark.parametrize("error", OURS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("wrapped", [True, False], ids=["through Ray", "as it is"])
@in_skewed_loop
async def test_our_errors_arrive_as_themselves(error: TokenServeError, *, wrapped: bool, live: LiveRevision) -> None:
    """An error of ours from a replica is raised with its own class, attributes and text, and is not tried again."""
    bucket(live).failures.append(as_ray_raises(error) if wrapped else error)
    with pytest.raises(TokenServeError) as caught:
        await call(live)
    assert type(caught.value) is type(error)
    assert (caught.value.detail, vars(caught.value)) == (error.detail, vars(error))
    assert len(bucket(live).calls) == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(BackPressureError(10, 10), Overloaded(RETRY_AFTER_S), id="BL-093 back pressure"),
        pytest.param(
            DeploymentUnavailableError(DeploymentID(name="tokens-16", app_name="minilm-v1")),
            RevisionUnavailable("minilm@v1", RETRY_AFTER_S),
            id="deployment failed",
        ),
        pytest.param(as_ray_raises(ValueError(REMOTE_TEXT)), ForwardFailed("ValueError"), id="foreign error"),
        pytest.param(as_ray_raises(KeyError(REMOTE_TEXT)), ForwardFailed("KeyError"), id="another foreign error"),
        pytest.param(RaySystemError(ValueError(REMOTE_TEXT)), ForwardFailed("RaySystemError"), id="Ray itself"),
        pytest.param(RayServeException(REMOTE_TEXT), ForwardFailed("RayServeException"), id="Serve itself"),
    ],
)
@in_skewed_loop
async def test_ray_errors_become_ours(error: BaseException, expected: TokenServeError, live: LiveRevision) -> None:
    """Whatever else Ray raises becomes a named error that holds nothing of Ray's text."""
    bucket(live).failures.append(error)
    with pytest.raises(TokenServeError) as caught:
        await call(live)
    assert (type(caught.value), caught.value.args) == (type(expected), expected.args)
    assert "secret" not in caught.value.detail
    assert len(bucket(live).calls) == 1


@in_skewed_loop
async def test_remote_text_is_not_logged(live: LiveRevision, caplog: pytest.LogCaptureFixture) -> None:
    """The log names the class of a foreign error and nothing of its text, which may hold token ids."""
    bucket(live).failures += [ActorDiedError(), as_ray_raises(ValueError(REMOTE_TEXT))]
    with caplog.at_level(logging.DEBUG), pytest.raises(ForwardFailed):
        await call(live)
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text
    assert "7592" not in caplog.text


# ---- several buckets -------------------------------------------------------------------------------------------------


async def start(live: LiveRevision) -> asyncio.Task[dict[BucketPart, InferReply]]:
    """One part per bucket, both in flight and held."""
    deadline = asyncio.get_running_loop().time() + 60
    for index in (0, 1):
        bucket(live, index).hold()
    parts = [part([1, 2]), part([3] * 20, index=1)]
    task = asyncio.create_task(
        all_or_cancel({each: call_bucket(live, each, CALLER, deadline=deadline) for each in parts})
    )
    for index in (0, 1):
        await bucket(live, index).called(1)
    return task


@in_skewed_loop
async def test_one_failing_part_cancels_the_others(live: LiveRevision) -> None:
    """When one bucket refuses, the rows of the other are taken back."""
    bucket(live, 1).failures.append(as_ray_raises(QueueFull(8, 1.0)))
    task = await start(live)
    with pytest.raises(QueueFull):
        await task
    await current_loop().skip(0)
    assert bucket(live, 0).num_cancelled == 1


@in_skewed_loop
async def test_cancelled_request_cancels_all_parts(live: LiveRevision) -> None:
    """A caller that leaves takes all of its calls with it, and nothing is tried again."""
    task = await start(live)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await current_loop().skip(0)
    assert [bucket(live, index).num_cancelled for index in (0, 1)] == [1, 1]
    assert [len(bucket(live, index).calls) for index in (0, 1)] == [1, 1]


@in_skewed_loop
async def test_parts_are_answered_by_name(live: LiveRevision) -> None:
    """Answers belong to their parts although the last may finish first."""
    task = await start(live)
    bucket(live, 1).release()
    await current_loop().skip(0)
    bucket(live, 0).release()
    replies = {each.bucket: reply.values for each, reply in (await task).items()}
    assert np.array_equal(replies[0], [vector([1, 2])])
    assert np.array_equal(replies[1], [vector([3] * 20)])


# ---- cutting ---------------------------------------------------------------------------------------------------------


def test_rows_are_cut_by_length(live: LiveRevision) -> None:
    """Good rows go to the first bucket that holds them, in their order; failed rows go nowhere."""
    lengths = [16, 17, 1, 64, 2]
    rows: list[EncodedInput | TokenServeError] = [
        EncodedInput(token_ids=np.full(length, length, dtype=np.int32)) for length in lengths
    ]
    rows.insert(2, EmptyInput("inputs[2]"))
    cut = [(each.bucket, each.indices, [len(ids) for ids in each.token_ids]) for each in cut_by_bucket(rows, live)]
    assert cut == [(0, (0, 3, 5), [16, 1, 2]), (1, (1, 4), [17, 64])]


@in_skewed_loop
async def test_call_carries_flat_arrays_and_the_caller(live: LiveRevision) -> None:
    """A call holds int32 ids end to end, lengths, and on whose behalf it runs."""
    deadline = asyncio.get_running_loop().time() + 60
    await call_bucket(live, part([1, 2, 3], [4]), CALLER, deadline=deadline)
    (sent,) = bucket(live).calls
    assert (sent.token_ids.tolist(), sent.lengths.tolist()) == ([1, 2, 3, 4], [3, 1])
    assert (sent.token_ids.dtype, sent.lengths.dtype) == (np.int32, np.int32)
    assert (sent.tenant, sent.batch_group) == ("acme", "shared")


@in_skewed_loop
async def test_a_refusal_in_the_reply_is_raised(live: LiveRevision) -> None:
    """What a replica refuses comes back as a value, and is the caller's error."""
    bucket(live).refusal = Overloaded(7.0)
    with pytest.raises(Overloaded) as caught:
        await call(live)
    assert caught.value.retry_after_s == 7.0
    assert len(bucket(live).calls) == 1


@in_skewed_loop
async def test_a_draining_replica_in_the_reply_is_tried_again(live: LiveRevision) -> None:
    """A stopping replica says so in its reply too; the second one decides."""
    bucket(live).refusal = Draining()
    with pytest.raises(ReplicaLost):
        await call(live)
    assert len(bucket(live).calls) == 2
