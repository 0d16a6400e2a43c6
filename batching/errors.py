"""Every error that a request can end in, as far as policy is concerned.

    TokenServeError
    ├── InvalidRequest          a field has the wrong type, value or shape
    │   ├── EmptyInput          no rows, or a row without tokens
    │   ├── InputTooLong        a row has more tokens than the limit
    │   ├── TokenIdOutOfRange   an id is outside the vocabulary
    │   └── RequestTooLarge     the whole request exceeds a limit on rows or tokens
    ├── UnknownRevision         no such revision, or not this tenant's
    ├── RevisionUnavailable     known, but no replica answers at present
    ├── Overloaded              the backlog is at its limit
    │   ├── QueueFull           this group's part of the backlog is
    │   ├── GroupLimit          too many groups are live
    │   └── WaitTooLong         the answer would come after the deadline, because of the backlog
    ├── TenantOverShare         this tenant's part of the backlog is at its limit
    ├── QuotaExceeded           the tenant's quota has no room at present
    ├── QuotaStoreDown          quotas cannot be looked up, and the setting says to refuse then
    ├── DeadlineExceeded        the deadline passed before an answer
    │   └── DeadlineUnreachable the request alone takes longer than its deadline
    ├── Draining                stopping: takes no new work, or was stopped with this row inside
    ├── ReplicaLost             the replica died with this request inside
    └── ForwardFailed           the model raised or returned something unusable
        ├── OutOfMemory         a row does not fit into the device's memory, even alone
        └── DeviceLost          the device does not run anything any more

Rules of this file: errors carry facts, not HTTP statuses; they cross processes, so every constructor argument goes to
`super().__init__` in order; `detail` is the text for the caller and never holds a payload.
"""


class TokenServeError(Exception):
    """Base of all errors here. `param` names the offending request field, if there is one."""

    param: str | None = None

    @property
    def detail(self) -> str:
        """One sentence for the caller."""
        raise NotImplementedError


class InvalidRequest(TokenServeError):
    """`param` is not what the contract says; `reason` completes the sentence."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(param, reason)
        self.param = param
        self.reason = reason
        self.others: tuple[str, ...] = ()
        """Further fields of the same request that are wrong too, for whoever collects them."""

    @property
    def detail(self) -> str:
        """Name the field and what is wrong with it."""
        others = f" (also refused: {', '.join(self.others)})" if self.others else ""
        return f"`{self.param}` {self.reason}{others}"


class EmptyInput(InvalidRequest):
    """`param` holds nothing to run."""

    def __init__(self, param: str, reason: str = "is empty") -> None:
        super().__init__(param, reason)


class InputTooLong(InvalidRequest):
    """A row of `num_tokens` tokens, special tokens included, where at most `limit` are allowed.

    `is_lower_bound`: the row was not read to its end, and has more.
    """

    def __init__(self, param: str, num_tokens: int, limit: int, is_lower_bound: bool = False) -> None:
        more_than = "more than " if is_lower_bound else ""
        super().__init__(param, f"has {more_than}{num_tokens} tokens; the limit is {limit}")
        self.args = (param, num_tokens, limit, is_lower_bound)
        self.is_lower_bound = is_lower_bound
        self.num_tokens = num_tokens
        self.limit = limit


class TokenIdOutOfRange(InvalidRequest):
    """A token id below 0 or not below `limit`."""

    def __init__(self, param: str, limit: int) -> None:
        source = "made by this model's tokenizer; a client that uses another must send text"
        super().__init__(param, f"must be a token id from 0 to {limit - 1}, {source}")
        self.args = (param, limit)
        self.limit = limit


class RequestTooLarge(InvalidRequest):
    """The request holds `amount` of `unit`; `setting`, where one is named, allows at most `limit` in one request."""

    def __init__(self, param: str, unit: str, amount: int, limit: int, setting: str | None = None) -> None:
        named = f" (setting {setting})" if setting else ""
        super().__init__(param, f"holds {amount} {unit}; the limit for one request is {limit}{named}")
        self.args = (param, unit, amount, limit, setting)
        self.unit = unit
        self.amount = amount
        self.limit = limit
        self.setting = setting


class UnknownRevision(TokenServeError):
    """The named revision does not exist or is not this tenant's: one error for both, so that names do not leak."""

    def __init__(self, param: str) -> None:
        super().__init__(param)
        self.param = param

    @property
    def detail(self) -> str:
        """Say so without repeating the name."""
        return f"`{self.param}` names no revision that this key may use"


class RevisionUnavailable(TokenServeError):
    """`revision` is configured but cannot answer now."""

    def __init__(self, revision: str, retry_after_s: float) -> None:
        super().__init__(revision, retry_after_s)
        self.revision = revision
        self.retry_after_s = retry_after_s

    @property
    def detail(self) -> str:
        """Name the revision, which this tenant may know."""
        return f"revision {self.revision} is not up; try again"


