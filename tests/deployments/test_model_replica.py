"""A replica without Ray: rows in, one forward, rows out; and what happens to neighbours when something fails."""

import asyncio
import gc
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from batching.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    DeviceLost,
    Draining,
    ForwardFailed,
    InputTooLong,
    OutOfMemory,
    Overloaded,
    RequestTooLarge,
    TokenIdOutOfRange,
    TokenServeError,
)
from batching.isolation import EXHAUSTED_AFTER_FORWARDS
from batching.padding import MalformedOutput
from deployments import model_replica
from deployments.wire import InferCall, TenantCounts
from tests.deployments.fakes import (
    DIMENSION,
    VOCAB_SIZE,
    FakeModel,
    FakeReplica,
    current_loop,
    in_skewed_loop,
    infer_call,
    replica,
    replica_context,
    rows_of_lengths,
    vector,
)
from tests.fakes import settle

SECRET = "token ids 101 7592 102"


@pytest.fixture(autouse=True)
def _inside_a_replica() -> Iterator[None]:
    with replica_context():
        yield


def array(*shape: int, fill: float = 0.5) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.full(shape, fill, dtype=np.float32)


async def error_of(target: FakeReplica, call: InferCall) -> TokenServeError:
    refusal = (await target.infer(call)).refusal
    assert refusal is not None
    return refusal


# ---- a batch that fails ----------------------------------------------------------------------------------------------

BAD_FORWARDS = [
    pytest.param(array(2, DIMENSION, fill=np.nan), MalformedOutput, id="nan"),
    pytest.param(array(2, DIMENSION, fill=np.inf), MalformedOutput, id="infinity"),
    pytest.param(array(1, DIMENSION), MalformedOutput, id="a row too few"),
    pytest.param(array(3, DIMENSION), MalformedOutput, id="a row too many"),
    pytest.param(array(2, DIMENSION - 1), MalformedOutput, id="too narrow"),
    pytest.param(array(2, DIMENSION, 1), MalformedOutput, id="a dimension too many"),
    pytest.param(array(2), MalformedOutput, id="a dimension too few"),
    pytest.param(ValueError(SECRET), ForwardFailed, id="raises"),
    pytest.param(MemoryError(), ForwardFailed, id="memory error of its own"),
    pytest.param(OutOfMemory(2), OutOfMemory, id="out of memory"),
]


@pytest.mark.parametrize(("answer", "expected"), BAD_FORWARDS)
@in_skewed_loop
async def test_no_value_of_a_bad_forward_is_used(answer: Any, expected: type[TokenServeError]) -> None:
    """S0-32 to S0-43: rows of a batch whose forward raises or returns nonsense are tried alone, once each."""
    model = FakeModel()
    model.answers.append(answer)
    target = replica(model)
    reply = await target.infer(infer_call([[1, 2], [3]]))
    assert not reply.errors
    assert np.array_equal(reply.values, np.stack([vector([1, 2]), vector([3])]))
    assert model.forwards == [[[1, 2], [3]], [[1, 2]], [[3]]]
    assert (await target.stats()).retried_forwards == 1


@pytest.mark.parametrize(("answer", "expected"), BAD_FORWARDS)
@in_skewed_loop
async def test_only_the_guilty_row_fails_and_by_name(answer: Any, expected: type[TokenServeError]) -> None:
    """The row that fails alone too ends in the named error without a value; the batch after it is answered."""
    model = FakeModel()
    is_fine_alone = isinstance(answer, np.ndarray) and answer.shape == (1, DIMENSION)
    model.answers += [answer, array(2, DIMENSION) if is_fine_alone else answer]
    target = replica(model)
    reply = await target.infer(infer_call([[1, 2], [3]]))
    assert {index: type(error) for index, error in reply.errors.items()} == {0: expected}
    assert not reply.values[0].any()
    assert np.array_equal(reply.values[1], vector([3]))
    later = await target.infer(infer_call([[4, 5]]))
    stats = await target.stats()
    assert np.array_equal(later.values[0], vector([4, 5]))
    assert (stats.forwards, stats.tenants["acme"]) == (2, TenantCounts(rows=2, tokens=3, failed_rows=1))
    await target.check_health()


