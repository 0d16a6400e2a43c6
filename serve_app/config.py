"""The `args` of both applications: what a restart is needed to change. Unknown keys are errors with their path.

What may change while serving is `user_config`; see `deployments.settings`.
"""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deployments.model_replica import ReplicaSettings
from deployments.settings import Dtype, Layout, PositiveInt, Task
from deployments.wire import BucketInfo

PROJECT_ROOT = Path(__file__).resolve().parent.parent

NonEmptyStr = Annotated[str, Field(min_length=1)]


class _Args(BaseModel):
    # Strict, but YAML has no tuples: sequences are lists here.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class GatewayArgs(_Args):
    """`args` of the gateway application."""

    tenants_file: NonEmptyStr
    """Who may call, see `serve_app.auth`. Relative paths: in the working directory, else beside the packages."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * 2**20
    """Largest request body; larger ones are refused while they are read. 2,048 rows of 256 tokens fit."""
    body_timeout_s: Annotated[float, Field(gt=0, le=600)] = 30.0
    """Longest time in which a body must have arrived."""
    public_readiness_details: bool = True
    """Whether /ready lists the revisions to callers without a key; if not, they learn only ready or not."""


class BucketArgs(_Args):
    """One length bucket: a deployment of its own, named tokens-<max_tokens>."""

    max_tokens: PositiveInt
    """The longest row it takes, special tokens included."""

    @property
    def deployment(self) -> str:
        """Name of the deployment, which operators use in the YAML."""
        return f"tokens-{self.max_tokens}"


class RevisionArgs(_Args):
    """`args` of a revision application: one model, one revision of it."""

    revision: NonEmptyStr
    """Name of this revision, such as minilm@v1; the gateway must list the same."""
    model: NonEmptyStr
    """bundled/all-MiniLM-L6-v2, a Hugging Face id, or a local folder."""
    task: Task
    """What the model is asked for."""
    layout: Layout = "ragged"
    """ragged: rows laid end to end, no padding. padded: a rectangle, for models whose attention cannot be packed."""
    ceilings: Annotated[list[PositiveInt], Field(min_length=1)] | None = None
    """padded only: rows are grouped by these ceilings and each is charged its ceiling. Default: powers of two."""
    dtype: Dtype = "float32"
    """Of weights and arithmetic; answers are float32."""
    device: NonEmptyStr = "auto"
    """auto (cuda if there is one, else cpu), cpu, cuda, cuda:N."""
    threads: PositiveInt | None = None
    """Threads of one forward on a CPU. Default: all that the process may use."""
    buckets: Annotated[list[BucketArgs], Field(min_length=1)]
    """Length buckets in increasing order; rows beyond the last are refused."""

    @model_validator(mode="after")
    def _check(self) -> "RevisionArgs":
        limits = [bucket.max_tokens for bucket in self.buckets]
        if limits != sorted(set(limits)):
            raise ValueError(f"buckets: max_tokens must increase, got {limits}")
        if self.ceilings is not None:
            if self.layout != "padded":
                raise ValueError("ceilings: only the padded layout has them")
            if self.ceilings != sorted(set(self.ceilings)):
                raise ValueError(f"ceilings: must increase, got {self.ceilings}")
            if self.ceilings[-1] > limits[-1]:
                raise ValueError(f"ceilings: {self.ceilings[-1]} is above the largest bucket, {limits[-1]}")
        return self

    def replica_settings(self, bucket: BucketArgs) -> ReplicaSettings:
        """What a replica of `bucket` is built from."""
        return ReplicaSettings(
            revision=self.revision,
            model=self.model,
            task=self.task,
            layout=self.layout,
            dtype=self.dtype,
            device=self.device,
            threads=self.threads,
            max_tokens=bucket.max_tokens,
            ceilings=self._ceilings(bucket.max_tokens),
            buckets=tuple(
                BucketInfo(deployment=other.deployment, max_tokens=other.max_tokens) for other in self.buckets
            ),
        )

    def _ceilings(self, max_tokens: int) -> tuple[int, ...]:
        if self.layout == "ragged":
            return ()
        ceilings = self.ceilings if self.ceilings is not None else [2**power for power in range(4, 20)]
        # The bucket's own limit is always a ceiling, so that its longest row has one.
        return (*(ceiling for ceiling in ceilings if ceiling < max_tokens), max_tokens)


def find_file(path: str) -> Path:
    """Resolve a path from the YAML: absolute, else in the working directory, else beside the packages.

    Raises FileNotFoundError naming what was tried.
    """
    candidates = [Path(path)] if Path(path).is_absolute() else [Path.cwd() / path, PROJECT_ROOT / path]
    candidates = list(dict.fromkeys(candidates))
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(f"no such file: {' or '.join(str(candidate) for candidate in candidates)}")
