"""Seed 0, queueing, delay, concurrency, the caller's pool and shutdown (S0-100 to S0-129)."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from batching.batcher import Batcher
from batching.errors import DeadlineExceeded, Draining, ForwardFailed, Overloaded, QueueFull
from batching.groups import GroupSettings, InferenceGroups, inference_groups
from batching.padding import ModelBatch
from tests.fakes import (
    FakeForward,
    FakeModel,
    Harness,
    HeldExecutor,
    advance,
    answer,
    batch_limits,
    doubled,
    in_loop,
    kinds,
    outcomes,
    queue_limits,
    requests,
    rows,
    settle,
)

THREAD_S = 5.0
"""How long a pool thread waits for an event that a correct run sets within milliseconds."""


# ---- waiting room ----------------------------------------------------------------------------------------------------


@in_loop
async def test_s0_100_sixty_fifth_waiting_item_fails_at_once() -> None:
    """S0-100: 64 items of a group wait, the 65th hears that the queue is full, and none of the 64 is dropped."""
    harness = Harness(executor=(pool := HeldExecutor()), max_rows=1)
    running = await harness.start(requests([1]))
    await advance(harness.clock, 0.01)
    waiting = await harness.start(requests([1] * 64))
    (refused,) = await harness.start(requests([1]))
    error = refused.exception()
    assert isinstance(error, QueueFull)
    assert (error.limit, error.retry_after_s > 0) == (64, True)
    await _run_all(pool)
    assert kinds(await outcomes(running + waiting)) == ["TokenPrediction"] * 65


async def _run_all(pool: HeldExecutor) -> None:
    await settle()
    while pool.waiting:
        pool.run()
        await settle()


@in_loop
async def test_s0_101_running_rows_do_not_count() -> None:
    """S0-101: with 16 rows in a call, 64 more may wait."""
    harness = Harness(executor=(pool := HeldExecutor()))
    tasks = await harness.start(requests([1] * 16))
    tasks += await harness.start(requests([1] * 64))
    assert not any(task.done() for task in tasks)
    await _run_all(pool)
    assert kinds(await outcomes(tasks)) == ["TokenPrediction"] * 80


@in_loop
async def test_s0_102_full_group_leaves_others_alone() -> None:
    """S0-102: another group of the same tenant, and another tenant, still get in."""
    harness = Harness(max_queued_rows_per_group=2, max_wait_s=60.0)
    await harness.start(requests([1, 1]))
    refused, other_bucket = await harness.start(requests([1, 17]))
    (other_tenant,) = await harness.start(requests([1], tenants="b"))
    await harness.groups.close()
    assert kinds(await outcomes([refused, other_bucket, other_tenant])) == ["QueueFull", *["TokenPrediction"] * 2]


@in_loop
async def test_s0_103_lone_request_leaves_after_the_delay() -> None:
    """S0-103: just before 10 ms nothing runs, at 10 ms the partial batch does."""
    harness = Harness()
    tasks = await harness.start(requests([5]))
    await advance(harness.clock, 0.009999)
    assert harness.model.shapes == []
    await advance(harness.clock, 0.01)
    assert (harness.model.shapes, kinds(await outcomes(tasks))) == ([(1, 5)], ["TokenPrediction"])


@in_loop
async def test_s0_104_delay_is_the_age_of_the_oldest_item() -> None:
    """S0-104: with arrivals every 5 ms the batch leaves 10 ms after the first; the third does not put it off."""
    harness = Harness()
    await harness.start(requests([1]))
    await advance(harness.clock, 0.005)
    await harness.start(requests([2]))
    await advance(harness.clock, 0.009999)
    await harness.start(requests([3]))
    await advance(harness.clock, 0.01)
    assert harness.model.shapes == [(3, 3)]


@pytest.mark.parametrize(
    ("changes", "lengths", "at_once", "at_the_delay"),
    [
        pytest.param({"max_rows": 3}, [1] * 4, [(3, 1)], [(3, 1), (1, 1)], id="count-binds"),
        pytest.param({"max_rows": 8}, [64] * 5, [(4, 64)], [(4, 64), (1, 64)], id="cost-binds"),
        pytest.param({"max_rows": 8}, [1] * 5, [], [(5, 1)], id="age-binds"),
        pytest.param({"max_rows": 1}, [1] * 3, [(1, 1)], [(1, 1)], id="group-concurrency-binds"),
    ],
)
@in_loop
async def test_s0_105_whichever_limit_binds_first_decides(
    changes: dict[str, int], lengths: list[int], at_once: list[Any], at_the_delay: list[Any]
) -> None:
    """S0-105, ACC-04: count, cost, age and one call per group apply together; calls are held in the last case."""
    held = HeldExecutor() if changes["max_rows"] == 1 else None
    harness = Harness(executor=held, max_concurrent_calls=4, **changes)
    await harness.start(requests(lengths))
    assert sorted(harness.groups.call_shapes.elements()) == sorted(at_once)
    await advance(harness.clock, 0.01)
    assert sorted(harness.groups.call_shapes.elements()) == sorted(at_the_delay)
    harness.groups.abort()


@in_loop
async def test_s0_106_one_call_per_group_while_others_proceed() -> None:
    """S0-106: the group's second batch starts when its first ends; another group runs meanwhile."""
    harness = Harness(executor=(pool := HeldExecutor()), max_concurrent_calls=4, max_rows=1)
    first, second, other = await harness.start(requests([1, 1, 1], tenants="aab"))
    assert len(pool.waiting) == 2
    pool.run(1)
    assert kinds(await outcomes([other])) == ["TokenPrediction"]
    assert pool.waiting
    pool.run()
    await settle()
    assert (first.done(), second.done(), len(pool.waiting)) == (True, False, 1)
    pool.run()
    await outcomes([second])


