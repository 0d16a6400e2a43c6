"""A request and its answer in the one form that every dialect is turned into, and what a tenant may ask for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from batching.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    InvalidRequest,
    RequestTooLarge,
    TokenServeError,
    WaitTooLong,
)
from batching.row import Priority
from deployments.dispatch import Caller
from deployments.quotas import Quota
from deployments.revisions import LiveRevision
from deployments.settings import GatewaySettings
from deployments.wire import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Whose request it is and what it may use."""

    name: str
    revisions: tuple[str, ...]
    """Globs on resolved revisions, such as minilm@*."""
    batch_group: str
    """Tenants of one batch group may share a forward."""
    is_admin: bool = False
    weight: float = 1.0
    """Twice the weight, twice the share of a model while others wait."""
    priority: Priority = "interactive"
    """Of requests that name none, and the highest that they may name."""
    max_timeout_s: float | None = None
    """Longest time that a request may ask for, where it is below the gateway's own limit."""
    quotas: tuple[Quota, ...] = ()
    """The first that covers a revision applies to it."""

    def may_use(self, revision: str) -> bool:
        """Whether a glob of this tenant covers the revision."""
        return any(fnmatchcase(revision, pattern) for pattern in self.revisions)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """One request in the form that every dialect is turned into."""

    tenant: Tenant
    revision: str
    """A revision or an alias, as the client wrote it."""
    inputs: Sequence[str | TokenIds]
    """Texts get the model's special tokens; ids ([n] int32) are used exactly as given."""
    params: Sequence[str]
    """Name of each input in the client's dialect, for errors."""
    truncate: bool = False
    """Cut over-long inputs instead of refusing them."""
    partial: bool = False
    """Answer good rows although others fail."""
    timeout_s: float | None = None
    timeout_param: str = "timeout_ms"
    """Where the client gave it."""
    priority: Priority | None = None
    """None takes the tenant's."""
    revision_param: str = "revision"
    inputs_param: str = "inputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class InferAnswer:
    """One outcome per input, in order.

    `values` [N, width] float32, zeros for failed rows; `num_tokens` has N counts, 0 for failed rows; `errors` maps
    failed rows to their errors and is empty unless the request allowed partial answers.
    """

    live: LiveRevision
    values: NDArray[np.float32]
    num_tokens: Sequence[int]
    truncated: frozenset[int]
    errors: Mapping[int, TokenServeError]
    computed_tokens: int


def check_num_rows(num_rows: int, settings: GatewaySettings, *, param: str) -> None:
    """Raise RequestTooLarge for more rows than a request may have."""
    if num_rows > settings.max_rows_per_request:
        raise RequestTooLarge(param, "rows", num_rows, settings.max_rows_per_request, "max_rows_per_request")


def timeout_of(request: InferRequest, settings: GatewaySettings) -> float:
    """The time that the request gets. Raises InvalidRequest for more than its tenant may ask for."""
    limit_s = settings.max_timeout_s
    if request.tenant.max_timeout_s is not None:
        limit_s = min(limit_s, request.tenant.max_timeout_s)
    if request.timeout_s is None:
        return min(settings.default_timeout_s, limit_s)
    if request.timeout_s > limit_s:
        raise InvalidRequest(request.timeout_param, f"is above the limit of {round(limit_s * 1000)}")
    return request.timeout_s


def caller_of(request: InferRequest) -> Caller:
    """On whose behalf the rows run. Raises InvalidRequest for a priority above that of the tenant."""
    tenant = request.tenant
    priority = request.priority or tenant.priority
    if priority == "interactive" and tenant.priority != "interactive":
        raise InvalidRequest("priority", f"must be {tenant.priority} for this key")
    return Caller(tenant=tenant.name, batch_group=tenant.batch_group, weight=tenant.weight, priority=priority)


def with_given_time(error: TokenServeError, timeout_s: float) -> TokenServeError:
    """A replica knows the time that was left when the call was sent; the client knows the time it gave."""
    match error:
        case WaitTooLong():
            return WaitTooLong(timeout_s, error.wait_s, error.retry_after_s)
        case DeadlineUnreachable():
            return DeadlineUnreachable(timeout_s, error.needed_s)
        case DeadlineExceeded():
            return DeadlineExceeded(timeout_s)
    return error
