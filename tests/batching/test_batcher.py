"""The batcher on a fake clock: when forwards start, how rows end, and that nothing is left behind."""

import asyncio
import contextvars
import gc
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batching.batcher import Batcher
from batching.errors import (
    DeadlineExceeded,
    Draining,
    ForwardFailed,
    InputTooLong,
    Overloaded,
    RequestTooLarge,
    TokenServeError,
)
from batching.forwards import FinishedForward
from batching.limits import BatchLimits
from tests import strategies
from tests.fakes import (
    FakeClock,
    FakeForward,
    advance,
    batch_limits,
    in_loop,
    kinds,
    outcomes,
    queue_limits,
    rows,
    settle,
)


class Bench:
    """A batcher, its clock, its forward and what its observer saw."""

    def __init__(self, forward: Any = None, *, queue: dict[str, int] | None = None, **limits: Any) -> None:
        self.clock = FakeClock()
        self.forward = forward or FakeForward()
        self.seen: list[FinishedForward[int]] = []
        self.batcher: Batcher[int, Any] = Batcher(
            self.forward,
            limits=batch_limits(**limits),
            queue_limits=queue_limits(**queue or {}),
            clock=self.clock,
            observe=self.seen.append,
        )

    async def submit(self, *args: Any, **kwargs: Any) -> list[asyncio.Future[Any]]:
        """Submit `rows(...)` and let happen what can."""
        futures = self.batcher.submit(rows(*args, **kwargs))
        await settle()
        return futures


# ---- when a batch starts ---------------------------------------------------------------------------------------------


@in_loop
async def test_rows_of_one_turn_find_each_other() -> None:
    """Without gathering, rows that arrive in the same turn of the loop share a forward."""
    bench = Bench()
    first = bench.batcher.submit(rows([10]))
    second = bench.batcher.submit(rows([20]))
    await settle()
    assert (len(bench.forward.calls), await outcomes(first + second)) == (1, [0, 0])


@in_loop
async def test_wait_is_measured_from_the_oldest_row() -> None:
    """One step before the oldest row's wait nothing runs, at it everything that waits."""
    bench = Bench(max_wait_s=1.0)
    await bench.submit([10])
    await advance(bench.clock, 0.75)
    await bench.submit([20])
    await advance(bench.clock, 0.9999)
    assert bench.forward.calls == []
    await advance(bench.clock, 1.0)
    assert [len(call) for call in bench.forward.calls] == [2]


@in_loop
async def test_full_batch_calls_the_timer_off() -> None:
    """A batch that leaves early leaves no timer behind."""
    bench = Bench(max_wait_s=1.0)
    await bench.submit([50])
    assert bench.clock.pending() == [1.0]
    await bench.submit([50])
    assert (bench.clock.pending(), len(bench.forward.calls)) == ([], 1)


@in_loop
async def test_one_timer_serves_all_rows() -> None:
    """Later rows do not set timers of their own while the first one's moment stands."""
    bench = Bench(max_wait_s=1.0)
    await bench.submit([1])
    await bench.submit([1])
    await bench.submit([1], timeout_s=9.0)
    assert (bench.clock.pending(), len(bench.clock.contexts)) == ([1.0], 1)


@in_loop
async def test_batch_grows_while_the_model_is_busy() -> None:
    """Rows that arrive during a forward leave together when it ends."""
    bench = Bench(FakeForward(held=True))
    await bench.submit([1])
    await bench.submit([2])
    await bench.submit([3])
    assert (len(bench.forward.calls), bench.batcher.queued_rows, bench.batcher.queued_tokens) == (1, 2, 5)
    bench.forward.release()
    await settle()
    assert [len(call) for call in bench.forward.calls] == [1, 2]