@in_skewed_loop
async def test_out_of_memory_cuts_the_budget_for_later_batches() -> None:
    """BL-141: after a batch that did not fit, batches are half as large; the replica lives."""
    model = FakeModel()
    target = replica(model, max_tokens=8)
    await target.reconfigure({"token_budget": 64})
    model.answers.append(OutOfMemory(8))
    rows = [[row] * 8 for row in range(8)]
    reply = await target.infer(infer_call(rows))
    assert not reply.errors
    assert [len(forward) for forward in model.forwards] == [8, 4, 4]
    assert (await target.stats()).token_budget == 32
    await target.infer(infer_call(rows))
    assert [len(forward) for forward in model.forwards[3:]] == [4, 4]
    assert (await target.stats()).out_of_memory == 1


@in_skewed_loop
async def test_memory_that_is_lost_for_good_fails_the_health_check() -> None:
    """BL-141: rows that do not fit alone, again and again, though the longest one fitted at load."""
    model = FakeModel()
    target = replica(model, max_tokens=8)
    for _ in range(EXHAUSTED_AFTER_FORWARDS):
        await target.check_health()
        model.answers.append(OutOfMemory(8))
        assert isinstance((await target.infer(infer_call([[1] * 8]))).errors[0], OutOfMemory)
    with pytest.raises(RuntimeError, match="out of memory"):
        await target.check_health()


@in_skewed_loop
async def test_a_lost_device_fails_the_health_check() -> None:
    """Nothing is tried again on a device that is lost: rows hear of it, and the replica asks to be replaced."""
    model = FakeModel()
    model.answers.append(DeviceLost(30.0))
    target = replica(model)
    reply = await target.infer(infer_call([[1], [2]]))
    assert [type(error) for error in reply.errors.values()] == [DeviceLost, DeviceLost]
    assert len(model.forwards) == 1
    with pytest.raises(RuntimeError, match="device"):
        await target.check_health()


@in_skewed_loop
async def test_s0_88_text_of_a_model_error_is_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    """What a model says when it raises may hold a payload: neither the reply nor the log has it."""
    model = FakeModel()
    model.answers.append(ValueError(SECRET))
    with caplog.at_level(logging.DEBUG):
        reply = await replica(model).infer(infer_call([[1, 2]]))
        await settle()
    assert SECRET not in reply.errors[0].detail + str(reply.errors[0])
    assert "ValueError" in caplog.text
    assert SECRET not in caplog.text


@in_skewed_loop
async def test_failed_forward_is_no_error_of_the_loop() -> None:
    """Counting a failed forward raises nothing: an error there would end the batcher's task unseen."""
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
    model = FakeModel()
    model.answers.append(ValueError(SECRET))
    target = replica(model)
    await target.infer(infer_call([[1, 2]]))
    await target.stop()
    await settle()
    gc.collect()  # asyncio reports an exception that nobody asked for when its task is gone
    assert not unseen


# ---- the door --------------------------------------------------------------------------------------------------------

REFUSED = [
    pytest.param(infer_call([[1, VOCAB_SIZE]]), TokenIdOutOfRange, id="an id at the vocabulary's end"),
    pytest.param(infer_call([[1, -1]]), TokenIdOutOfRange, id="a negative id"),
    pytest.param(infer_call([[1] * 257]), InputTooLong, id="a row above the bucket"),
    pytest.param(infer_call([]), ForwardFailed, id="no rows"),
    pytest.param(infer_call([[1, 2]], lengths=np.array([0, 2], dtype=np.int32)), ForwardFailed, id="an empty row"),
    pytest.param(infer_call([[1, 2]], lengths=np.array([3, -1], dtype=np.int32)), ForwardFailed, id="negative length"),
    pytest.param(infer_call([[1, 2]], lengths=np.array([1], dtype=np.int32)), ForwardFailed, id="ids left over"),
    pytest.param(infer_call([[1, 2]], lengths=np.array([3], dtype=np.int32)), ForwardFailed, id="ids missing"),
]