@in_loop
async def test_s0_107_admission_is_bounded_above_the_groups() -> None:
    """S0-107: a cap over all groups refuses work although each group has room."""
    batcher: Batcher[int, int] = Batcher(
        FakeForward(held=True), limits=batch_limits(), queue_limits=queue_limits(max_queued_rows=3)
    )
    batcher.submit(rows([1, 1, 1], groups="abc"))
    with pytest.raises(Overloaded) as caught:
        batcher.submit(rows([1], groups="d"))
    assert type(caught.value) is Overloaded
    batcher.abort()


def test_s0_107_worst_case_of_the_groups_is_the_cap() -> None:
    """S0-107: for the recipe the cap is groups x waiting room, in rows and in cost."""
    limits = GroupSettings(max_groups=3, max_queued_rows_per_group=64).queue_limits
    assert (limits.max_queued_rows, limits.max_queued_cost) == (192, 192 * 256)


@in_loop
async def test_s0_108_cancelled_waiting_caller_frees_its_place() -> None:
    """S0-108: the item of a caller that left is not in the call, and another takes its place in the queue."""
    harness = Harness(max_queued_rows_per_group=2, max_wait_s=60.0)
    gone, stays = await harness.start(requests([1, 2]))
    gone.cancel()
    await settle()
    (later,) = await harness.start(requests([3]))
    await harness.groups.close()
    assert kinds(await outcomes([gone, stays, later])) == ["CancelledError", *["TokenPrediction"] * 2]
    assert [batch.attention_mask for batch in harness.model.batches] == [((1, 1, 0), (1, 1, 1))]


@in_loop
async def test_s0_108_cancelled_running_caller_leaves_the_others_intact() -> None:
    """S0-108: the neighbours of a caller that left during the call get their own values."""
    harness = Harness(executor=(pool := HeldExecutor()), max_rows=3)
    cohort = requests([1, 2, 3])
    first, gone, last = await harness.start(cohort)
    gone.cancel()
    await settle()
    pool.run()
    results = await outcomes([first, gone, last])
    assert kinds(results) == ["TokenPrediction", "CancelledError", "TokenPrediction"]
    assert (results[0].values, results[2].values) == (answer(cohort[0]), answer(cohort[2]))


@in_loop
async def test_s0_109_caller_timeout_ends_that_wait_only() -> None:
    """S0-109: one caller's timeout is its own; its neighbour in the same call is answered."""
    harness = Harness(executor=(pool := HeldExecutor()), max_rows=2)
    impatient, patient = requests([1, 2])
    (task,) = await harness.start([patient])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(harness.groups.process(impatient), timeout=0.001)
    await advance(harness.clock, 0.01)
    await _run_all(pool)
    assert (await task).values == answer(patient)


@in_loop
async def test_s0_109_models_timeout_is_a_failure() -> None:
    """S0-109: a TimeoutError of the model is reported as the model's failure, not as anybody's deadline."""

    def late(_: ModelBatch) -> object:
        raise TimeoutError("model")

    (failed,) = await Harness(FakeModel(late)).outcomes(requests([1]))
    assert (type(failed), failed.reason) == (ForwardFailed, "TimeoutError")
    assert not isinstance(failed, TimeoutError | DeadlineExceeded)


# ---- pool ------------------------------------------------------------------------------------------------------------


class Meter:
    """A model that notes how many of its calls run at once; `together` calls must meet before any ends."""

    def __init__(self, together: int) -> None:
        self.peak = 0
        self._running = 0
        self._lock = threading.Lock()
        self._meet = threading.Barrier(together, timeout=THREAD_S)

    def __call__(self, batch: ModelBatch) -> object:
        """Run one batch."""
        with self._lock:
            self._running += 1
            self.peak = max(self.peak, self._running)
        self._meet.wait()
        with self._lock:
            self._running -= 1
        return doubled(batch)


