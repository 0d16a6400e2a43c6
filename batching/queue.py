"""Rows that wait, in fair order.

Only this file orders rows. Who is next is decided on three levels, in seconds of work and never by counting rows:

1. `interactive` and `batch` rows share the model as 1 - batch_share to batch_share while both wait;
2. within a priority, tenants share it by weight, see `batching.shares`;
3. within a tenant, the row whose deadline is nearest is next; see `Row.rank` for the bound on overtaking.

A group is everything that may share a forward: one revision, one batch group of tenants, one bucket.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeAlias

from batching.row import PRIORITIES, GroupKey, Payload, Priority, Row
from batching.shares import Flow, Shares

DEFAULT_BATCH_SHARE = 0.1


@dataclass(slots=True, eq=False)
class _Line:
    """A flow's rows in one group: a heap of (rank, ticket), of which some may have left."""

    flow: "_Flow"
    entries: list[tuple[float, int]] = field(default_factory=list)
    num_rows: int = 0


_Flow: TypeAlias = Flow[GroupKey, _Line]
_Shares: TypeAlias = Shares[GroupKey, _Line]


@dataclass(slots=True, eq=False)
class _Group(Generic[Payload]):
    rows: OrderedDict[Row[Payload], None] = field(default_factory=OrderedDict)
    """In order of arrival. Ordered, because the first of a plain dict is slow to find once many have left."""
    cost: int = 0
    turns: dict[Priority, list[tuple[float, int, _Line]]] = field(
        default_factory=lambda: {priority: [] for priority in PRIORITIES}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Seconds of waiting work as one tenant sees it, for a row of one priority."""

    own_s: float
    """The tenant's own, of this priority."""
    same_priority_s: float
    """Everybody's of this priority, own included."""
    other_priority_s: float
    weight: float
    """Of all tenants with rows of this priority, the tenant itself not counted."""


@dataclass(slots=True)
class FairQueue(Generic[Payload]):
    """The waiting rows of one batcher, with running totals. Raises ValueError for a share that starves somebody."""

    batch_share: float = DEFAULT_BATCH_SHARE
    """Of the model's time, for `batch` rows while `interactive` ones wait too; between 0 and 1, both excluded."""
    num_rows: int = 0
    num_tokens: int = 0
    cost: int = 0
    work_s: float = 0.0
    _shares: dict[Priority, _Shares] = field(
        default_factory=lambda: {priority: Shares() for priority in PRIORITIES}, init=False
    )
    _groups: dict[GroupKey, _Group[Payload]] = field(default_factory=dict, init=False)
    _now: float = field(default=0.0, init=False)  # virtual time between the two priorities
    _tickets: dict[Row[Payload], int] = field(default_factory=dict, init=False)
    # Heaps hold tickets, never rows: an entry may outlive its row, and must not keep a payload alive.
    _rows: dict[int, Row[Payload]] = field(default_factory=dict, init=False)
    _starts: list[tuple[float, int]] = field(default_factory=list, init=False)
    _counter: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.batch_share < 1:
            raise ValueError("batch_share: must be between 0 and 1, both excluded")

    # ---- in and out ----------------------------------------------------------------------------------------------

    def add(self, row: Row[Payload]) -> None:
        """Let `row` wait. Raises ValueError unless its work and weight are positive."""
        if not (row.work_s > 0 and row.weight > 0):
            raise ValueError("work_s and weight: must be above 0")
        self._counter += 1
        ticket = self._tickets[row] = self._counter
        self._rows[ticket] = row
        group = self._groups.setdefault(row.key, _Group())
        group.rows[row] = None
        group.cost += row.cost
        line = self._line(row, group)
        line.num_rows += 1
        heapq.heappush(line.entries, (row.rank, ticket))
        self.num_rows += 1
        self.num_tokens += row.num_tokens
        self.cost += row.cost
        self.work_s += row.work_s
        if row.latest_start is not None:
            heapq.heappush(self._starts, (row.latest_start, ticket))

    def discard(self, row: Row[Payload]) -> bool:
        """Take `row` out wherever it stands; False if it is not waiting."""
        ticket = self._tickets.pop(row, None)
        if ticket is None:
            return False
        del self._rows[ticket]
        group = self._groups[row.key]
        del group.rows[row]
        group.cost -= row.cost
        shares = self._shares[row.priority]
        flow = shares.flows[row.tenant]
        line = flow.lines[row.key]
        line.num_rows -= 1
        if not line.num_rows:
            del flow.lines[row.key]
        elif len(line.entries) > 2 * line.num_rows + 64:
            line.entries = self._living(line.entries)
        shares.remove(flow, row.work_s)
        self.num_rows -= 1
        self.num_tokens -= row.num_tokens
        self.cost -= row.cost
        self.work_s -= row.work_s
        if not self.num_rows:
            self.work_s = 0.0  # sums of floats drift
            self._now = max(of.served for of in self._shares.values())
        if not group.rows:
            del self._groups[row.key]
        if len(self._starts) > 2 * len(self._rows) + 64:
            # Most rows leave long before their deadline; without this their entries would pile up until then.
            self._starts = self._living(self._starts)
        return True

    # ---- who waits -----------------------------------------------------------------------------------------------

    def groups(self) -> Iterator[GroupKey]:
        """Groups with waiting rows, in no particular order."""
        return iter(self._groups)

    def num_groups(self) -> int:
        """How many groups have waiting rows."""
        return len(self._groups)

    def rows(self, key: GroupKey) -> Iterator[Row[Payload]]:
        """Waiting rows of a group, in order of arrival."""
        return iter(self._groups[key].rows) if key in self._groups else iter(())

    def num_rows_in(self, key: GroupKey) -> int:
        """How many rows of a group wait."""
        return len(self._groups[key].rows) if key in self._groups else 0

    def cost_of(self, key: GroupKey) -> int:
        """Cost of a group's waiting rows."""
        return self._groups[key].cost if key in self._groups else 0

    def tenant_work_s(self, tenant: str) -> float:
        """Waiting work of one tenant, both priorities."""
        return sum(of.flows[tenant].work_s for of in self._shares.values() if tenant in of.flows)

    def num_tenants(self) -> int:
        """Tenants that are remembered; one counts for each of its priorities."""
        return sum(len(of.flows) for of in self._shares.values())

    def backlog(self, tenant: str, priority: Priority) -> Backlog:
        """What stands before a new row of `tenant`."""
        of = self._shares[priority]
        flow = of.flows.get(tenant)
        is_waiting = flow is not None and flow.num_rows > 0
        own_weight = flow.weight if flow is not None and is_waiting else 0.0
        return Backlog(
            own_s=flow.work_s if flow is not None else 0.0,
            same_priority_s=of.work_s,
            other_priority_s=self.work_s - of.work_s,
            weight=max(of.weight - own_weight, 0.0),
        )

    def next_latest_start(self) -> float | None:
        """The earliest moment after which a waiting row can no longer be answered in time."""
        while self._starts and self._starts[0][1] not in self._rows:
            heapq.heappop(self._starts)
        return self._starts[0][0] if self._starts else None

    def expired(self, now: float) -> list[Row[Payload]]:
        """Waiting rows that no forward from `now` on could answer in time, each once; the caller discards them."""
        rows: list[Row[Payload]] = []
        while self._starts and self._starts[0][0] <= now:
            row = self._rows.get(heapq.heappop(self._starts)[1])
            if row is not None:
                rows.append(row)
        return rows

    # ---- whose turn ----------------------------------------------------------------------------------------------

    def lead(self, is_usable: Callable[[GroupKey], bool]) -> GroupKey | None:
        """The group whose turn it is among the usable ones: of the next priority, its next tenant, its next row."""
        waiting = [priority for priority in PRIORITIES if self._shares[priority].num_rows]
        unusable: set[GroupKey] = set()
        for priority in sorted(waiting, key=lambda priority: self._shares[priority].served):
            for flow in self._shares[priority].in_order():
                usable: list[tuple[tuple[float, int], GroupKey]] = []
                for key, line in flow.lines.items():
                    if key in unusable:
                        continue
                    if is_usable(key):
                        head = self._head(line)
                        assert head is not None, "nothing is set aside between passes"
                        usable.append((head, key))
                    else:
                        unusable.add(key)
                if usable:
                    return min(usable)[1]
                if len(unusable) == len(self._groups):
                    return None
        return None

    def turn(self, key: GroupKey) -> "Turn[Payload]":
        """Go through the rows of a group in fair order, taking some."""
        return Turn(self, key)

    # ---- parts ---------------------------------------------------------------------------------------------------

    def _line(self, row: Row[Payload], group: _Group[Payload]) -> _Line:
        shares = self._shares[row.priority]
        if not shares.num_rows:
            shares.served = max(shares.served, self._now)
        flow = shares.join(row.tenant, weight=row.weight, order=self._counter)
        shares.add(flow, row.work_s)
        line = flow.lines.get(row.key)
        if line is None:
            line = flow.lines[row.key] = _Line(flow)
            heapq.heappush(group.turns[row.priority], (flow.served, self._counter, line))
        return line

    def _charge(self, row: Row[Payload], flow: _Flow) -> None:
        shares = self._shares[row.priority]
        part = self.batch_share if row.priority == "batch" else 1 - self.batch_share
        self._now = max(self._now, shares.served)
        shares.served += row.work_s / part
        shares.charge(flow, row.work_s)

    def _head(self, line: _Line) -> tuple[float, int] | None:
        """The first entry of a row that still waits; None when a pass has set all of them aside."""
        while line.entries and line.entries[0][1] not in self._rows:
            heapq.heappop(line.entries)
        return line.entries[0] if line.entries else None

    def _living(self, entries: list[tuple[float, int]]) -> list[tuple[float, int]]:
        living = [entry for entry in entries if entry[1] in self._rows]
        heapq.heapify(living)
        return living


class Turn(Generic[Payload]):
    """One pass over a group: `next` shows a row, which is then taken or skipped; `finish` lets the skipped wait on."""

    def __init__(self, queue: FairQueue[Payload], key: GroupKey) -> None:
        self._queue = queue
        self._group = queue._groups[key]
        self._skipped: list[tuple[Row[Payload], int, _Line]] = []
        self._turns: list[tuple[float, int, _Line]] = []
        self._shown: Priority | None = None
        self._exhausted: set[_Line] = set()
        self._candidates = [priority for priority in PRIORITIES if self._has_next(self._group.turns[priority])]

    def next(self) -> Row[Payload] | None:
        """The row whose turn it is; None when all were shown."""
        if self._shown is not None and not self._has_next(self._turns):
            self._candidates.remove(self._shown)  # only the heap that was used last can have changed
            self._shown = None
        if not self._candidates:
            return None
        best = self._candidates[0]
        if len(self._candidates) == 2:
            other, shares = self._candidates[1], self._queue._shares
            best = other if shares[other].served < shares[best].served else best
        self._shown = best
        self._turns = self._group.turns[best]
        return self._queue._rows[self._turns[0][2].entries[0][1]]

    def take(self) -> None:
        """The row shown leaves the queue and is charged to its tenant."""
        _, order, line = self._turns[0]
        row = self._queue._rows[heapq.heappop(line.entries)[1]]
        flow = line.flow
        self._queue._charge(row, flow)
        self._queue.discard(row)
        heapq.heapreplace(self._turns, (flow.served, order, line))

    def skip(self) -> None:
        """The row shown does not run now; the next one of its tenant may."""
        line = self._turns[0][2]
        ticket = heapq.heappop(line.entries)[1]
        self._skipped.append((self._queue._rows[ticket], ticket, line))

    def finish(self) -> None:
        """End the pass. The skipped keep their place, or the front of their tenant if they became barriers."""
        for row, ticket, line in self._skipped:
            heapq.heappush(line.entries, (row.rank, ticket))
            if line in self._exhausted:
                self._exhausted.discard(line)
                self._queue._counter += 1
                heapq.heappush(self._group.turns[row.priority], (line.flow.served, self._queue._counter, line))
        self._skipped.clear()

    def _has_next(self, turns: list[tuple[float, int, _Line]]) -> bool:
        while turns:
            served, order, line = turns[0]
            if not line.num_rows:
                heapq.heappop(turns)
            elif served < line.flow.served:
                heapq.heapreplace(turns, (line.flow.served, order, line))
            elif self._queue._head(line) is not None:
                return True
            else:
                heapq.heappop(turns)
                self._exhausted.add(line)
        return False
