"""From waiting rows to running forwards: the only asynchronous file here, and the only one that resolves futures.

Rules of this file:
- every accepted row ends exactly once: with its value, a named error, or its caller's own cancellation;
- a batch is chosen when a forward may start, or `prepare_ahead_s` before, so that it can grow while the model is busy;
- there is no endless loop that could die: arrivals, finished forwards and one timer each trigger `_dispatch`;
- nothing of a caller's context reaches the forward, and nothing of a payload reaches the log.
"""

import asyncio
import contextvars
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic

from batching.admission import Moment, PaceMeter, Promises, admit
from batching.errors import DeadlineExceeded, Draining, ForwardFailed, RequestTooLarge, TokenServeError
from batching.forwards import Clock, FinishedForward, Forward, Outcome, Running, Timer, Value
from batching.isolation import Isolation
from batching.limits import BatchLimits, QueueLimits
from batching.plan import Pace, Plan, Situation, ready_at, take_batch
from batching.queue import DEFAULT_BATCH_SHARE, FairQueue
from batching.row import GroupKey, Payload, Row

logger = logging.getLogger(__name__)


class Batcher(Generic[Payload, Value]):
    """Holds rows, starts forwards, hands every row its outcome. Everything happens on one event loop."""

    def __init__(
        self,
        forward: Forward[Payload, Value],
        *,
        limits: BatchLimits,
        queue_limits: QueueLimits,
        clock: Clock | None = None,
        observe: Callable[[FinishedForward[Payload]], None] | None = None,
    ) -> None:
        self.limits = limits
        self.queue_limits = queue_limits
        self._forward = forward
        self._clock = clock
        self._observe = observe
        self._queue: FairQueue[Payload] = FairQueue()
        self._futures: dict[Row[Payload], asyncio.Future[Value]] = {}
        self._running: dict[Running[Payload], None] = {}  # in order of their start
        self._running_groups: Counter[GroupKey] = Counter()
        self._meter = PaceMeter()
        self._promises = Promises()
        self._last_end = float("-inf")
        self._timer: Timer | None = None
        self._timer_at: float | None = None
        self._dispatch_scheduled = False
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- callers -------------------------------------------------------------------------------------------------

    def submit(self, rows: Sequence[Row[Payload]]) -> list[asyncio.Future[Value]]:
        """Admit all `rows` or none; one future per row, in order. Cancelling a future takes its row out.

        Raises Draining after close, RequestTooLarge for a row above the budget, and what `admission.admit` raises.
        """
        if self._closing:
            raise Draining()
        most_cost = max((row.cost for row in rows), default=0)
        if most_cost > self.limits.token_budget:
            # No batch would ever hold it.
            raise RequestTooLarge("inputs", "tokens of cost in one row", most_cost, self.limits.token_budget)
        loop = asyncio.get_running_loop()
        self._clock = self._clock or loop
        now = self._clock.time()
        admit(rows, self._queue, self.queue_limits, moment=self._moment(now), promises=self._promises)
        futures: list[asyncio.Future[Value]] = []
        for row in rows:
            row.arrived = now
            row.least_s = self.pace.forward_s(row.work_s)
            future: asyncio.Future[Value] = loop.create_future()
            future.add_done_callback(lambda done, row=row: self._forget_cancelled(row, done))  # type: ignore[misc]
            self._futures[row] = future
            self._queue.add(row)
            futures.append(future)
        self._idle.clear()
        self._schedule_dispatch()
        return futures

    def reconfigure(
        self, limits: BatchLimits, queue_limits: QueueLimits, *, batch_share: float = DEFAULT_BATCH_SHARE
    ) -> None:
        """Use other limits from the next decision on; rows that wait stay.

        Raises ValueError, and changes nothing, when a row that waits costs more than the new budget.
        """
        most_cost = max((row.cost for key in self._queue.groups() for row in self._queue.rows(key)), default=0)
        if most_cost > limits.token_budget:
            raise ValueError(f"token_budget: {limits.token_budget} is less than a waiting row costs, {most_cost}")
        self.limits = limits
        self.queue_limits = queue_limits
        self._queue.batch_share = batch_share
        if self._futures:
            self._schedule_dispatch()

    def set_token_budget(self, token_budget: int) -> None:
        """Use another budget from the next decision on, at least what the longest row costs."""
        self.limits = replace(self.limits, token_budget=token_budget)

    def set_overhead(self, overhead_s: float) -> None:
        """Take another prediction of what a forward costs beside its rows."""
        self._meter.overhead_s = overhead_s

    async def close(self, timeout_s: float | None = None) -> None:
        """Refuse new rows, run everything that waits without further gathering, return when all is resolved.

        Raises TimeoutError after `timeout_s`; nothing is cancelled then, and a later close can finish the drain.
        """
        self._closing = True
        self._schedule_dispatch()
        async with asyncio.timeout(timeout_s):
            await self._idle.wait()

    def abort(self) -> None:
        """Refuse new rows and end all waiting and running ones in Draining now. Late results are dropped."""
        self._closing = True
        self._cancel_timer()
        for row in list(self._futures):
            self._resolve(row, Draining())

    # ---- what others may ask -------------------------------------------------------------------------------------

    @property
    def queued_rows(self) -> int:
        """Rows that wait."""
        return self._queue.num_rows

    @property
    def queued_tokens(self) -> int:
        """Tokens of the rows that wait."""
        return self._queue.num_tokens

    def oldest_forward_s(self) -> float:
        """For how long the oldest running forward has been running; 0 when none runs."""
        if not self._running or self._clock is None:
            return 0.0
        return self._clock.time() - min(running.started for running in self._running)

    @property
    def pace(self) -> Pace:
        """How predicted seconds became seconds on the clock of late."""
        return self._meter.pace

    @property
    def backlog_s(self) -> float:
        """Predicted time to work off the rows that wait."""
        return self._queue.work_s * self._meter.wall_per_work

    # ---- deciding ------------------------------------------------------------------------------------------------

    def _schedule_dispatch(self) -> None:
        # Not at once: rows that arrive in the same turn of the loop should find each other.
        if not self._dispatch_scheduled:
            self._dispatch_scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch, context=contextvars.Context())

    def _dispatch(self) -> None:
        self._dispatch_scheduled = False
        assert self._clock is not None or not self._futures, "rows are only accepted with a clock"
        if self._clock is not None:
            now = self._clock.time()
            for row in self._queue.expired(now):
                self._resolve(row, DeadlineExceeded(row.timeout_s or 0.0))
            while now >= self._may_start_at():
                situation = Situation(now=now, pace=self.pace, busy=self._busy_groups(), draining=self._closing)
                plan = take_batch(self._queue, self.limits, situation)
                if plan is None:
                    break
                self._start(plan, now)
            self._set_timer()
        if not self._running and not self._futures:
            self._idle.set()

    def _may_start_at(self) -> float:
        """When the next batch may be chosen: now, shortly before the running forward ends, or (never) after it."""
        if len(self._running) < self.limits.max_concurrent_forwards:
            return float("-inf")
        if not self.limits.prepare_ahead_s or len(self._running) > self.limits.max_concurrent_forwards:
            return float("inf")
        first = next(iter(self._running))
        return first.started + first.predicted_s - self.limits.prepare_ahead_s

    def _busy_groups(self) -> set[GroupKey]:
        limit = self.limits.max_concurrent_per_group + bool(self.limits.prepare_ahead_s)
        return {key for key, count in self._running_groups.items() if count >= limit}

    def _set_timer(self) -> None:
        moments: list[float] = []
        may_start_at = self._may_start_at()
        if self._queue.num_rows and may_start_at < float("inf"):
            # Whatever was ready has been started, unless the model is busy; what is not gathers company.
            busy = self._busy_groups()
            gathering = self._queue.groups() if self.limits.max_wait_s else ()
            ready = min((ready_at(self._queue, key, self.limits) for key in gathering if key not in busy), default=None)
            if ready is not None or may_start_at > float("-inf"):
                moments.append(max(may_start_at, ready if ready is not None else may_start_at))
        latest_start = self._queue.next_latest_start()
        if latest_start is not None:
            moments.append(latest_start)
        when = min(moments, default=None)
        if when == self._timer_at:
            return
        self._cancel_timer()
        if when is not None and self._clock is not None:
            self._timer_at = when
            self._timer = self._clock.call_at(when, self._on_timer)

    def _moment(self, now: float) -> Moment:
        running_s = 0.0
        if len(self._running) >= self.limits.max_concurrent_forwards:
            first = next(iter(self._running))
            running_s = max(first.started + first.predicted_s - now, 0.0)
        return Moment(
            now=now,
            pace=self.pace,
            running=self._running_groups,
            running_s=running_s,
            token_budget=self.limits.token_budget,
        )

    def _on_timer(self) -> None:
        self._timer = self._timer_at = None
        self._dispatch()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timer_at = None

    # ---- running -------------------------------------------------------------------------------------------------

    def _start(self, plan: Plan[Payload], now: float) -> None:
        predicted_s = self.pace.forward_s(plan.work_s)
        running = Running(plan=plan, started=now, predicted_s=predicted_s)
        self._running[running] = None
        self._running_groups[plan.key] += 1
        # An empty context: the first caller's variables are not the batch's.
        running.task = asyncio.get_running_loop().create_task(self._run(running), context=contextvars.Context())

    async def _run(self, running: Running[Payload]) -> None:
        assert self._clock is not None, "a running batch has a clock"
        assert running.task is not None, "and a task"
        plan = running.plan
        isolation = Isolation(attempt=self._attempt, is_wanted=self._is_wanted)
        try:
            result = await self._attempt(plan.rows)
            if not isinstance(result, TokenServeError):
                outcomes = result
            elif self.limits.isolate_failures:
                outcomes = await isolation.run(plan.rows, result)
            else:
                outcomes = [result for _ in plan.rows]
            num_failed = sum(isinstance(outcome, TokenServeError) for outcome in outcomes)
            for row, outcome in zip(plan.rows, outcomes, strict=True):
                self._resolve(row, outcome)
        except asyncio.CancelledError:
            if running.task.cancelling():
                self.abort()  # not from within the forward: the loop is being stopped
            raise
        finally:
            # Also when cancelled: no caller may be left waiting.
            for row in plan.rows:
                self._resolve(row, Draining())
            del self._running[running]
            started, now = max(running.started, self._last_end), self._clock.time()
            self._last_end = now if self.limits.prepare_ahead_s else float("-inf")
            self._running_groups[plan.key] -= 1
            self._running_groups += Counter()  # drops zero counts
            self._schedule_dispatch()  # in here, so that whatever goes wrong above or below, those who wait go on
        if isolation.num_attempts == 1:
            self._meter.record(plan.work_s, now - started)
        if self._observe is not None:
            self._observe(
                FinishedForward(
                    plan=plan,
                    started=started,
                    duration_s=now - started,
                    predicted_s=running.predicted_s,
                    num_failed=num_failed,
                    num_attempts=isolation.num_attempts,
                    out_of_memory_cost=isolation.out_of_memory_cost,
                )
            )

    async def _attempt(self, rows: Sequence[Row[Payload]]) -> Sequence[Outcome[Value]] | TokenServeError:
        """Run the model once; the error of the whole batch instead of outcomes when it failed."""
        try:
            outcomes = list(await self._forward(rows))
        except Exception as error:  # noqa: BLE001 - the one place: whatever a model raises ends its own batch only
            logger.error(
                "forward failed: revision=%s bucket=%d rows=%d cost=%d error=%s",
                rows[0].key.revision,
                rows[0].key.bucket,
                len(rows),
                sum(row.cost for row in rows),
                type(error).__name__,
            )
            return _forward_failed(error)
        if len(outcomes) != len(rows):
            return ForwardFailed(f"{len(rows)} rows went in and {len(outcomes)} outcomes came out")
        return outcomes

    def _is_wanted(self, row: Row[Payload]) -> bool:
        future = self._futures.get(row)
        assert self._clock is not None, "a running batch has a clock"
        if future is None or future.done():
            return False
        if row.latest_start is not None and row.latest_start <= self._clock.time():
            self._resolve(row, DeadlineExceeded(row.timeout_s or 0.0))
            return False
        return True

    def _resolve(self, row: Row[Payload], outcome: Outcome[Value]) -> None:
        future = self._futures.pop(row, None)
        self._queue.discard(row)
        if future is None or future.done():
            return
        if isinstance(outcome, TokenServeError):
            future.set_exception(outcome)
            # Marks it as retrieved: asyncio would log the cause's text, tokens and all, if the caller never asked.
            future.exception()
        else:
            future.set_result(outcome)

    def _forget_cancelled(self, row: Row[Payload], future: asyncio.Future[Value]) -> None:
        if future.cancelled():
            self._futures.pop(row, None)
            self._queue.discard(row)


def _forward_failed(error: Exception) -> TokenServeError:
    if isinstance(error, TokenServeError):
        return error
    failed = ForwardFailed(type(error).__name__)
    failed.__cause__ = error
    return failed
