"""Quotas per tenant and revision: charged before the run with the exact number of tokens, given back when it fails.

Rules of this file: every charge is finished once and given back at most once, whatever becomes of the caller; a store
that is down or slow costs a bounded time and is never an error of its own.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray.serve import metrics

from batching.errors import QuotaExceeded, QuotaStoreDown, RequestTooLarge
from deployments.token_bucket import BucketStore, Shortage, Take, given_back

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 0.25
STORE_RETRY_S = 1.0
"""How long a store that failed is left alone, so that a dead one does not cost every request the timeout."""
LOG_INTERVAL_S = 10.0
FIRST_RUN_S = 1.0
"""How long a run is taken to last before one has ended."""
MIN_RETRY_S = 0.1
RUN_WEIGHT = 0.2
"""Share of the newest run in the mean."""

OnStoreFailure = Literal["open", "closed"]
Rate = Annotated[float, Field(ge=0.001, le=1e9, allow_inf_nan=False)]
Burst = Annotated[int, Field(ge=1, le=10**12)]
Result = TypeVar("Result")


class Quota(BaseModel):
    """What one tenant may use of each revision that a glob covers. A limit that is not set does not exist."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    revisions: Annotated[str, Field(min_length=1)]
    """Glob on revisions, such as minilm@*; each revision is counted on its own."""
    tokens_per_s: Rate | None = None
    """Tokens admitted per second in the long run."""
    burst_tokens: Burst | None = None
    """Tokens admitted at once after a pause, and the most in one request. Default: one second's worth."""
    requests_per_s: Rate | None = None
    """Requests admitted per second in the long run."""
    burst_requests: Burst | None = None
    """Requests admitted at once after a pause. Default: one second's worth."""
    max_concurrent_tokens: Burst | None = None
    """Tokens admitted and not answered yet, in each ingress replica."""

    @model_validator(mode="after")
    def _check_bursts(self) -> "Quota":
        for name, burst, rate_name, rate in (
            ("burst_tokens", self.burst_tokens, "tokens_per_s", self.tokens_per_s),
            ("burst_requests", self.burst_requests, "requests_per_s", self.requests_per_s),
        ):
            if burst is not None and rate is None:
                raise ValueError(f"{name}: means nothing without {rate_name}")
            if burst is not None and rate is not None and burst < rate:
                raise ValueError(f"{name}: {burst} is below one second's worth, {rate:g}")
        return self

    def takes(self, owner: str, *, tokens: int) -> list[Take]:
        """What a request of `tokens` takes out of the buckets of `owner`."""
        return [
            # With the numbers in the key, changed ones start with a full bucket instead of an old level.
            Take(
                key=f"{owner}/{setting}/{rate:g}/{burst}",
                rate_per_s=rate,
                burst=burst,
                amount=amount,
                setting=setting,
            )
            for setting, rate, burst, amount in (
                ("tokens_per_s", self.tokens_per_s, _burst(self.burst_tokens, self.tokens_per_s), tokens),
                ("requests_per_s", self.requests_per_s, _burst(self.burst_requests, self.requests_per_s), 1),
            )
            if rate is not None
        ]

    def check_size(self, tokens: int, *, param: str) -> None:
        """Raise RequestTooLarge for a request that could not pass at any time."""
        limits = [(self.max_concurrent_tokens, "max_concurrent_tokens")]
        if self.tokens_per_s is not None:
            limits.append((_burst(self.burst_tokens, self.tokens_per_s), "burst_tokens"))
        for limit, setting in limits:
            if limit is not None and tokens > limit:
                raise RequestTooLarge(param, "tokens", tokens, limit, f"{setting} of this tenant's quota")


def quota_of(quotas: Sequence[Quota], revision: str) -> Quota | None:
    """The first quota that covers the revision."""
    return next((quota for quota in quotas if fnmatchcase(revision, quota.revisions)), None)


@dataclass(slots=True, eq=False, kw_only=True)
class Charge:
    """What one request holds of a quota."""

    owner: str
    """Tenant and revision."""
    tokens: int
    started: float
    takes: Sequence[Take] = ()
    """What the store counted and has not got back."""


