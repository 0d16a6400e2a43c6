"""Only the guilty fail: failed batches taken apart, budgets cut and grown back."""

from collections.abc import Sequence
from typing import Any

import pytest

from batching.batcher import Batcher
from batching.errors import DeadlineExceeded, DeviceLost, ForwardFailed, OutOfMemory
from batching.forwards import FinishedForward
from batching.isolation import RECOVER_AFTER_FORWARDS, BudgetGovernor
from batching.padding import MalformedOutput
from batching.row import Row
from tests.fakes import FakeClock, batch_limits, in_loop, outcomes, queue_limits, rows


class Device:
    """Fails a forward that holds a poisoned row, or more cost than its memory; records what was tried."""

    def __init__(
        self, *, poison: Sequence[int] = (), memory: int = 10**9, error: Exception | None = None, lost: bool = False
    ) -> None:
        self.tried: list[list[int]] = []
        self.clock = FakeClock()
        self.finished: list[FinishedForward[int]] = []
        self.batcher: Batcher[int, int] = Batcher(
            self,
            limits=batch_limits(isolate_failures=True),
            queue_limits=queue_limits(),
            clock=self.clock,
            observe=self.finished.append,
        )
        self._poison = set(poison)
        self._memory = memory
        self._error = error or MalformedOutput("a value is not finite")
        self._lost = lost

    async def __call__(self, batch: Sequence[Row[int]], /) -> list[int]:
        """Run one batch."""
        self.tried.append([row.payload for row in batch])
        if self._lost:
            raise DeviceLost(1.0)
        if sum(row.cost for row in batch) > self._memory:
            raise OutOfMemory(0)
        if self._poison & {row.payload for row in batch}:
            raise self._error
        return [row.payload for row in batch]

    async def run(self, lengths: Sequence[int], **changes: Any) -> list[Any]:
        """Outcomes of rows of these lengths."""
        return await outcomes(self.batcher.submit(rows(lengths, **changes)))


@pytest.mark.parametrize(
    "error", [MalformedOutput("a value is not finite"), IndexError("row 2")], ids=["values", "any"]
)
@in_loop
async def test_only_the_guilty_row_fails(error: Exception) -> None:
    """ISSUE-3: after one failure each row of the batch runs alone, once."""
    device = Device(poison=[2], error=error)
    results = await device.run([1, 1, 1, 1])
    assert [result if isinstance(result, int) else "failed" for result in results] == [0, 1, "failed", 3]
    assert isinstance(results[2], ForwardFailed | MalformedOutput)
    assert device.tried == [[0, 1, 2, 3], [0], [1], [2], [3]]
    assert [(done.num_attempts, done.num_failed) for done in device.finished] == [(5, 1)]


@in_loop
async def test_a_row_alone_is_not_tried_again() -> None:
    """One row, one forward."""
    device = Device(poison=[0])
    await device.run([1])
    assert device.tried == [[0]]


@in_loop
async def test_out_of_memory_halves_the_batch() -> None:
    """BL-141, BL-143: what does not fit together runs in parts, and every row gets its answer."""
    device = Device(memory=30)
    assert await device.run([10] * 8) == list(range(8))
    assert device.tried == [list(range(8)), [0, 1, 2, 3], [0, 1], [2, 3], [4, 5, 6, 7], [4, 5], [6, 7]]
    assert [done.out_of_memory_cost for done in device.finished] == [40]


@in_loop
async def test_a_row_that_does_not_fit_alone_is_refused_by_name() -> None:
    """BL-141: the culprit hears its size, its neighbours are served."""
    device = Device(memory=30)
    results = await device.run([10, 40, 10])
    assert (results[0], results[2]) == (0, 2)
    assert isinstance(results[1], OutOfMemory)
    assert results[1].num_tokens == 40


@in_loop
async def test_a_poisoned_row_in_a_batch_too_large_for_memory() -> None:
    """Both troubles at once: halves first, then one by one."""
    device = Device(memory=20, poison=[3])
    results = await device.run([10] * 4)
    assert results[:3] == [0, 1, 2]
    assert isinstance(results[3], MalformedOutput)


@in_loop
async def test_nothing_is_tried_on_a_lost_device() -> None:
    """Every row hears that the device is gone; the health check replaces the replica."""
    device = Device(lost=True)
    results = await device.run([1, 1, 1])
    assert [type(result) for result in results] == [DeviceLost] * 3
    assert len(device.tried) == 1


@in_loop
async def test_rows_that_nobody_waits_for_are_not_tried() -> None:
    """A caller that left during the failed forward costs no forward of its own."""
    futures: list[Any] = []

    class Leaving(Device):
        async def __call__(self, batch: Sequence[Row[int]], /) -> list[int]:
            futures[1].cancel()
            return await super().__call__(batch)

    device = Leaving(poison=[0])
    futures += device.batcher.submit(rows([1, 1, 1]))
    results = await outcomes([futures[0], futures[2]])
    assert isinstance(results[0], MalformedOutput)
    assert device.tried == [[0, 1, 2], [0], [2]]


@in_loop
async def test_rows_that_became_late_are_not_tried() -> None:
    """The failed forward took the time of a row: it ends in its deadline."""

    class Slow(Device):
        async def __call__(self, batch: Sequence[Row[int]], /) -> list[int]:
            self.clock.advance_to(self.clock.time() + 3.0)
            return await super().__call__(batch)

    device = Slow(poison=[0])
    results = await device.run([1, 1], timeout_s=2.0)
    assert [type(result) for result in results] == [DeadlineExceeded] * 2
    assert device.tried == [[0, 1]]


def test_budget_is_cut_and_grows_back() -> None:
    """Half of what did not fit; then a tenth more after each stretch of good forwards, never above the setting."""
    governor = BudgetGovernor(configured=1000, floor=100)
    governor.out_of_memory(800)
    assert governor.budget == 400
    governor.out_of_memory(900)
    assert governor.budget == 400, "a forward that was already larger than the budget teaches no more"
    governor.out_of_memory(150)
    assert governor.budget == 100, "the longest row must fit"
    seen = []
    for _ in range(40):
        for _ in range(RECOVER_AFTER_FORWARDS):
            governor.succeeded()
        seen.append(governor.budget)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (111, 1000)


def test_a_lower_setting_wins() -> None:
    """A budget that was cut never exceeds a setting that was lowered meanwhile."""
    governor = BudgetGovernor(configured=1000, floor=10)
    governor.succeeded()
    assert governor.budget == 1000
    governor.out_of_memory(800)
    governor.configured = 300
    assert governor.budget == 300


def test_bl141_memory_that_is_lost_for_good_is_noticed() -> None:
    """BL-141: single rows that fitted at load do not fit any more, several times in a row; one that fits clears it."""
    governor = BudgetGovernor(configured=1000, floor=100)
    for _ in range(10):
        governor.out_of_memory(101)
    assert not governor.is_exhausted, "a smaller batch may fit"
    for _ in range(2):
        governor.out_of_memory(100)
    governor.succeeded()
    for _ in range(2):
        governor.out_of_memory(50)
    assert not governor.is_exhausted
    governor.out_of_memory(50)
    assert governor.is_exhausted