@pytest.mark.parametrize(
    ("limits", "groups", "running"),
    [
        pytest.param({"max_concurrent_forwards": 2}, "ab", 2, id="two-groups"),
        pytest.param({"max_concurrent_forwards": 2}, "abc", 2, id="over-all-groups"),
        pytest.param({"max_concurrent_forwards": 2}, "aa", 1, id="one-per-group"),
        pytest.param({"max_concurrent_forwards": 3, "max_concurrent_per_group": 2}, "aaa", 2, id="two-per-group"),
    ],
)
@in_loop
async def test_forwards_that_run_at_once(limits: dict[str, int], groups: str, running: int) -> None:
    """Concurrency is bounded over all groups and within each."""
    bench = Bench(FakeForward(held=True), max_rows=1, **limits)
    await bench.submit([1] * len(groups), groups=groups)
    assert len(bench.forward.calls) == running


@in_loop
async def test_other_limits_hold_from_the_next_decision() -> None:
    """Reconfiguring reaches rows that wait already."""
    bench = Bench(max_wait_s=60.0)
    futures = await bench.submit([10, 10])
    bench.batcher.reconfigure(batch_limits(max_wait_s=0.0), queue_limits(max_queued_rows=1))
    assert await outcomes(futures) == [0, 1]
    with pytest.raises(RequestTooLarge):
        bench.batcher.submit(rows([1, 1]))


@in_loop
async def test_reconfiguring_an_idle_batcher_starts_nothing() -> None:
    """With nothing waiting there is nothing to decide."""
    bench = Bench()
    bench.batcher.reconfigure(batch_limits(max_rows=1), queue_limits())
    await settle()
    assert (bench.batcher.limits.max_rows, bench.forward.calls) == (1, [])


@in_loop
async def test_budget_below_a_waiting_row_is_refused() -> None:
    """Limits under which a waiting row could never run are not taken over."""
    bench = Bench(max_wait_s=60.0)
    futures = await bench.submit([80])
    with pytest.raises(ValueError, match="token_budget: 79 is less than a waiting row costs, 80"):
        bench.batcher.reconfigure(batch_limits(token_budget=79), queue_limits())
    await bench.batcher.close()
    assert await outcomes(futures) == [0]


@in_loop
async def test_loop_is_the_clock_by_default() -> None:
    """Without a clock of its own the batcher lives on the loop's time."""
    batcher: Batcher[int, int] = Batcher(FakeForward(), limits=batch_limits(), queue_limits=queue_limits())
    assert batcher.oldest_forward_s() == 0.0
    assert await outcomes(batcher.submit(rows([1, 1], timeout_s=60.0))) == [0, 1]
    await batcher.close()


# ---- how rows end ----------------------------------------------------------------------------------------------------


@in_loop
async def test_request_is_admitted_whole_or_not_at_all() -> None:
    """A refusal leaves no row of its request behind."""
    bench = Bench(FakeForward(held=True), queue={"max_queued_rows": 3})
    await bench.submit([1])
    await bench.submit([1, 1])
    with pytest.raises(Overloaded):
        bench.batcher.submit(rows([1, 1]))
    assert bench.batcher.queued_rows == 2


@in_loop
async def test_refusals_name_the_measured_backlog() -> None:
    """Retry-After is what waits, at the pace of the forwards so far: 100 ms of work took 500 ms."""
    bench = Bench(FakeForward(held=True), queue={"max_queued_rows": 2})
    await bench.submit([100])
    await bench.submit([60, 60])
    await advance(bench.clock, 0.5)
    bench.forward.release()
    await settle()
    await bench.submit([90])
    with pytest.raises(Overloaded) as caught:
        bench.batcher.submit(rows([90]))
    # 60 ms run and 150 ms wait.
    assert caught.value.retry_after_s == pytest.approx(1.05)
    assert (bench.batcher.backlog_s, bench.batcher.pace.wall_per_work) == pytest.approx((0.75, 5.0))


@in_loop
async def test_row_above_the_budget_is_refused() -> None:
    """A row that no batch could hold is turned away at the door with both numbers."""
    bench = Bench()
    with pytest.raises(RequestTooLarge) as caught:
        bench.batcher.submit(rows([1, 101]))
    assert (caught.value.amount, caught.value.limit, bench.batcher.queued_rows) == (101, 100, 0)


