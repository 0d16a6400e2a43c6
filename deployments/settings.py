"""What may change while a deployment serves: the `user_config` of the YAML, checked with the path of a bad key."""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from batching.limits import BatchLimits, QueueLimits
from batching.queue import DEFAULT_BATCH_SHARE

MAX_ROWS_PER_FORWARD = 1000
"""Also the size of a batch for `@serve.batch`, which a plan never exceeds."""

DEFAULT_CPU_TOKEN_BUDGET = 2048
"""About a third of a second of a 6-layer model on two CPU cores; throughput is flat above it there."""
DEFAULT_FORWARD_S = 0.25
OVERHEADS_PER_FORWARD = 10
"""A forward costs something whatever it holds; cut shorter than this, a tenth of the model's time would go there."""
DEFAULT_GPU_TOKEN_BUDGET = 16384
"""The default of text-embeddings-inference, which was chosen for GPUs."""

Task = Literal["embed"]
Layout = Literal["ragged", "padded"]
Dtype = Literal["float32", "bfloat16", "float16"]

PositiveInt = Annotated[int, Field(ge=1)]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class BucketSettings(_Settings):
    """`user_config` of a bucket deployment such as tokens-64."""

    token_budget: PositiveInt | None = None
    """Most cost in one forward, in tokens. Default by device, never below the bucket's longest row."""
    max_rows: Annotated[int, Field(ge=1, le=MAX_ROWS_PER_FORWARD)] = 256
    """Most rows in one forward."""
    max_wait_s: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 0.0
    """How long rows may be held back to gather company; 0 starts an idle model at once."""
    max_forward_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Longest predicted time of one forward that holds several rows: everybody else waits for it. Default: a quarter of
    a second, or ten times what a forward costs beside its rows, whichever is longer."""
    prepare_ahead_s: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """How long before the predicted end of a forward the next batch is chosen. 0: after it, with the most to choose."""
    max_backlog_s: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] = 30.0
    """Most predicted work waiting in one replica; each tenant gets as much of it, by weight, as all leave free."""
    batch_share: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = DEFAULT_BATCH_SHARE
    """Part of the model that `batch` rows get while `interactive` ones wait too."""
    max_queued_tokens: PositiveInt = 524_288
    """Most cost waiting in one replica. The default takes the largest request that the ingress lets through."""
    max_queued_rows: Annotated[int, Field(ge=1, le=8192)] = 8192
    """Most rows waiting in one replica."""
    max_groups: PositiveInt = 4096
    """Most batch groups with work in one replica."""
    stuck_forward_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 120.0
    """A forward that runs longer fails the health check, and Ray replaces the replica."""

    def batch_limits(
        self, *, max_tokens: int, default_token_budget: int, overhead_s: float | None = None
    ) -> BatchLimits:
        """Limits for a bucket whose longest row has `max_tokens`, on a device with forwards of this overhead.

        None: the time of a forward is not bounded by default. Raises ValueError when the longest row could never run.
        """
        default_forward_s = (
            math.inf if overhead_s is None else max(DEFAULT_FORWARD_S, OVERHEADS_PER_FORWARD * overhead_s)
        )
        budget = max(default_token_budget, max_tokens) if self.token_budget is None else self.token_budget
        if budget < max_tokens:
            raise ValueError(
                f"token_budget: {budget} is below the bucket's longest row of {max_tokens} tokens, which can never run"
            )
        return BatchLimits(
            token_budget=budget,
            max_rows=self.max_rows,
            max_wait_s=self.max_wait_s,
            max_work_s=default_forward_s if self.max_forward_s is None else self.max_forward_s,
            prepare_ahead_s=self.prepare_ahead_s,
            isolate_failures=True,
        )

    def queue_limits(self) -> QueueLimits:
        """Limits on what waits; one group may use all of it."""
        return QueueLimits(
            max_queued_cost=self.max_queued_tokens,
            max_queued_rows=self.max_queued_rows,
            max_queued_rows_per_group=self.max_queued_rows,
            max_groups=self.max_groups,
            max_backlog_s=self.max_backlog_s,
        )


class GatewaySettings(_Settings):
    """`user_config` of the ingress deployment."""

    revisions: dict[Annotated[str, Field(min_length=1)], Annotated[str, Field(min_length=1)]]
    """Revision, such as minilm@v1, to the name of its application."""
    aliases: dict[Annotated[str, Field(min_length=1)], str] = {}
    """Other names for revisions. A revision is always known by its own name too."""
    default_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Time given to a request that names none."""
    max_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 300.0
    """Longest time that a request may ask for."""
    max_rows_per_request: Annotated[int, Field(ge=1, le=100_000)] = 2048
    """The limit of OpenAI's API."""
    max_tokens_per_request: PositiveInt = 524_288
    """Real tokens of all rows of one request."""

    @model_validator(mode="after")
    def _check_aliases(self) -> "GatewaySettings":
        for alias, revision in self.aliases.items():
            if revision not in self.revisions:
                raise ValueError(f"aliases.{alias}: {revision} is not among the revisions")
            if alias in self.revisions:
                raise ValueError(f"aliases.{alias}: a revision has that name already")
        if self.default_timeout_s > self.max_timeout_s:
            raise ValueError(f"default_timeout_s: {self.default_timeout_s} is above max_timeout_s {self.max_timeout_s}")
        return self
