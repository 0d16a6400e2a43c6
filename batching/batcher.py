"""From waiting rows to running forwards: the only asynchronous file here, and the only one that resolves futures.

Rules of this file:
- every accepted row ends exactly once: with its value, a named error, or its caller's own cancellation;
- a batch is chosen when a forward may start, not earlier, so that it can still grow while the model is busy;
- there is no endless loop that could die: arrivals, finished forwards and one timer each trigger `_dispatch`;
- nothing of a caller's context reaches the forward, and nothing of a payload reaches the log.
"""

import asyncio
import contextvars
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from batching.admission import DrainRate, admit
from batching.errors import DeadlineExceeded, Draining, ForwardFailed, RequestTooLarge, TokenServeError
from batching.limits import BatchLimits, QueueLimits
from batching.plan import Plan, next_batch, ready_at, take
from batching.queue import GroupKey, Payload, PendingQueue, Row

logger = logging.getLogger(__name__)

Value = TypeVar("Value")
ForwardValue = TypeVar("ForwardValue", covariant=True)
ForwardPayload = TypeVar("ForwardPayload")
Outcome: TypeAlias = Value | TokenServeError


class Timer(Protocol):
    """A callback that may still be called off."""

    def cancel(self) -> None:
        """Call it off."""


class Clock(Protocol):
    """The part of an event loop that policy needs; asyncio's loop is one."""

    def time(self) -> float:
        """Monotonic seconds."""

    def call_at(self, when: float, callback: Callable[[], None], /) -> Timer:
        """Run `callback` once when `time()` has reached `when`."""


class Forward(Protocol[ForwardPayload, ForwardValue]):
    """Runs one batch: one outcome per row, in order. Raising fails every row of the batch."""

    async def __call__(self, rows: Sequence[Row[ForwardPayload]], /) -> Sequence[ForwardValue | TokenServeError]:
        """Run the model on `rows`, which share one group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedForward(Generic[Payload]):
    """What an observer learns of each forward."""

    plan: Plan[Payload]
    started: float
    duration_s: float
    num_failed: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Running(Generic[Payload]):
    plan: Plan[Payload]
    started: float
    task: asyncio.Task[None] | None = None


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
        self._queue: PendingQueue[Payload] = PendingQueue()
        self._futures: dict[Row[Payload], asyncio.Future[Value]] = {}
        self._running: set[_Running[Payload]] = set()
        self._running_groups: Counter[GroupKey] = Counter()
        self._drain_rate = DrainRate()
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
        admit(rows, self._queue, self.queue_limits, running=self._running_groups, retry_after_s=self.retry_after_s())
        now = self._clock.time()
        futures: list[asyncio.Future[Value]] = []
        for row in rows:
            row.arrived = now
            future: asyncio.Future[Value] = loop.create_future()
            future.add_done_callback(lambda done, row=row: self._forget_cancelled(row, done))  # type: ignore[misc]
            self._futures[row] = future
            self._queue.add(row)
            futures.append(future)
        self._idle.clear()
        self._schedule_dispatch()
        return futures

    def reconfigure(self, limits: BatchLimits, queue_limits: QueueLimits) -> None:
        """Use other limits from the next decision on; rows that wait stay.

        Raises ValueError, and changes nothing, when a row that waits costs more than the new budget.
        """
        most_cost = max((row.cost for key in self._queue.groups() for row in self._queue.rows(key)), default=0)
        if most_cost > limits.token_budget:
            raise ValueError(f"token_budget: {limits.token_budget} is less than a waiting row costs, {most_cost}")
        self.limits = limits
        self.queue_limits = queue_limits
        if self._futures:
            self._schedule_dispatch()

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

    def retry_after_s(self) -> float:
        """Estimated time to work off all that waits."""
        return self._drain_rate.retry_after_s(self._queue.cost)

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
            while len(self._running) < self.limits.max_concurrent_forwards:
                plan = next_batch(self._queue, self.limits, now, busy=self._busy_groups(), draining=self._closing)
                if plan is None:
                    break
                self._start(plan, now)
            self._set_timer()
        if not self._running and not self._futures:
            self._idle.set()

    def _busy_groups(self) -> set[GroupKey]:
        limit = self.limits.max_concurrent_per_group
        return {key for key, count in self._running_groups.items() if count >= limit}

    def _set_timer(self) -> None:
        busy = self._busy_groups()
        moments = [ready_at(self._queue, key, self.limits) for key in self._queue.groups() if key not in busy]
        if len(self._running) >= self.limits.max_concurrent_forwards:
            moments = []  # a finishing forward decides anew
        deadline = self._queue.next_deadline()
        if deadline is not None:
            moments.append(deadline)
        when = min(moments, default=None)
        if when == self._timer_at:
            return
        self._cancel_timer()
        if when is not None and self._clock is not None:
            self._timer_at = when
            self._timer = self._clock.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = self._timer_at = None
        self._dispatch()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timer_at = None

    # ---- running -------------------------------------------------------------------------------------------------

    def _start(self, plan: Plan[Payload], now: float) -> None:
        take(self._queue, plan)
        running = _Running(plan=plan, started=now)
        self._running.add(running)
        self._running_groups[plan.key] += 1
        # An empty context: the first caller's variables are not the batch's.
        running.task = asyncio.get_running_loop().create_task(self._run(running), context=contextvars.Context())

    async def _run(self, running: _Running[Payload]) -> None:
        assert self._clock is not None, "a running batch has a clock"
        assert running.task is not None, "and a task"
        plan = running.plan
        try:
            outcomes = await self._outcomes(plan)
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
            self._running.discard(running)
            self._running_groups[plan.key] -= 1
            self._running_groups += Counter()  # drops zero counts
            self._schedule_dispatch()  # in here, so that whatever goes wrong above or below, those who wait go on
        duration_s = self._clock.time() - running.started
        self._drain_rate.record(plan.cost, duration_s)
        if self._observe is not None:
            self._observe(
                FinishedForward(plan=plan, started=running.started, duration_s=duration_s, num_failed=num_failed)
            )

    async def _outcomes(self, plan: Plan[Payload]) -> Sequence[Outcome[Value]]:
        try:
            outcomes = list(await self._forward(plan.rows))
        except Exception as error:  # noqa: BLE001 - the one place: whatever a model raises ends its own batch only
            logger.error(
                "forward failed: revision=%s bucket=%d rows=%d cost=%d error=%s",
                plan.key.revision,
                plan.key.bucket,
                len(plan.rows),
                plan.cost,
                type(error).__name__,
            )
            return [_forward_failed(error) for _ in plan.rows]
        if len(outcomes) != len(plan.rows):
            reason = f"{len(plan.rows)} rows went in and {len(outcomes)} outcomes came out"
            return [ForwardFailed(reason) for _ in plan.rows]
        return outcomes

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