@in_loop
async def test_rows_may_fail_one_by_one() -> None:
    """An error among the outcomes ends its own row only."""
    error = InputTooLong("input", 9, 8)
    bench = Bench(FakeForward(outcome=lambda row: error if row.payload == 1 else row.payload))
    assert await outcomes(await bench.submit([1, 1, 1])) == [0, error, 2]
    assert [(seen.num_failed, seen.plan.reason) for seen in bench.seen] == [(1, "waited")]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        pytest.param(ValueError("bad"), ForwardFailed("ValueError"), id="any-error"),
        pytest.param(TimeoutError(), ForwardFailed("TimeoutError"), id="timeout"),
        pytest.param(StopIteration(), ForwardFailed("RuntimeError"), id="stop-iteration"),
        pytest.param(InputTooLong("input", 9, 8), InputTooLong("input", 9, 8), id="named-error"),
    ],
)
@in_loop
async def test_raising_forward_fails_its_batch(raised: Exception, expected: TokenServeError) -> None:
    """Every row of the batch ends in a named error, the next batch runs."""
    bench = Bench(FakeForward(fail_on={0: raised}), max_rows=2)
    results = await outcomes(await bench.submit([1, 1, 1]))
    assert [(type(result), result.args) for result in results[:2]] == [(type(expected), expected.args)] * 2
    assert (results[2], [seen.num_failed for seen in bench.seen]) == (2, [2, 0])


@in_loop
async def test_cause_of_a_failure_is_kept() -> None:
    """What the model raised is the cause of what the caller gets."""
    raised = ValueError("bad")
    (result,) = await outcomes(await Bench(FakeForward(fail_on={0: raised})).submit([1]))
    assert result.__cause__ is raised


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param([1], "2 rows went in and 1 outcomes came out", id="too-few"),
        pytest.param([1, 2, 3], "2 rows went in and 3 outcomes came out", id="too-many"),
        pytest.param(None, "TypeError", id="none"),
        pytest.param(7, "TypeError", id="no-sequence"),
    ],
)
@in_loop
async def test_wrong_number_of_outcomes_fails_the_batch(answer: Any, reason: str) -> None:
    """No row gets another's value when the counts differ, and rows that wait still get their turn."""
    answers = iter([answer, [7]])

    async def forward(batch: Any) -> Any:
        return next(answers)

    results = await outcomes(await Bench(forward, max_rows=2).submit([1, 1, 1]))
    assert [getattr(result, "reason", result) for result in results] == [reason, reason, 7]


@in_loop
async def test_forward_that_is_cancelled_from_within_stops_nothing_else() -> None:
    """A cancelled piece of the model's work ends its batch in Draining; the next batch runs."""
    bench = Bench(FakeForward(fail_on={0: asyncio.CancelledError()}), max_rows=1)
    assert kinds(await outcomes(await bench.submit([1, 1]))) == ["Draining", "int"]


@in_loop
async def test_stopping_loop_ends_everything() -> None:
    """When the loop cancels a running batch, as `asyncio.run` does at its end, nobody waits on and nothing starts."""
    others = asyncio.all_tasks()
    bench = Bench(FakeForward(held=True), max_rows=1)
    futures = await bench.submit([1, 1])
    (running,) = asyncio.all_tasks() - others
    running.cancel()
    assert kinds(await outcomes(futures)) == ["Draining", "Draining"]
    await settle()
    assert (len(bench.forward.calls), asyncio.all_tasks()) == (1, others)


@in_loop
async def test_raising_observer_stops_nothing() -> None:
    """A broken observer is reported by the loop and the next batch runs."""
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(repr(context["exception"])))

    def observe(_: object) -> None:
        raise ZeroDivisionError

    batcher: Batcher[int, int] = Batcher(
        FakeForward(), limits=batch_limits(max_rows=1), queue_limits=queue_limits(), observe=observe
    )
    assert await outcomes(batcher.submit(rows([1, 1]))) == [0, 1]
    await batcher.close()
    gc.collect()
    assert reported == ["ZeroDivisionError()"] * 2