@pytest.mark.parametrize(("call", "expected"), REFUSED)
@in_skewed_loop
async def test_impossible_rows_never_reach_the_model(call: InferCall, expected: type[TokenServeError]) -> None:
    """A call that the ingress should not have let through is refused before the queue (BL-069)."""
    model = FakeModel()
    assert type(await error_of(replica(model), call)) is expected
    assert model.forwards == []


@pytest.mark.parametrize(
    ("user_config", "num_rows", "expected"),
    [
        pytest.param({"max_queued_rows": 2}, 3, RequestTooLarge, id="rows that never fit"),
        pytest.param({"max_queued_tokens": 2}, 3, RequestTooLarge, id="tokens that never fit"),
        pytest.param({"max_queued_rows": 2}, 2, Overloaded, id="rows beside those that wait"),
        pytest.param({"max_queued_tokens": 2}, 2, Overloaded, id="tokens beside those that wait"),
    ],
)
@in_skewed_loop
async def test_refused_rows_are_counted(
    user_config: dict[str, Any], num_rows: int, expected: type[TokenServeError]
) -> None:
    """Admission refuses a whole call at once, by name, and counts its rows for its tenant."""
    model = FakeModel()
    model.hold()
    target = replica(model)
    await target.reconfigure(user_config)
    running = asyncio.create_task(target.infer(infer_call([[1]])))
    await model.started()
    waiting = asyncio.create_task(target.infer(infer_call([[2]])))
    await settle()
    error = await error_of(target, infer_call([[3]] * num_rows, tenant="globex"))
    model.release()
    await asyncio.gather(running, waiting)
    stats = await target.stats()
    assert isinstance(error, expected)
    assert stats.tenants["globex"] == TenantCounts(refused=num_rows)
    assert stats.tenants["acme"] == TenantCounts(rows=2, tokens=2)


@in_skewed_loop
async def test_overload_ends_when_the_backlog_is_worked_off() -> None:
    """After a refusal and a drained queue the same call is answered."""
    model = FakeModel()
    model.hold()
    target = replica(model)
    await target.reconfigure({"max_queued_rows": 1})
    others = [asyncio.create_task(target.infer(infer_call([[1]])))]
    await model.started()
    others.append(asyncio.create_task(target.infer(infer_call([[2]]))))
    await settle()
    assert isinstance(await error_of(target, infer_call([[3]])), Overloaded)
    model.release()
    await asyncio.gather(*others)
    assert np.array_equal((await target.infer(infer_call([[3]]))).values[0], vector([3]))


# ---- callers that leave, deadlines, stop -----------------------------------------------------------------------------


@in_skewed_loop
async def test_rows_of_a_cancelled_caller_never_reach_the_model() -> None:
    """A caller that leaves while its rows wait takes them out of the queue."""
    model = FakeModel()
    model.hold()
    target = replica(model)
    running = asyncio.create_task(target.infer(infer_call([[1]])))
    await model.started()
    leaving = asyncio.create_task(target.infer(infer_call([[2], [3]])))
    await settle()
    assert (await target.stats()).queued_rows == 2
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    stats = await target.stats()
    assert stats.queued_rows == 0
    assert stats.tenants["acme"].failed_rows == 2, "accepted, and not answered"
    model.release()
    await running
    await target.stop()
    assert model.forwards == [[[1]]]


@in_skewed_loop
async def test_caller_that_leaves_a_running_forward_harms_nobody() -> None:
    """When one of two callers in a forward leaves, the other gets its own rows."""
    model = FakeModel()
    model.hold()
    target = replica(model)
    first = asyncio.create_task(target.infer(infer_call([[9]])))
    await model.started()
    leaving = asyncio.create_task(target.infer(infer_call([[1]])))
    staying = asyncio.create_task(target.infer(infer_call([[2, 3]])))
    await settle()
    model.release()
    await model.started()
    leaving.cancel()
    reply = await staying
    await asyncio.gather(first, leaving, return_exceptions=True)
    assert model.forwards == [[[9]], [[1], [2, 3]]]
    assert np.array_equal(reply.values[0], vector([2, 3]))