@pytest.mark.parametrize("workers", [1, 2])
@in_loop
async def test_s0_120_pool_bounds_calls_over_all_groups(workers: int) -> None:
    """S0-120, ACC-04: with k workers and more busy groups exactly k calls run at once."""
    meter = Meter(workers)
    with ThreadPoolExecutor(max_workers=workers) as pool:
        settings = GroupSettings(max_concurrent_calls=8)
        async with inference_groups(meter, executor=pool, settings=settings) as groups:
            results = await outcomes([groups.process(one) for one in requests([1] * 6, tenants="abcdef")])
    assert (kinds(results), meter.peak) == (["TokenPrediction"] * 6, workers)


@in_loop
async def test_s0_120_calls_are_bounded_without_the_pool() -> None:
    """S0-120: no more than `max_concurrent_calls` are handed to the pool, so that its queue never fills."""
    harness = Harness(executor=(pool := HeldExecutor()), max_concurrent_calls=2, max_rows=1)
    tasks = await harness.start(requests([1] * 6, tenants="abcdef"))
    assert len(pool.waiting) == 2
    await _run_all(pool)
    assert kinds(await outcomes(tasks)) == ["TokenPrediction"] * 6


@in_loop
async def test_s0_121_loop_keeps_running_while_the_model_blocks() -> None:
    """S0-121: the model, in a thread of the pool, ends only because the loop could tick meanwhile."""
    ticked, threads = threading.Event(), []

    def model(batch: ModelBatch) -> object:
        threads.append(threading.current_thread())
        return doubled(batch) if ticked.wait(THREAD_S) else None

    with ThreadPoolExecutor(max_workers=1) as pool:
        async with inference_groups(model, executor=pool, settings=GroupSettings(max_wait_s=0.0)) as groups:
            task = asyncio.create_task(groups.process(requests([1])[0]))
            await _until(lambda: threads)
            await settle()
            ticked.set()
            assert kinds(await outcomes([task])) == ["TokenPrediction"]
    assert threads[0] is not threading.current_thread()


async def _until(condition: Callable[[], object]) -> None:
    """Let the loop run until another thread has made `condition` true."""
    while not condition():  # noqa: ASYNC110 - a thread cannot set an asyncio.Event
        await asyncio.sleep(0)


class ClosableModel(FakeModel):
    """A model with a `close`, as a client of some engine has."""

    closed = False
    calls_after_close = 0

    def __call__(self, batch: ModelBatch) -> object:
        """Run one batch."""
        self.calls_after_close += self.closed
        return super().__call__(batch)

    def close(self) -> None:
        """Free what it holds."""
        self.closed = True


@in_loop
async def test_s0_122_pool_and_model_survive_the_groups() -> None:
    """S0-122, ACC-04: after the groups have ended the pool takes work and nobody closed the model."""
    model = ClosableModel()
    with ThreadPoolExecutor(max_workers=1) as pool:
        async with inference_groups(model, executor=pool) as groups:
            await groups.process(requests([1])[0])
        assert (pool.submit(lambda: 7).result(THREAD_S), model.closed) == (7, False)


# ---- shutdown --------------------------------------------------------------------------------------------------------


@in_loop
async def test_s0_123_exit_drains() -> None:
    """S0-123: every accepted request is resolved when leaving the context returns, also those of partial batches."""
    cohort = requests([1, 20, 200] * 5, tenants="ab")
    with ThreadPoolExecutor(max_workers=1) as pool:
        async with inference_groups(FakeModel(), executor=pool, settings=GroupSettings(max_wait_s=60.0)) as groups:
            tasks = [asyncio.create_task(groups.process(one)) for one in cohort]
            await settle()
        assert [task.result().values for task in tasks] == [answer(one) for one in cohort]


@in_loop
async def test_s0_124_submit_after_close_begins_fails_at_once() -> None:
    """S0-124: while the drain is under way a new request is refused; the accepted one is answered."""
    harness = Harness(executor=(pool := HeldExecutor()))
    (accepted,) = await harness.start(requests([1]))
    closing = asyncio.create_task(harness.groups.close())
    await settle()
    (refused,) = await harness.start(requests([1]))
    assert isinstance(refused.exception(), Draining)
    await _run_all(pool)
    await closing
    assert kinds(await outcomes([accepted])) == ["TokenPrediction"]


