"""Rows that wait, first come first served within a group, groups in turn.

Only this file orders rows. A group is everything that may share a forward: one revision, one batch group of tenants,
one bucket. It exists while rows of it wait; an emptied group is forgotten and starts again at the back.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

Payload = TypeVar("Payload")


class GroupKey(NamedTuple):
    """What rows must have in common to run in one forward. `bucket` is a ceiling in tokens, 0 where lengths mix."""

    batch_group: str
    revision: str
    bucket: int


@dataclass(slots=True, kw_only=True, eq=False)
class Row(Generic[Payload]):
    """One sequence on its way through the batcher; compared by identity."""

    key: GroupKey
    tenant: str
    num_tokens: int
    cost: int
    """What it counts against the token budget."""
    payload: Payload = field(repr=False)
    timeout_s: float | None = None
    """The time that its request was given; None waits for ever."""
    arrived: float = 0.0
    """Clock time of admission, set by the batcher."""
    passed_over: int = 0
    """Batches that later rows joined while this one did not fit."""

    @property
    def deadline(self) -> float | None:
        """Clock time after which nobody wants the answer."""
        return None if self.timeout_s is None else self.arrived + self.timeout_s


@dataclass(slots=True)
class PendingQueue(Generic[Payload]):
    """The waiting rows of one batcher, with running totals."""

    num_rows: int = 0
    num_tokens: int = 0
    cost: int = 0
    # Insertion-ordered dicts serve as ordered sets: O(1) to add, cancel and rotate. Each row has a ticket.
    _groups: dict[GroupKey, dict[Row[Payload], int]] = field(default_factory=dict)
    # A heap of (deadline, ticket): it may outlive a row, so it holds no row, and no payload is kept by it.
    _deadlines: list[tuple[float, int]] = field(default_factory=list)
    _rows_with_deadline: dict[int, Row[Payload]] = field(default_factory=dict)
    _tickets: int = 0

    def add(self, row: Row[Payload]) -> None:
        """Put `row` at the end of its group."""
        self._tickets += 1
        self._groups.setdefault(row.key, {})[row] = self._tickets
        self.num_rows += 1
        self.num_tokens += row.num_tokens
        self.cost += row.cost
        if row.deadline is not None:
            self._rows_with_deadline[self._tickets] = row
            heapq.heappush(self._deadlines, (row.deadline, self._tickets))

    def discard(self, row: Row[Payload]) -> bool:
        """Take `row` out wherever it stands; False if it is not waiting."""
        group = self._groups.get(row.key)
        if group is None or row not in group:
            return False
        self._rows_with_deadline.pop(group.pop(row), None)
        if not group:
            del self._groups[row.key]
        self.num_rows -= 1
        self.num_tokens -= row.num_tokens
        self.cost -= row.cost
        self._drop_stale_deadlines()
        return True

    def rotate(self, key: GroupKey) -> None:
        """Send the group to the back of the turn order, if rows of it still wait."""
        group = self._groups.pop(key, None)
        if group is not None:
            self._groups[key] = group

    def groups(self) -> Iterator[GroupKey]:
        """Groups with waiting rows, the next in turn first."""
        return iter(self._groups)

    def num_groups(self) -> int:
        """How many groups have waiting rows."""
        return len(self._groups)

    def rows(self, key: GroupKey) -> Iterator[Row[Payload]]:
        """Waiting rows of a group, oldest first."""
        return iter(self._groups.get(key, ()))

    def num_rows_in(self, key: GroupKey) -> int:
        """How many rows of a group wait."""
        return len(self._groups.get(key, ()))

    def next_deadline(self) -> float | None:
        """The earliest deadline of a waiting row."""
        while self._deadlines and self._deadlines[0][1] not in self._rows_with_deadline:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expired(self, now: float) -> list[Row[Payload]]:
        """Waiting rows whose deadline is at or before `now`, earliest first, each once; the caller discards them."""
        rows: list[Row[Payload]] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            row = self._rows_with_deadline.get(heapq.heappop(self._deadlines)[1])
            if row is not None:
                rows.append(row)
        return rows

    def _drop_stale_deadlines(self) -> None:
        # Most rows leave long before their deadline; without this their tickets would pile up until then.
        if len(self._deadlines) > 2 * len(self._rows_with_deadline) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._rows_with_deadline]
            heapq.heapify(self._deadlines)
