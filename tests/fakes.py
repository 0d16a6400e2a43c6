"""Stand-ins for what tests must control: time, the model, the pool. No sleeps, no mocks.

clock, forward = FakeClock(), FakeForward(held=True)
batcher = Batcher(forward, limits=batch_limits(), queue_limits=queue_limits(), clock=clock)
futures = batcher.submit(rows([3, 40, 7], tenants="aab"))
await settle()                       # everything that can happen now has happened
"""

import asyncio
import contextvars
import functools
import heapq
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from batching.groups import GroupSettings, InferenceGroups
from batching.limits import BatchLimits, QueueLimits
from batching.padding import ModelBatch
from batching.request import TokenRequest
from batching.row import GroupKey, Row

HANG_S = 20.0
"""Tests end in milliseconds; what is not done by then never will be."""

# ---- time ------------------------------------------------------------------------------------------------------------


class FakeTimer:
    """A callback in a FakeClock."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        """Never fire."""
        self.cancelled = True


class FakeClock:
    """Time that moves only when a test says so."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._heap: list[tuple[float, int, FakeTimer]] = []
        self._added = 0
        self.contexts: list[contextvars.Context] = []
        """The context of each `call_at`."""

    def time(self) -> float:
        """Seconds on this clock."""
        return self._now

    def call_at(self, when: float, callback: Callable[[], None], /) -> FakeTimer:
        """Fire `callback` once time is advanced to `when`."""
        timer = FakeTimer(callback)
        self.contexts.append(contextvars.copy_context())
        self._added += 1
        heapq.heappush(self._heap, (when, self._added, timer))
        return timer

    def advance_to(self, when: float) -> None:
        """Set the time and fire what is due, in order, each at its own moment."""
        while self._heap and self._heap[0][0] <= when:
            due, _, timer = heapq.heappop(self._heap)
            self._now = max(self._now, due)
            if not timer.cancelled:
                timer.callback()
        self._now = max(self._now, when)

    def pending(self) -> list[float]:
        """Moments of the timers that would still fire."""
        return sorted(when for when, _, timer in self._heap if not timer.cancelled)


async def settle() -> None:
    """Let every callback run that can run without time passing."""
    for _ in range(20):
        await asyncio.sleep(0)


async def advance(clock: FakeClock, when: float) -> None:
    """Move the clock and let the consequences happen."""
    clock.advance_to(when)
    await settle()


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in a loop of its own; one that hangs fails."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), HANG_S))

    return run


# ---- rows and limits -------------------------------------------------------------------------------------------------


def rows(
    lengths: Sequence[int],
    *,
    tenants: str = "a",
    groups: str = "g",
    bucket: int = 0,
    cost: int | None = None,
    **changes: Any,
) -> list[Row[int]]:
    """Rows of these lengths; `tenants` and `groups` repeat letter by letter, the payload is the position.

    A token is a millisecond of work.
    """
    return [
        Row(
            key=GroupKey(groups[index % len(groups)], "rev-1", bucket),
            tenant=tenants[index % len(tenants)],
            num_tokens=length,
            cost=length if cost is None else cost,
            payload=index,
            **{"work_s": length / 1000, **changes},
        )
        for index, length in enumerate(lengths)
    ]


def batch_limits(**changes: Any) -> BatchLimits:
    """A budget of 100 tokens, 16 rows, no gathering."""
    return BatchLimits(**{"token_budget": 100, "max_rows": 16, **changes})


def queue_limits(**changes: Any) -> QueueLimits:
    """Limits that no test reaches by accident."""
    wide = {
        "max_queued_cost": 10**9,
        "max_queued_rows": 10**6,
        "max_queued_rows_per_group": 10**6,
        "max_groups": 10**4,
    }
    return QueueLimits(**{**wide, **changes})


def requests(
    lengths: Sequence[int], *, tenants: Sequence[str] = "a", revisions: Sequence[str] = ("demo-v1",)
) -> list[TokenRequest]:
    """Token requests of these lengths with ids that no two of them share at one position."""
    return [
        TokenRequest(
            f"r{index}",
            tenants[index % len(tenants)],
            revisions[index % len(revisions)],
            [1000 * index + position for position in range(length)],
        )
        for index, length in enumerate(lengths)
    ]


# ---- models ----------------------------------------------------------------------------------------------------------