@in_loop
async def test_observer_sees_each_forward() -> None:
    """Plan, start, duration and failures of a forward are reported once it has ended."""
    bench = Bench(FakeForward(held=True))
    await bench.submit([10, 20])
    await advance(bench.clock, 2.5)
    assert bench.batcher.oldest_forward_s() == 2.5
    bench.forward.release()
    await settle()
    (seen,) = bench.seen
    assert (seen.started, seen.duration_s, seen.num_failed, seen.plan.cost) == (0.0, 2.5, 0, 30)
    assert bench.batcher.oldest_forward_s() == 0.0


@in_loop
async def test_deadline_ends_a_waiting_row() -> None:
    """A row that waits until its own millisecond would end too late ends then; one step before, it still waits."""
    bench = Bench(FakeForward(held=True))
    await bench.submit([1])
    (late,) = await bench.submit([1], timeout_s=2.0)
    await advance(bench.clock, 1.998)
    assert not late.done()
    await advance(bench.clock, 1.999)
    (error,) = await outcomes([late])
    assert (type(error), error.timeout_s, bench.batcher.queued_rows) == (DeadlineExceeded, 2.0, 0)


@in_loop
async def test_deadline_does_not_touch_a_running_row() -> None:
    """Once in a forward, a row gets its value even after its deadline."""
    bench = Bench(FakeForward(held=True))
    futures = await bench.submit([1], timeout_s=2.0)
    await advance(bench.clock, 5.0)
    bench.forward.release()
    assert await outcomes(futures) == [0]


@in_loop
async def test_cancelled_row_never_runs() -> None:
    """A caller that leaves while waiting takes its row along."""
    bench = Bench(FakeForward(held=True))
    await bench.submit([1])
    gone, stays = await bench.submit([1, 1])
    gone.cancel()
    await settle()
    assert bench.batcher.queued_rows == 1
    bench.forward.release(2)
    assert (await outcomes([stays]), bench.forward.payloads) == ([1], [[0], [1]])


@in_loop
async def test_caller_context_does_not_reach_the_forward() -> None:
    """The forward runs in an empty context, whoever submits and whichever event starts it."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="empty")
    seen: list[str] = []

    async def forward(batch: Any) -> Any:
        seen.append(variable.get())
        return [0 for _ in batch]

    variable.set("caller")
    bench = Bench(forward, max_rows=2, max_wait_s=1.0)
    futures = await bench.submit([1, 1, 1])
    await advance(bench.clock, 1.0)
    assert (await outcomes(futures), seen) == ([0, 0, 0], ["empty", "empty"])


@in_loop
async def test_timer_does_not_hold_the_callers_context() -> None:
    """The timer that a row sets carries none of its caller's variables."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("caller")
    bench = Bench(max_wait_s=1.0)
    await bench.submit([1])
    assert [variable in context for context in bench.clock.contexts] == [False]
    await bench.batcher.close()


@in_loop
async def test_result_in_the_turn_of_the_cancellation_is_dropped() -> None:
    """A caller that leaves in the very turn in which its batch ends disturbs nobody."""
    futures: list[asyncio.Future[int]] = []

    async def forward(batch: Any) -> Any:
        futures[0].cancel()
        return [row.payload for row in batch]

    bench = Bench(forward)
    futures += bench.batcher.submit(rows([1, 1]))
    assert kinds(await outcomes(futures)) == ["CancelledError", "int"]
    await bench.batcher.close()
    assert [seen.num_failed for seen in bench.seen] == [0]


@in_loop
async def test_unread_failure_is_not_logged_by_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    """A failed row whose caller never asks leaves one line without the model's words."""
    caplog.set_level(logging.DEBUG)
    bench = Bench(FakeForward(fail_on={0: ValueError("tokens [1, 2, 3]")}))
    futures = await bench.submit([1])
    del futures
    await settle()
    ours = [record.getMessage() for record in caplog.records if record.name != "asyncio"]
    assert ours == ["forward failed: revision=rev-1 bucket=0 rows=1 cost=1 error=ValueError"]
    assert "tokens" not in caplog.text