class Overloaded(TokenServeError):
    """The backlog is at its limit. `retry_after_s` is the estimated time to work it off."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(retry_after_s)
        self.retry_after_s = retry_after_s

    @property
    def detail(self) -> str:
        """Tell overload from failure."""
        return "the backlog of this revision is full; try again after the time in Retry-After"


class QueueFull(Overloaded):
    """The waiting rows of one group are at `limit`."""

    def __init__(self, limit: int, retry_after_s: float) -> None:
        super().__init__(retry_after_s)
        self.args = (limit, retry_after_s)
        self.limit = limit

    @property
    def detail(self) -> str:
        """Name the limit."""
        return f"{self.limit} rows of this group are waiting already, which is the limit; try again later"


class GroupLimit(Overloaded):
    """`limit` groups are live and this row would open another."""

    def __init__(self, limit: int, retry_after_s: float) -> None:
        super().__init__(retry_after_s)
        self.args = (limit, retry_after_s)
        self.limit = limit

    @property
    def detail(self) -> str:
        """Name the limit."""
        return f"{self.limit} groups have work already, which is the limit; try again later"


class WaitTooLong(Overloaded):
    """All that waits would take this request to `wait_s`, beyond the `timeout_s` that it was given."""

    def __init__(self, timeout_s: float, wait_s: float, retry_after_s: float) -> None:
        super().__init__(retry_after_s)
        self.args = (timeout_s, wait_s, retry_after_s)
        self.timeout_s = timeout_s
        self.wait_s = wait_s

    @property
    def detail(self) -> str:
        """Name both times."""
        return (
            f"the answer would take about {_ms(self.wait_s)}, longer than the {_ms(self.timeout_s)} that this request "
            "was given; try again after the time in Retry-After"
        )


class TenantOverShare(TokenServeError):
    """This tenant's own waiting rows stand in the way; others would be admitted."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(retry_after_s)
        self.retry_after_s = retry_after_s

    @property
    def detail(self) -> str:
        """Say that it is the caller's own doing."""
        return "too much work of this tenant is waiting already; try again after the time in Retry-After"


class QuotaExceeded(TokenServeError):
    """`setting` of the tenant's quota, which is `limit`, has no room for this request for `retry_after_s` more."""

    def __init__(self, setting: str, limit: float, retry_after_s: float) -> None:
        super().__init__(setting, limit, retry_after_s)
        self.setting = setting
        self.limit = limit
        self.retry_after_s = retry_after_s

    @property
    def detail(self) -> str:
        """Name the limit and its setting."""
        return (
            f"this tenant's quota for this revision is used up: {self.setting} is {self.limit:g}; "
            "try again after the time in Retry-After"
        )


class QuotaStoreDown(TokenServeError):
    """The store of the quotas does not answer, and `setting` says that nothing is admitted without it."""

    def __init__(self, setting: str, retry_after_s: float) -> None:
        super().__init__(setting, retry_after_s)
        self.setting = setting
        self.retry_after_s = retry_after_s

    @property
    def detail(self) -> str:
        """Name the setting."""
        return f"this tenant's quota cannot be checked at present, and {self.setting} is closed; try again"


class DeadlineExceeded(TokenServeError):
    """No answer within `timeout_s`, the time that this request was given."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.timeout_s = timeout_s

    @property
    def detail(self) -> str:
        """Name the limit that applied to this request."""
        return f"no answer within the {_ms(self.timeout_s)} that this request was given"


class DeadlineUnreachable(DeadlineExceeded):
    """The request alone is predicted to take `needed_s`, on an idle replica, beyond the `timeout_s` it was given."""

    def __init__(self, timeout_s: float, needed_s: float) -> None:
        super().__init__(timeout_s)
        self.args = (timeout_s, needed_s)
        self.needed_s = needed_s

    @property
    def detail(self) -> str:
        """Name both times."""
        return (
            f"this request takes about {_ms(self.needed_s)} even on an idle replica, longer than the "
            f"{_ms(self.timeout_s)} that it was given"
        )


class Draining(TokenServeError):
    """Stopping: new rows are refused; rows that were inside at a forced stop end in this too."""

    def __init__(self) -> None:
        super().__init__()
        self.retry_after_s = 1.0

    @property
    def detail(self) -> str:
        """Say that another replica may take it."""
        return "this replica is stopping; try again"


class ReplicaLost(TokenServeError):
    """The replica died while it held this request, and the one retry did not succeed either."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(retry_after_s)
        self.retry_after_s = retry_after_s

    @property
    def detail(self) -> str:
        """Say that nothing was answered twice or dropped in silence."""
        return "the replica that held this request stopped, and no other could take it; try again"


class ForwardFailed(TokenServeError):
    """The forward gave no usable result. `reason` holds type names and counts only, never values."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    @property
    def detail(self) -> str:
        """Name the kind of failure."""
        return f"the model failed on this batch: {self.reason}"


class OutOfMemory(ForwardFailed):
    """A row of `num_tokens` tokens does not fit into the device's memory, even alone."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__("out of memory")
        self.args = (num_tokens,)
        self.num_tokens = num_tokens

    @property
    def detail(self) -> str:
        """Name the size, so that the caller sends less."""
        return (
            f"a row of {self.num_tokens} tokens does not fit into the memory of the model's device; send shorter rows"
        )


class DeviceLost(ForwardFailed):
    """The device failed in a way that ends every further forward; the replica is about to be replaced."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("the device is lost")
        self.args = (retry_after_s,)
        self.retry_after_s = retry_after_s

    @property
    def detail(self) -> str:
        """Say that another replica may take it."""
        return "the device of this replica failed and is being replaced; try again"


def _ms(seconds: float) -> str:
    return f"{round(seconds * 1000, 1):g} ms"
