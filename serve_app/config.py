"""The `args` of both applications: what a restart is needed to change. Unknown keys are errors with their path.

What may change while serving is `user_config`; see `deployments.settings`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import SplitResult, parse_qs, urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deployments.quotas import OnStoreFailure
from deployments.replica_model import ReplicaSettings
from deployments.settings import Dtype, Layout, PositiveInt, Task
from deployments.wire import BucketInfo

QUOTA_STORAGE_VARIABLE = "RAGGEDSERVE_QUOTA_STORAGE"
"""Environment variable for a URI with a password, because Ray's dashboard shows `args`."""
PROJECT_ROOT = Path(__file__).resolve().parent.parent

NonEmptyStr = Annotated[str, Field(min_length=1)]


class _Args(BaseModel):
    # Strict, but YAML has no tuples: sequences are lists here.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class GatewayArgs(_Args):
    """`args` of the gateway application."""

    # An error repeats no value: a URI that is refused may be one with a password.
    model_config = ConfigDict(hide_input_in_errors=True)

    tenants_file: NonEmptyStr
    """Who may call, see `serve_app.auth`. Relative paths: in the working directory, else beside the packages."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * 2**20
    """Largest request body; larger ones are refused while they are read. 2,048 rows of 256 tokens fit."""
    body_timeout_s: Annotated[float, Field(gt=0, le=600)] = 30.0
    """Longest time in which a body must have arrived."""
    public_readiness_details: bool = True
    """Whether /ready lists the revisions to callers without a key; if not, they learn only ready or not."""
    quota_storage: NonEmptyStr | None = None
    """redis://host:port, in which all ingress replicas count quotas together. Default: each counts in its memory."""
    quota_on_store_failure: OnStoreFailure = "open"
    """While that storage is down, requests under a quota are admitted uncounted (open) or refused (closed)."""

    @field_validator("quota_storage")
    @classmethod
    def _check_quota_storage(cls, uri: str | None) -> str | None:
        if uri is not None and _has_password(_redis_uri(uri)):
            raise ValueError(f"must not hold a password: put the URI into the variable {QUOTA_STORAGE_VARIABLE}")
        return uri


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
    yield_cpu: bool = True
    """Forwards on a CPU run while nothing else on the machine wants one: gateway and proxy come first (Linux)."""
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
            yield_cpu=self.yield_cpu,
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


def quota_storage_uri(args: GatewayArgs, environment: Mapping[str, str]) -> str | None:
    """Where quotas are counted: the environment's URI, else that of `args`, else None for this process.

    Raises ValueError naming the variable, and never its value.
    """
    uri = environment.get(QUOTA_STORAGE_VARIABLE)
    if not uri:
        return args.quota_storage
    try:
        _redis_uri(uri)
    except ValueError as error:
        raise ValueError(f"environment variable {QUOTA_STORAGE_VARIABLE}: {error}") from None
    return uri


def _redis_uri(uri: str) -> SplitResult:
    try:
        parts = urlsplit(uri)
        is_complete = parts.scheme in {"redis", "rediss"} and bool(parts.hostname) and parts.port is not None
    except ValueError:  # a port that is no number
        is_complete = False
    if not is_complete:
        raise ValueError("must be redis://host:port or rediss://host:port, with /N for database N")
    return parts


def _has_password(parts: SplitResult) -> bool:
    return bool(parts.password) or "password" in parse_qs(parts.query)


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