# ---- stopping --------------------------------------------------------------------------------------------------------


@in_loop
async def test_close_runs_what_waits_without_gathering() -> None:
    """A drain does not wait for company, and nothing new gets in."""
    bench = Bench(max_wait_s=60.0, max_rows=2)
    futures = await bench.submit([1, 1, 1])
    await bench.batcher.close()
    assert ([future.result() for future in futures], [seen.plan.reason for seen in bench.seen]) == (
        [0, 1, 2],
        ["full", "drain"],
    )
    with pytest.raises(Draining):
        bench.batcher.submit(rows([1]))


@in_loop
async def test_close_of_an_unused_batcher_returns() -> None:
    """There is nothing to wait for, once or twice."""
    batcher: Batcher[int, int] = Batcher(FakeForward(), limits=batch_limits(), queue_limits=queue_limits())
    await batcher.close()
    await batcher.close()
    with pytest.raises(Draining):
        batcher.submit(rows([1]))


@in_loop
async def test_close_that_takes_too_long_can_be_repeated() -> None:
    """A timeout of the drain cancels nothing; the next drain ends."""
    bench = Bench(FakeForward(held=True))
    futures = await bench.submit([1])
    with pytest.raises(TimeoutError):
        await bench.batcher.close(timeout_s=0)
    bench.forward.release()
    await bench.batcher.close()
    assert [future.result() for future in futures] == [0]


@in_loop
async def test_last_caller_leaving_ends_the_drain() -> None:
    """A drain ends when the only row left is cancelled."""
    bench = Bench(FakeForward(held=True))
    running, waiting = (await bench.submit([1])) + (await bench.submit([1]))
    closing = asyncio.create_task(bench.batcher.close())
    await settle()
    waiting.cancel()
    bench.forward.release()
    await closing
    assert (running.result(), len(bench.forward.calls)) == (0, 1)


@in_loop
async def test_abort_ends_everything_now() -> None:
    """Waiting and running rows end in Draining at once; a late result is dropped, timers are off."""
    bench = Bench(FakeForward(held=True), max_wait_s=0.0)
    futures = (await bench.submit([1])) + (await bench.submit([1], timeout_s=9.0))
    bench.batcher.abort()
    assert kinds(await outcomes(futures)) == ["Draining", "Draining"]
    assert (bench.batcher.queued_rows, bench.clock.pending()) == (0, [])
    with pytest.raises(Draining):
        bench.batcher.submit(rows([1]))
    bench.forward.release()
    await bench.batcher.close()
    assert len(bench.forward.calls) == 1


@in_loop
async def test_abort_of_an_idle_batcher_is_silent() -> None:
    """Nothing waits, nothing ends, and a drain afterwards returns."""
    bench = Bench()
    bench.batcher.abort()
    await bench.batcher.close()
    assert bench.seen == []


# ---- invariants, for any arrivals, cancellations and time steps ------------------------------------------------------


@given(strategies.events, strategies.limits)
@settings(max_examples=150)
@in_loop
async def test_invariants(script: list[strategies.Event], limits: BatchLimits) -> None:
    """Nobody is lost, doubled, mixed up or overtaken without bound, and no batch is above its limits."""
    history = await strategies.play(script, limits)
    _check_everybody_ends_once(history)
    _check_batches(history, limits)
    assert all(history.times_overtaken(row) <= limits.max_passed_over for row in history.admitted)
    assert (history.batcher.queued_rows, history.batcher.queued_tokens) == (0, 0)
    assert history.batcher.oldest_forward_s() == 0.0


def _check_everybody_ends_once(history: strategies.History) -> None:
    """Admitted = answered with its own value, or late, or cancelled; what ran, ran once."""
    ran = history.in_batches()
    assert len(ran) == len(set(ran))
    assert all(future.done() for future in history.futures)
    for number in range(len(history.futures)):
        outcome = history.outcome(number)
        assert outcome == number or outcome is None or isinstance(outcome, DeadlineExceeded)
        assert outcome != number or number in ran
        assert not isinstance(outcome, DeadlineExceeded) or number not in ran


