"""The numbers that govern batching, declared and checked once."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """What one forward may hold, and when a batch leaves. Raises ValueError for values that could never work."""

    token_budget: int
    """Most cost in one forward: real tokens when packed, rows x ceiling when padded. At least the longest row."""

    max_rows: int
    """Most rows in one forward, whatever they cost."""

    max_wait_s: float = 0.0
    """How long the oldest row of a group may be held back to gather company. 0: an idle model starts at once."""

    max_passed_over: int = 1
    """In how many batches later rows may pass a row that did not fit; after that nothing passes it. 0: strict order."""

    max_work_s: float = math.inf
    """Most predicted seconds in one forward; a row that alone takes longer runs alone."""

    prepare_ahead_s: float = 0.0
    """How long before the predicted end of the running forward the next batch may be chosen. 0: after it has ended."""

    isolate_failures: bool = False
    """After a failed forward try its rows apart, so that only the guilty ones fail; see `batching.isolation`."""

    max_concurrent_forwards: int = 1
    """Forwards started and not finished, over all groups."""

    max_concurrent_per_group: int = 1
    """The same within one group."""

    def __post_init__(self) -> None:
        _check_ints(
            self, token_budget=1, max_rows=1, max_passed_over=0, max_concurrent_forwards=1, max_concurrent_per_group=1
        )
        _check_seconds(self, "max_wait_s", "prepare_ahead_s")
        if not self.max_work_s > 0:
            raise ValueError("max_work_s: must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """How much may wait. Running rows do not count: their place is free again. Raises ValueError."""

    max_queued_cost: int
    """Most cost waiting in all groups together; beyond it rows are refused at once."""

    max_queued_rows: int
    """Most rows waiting in all groups together."""

    max_queued_rows_per_group: int
    """Most rows waiting in one group."""

    max_groups: int
    """Most groups that have waiting or running rows. A group ends when its last row leaves."""

    max_backlog_s: float = math.inf
    """Most time that all waiting work may be predicted to take. A tenant gets, for each unit of its weight, as much of
    this room as all leave free: alone a half, beside another flood a third, so that a newcomer always finds some."""

    def __post_init__(self) -> None:
        _check_ints(self, max_queued_cost=1, max_queued_rows=1, max_queued_rows_per_group=1, max_groups=1)
        if not self.max_backlog_s > 0:
            raise ValueError("max_backlog_s: must be above 0")


def _check_seconds(limits: object, *names: str) -> None:
    for name in names:
        value = getattr(limits, name)
        if isinstance(value, bool) or not (0 <= value < math.inf):
            raise ValueError(f"{name}: must be a finite number of seconds, 0 or more")


def _check_ints(limits: object, **minima: int) -> None:
    for name, minimum in minima.items():
        value = getattr(limits, name)
        if type(value) is not int or value < minimum:
            raise ValueError(f"{name}: must be an integer of at least {minimum}")
