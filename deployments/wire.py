"""What travels between the ingress and model replicas: flat arrays and plain values, pickled by Ray."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from batching.errors import TokenServeError
from batching.row import Priority

TokenIds = NDArray[np.int32]
"""[n]: the ids of one row, special tokens included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferCall:
    """Rows of one request for one bucket.

    Shapes: `token_ids` [T] int32, special tokens included; `lengths` [B] int32, adding up to T, each at least 1.
    """

    token_ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    tenant: str
    batch_group: str
    weight: float = 1.0
    """Of the tenant: twice the weight, twice the share of the model while others wait."""
    priority: Priority = "interactive"
    timeout_s: float
    """Time left when the call was sent; a duration, because clocks of two nodes do not agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferReply:
    """One outcome per row of the call.

    `values` [B, width] float32, zeros for a failed row; `errors` maps the index of each failed row to its error;
    `computed_tokens` is what the model processed for it, padding of its rows included. A call that was refused as
    a whole carries `refusal` and no values: raised across Ray, each refusal would write a traceback into the log.
    """

    values: NDArray[np.float32]
    refusal: TokenServeError | None = None
    errors: dict[int, TokenServeError] = field(default_factory=dict)
    computed_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketInfo:
    """One bucket deployment of a revision and the longest row it takes, in tokens."""

    deployment: str
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionInfo:
    """All that the ingress needs to know about a revision; asked from the revision's own application."""

    revision: str
    task: str
    layout: str
    dtype: str
    attention_backend: str
    dimension: int
    supports_dimensions: bool
    """Whether a prefix of the vector is meaningful (Matryoshka)."""
    vocab_size: int
    """Rows of the embedding table: token ids are below it."""
    buckets: tuple[BucketInfo, ...]
    """In order of their ceilings."""
    tokenizer_json: str
    created: int
    """Unix time at which the model was loaded."""

    @property
    def max_tokens(self) -> int:
        """The longest row that any bucket takes."""
        return self.buckets[-1].max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCounts:
    """Rows of one tenant since the replica started."""

    rows: int = 0
    """Answered."""
    tokens: int = 0
    """Real tokens of the answered rows."""
    refused: int = 0
    """Rows turned away at the door."""
    failed_rows: int = 0
    """Rows that were accepted and ended in an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostStats:
    """The cost model in force, see `batching.cost`: seconds = overhead + per_token x positions + per_pair x pairs."""

    overhead_s: float
    per_token_s: float
    per_pair_s: float
    error: float
    """Median relative error of its predictions."""
    is_reliable: bool
    """False: durations cannot be told from noise, and positions alone count."""
    wall_per_work: float
    """Seconds on the clock per predicted second, over about the last ten forwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """Counters of one replica since it started, and what waits in it now."""

    forwards: int
    shared_forwards: int
    """Forwards that held rows of more than one tenant; 0 unless tenants share a batch group."""
    computed_tokens: int
    """Positions the model processed, padding included."""
    charged_tokens: int
    """Cost of the batches against the token budget."""
    probe_forwards: int
    slow_forwards: int
    """Forwards that took several times their predicted time."""
    retried_forwards: int
    """Forwards that failed and whose rows were tried apart."""
    out_of_memory: int
    """Of those, the ones for which memory was too small."""
    queued_rows: int
    queued_tokens: int
    backlog_s: float
    """Predicted time to work off what waits."""
    token_budget: int
    """In force; below the configured one after running out of memory."""
    cost: CostStats
    tenants: dict[str, TenantCounts]