@in_skewed_loop
async def test_row_whose_time_is_over_is_not_run() -> None:
    """A row that waits past its deadline ends in DeadlineExceeded and is counted as failed."""
    model = FakeModel()
    target = replica(model)
    model.hold()
    running = asyncio.create_task(target.infer(infer_call([[9]])))
    await model.started()
    reply = await target.infer(infer_call([[1]], timeout_s=0.05))
    model.release()
    await running
    assert isinstance(reply.errors[0], DeadlineExceeded)
    assert model.forwards == [[[9]]]
    assert (await target.stats()).tenants["acme"] == TenantCounts(rows=1, tokens=1, failed_rows=1)


@in_skewed_loop
async def test_time_that_is_too_short_is_refused_at_the_door() -> None:
    """No forward could end in no time: refused before the queue, and counted so."""
    model = FakeModel()
    target = replica(model)
    assert isinstance(await error_of(target, infer_call([[1]], timeout_s=0.0)), DeadlineUnreachable)
    assert (await target.stats()).tenants["acme"] == TenantCounts(refused=1)


@in_skewed_loop
async def test_stop_finishes_what_was_accepted() -> None:
    """Stopping answers running and waiting rows, then refuses new ones."""
    model = FakeModel()
    model.hold()
    target = replica(model)
    accepted = [asyncio.create_task(target.infer(infer_call([[1]])))]
    await model.started()
    accepted.append(asyncio.create_task(target.infer(infer_call([[2]]))))
    await settle()
    stopping = asyncio.create_task(target.stop())
    await settle()
    assert isinstance(await error_of(target, infer_call([[3]])), Draining)
    model.release()
    replies = await asyncio.gather(*accepted)
    await stopping
    assert [reply.errors for reply in replies] == [{}, {}]
    assert model.forwards == [[[1]], [[2]]]


@in_skewed_loop
async def test_stop_that_takes_too_long_ends_rows_by_name() -> None:
    """What is not done after the stop's time ends in Draining, which the ingress sends elsewhere."""
    model = FakeModel()
    model.hold()
    target = replica(model)
    inside = asyncio.create_task(target.infer(infer_call([[1]])))
    await model.started()
    stopping = asyncio.create_task(target.stop())
    await settle()
    await current_loop().skip(model_replica.STOP_TIMEOUT_S + 1)
    reply = await inside
    await stopping
    model.release()
    assert isinstance(reply.errors[0], Draining)


# ---- health ----------------------------------------------------------------------------------------------------------


@in_skewed_loop
async def test_dead_batch_task_fails_the_health_check() -> None:
    """When the task behind @serve.batch has ended, no batch would ever run again, and the check says so."""
    target = replica(FakeModel())
    await target.infer(infer_call([[1]]))
    await target.check_health()
    (task,) = [task for task in asyncio.all_tasks() if "_process_batches" in repr(task.get_coro())]
    task.cancel()
    await settle()
    with pytest.raises(RuntimeError, match="batching task has ended"):
        await target.check_health()


@in_skewed_loop
async def test_stuck_forward_fails_the_health_check() -> None:
    """A forward is healthy up to `stuck_forward_s` and not beyond; once it ends the replica is healthy again."""
    model = FakeModel()
    model.hold()
    target = replica(model)
    await target.reconfigure({"stuck_forward_s": 100.0})
    running = asyncio.create_task(target.infer(infer_call([[1]])))
    await model.started()
    await current_loop().skip(50)
    await target.check_health()
    await current_loop().skip(51)
    with pytest.raises(RuntimeError, match="a forward has been running for 10"):
        await target.check_health()
    model.release()
    await asyncio.gather(running, return_exceptions=True)
    await target.check_health()


@in_skewed_loop
async def test_probe_runs_a_forward_and_counts_as_nobodys() -> None:
    """A probe of an idle replica runs the model and shows up in no tenant's counts."""
    model = FakeModel()
    target = replica(model)
    await target.probe(3.0)
    stats = await target.stats()
    assert model.forwards == [[[0]]]
    assert (stats.probe_forwards, stats.forwards, stats.tenants) == (1, 0, {})
    assert (stats.computed_tokens, stats.charged_tokens) == (0, 0)


