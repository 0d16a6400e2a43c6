"""Refusing at the ingress what a replica has just refused, before it costs anything.

A refusal by a replica costs tokenising and a call between processes; in an overload these take the CPU that the model
needs. So once replicas have refused several requests of a tenant in a row, the ingress refuses, for a moment, those
that are no smaller and no more patient than the last one.
"""

from dataclasses import dataclass, field
from typing import Protocol

from ray.serve import metrics

from batching.errors import Overloaded, TenantOverShare, TokenServeError, WaitTooLong

MOST_REMEMBERED_S = 0.5
"""The replica is asked again at least this often, so that a backlog that is gone is noticed."""

MIN_REFUSALS = 3
"""In a row, before anything is shed: where there are several replicas, one that is full is not all of them."""

ShedKey = tuple[str, str, str]
"""Tenant, revision, priority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is known of a request before any work on it."""

    num_chars: int
    """Characters of texts and ids of id lists, all inputs together."""
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refused:
    size: Size
    error: TokenServeError
    at: float
    until: float
    num: int
    """Refusals in a row."""


class Count(Protocol):
    """The part of a metric that is used here."""

    def inc(self, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
        """Add `value`."""


def _shed_requests() -> Count:
    counter: Count = metrics.Counter(
        "raggedserve_shed_requests",
        description="Requests refused by the ingress because replicas had just refused several like them.",
        tag_keys=("error",),
    )
    return counter


@dataclass(slots=True)
class Shedder:
    """What was refused a moment ago; times are monotonic seconds."""

    num_shed: Count = field(default_factory=_shed_requests)
    _refused: dict[ShedKey, _Refused] = field(default_factory=dict)

    def check(self, key: ShedKey, size: Size, now: float) -> None:
        """Raise what a replica said a moment ago to a request that was easier to serve than this one."""
        known = self._refused.get(key)
        if known is None or known.num < MIN_REFUSALS or now >= known.until:
            return  # a replica is asked
        if size.num_chars >= known.size.num_chars and size.timeout_s <= known.size.timeout_s:
            self.num_shed.inc(1, tags={"error": type(known.error).__name__})
            raise _again(known.error, timeout_s=size.timeout_s, elapsed_s=now - known.at)

    def answered(self, key: ShedKey) -> None:
        """A replica took a request."""
        self._refused.pop(key, None)

    def note(self, key: ShedKey, size: Size, error: TokenServeError, now: float) -> None:
        """Remember a refusal for load; other errors say nothing about the next request."""
        if not isinstance(error, Overloaded | TenantOverShare):
            return
        known = self._refused.get(key)
        num = 1 if known is None else known.num + 1
        until = now + min(error.retry_after_s, MOST_REMEMBERED_S)
        if len(self._refused) > 1000:
            self._refused = {known: refused for known, refused in self._refused.items() if refused.until > now}
        self._refused[key] = _Refused(size=size, error=error, at=now, until=until, num=num)


def _again(error: TokenServeError, *, timeout_s: float, elapsed_s: float) -> TokenServeError:
    match error:
        case WaitTooLong():
            return WaitTooLong(timeout_s, error.wait_s, _left(error.retry_after_s, elapsed_s))
        case TenantOverShare():
            return TenantOverShare(_left(error.retry_after_s, elapsed_s))
    assert isinstance(error, Overloaded), "nothing else is remembered"
    return Overloaded(_left(error.retry_after_s, elapsed_s))


def _left(retry_after_s: float, elapsed_s: float) -> float:
    return max(retry_after_s - elapsed_s, 0.0)
