"""After a batch failed: find the rows that are to blame, so that only they fail.

No value of a failed batch is used. Its rows are tried alone, once each; after running out of memory the batch is
halved instead, until it fits, because the size of the batch was to blame and not a row. A row whose caller has gone
meanwhile is not tried. A device that is lost runs nothing any more, so nothing is tried on it.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from batching.errors import DeviceLost, Draining, OutOfMemory, TokenServeError
from batching.forwards import Outcome, Value
from batching.row import Payload, Row

RECOVER_AFTER_FORWARDS = 50
"""Forwards without trouble before a budget that was cut grows again."""
RECOVER_FACTOR = 1.1
EXHAUSTED_AFTER_FORWARDS = 3
"""Forwards in a row, each no larger than the longest row, that did not fit: load had proved that they do."""


@dataclass(slots=True)
class Isolation(Generic[Payload, Value]):
    """One failed batch being taken apart. `attempt` runs rows and returns outcomes, or the error of the whole."""

    attempt: Callable[[Sequence[Row[Payload]]], Awaitable[Sequence[Outcome[Value]] | TokenServeError]]
    is_wanted: Callable[[Row[Payload]], bool]
    """Whether anybody still waits for the row."""
    num_attempts: int = 1
    """Forwards so far, the failed one included."""
    out_of_memory_cost: int | None = None
    """The least cost that did not fit."""

    async def run(self, rows: Sequence[Row[Payload]], error: TokenServeError) -> Sequence[Outcome[Value]]:
        """One outcome per row of a batch that ended in `error`."""
        if isinstance(error, OutOfMemory):
            cost = sum(row.cost for row in rows)
            self.out_of_memory_cost = min(cost, self.out_of_memory_cost or cost)
        if len(rows) == 1 or isinstance(error, DeviceLost):
            return [_for_row(error, row) for row in rows]
        size = (len(rows) + 1) // 2 if isinstance(error, OutOfMemory) else 1
        outcomes: list[Outcome[Value]] = []
        for start in range(0, len(rows), size):
            outcomes.extend(await self._part(rows[start : start + size]))
        return outcomes

    async def _part(self, rows: Sequence[Row[Payload]]) -> Sequence[Outcome[Value]]:
        wanted = [row for row in rows if self.is_wanted(row)]
        if not wanted:
            return [Draining() for _ in rows]  # nobody reads it
        self.num_attempts += 1
        result = await self.attempt(wanted)
        outcomes = await self.run(wanted, result) if isinstance(result, TokenServeError) else result
        of = dict(zip(wanted, outcomes, strict=True))
        return [of.get(row, Draining()) for row in rows]


def _for_row(error: TokenServeError, row: Row[Payload]) -> TokenServeError:
    return OutOfMemory(row.num_tokens) if isinstance(error, OutOfMemory) else error


@dataclass(slots=True)
class BudgetGovernor:
    """The token budget that the device's memory really allows: halved when it ran out, grown back slowly."""

    configured: int
    floor: int
    """The longest row: it must always fit a batch of its own."""
    _cut: int | None = None
    _good_forwards: int = 0
    _misfits: int = 0
    """Forwards within `floor` that did not fit, since the last good one."""

    @property
    def is_exhausted(self) -> bool:
        """Whether the memory is lost to something else, such as a leak, and only a fresh process helps."""
        return self._misfits >= EXHAUSTED_AFTER_FORWARDS

    @property
    def budget(self) -> int:
        """The budget in force."""
        return self.configured if self._cut is None else min(self._cut, self.configured)

    def out_of_memory(self, cost: int) -> None:
        """A forward of this cost did not fit."""
        self._cut = max(min(self.budget, cost // 2), self.floor)
        self._good_forwards = 0
        if cost <= self.floor:
            self._misfits += 1

    def succeeded(self) -> None:
        """A forward ran well."""
        self._misfits = 0
        if self._cut is None:
            return
        self._good_forwards += 1
        if self._good_forwards >= RECOVER_AFTER_FORWARDS:
            self._good_forwards = 0
            grown = int(self._cut * RECOVER_FACTOR) + 1
            self._cut = None if grown >= self.configured else grown