@in_loop
async def test_s0_125_forced_stop_leaves_nobody_waiting() -> None:
    """S0-125, ACC-04: on abort the running and the queued requests end at once; the thread's late result is dropped."""
    started, release = threading.Event(), threading.Event()
    finished: list[bool] = []

    def model(batch: ModelBatch) -> object:
        started.set()
        finished.append(release.wait(THREAD_S))
        return doubled(batch)

    with ThreadPoolExecutor(max_workers=1) as pool:
        groups = InferenceGroups(model, executor=pool, settings=GroupSettings(max_rows=1))
        tasks = [asyncio.create_task(groups.process(one)) for one in requests([1] * 5)]
        await _until(started.is_set)
        groups.abort()
        assert kinds(await outcomes(tasks)) == ["Draining"] * 5
        assert finished == []
        release.set()
        await groups.close()
    assert finished == [True]


@in_loop
async def test_s0_126_close_with_timeout_cancels_nothing() -> None:
    """S0-126: a close that runs out of time says so; the call goes on and a later close completes."""
    harness = Harness(executor=(pool := HeldExecutor()))
    tasks = await harness.start(requests([1]))
    with pytest.raises(TimeoutError):
        await harness.groups.close(timeout_s=0.001)
    assert (len(pool.waiting), tasks[0].done()) == (1, False)
    pool.run()
    await harness.groups.close()
    assert kinds(await outcomes(tasks)) == ["TokenPrediction"]


@in_loop
async def test_s0_127_close_is_idempotent_and_final() -> None:
    """S0-127: closing again changes nothing, and closed groups take no work ever again."""
    harness = Harness()
    await harness.groups.close()
    await harness.groups.close()
    assert kinds(await harness.outcomes(requests([1]))) == ["Draining"]


@in_loop
async def test_s0_127_body_exception_still_drains() -> None:
    """S0-127: when the body raises, accepted requests are answered before the exception goes on."""
    tasks: list[asyncio.Task[Any]] = []

    async def body(pool: ThreadPoolExecutor) -> None:
        async with inference_groups(FakeModel(), executor=pool, settings=GroupSettings(max_wait_s=60.0)) as groups:
            tasks.append(asyncio.create_task(groups.process(requests([1])[0])))
            await settle()
            raise ZeroDivisionError

    with ThreadPoolExecutor(max_workers=1) as pool:
        with pytest.raises(ZeroDivisionError):
            await body(pool)
        assert kinds([task.result() for task in tasks]) == ["TokenPrediction"]


@in_loop
async def test_s0_128_pool_shut_down_under_the_groups() -> None:
    """S0-128: callers of a pool that takes no more work get an error, one batch after the other."""
    pool = ThreadPoolExecutor(max_workers=1)
    async with inference_groups(FakeModel(), executor=pool, settings=GroupSettings(max_rows=1)) as groups:
        await groups.process(requests([1])[0])
        pool.shutdown()
        results = await outcomes([groups.process(one) for one in requests([1] * 3)])
    assert kinds(results) == ["ForwardFailed"] * 3


@in_loop
async def test_s0_128_pool_drops_a_submitted_call() -> None:
    """S0-128: when the pool cancels a call that it had accepted, its callers and those behind get an error."""
    busy, free = threading.Event(), threading.Event()
    pool = ThreadPoolExecutor(max_workers=1)
    pool.submit(lambda: (busy.set(), free.wait(THREAD_S)))
    async with inference_groups(FakeModel(), executor=pool, settings=GroupSettings(max_rows=1)) as groups:
        tasks = [asyncio.create_task(groups.process(one)) for one in requests([1] * 3)]
        await _until(busy.is_set)
        await settle()
        pool.shutdown(wait=False, cancel_futures=True)
        free.set()
        results = await outcomes(tasks)
    assert kinds(results) == ["Draining", "ForwardFailed", "ForwardFailed"]
    pool.shutdown()


@contextmanager
def _closing(model: ClosableModel) -> Iterator[ClosableModel]:
    try:
        yield model
    finally:
        model.close()


@pytest.mark.parametrize("stop", [lambda groups: None, lambda groups: groups.abort()], ids=["drained", "forced"])
@in_loop
async def test_s0_129_no_call_starts_after_the_model_is_closed(stop: Callable[[InferenceGroups], None]) -> None:
    """S0-129: with model, pool and groups nested in this order the model is closed after its last call."""
    with _closing(ClosableModel()) as model, ThreadPoolExecutor(max_workers=2) as pool:
        settings = GroupSettings(max_rows=1, max_concurrent_calls=2)
        async with inference_groups(model, executor=pool, settings=settings) as groups:
            tasks = [asyncio.create_task(groups.process(one)) for one in requests([1] * 8, tenants="ab")]
            await _until(lambda: model.batches)
            stop(groups)
    await outcomes(tasks)
    assert (model.closed, model.calls_after_close) == (True, 0)