@in_skewed_loop
async def test_probe_takes_a_recent_success_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that succeeded a moment ago answers the probe; one of PROBE_FRESH_S ago does not."""
    now = 100.0
    monkeypatch.setattr(model_replica.time, "monotonic", lambda: now)
    model = FakeModel()
    target = replica(model)
    await target.infer(infer_call([[1]]))
    now = 100.0 + model_replica.PROBE_FRESH_S - 0.001
    await target.probe(3.0)
    assert len(model.forwards) == 1
    now = 100.0 + model_replica.PROBE_FRESH_S
    await target.probe(3.0)
    assert len(model.forwards) == 2


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param(ValueError(SECRET), ForwardFailed, id="raises"),
        pytest.param(array(1, DIMENSION, fill=np.nan), MalformedOutput, id="nan"),
    ],
)
@in_skewed_loop
async def test_probe_raises_what_the_forward_ended_in(answer: Any, expected: type[TokenServeError]) -> None:
    """A failing model fails the probe, and the failure is nobody's failed row."""
    model = FakeModel()
    model.answers.append(answer)
    target = replica(model)
    with pytest.raises(expected):
        await target.probe(3.0)
    assert (await target.stats()).tenants == {}


# ---- one forward -----------------------------------------------------------------------------------------------------

COUNTED = [
    pytest.param((), (1, 160, 160, 160), id="ragged: one forward, 160 computed and charged"),
    pytest.param((16, 64, 256), (3, 160, 160, 336), id="padded by ceiling: three forwards, 336 charged"),
    pytest.param((256,), (1, 160, 300, 768), id="padded in one rectangle: 300 computed"),
]