class FakeForward:
    """An echoing batcher forward that records the rows of every call.

    `fail_on[k]` is raised by call k; with `held`, calls end only when released, oldest first; `outcome` makes a row's
    outcome from the row.
    """

    def __init__(
        self,
        *,
        fail_on: Mapping[int, BaseException] | None = None,
        held: bool = False,
        outcome: Callable[[Row[Any]], Any] = lambda row: row.payload,
    ) -> None:
        self.calls: list[tuple[Row[Any], ...]] = []
        self._fail_on = fail_on or {}
        self._held = held
        self._permits = asyncio.Semaphore(0)
        self._outcome = outcome

    async def __call__(self, batch: Sequence[Row[Any]], /) -> list[Any]:
        """Run one batch."""
        index = len(self.calls)
        self.calls.append(tuple(batch))
        if self._held:
            await self._permits.acquire()
        if index in self._fail_on:
            raise self._fail_on[index]
        return [self._outcome(row) for row in batch]

    def release(self, num_calls: int = 1) -> None:
        """Let the oldest held calls end."""
        for _ in range(num_calls):
            self._permits.release()

    def release_all(self) -> None:
        """Let all held calls end, and hold none from now on."""
        self._held = False
        self.release(len(self.calls))

    @property
    def payloads(self) -> list[list[Any]]:
        """What each call held, by payload."""
        return [[row.payload for row in call] for call in self.calls]


class FakeModel:
    """A synchronous model that doubles ids and records its batches; `output` replaces the answer of every call."""

    def __init__(self, output: Callable[[ModelBatch], object] | None = None) -> None:
        self.batches: list[ModelBatch] = []
        self._output = output

    def __call__(self, batch: ModelBatch) -> object:
        """Run one batch."""
        self.batches.append(batch)
        if self._output is not None:
            return self._output(batch)
        return doubled(batch)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(rows, width) of each call."""
        return [(batch.num_rows, batch.width) for batch in self.batches]


def doubled(batch: ModelBatch) -> list[list[int]]:
    """What the untrained model answers."""
    return [[2 * token_id for token_id in row] for row in batch.input_ids]


def answer(request: TokenRequest) -> tuple[int, ...]:
    """What `request` must get from the doubling model."""
    return tuple(2 * token_id for token_id in request.token_ids)


# ---- pools -----------------------------------------------------------------------------------------------------------


class InlineExecutor(Executor):
    """A pool whose work is done the moment it is submitted."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call `function` here and now."""
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - what a real pool does
            future.set_exception(error)
        return future


class HeldExecutor(Executor):
    """A pool that is busy until told otherwise: `run` does one submitted piece of work."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Keep the work."""
        assert not kwargs, "run_in_executor passes none"
        future: Future[Any] = Future()
        self.waiting.append((future, function, args))
        return future

    def run(self, index: int = 0) -> None:
        """Do one piece of work, by default the oldest."""
        future, function, args = self.waiting.pop(index)
        try:
            outcome = function(*args)
        except BaseException as error:  # noqa: BLE001 - what a real pool does
            future.set_exception(error)
        else:
            future.set_result(outcome)


# ---- groups ----------------------------------------------------------------------------------------------------------


class Harness:
    """Inference groups on a fake clock; an inline pool unless another is given."""

    def __init__(
        self, model: Callable[[ModelBatch], object] | None = None, *, executor: Executor | None = None, **changes: Any
    ) -> None:
        self.clock = FakeClock()
        self.model = FakeModel()
        self.groups = InferenceGroups(
            model or self.model,
            executor=executor or InlineExecutor(),
            settings=GroupSettings(**changes),
            clock=self.clock,
        )

    async def start(self, cohort: Sequence[TokenRequest]) -> list[asyncio.Task[Any]]:
        """Begin one caller per request and let happen what can."""
        tasks = [asyncio.create_task(self.groups.process(request)) for request in cohort]
        await settle()
        return tasks

    async def outcomes(self, cohort: Sequence[TokenRequest]) -> list[Any]:
        """Run the cohort to its end: predictions and errors, in order."""
        tasks = await self.start(cohort)
        await self.groups.close()
        return await outcomes(tasks)


async def outcomes(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """Results and errors, in order; a caller that never ends makes the test time out."""
    return await asyncio.gather(*awaitables, return_exceptions=True)


def kinds(results: Sequence[Any]) -> list[str]:
    """Type names of outcomes, for comparison with a table."""
    return [type(result).__name__ for result in results]
