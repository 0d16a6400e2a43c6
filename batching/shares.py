"""How tenants of one priority share the model: virtual time, in seconds of work divided by weight.

A tenant's `served` grows by work / weight of each of its rows; who has the least is next. One that comes back starts at
the present virtual time, never below its own, so idling earns nothing and leaving pays no debt. This is start-time fair
queueing; against deficit round robin it needs no quantum, and it stays exact when rows of one forward belong to several
tenants. A tenant without rows is forgotten once the others have caught up with it.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Line = TypeVar("Line")
Key = TypeVar("Key")


@dataclass(slots=True, eq=False)
class Flow(Generic[Key, Line]):
    """One tenant's rows of one priority."""

    tenant: str
    weight: float
    served: float
    """Virtual time."""
    order: int
    """Breaks ties: who came first."""
    work_s: float = 0.0
    num_rows: int = 0
    lines: dict[Key, Line] = field(default_factory=dict)
    """Its rows by group; filled by the queue."""
    in_turn: bool = False
    """Whether the heap of turns has an entry for it."""


@dataclass(slots=True, eq=False)
class Shares(Generic[Key, Line]):
    """All flows of one priority, and their totals."""

    served: float = 0.0
    """Virtual time of the priority as a whole, among priorities."""
    work_s: float = 0.0
    num_rows: int = 0
    weight: float = 0.0
    """Of the flows that have rows."""
    flows: dict[str, Flow[Key, Line]] = field(default_factory=dict)
    _now: float = 0.0  # where the flow that was served last stood before
    _most_served: float = 0.0
    # Heaps by `served` as it was when the entry was made: it only grows, so a stale entry is too early at worst.
    _turns: list[tuple[float, int, Flow[Key, Line]]] = field(default_factory=list)
    _idle: list[tuple[float, int, Flow[Key, Line]]] = field(default_factory=list)

    def join(self, tenant: str, *, weight: float, order: int) -> Flow[Key, Line]:
        """The flow of `tenant`, with the weight that holds from now on, ready to get a row."""
        flow = self.flows.get(tenant)
        if flow is None:
            flow = self.flows[tenant] = Flow(tenant, weight, self._now, order)
        if flow.num_rows:
            self.weight -= flow.weight
        else:
            flow.order = order
            flow.served = max(flow.served, self._now)
        flow.weight = weight
        self.weight += weight
        if not flow.in_turn:
            flow.in_turn = True
            heapq.heappush(self._turns, (flow.served, flow.order, flow))
        return flow

    def add(self, flow: Flow[Key, Line], work_s: float) -> None:
        """Count one row more."""
        flow.num_rows += 1
        flow.work_s += work_s
        self.num_rows += 1
        self.work_s += work_s

    def remove(self, flow: Flow[Key, Line], work_s: float) -> None:
        """Count one row less."""
        flow.num_rows -= 1
        flow.work_s -= work_s
        self.num_rows -= 1
        self.work_s -= work_s
        if not flow.num_rows:
            flow.work_s = 0.0  # sums of floats drift
            self.weight -= flow.weight
            heapq.heappush(self._idle, (flow.served, flow.order, flow))
        if not self.num_rows:
            # Nobody waits, so nobody can be behind: all are even.
            self.work_s = self.weight = 0.0
            self._now = self._most_served
            self.flows.clear()
            self._idle.clear()
            self._turns.clear()

    def charge(self, flow: Flow[Key, Line], work_s: float) -> None:
        """Work is done for `flow`."""
        self._now = max(self._now, flow.served)
        flow.served += work_s / flow.weight
        self._most_served = max(self._most_served, flow.served)
        while self._idle and self._idle[0][0] <= self._now:
            idle = heapq.heappop(self._idle)[2]
            if not idle.num_rows and idle.served <= self._now and self.flows.get(idle.tenant) is idle:
                del self.flows[idle.tenant]

    def in_order(self) -> Iterator[Flow[Key, Line]]:
        """Flows with rows, the one served least first. Nothing may be added or charged meanwhile."""
        seen: list[Flow[Key, Line]] = []
        try:
            while self._turns:
                served, _, flow = self._turns[0]
                if not flow.num_rows:
                    heapq.heappop(self._turns)
                    flow.in_turn = False
                elif served < flow.served:
                    heapq.heapreplace(self._turns, (flow.served, flow.order, flow))
                else:
                    heapq.heappop(self._turns)
                    seen.append(flow)
                    yield flow
        finally:
            for flow in seen:
                heapq.heappush(self._turns, (flow.served, flow.order, flow))