def _check_batches(history: strategies.History, limits: BatchLimits) -> None:
    """Each batch is inside the budget and the row limit, of one group, and in order of arrival."""
    for batch in history.batches:
        assert 0 < sum(row.cost for row in batch) <= limits.token_budget
        assert len(batch) <= limits.max_rows
        assert len({row.key for row in batch}) == 1
        assert [row.payload for row in batch] == sorted(row.payload for row in batch)


@given(st.lists(strategies.lengths, min_size=1, max_size=40), st.integers(0, 3))
@in_loop
async def test_only_misfits_are_overtaken(lengths: list[int], max_passed_over: int) -> None:
    """A row is only ever passed in a batch whose room, when its turn came, was too small for it."""
    limits = BatchLimits(token_budget=strategies.BUDGET, max_rows=16, max_passed_over=max_passed_over)
    history = await strategies.play([strategies.Arrive(tuple(lengths), "a", None)], limits)
    waiting = list(history.admitted)
    for batch in history.batches:
        room = limits.token_budget
        for row in waiting[: waiting.index(batch[-1]) + 1]:
            assert row in batch or row.cost > room
            room -= row.cost * (row in batch)
        waiting = [row for row in waiting if row not in batch]


# ---- preparing ahead -------------------------------------------------------------------------------------------------


@in_loop
async def test_next_batch_is_chosen_shortly_before_the_running_one_ends() -> None:
    """One runs, at most one is prepared, and the choice stays open until the model is nearly free."""
    bench = Bench(FakeForward(held=True), prepare_ahead_s=0.02)
    await bench.submit([100])  # predicted: 100 ms
    await bench.submit([30])
    await advance(bench.clock, 0.0799)
    await bench.submit([40])
    assert len(bench.forward.calls) == 1
    await advance(bench.clock, 0.08)
    assert [[row.num_tokens for row in call] for call in bench.forward.calls] == [[100], [30, 40]]
    await bench.submit([50])
    await advance(bench.clock, 5.0)
    assert len(bench.forward.calls) == 2, "no third one, however late the first is"
    bench.forward.release()
    await settle()
    assert [[row.num_tokens for row in call] for call in bench.forward.calls[2:]] == [[50]]
    bench.forward.release_all()
    await bench.batcher.close()


@in_loop
async def test_time_of_a_prepared_forward_begins_when_the_one_before_ends() -> None:
    """Waiting for the model is not the forward's own time, or the pace would seem half as fast."""
    bench = Bench(FakeForward(held=True), prepare_ahead_s=0.05)
    await bench.submit([100])
    await bench.submit([100])
    await advance(bench.clock, 0.05)
    assert len(bench.forward.calls) == 2
    for end in (0.1, 0.2):
        await advance(bench.clock, end)
        bench.forward.release()
        await settle()
    assert [(done.started, done.duration_s) for done in bench.seen] == [
        (0.0, pytest.approx(0.1)),
        (0.1, pytest.approx(0.1)),
    ]


@in_loop
async def test_a_row_that_arrives_late_in_a_forward_is_prepared_at_once() -> None:
    """Nothing waited when the moment came; the first to arrive after it is chosen on arrival."""
    bench = Bench(FakeForward(held=True), prepare_ahead_s=0.02)
    await bench.submit([100])
    await advance(bench.clock, 0.09)
    await bench.submit([7])
    assert [[row.num_tokens for row in call] for call in bench.forward.calls] == [[100], [7]]
    bench.forward.release_all()
    await bench.batcher.close()


@in_loop
async def test_a_budget_that_was_cut_counts_from_the_next_batch_on() -> None:
    """As after running out of memory."""
    bench = Bench(FakeForward(held=True))
    await bench.submit([1])
    bench.batcher.set_token_budget(50)
    await bench.submit([30, 30])
    bench.forward.release_all()
    await bench.batcher.close()
    assert [[row.num_tokens for row in call] for call in bench.forward.calls] == [[1], [30], [30]]