class QuotaKeeper:
    """Charges requests. One per ingress replica; replicas whose store is one Redis share the rates."""

    def __init__(
        self,
        store: BucketStore,
        *,
        on_store_failure: OnStoreFailure,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._store_errors: tuple[type[Exception], ...] = (TimeoutError, *store.failures)
        self._on_store_failure = on_store_failure
        self._timeout_s = timeout_s
        self._clock = clock
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_down = False
        self._retry_at = self._log_at = float("-inf")
        self._failed = metrics.Counter(
            "raggedserve_quota_store_failures", description="Charges and refunds that the quota store did not count."
        )

    @asynccontextmanager
    async def charged(
        self, tenant: str, revision: str, quotas: Sequence[Quota], *, tokens: int, param: str
    ) -> AsyncIterator[Charge]:
        """Hold a charge while the body runs, and give it back when the body raises or is cancelled.

        Raises as `charge` does.
        """
        charge = await self.charge(tenant, revision, quotas, tokens=tokens, param=param)
        is_answered = False
        try:
            yield charge
            is_answered = True
        finally:
            self.finish(charge)
            if not is_answered:
                await self.refund(charge)

    async def charge(self, tenant: str, revision: str, quotas: Sequence[Quota], *, tokens: int, param: str) -> Charge:
        """Charge a request of `tokens` tokens; `param` is the field to blame for a large one.

        Raises QuotaExceeded, RequestTooLarge, QuotaStoreDown, and then holds nothing.
        """
        charge = Charge(owner=f"{tenant}/{revision}", tokens=tokens, started=self._clock())
        quota = quota_of(quotas, revision)
        if quota is None:
            return charge
        quota.check_size(tokens, param=param)
        if quota.max_concurrent_tokens is not None:
            self._start(charge, limit=quota.max_concurrent_tokens)
        with ExitStack() as undo:
            undo.callback(self.finish, charge)
            takes = quota.takes(charge.owner, tokens=tokens)
            if takes and await self._take(takes):
                charge.takes = takes
            undo.pop_all()
        return charge

    async def refund(self, charge: Charge) -> None:
        """Give back tokens and request, once. A caller that is cancelled meanwhile does not stop it."""
        takes, charge.takes = charge.takes, ()
        if takes:
            await asyncio.shield(self._spawn(self._give_back(takes)))

    async def refund_tokens(self, charge: Charge, tokens: int) -> None:
        """Give back the tokens of rows that failed in a request that was answered."""
        takes = [replace(take, amount=tokens) for take in charge.takes if take.setting == "tokens_per_s"]
        if tokens and takes:
            await asyncio.shield(self._spawn(self._give_back(takes)))

    def finish(self, charge: Charge) -> None:
        """Make room for others under max_concurrent_tokens, once."""
        running = self._running.get(charge.owner)
        if running is not None and charge in running.charges:
            running.remove(charge, now=self._clock())
            if not running.charges:
                del self._running[charge.owner]

    async def stop(self) -> None:
        """Wait for refunds on their way, each of which is bounded in time, and close the store."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._store.close()

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _start(self, charge: Charge, *, limit: int) -> None:
        running = self._running.setdefault(charge.owner, _Running())
        if running.tokens + charge.tokens > limit:
            wait_s = running.room_in_s(charge.tokens, limit=limit, now=charge.started)
            raise QuotaExceeded("max_concurrent_tokens", limit, wait_s)
        running.add(charge)

    async def _take(self, takes: Sequence[Take]) -> bool:
        """Whether the store counted it; if not, it is down and the request may run all the same."""
        task = self._spawn(self._ask(takes))
        try:
            shortage = await asyncio.shield(task)
        except asyncio.CancelledError:
            # What the store may still count is nobody's: the caller is gone.
            self._spawn(self._undo(task, takes))
            raise
        except _StoreFailed:
            if self._on_store_failure == "closed":
                raise QuotaStoreDown("quota_on_store_failure", STORE_RETRY_S) from None
            return False
        if shortage is not None:
            short = takes[shortage.index]
            raise QuotaExceeded(short.setting, short.rate_per_s, shortage.wait_s)
        return True

    async def _undo(self, task: asyncio.Task[Shortage | None], takes: Sequence[Take]) -> None:
        with suppress(_StoreFailed):
            if await task is None:
                await self._ask(given_back(takes))

    async def _give_back(self, takes: Sequence[Take]) -> None:
        with suppress(_StoreFailed):
            await self._ask(given_back(takes))

    async def _ask(self, takes: Sequence[Take]) -> Shortage | None:
        """Ask the store, within the timeout. Raises _StoreFailed, at once while it is left alone."""
        if self._is_down:
            if self._clock() < self._retry_at:
                self._failed.inc(1)
                raise _StoreFailed
            self._retry_at = self._clock() + STORE_RETRY_S  # one looks; the others do not wait with it
        try:
            async with asyncio.timeout(self._timeout_s):
                shortage = await self._store.take(takes)
        except self._store_errors as error:
            self._note_failure(error)
            raise _StoreFailed from None
        self._is_down = False
        return shortage

    def _note_failure(self, error: Exception) -> None:
        now = self._clock()
        self._failed.inc(1)
        self._is_down = True
        self._retry_at = now + STORE_RETRY_S
        if now - self._log_at >= LOG_INTERVAL_S:
            self._log_at = now
            outcome = "admitted uncounted" if self._on_store_failure == "open" else "refused"
            # The text of the error could hold the URI.
            logger.error("quota store: %s; requests under a quota are %s", type(error).__name__, outcome)

    def _spawn(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _StoreFailed(Exception):
    """The store did not count it, or nobody asked because it was down a moment ago."""


class _Running:
    """Unfinished charges of one owner, the oldest first."""

    def __init__(self) -> None:
        self.charges: dict[Charge, None] = {}
        self.tokens = 0
        self._mean_s = FIRST_RUN_S

    def add(self, charge: Charge) -> None:
        self.charges[charge] = None
        self.tokens += charge.tokens

    def remove(self, charge: Charge, *, now: float) -> None:
        del self.charges[charge]
        self.tokens -= charge.tokens
        self._mean_s += RUN_WEIGHT * (now - charge.started - self._mean_s)

    def room_in_s(self, tokens: int, *, limit: int, now: float) -> float:
        """When enough of them will have ended, if they last as long as those before."""
        left = self.tokens
        for charge in self.charges:
            left -= charge.tokens
            if left + tokens <= limit:
                return max(charge.started + self._mean_s - now, MIN_RETRY_S)
        raise AssertionError("a request above the limit by itself was refused before")


def _burst(burst: int | None, rate: float | None) -> int:
    """The burst as set, else one second's worth, with which one token or request fits at any rate."""
    return burst if burst is not None else max(1, math.ceil(rate or 0.0))