@pytest.mark.parametrize(("ceilings", "expected"), COUNTED)
@in_skewed_loop
async def test_s2_02_rows_of_10_50_and_100_tokens(ceilings: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Issue 2, point 2: forwards, real, computed and charged tokens of one request in each layout."""
    model = FakeModel(layout="padded" if ceilings else "ragged")
    target = replica(model, ceilings=ceilings)
    reply = await target.infer(infer_call(rows_of_lengths(10, 50, 100)))
    stats = await target.stats()
    tokens = stats.tenants["acme"].tokens
    assert (stats.forwards, tokens, stats.computed_tokens, stats.charged_tokens) == expected
    assert reply.computed_tokens == stats.computed_tokens
    assert len(model.forwards) == expected[0]


@pytest.mark.parametrize("ceilings", [(), (4, 8, 16)], ids=["ragged", "padded"])
@in_skewed_loop
async def test_every_row_gets_its_own_value(ceilings: tuple[int, ...]) -> None:
    """Rows of many callers, mixed in forwards, come back to their callers in order."""
    target = replica(FakeModel(layout="padded" if ceilings else "ragged"), max_tokens=16, ceilings=ceilings)
    await target.reconfigure({"token_budget": 16})
    requests = [[[caller, 7, 9][: 1 + caller % 3], [caller] * (1 + caller % 16)] for caller in range(30)]
    replies = await asyncio.gather(*(target.infer(infer_call(rows)) for rows in requests))
    values = np.stack([reply.values for reply in replies])
    assert np.array_equal(values, np.stack([[vector(row) for row in rows] for rows in requests]))


@in_skewed_loop
async def test_forward_runs_in_one_worker_thread() -> None:
    """The event loop stays free while the model computes, and the model, loading included, meets one thread only."""
    model = FakeModel()
    target = replica(model)
    await target.infer(infer_call([[1]]))
    await target.infer(infer_call([[2]]))
    assert model.threads == {"forward_0"}


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        pytest.param(("acme", "globex"), [[[9]], [[1]], [[2]]], id="two groups: two forwards"),
        pytest.param(("shared", "shared"), [[[9]], [[1], [2]]], id="one group: one forward"),
    ],
)
@in_skewed_loop
async def test_tenants_share_a_forward_only_within_a_batch_group(
    groups: tuple[str, str], expected: list[list[list[int]]]
) -> None:
    """Rows of two tenants that wait together run together exactly when their batch group is the same."""
    model = FakeModel()
    model.hold()
    target = replica(model)
    calls = [asyncio.create_task(target.infer(infer_call([[9]], batch_group="busy")))]
    await model.started()
    calls += [
        asyncio.create_task(target.infer(infer_call([[row]], tenant=tenant, batch_group=group)))
        for row, tenant, group in zip((1, 2), ("acme", "globex"), groups, strict=True)
    ]
    await settle()
    model.release()
    await asyncio.gather(*calls)
    stats = await target.stats()
    assert model.forwards == expected
    assert {name: counts.rows for name, counts in stats.tenants.items()} == {"acme": 2, "globex": 1}


# ---- settings --------------------------------------------------------------------------------------------------------


@in_skewed_loop
async def test_reconfigure_applies_to_the_next_forward() -> None:
    """A new row limit holds for rows that wait already."""
    model = FakeModel()
    model.hold()
    target = replica(model)
    calls = [asyncio.create_task(target.infer(infer_call([[9]])))]
    await model.started()
    calls.append(asyncio.create_task(target.infer(infer_call([[1], [2], [3]]))))
    await settle()
    await target.reconfigure({"max_rows": 2})
    model.release()
    await asyncio.gather(*calls)
    assert model.forwards == [[[9]], [[1], [2]], [[3]]]


@pytest.mark.parametrize(
    ("user_config", "key"),
    [
        pytest.param({"max_row": 2}, "max_row", id="unknown key"),
        pytest.param({"max_rows": "2"}, "max_rows", id="wrong type"),
        pytest.param({"max_rows": 0}, "max_rows", id="out of range"),
        pytest.param({"token_budget": 255}, "token_budget", id="budget below the longest row"),
    ],
)
@in_skewed_loop
async def test_bad_reconfigure_names_the_key_and_keeps_the_old(user_config: dict[str, Any], key: str) -> None:
    """A user_config with a mistake is refused with its key, and the settings before stay in force."""
    model = FakeModel()
    target = replica(model)
    await target.reconfigure({"max_rows": 1, "stuck_forward_s": 5.0})
    with pytest.raises((ValidationError, ValueError), match=key):
        await target.reconfigure(user_config)
    await target.infer(infer_call([[1], [2]]))
    assert model.forwards == [[[1]], [[2]]]


@pytest.mark.parametrize(
    ("device", "expected"),
    [pytest.param("cpu", [16, 4], id="cpu: 2048"), pytest.param("cuda:0", [20], id="gpu: 16384")],
)
@in_skewed_loop
async def test_default_budget_goes_by_device(device: str, expected: list[int]) -> None:
    """Without a token_budget a forward holds what suits the device."""
    model = FakeModel(device=device)
    await replica(model, max_tokens=128).infer(infer_call([[1] * 128] * 20))
    assert list(map(len, model.forwards)) == expected


# ---- what it says of itself ------------------------------------------------------------------------------------------


@in_skewed_loop
async def test_describe_answers_once_per_fingerprint() -> None:
    """A caller that knows the fingerprint is told nothing new; anyone else gets the revision."""
    target = replica(FakeModel())
    answer = await target.describe()
    assert answer is not None
    fingerprint, info = answer
    assert (info.revision, info.max_tokens, info.vocab_size) == ("minilm@v1", 256, VOCAB_SIZE)
    assert await target.describe(fingerprint) is None
    assert await target.describe("another") == answer


@in_skewed_loop
async def test_fingerprint_tells_revisions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas of one revision agree although they were started at different times; another revision differs."""
    starts = itertools.count(1_700_000_000.0, 60.0)
    monkeypatch.setattr(model_replica.time, "time", lambda: next(starts))
    targets = [replica(FakeModel(), revision=revision) for revision in ("minilm@v1", "minilm@v1", "minilm@v2")]
    one, same, other = [answer[0] for target in targets if (answer := await target.describe())]
    assert one == same != other
