"""One sequence on its way through the batcher."""

from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

Payload = TypeVar("Payload")

Priority = Literal["interactive", "batch"]
PRIORITIES: tuple[Priority, ...] = ("interactive", "batch")
ORDER_HORIZON_S = 10.0
"""Within a tenant, a row is overtaken only by rows that arrive less than this after it."""


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
    work_s: float
    """What it adds to a forward, in predicted seconds: the unit of shares, backlog and waits."""
    payload: Payload = field(repr=False)
    weight: float = 1.0
    """Of its tenant: twice the weight, twice the share."""
    priority: Priority = "interactive"
    timeout_s: float | None = None
    """The time that its request was given; None waits for ever."""
    arrived: float = 0.0
    """Clock time of admission, set by the batcher."""
    least_s: float = 0.0
    """Predicted time of a forward with this row alone, set by the batcher."""
    passed_over: int = 0
    """Batches that rows behind it joined while this one did not fit."""
    is_barrier: bool = False
    """It was passed over as often as allowed: first of its tenant, and nothing passes it again."""

    @property
    def deadline(self) -> float | None:
        """Clock time after which nobody wants the answer."""
        return None if self.timeout_s is None else self.arrived + self.timeout_s

    @property
    def latest_start(self) -> float | None:
        """Clock time after which even a forward of its own would end too late."""
        return None if self.timeout_s is None else self.arrived + self.timeout_s - self.least_s

    @property
    def rank(self) -> float:
        """Place within its tenant: its deadline, but never more than ORDER_HORIZON_S after its arrival."""
        if self.is_barrier:
            return float("-inf")
        return self.arrived + min(ORDER_HORIZON_S if self.timeout_s is None else self.timeout_s, ORDER_HORIZON_S)
