"""What `neighbours` and `overload` share: texts, keys, a server or the baseline, its capacity, its counters."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from benchmarks import plain_serve
from benchmarks.children import run_child
from benchmarks.load import LoadSpec
from benchmarks.server import Transport, project_config, request_json, serving, with_tenants, write_tenants
from benchmarks.streams import DEFAULT_TIMEOUT_S, HANG_EXTRA_S, OpenLoopResult, OpenLoopSpec, Stream
from benchmarks.table import Window, percentile
from benchmarks.workload import LengthMix, make_texts, make_workload, one_token_words
from deployments.model import find_folder

MODEL = "bundled/all-MiniLM-L6-v2"
REVISION = "minilm"
OPERATOR = "operator"
WARMUP_S = 3.0
FULL_BATCH_TOKENS = 2048
"""The default budget of one forward on a CPU."""
FULL_BATCH_TRIES = 5

Target = Literal["one-bucket", "default", "plain"]
TARGETS: dict[Target, str] = {
    "one-bucket": "raggedserve, one 256-token bucket",
    "default": "raggedserve, serve_config.yaml",
    "plain": "plain @serve.batch",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counters of the server, all revisions, buckets and tenants together."""

    forwards: int
    rows: int
    """Answered."""
    computed_tokens: int
    failed_rows: int
    refused: int

    @staticmethod
    def of(base: str, *, key: str) -> "Totals":
        """Of the server at `base`, asked with an administrator's key."""
        revisions = request_json(f"{base}/v1/stats", key=key)["revisions"].values()
        buckets = [bucket for revision in revisions for bucket in revision.values()]
        return Totals(
            forwards=sum(bucket["forwards"] for bucket in buckets),
            rows=sum(bucket["rows"] for bucket in buckets),
            computed_tokens=sum(bucket["computed_tokens"] for bucket in buckets),
            failed_rows=sum(bucket["failed_rows"] for bucket in buckets),
            refused=sum(bucket["refused"] for bucket in buckets),
        )

    def since(self, before: "Totals") -> "Totals":
        """By how much they rose."""
        return Totals(
            forwards=self.forwards - before.forwards,
            rows=self.rows - before.rows,
            computed_tokens=self.computed_tokens - before.computed_tokens,
            failed_rows=self.failed_rows - before.failed_rows,
            refused=self.refused - before.refused,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The folder of one run, its texts, and the tenants that it made."""

    folder: Path
    mean_tokens: float
    """Of a text."""
    keys: dict[str, str]
    """By tenant."""
    long_texts: list[str]
    """As many full-length ones as make up one full batch."""

    @staticmethod
    def prepare(folder: Path, tenants: dict[str, dict[str, object]], *, num_texts: int, seed: int) -> "Bench":
        """Write texts and tenants into `folder`; an administrator is added."""
        model = find_folder(MODEL)
        workload = make_workload(model, num_texts=num_texts, seed=seed)
        workload.save(folder)
        longest = LengthMix().max_tokens
        words = one_token_words(Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab())
        return Bench(
            folder=folder,
            mean_tokens=sum(workload.lengths) / num_texts,
            keys=write_tenants(folder / "tenants.yaml", {**tenants, OPERATOR: {"admin": True}}),
            long_texts=make_texts([longest] * (FULL_BATCH_TOKENS // longest), words, seed),
        )

    @contextmanager
    def serving(self, target: Target, *, transport: Transport) -> "Iterator[Served]":
        """A server of that kind, up and used once. Raises ServerFailed."""
        with serving(self.config(target), transport=transport) as base:
            yield Served(bench=self, base=base, is_ours=target != "plain")

    def config(self, target: Target) -> dict[str, Any]:
        """What is served for `target`, with the tenants of this run."""
        if target == "plain":
            return plain_serve.config(str(find_folder(MODEL)))
        args = {"buckets": [{"max_tokens": LengthMix().max_tokens}]} if target == "one-bucket" else {}
        return with_tenants(project_config(**args), self.folder / "tenants.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that runs."""

    bench: Bench
    base: str
    is_ours: bool
    """Has tenants, deadlines and counters."""

    @property
    def url(self) -> str:
        """Where texts go."""
        return f"{self.base}/v1/infer"

    @property
    def fields(self) -> dict[str, str]:
        """What a body has beside its texts."""
        return {"revision": REVISION} if self.is_ours else {}

    def headers(self, tenant: str) -> dict[str, str]:
        """Of a request of `tenant`."""
        return {"Content-Type": "application/json", "X-API-Key": self.bench.keys[tenant]}

    def capacity(self, tenant: str, *, texts: int, connections: int, seconds: float) -> Window:
        """What a closed loop gets through after a warm-up."""
        spec = LoadSpec(
            url=self.url,
            workload=str(self.bench.folder),
            rows_per_request=texts,
            connections=connections,
            warmup_s=WARMUP_S,
            window_s=seconds,
            first_text=0,
            headers=self.headers(tenant),
            fields=self.fields,
        )
        fields, foreign = run_child("benchmarks.load", asdict(spec), seconds=WARMUP_S + seconds)
        return Window(**{**fields, "foreign_cpu_share": foreign})

    def play(self, streams: Sequence[Stream]) -> OpenLoopResult:
        """Send all `streams` from one process, and wait for the last reply."""
        spec = OpenLoopSpec(url=self.url, workload=str(self.bench.folder), streams=streams)
        longest_s = max(
            stream.ends_s + max([*(timeout / 1000 for timeout in stream.timeouts_ms), DEFAULT_TIMEOUT_S])
            for stream in streams
        )
        content, foreign = run_child("benchmarks.open_loop", asdict(spec), seconds=longest_s + HANG_EXTRA_S)
        return replace(OpenLoopResult.of_json(content), foreign_cpu_share=foreign)

    def full_batch_s(self, tenant: str) -> float:
        """Median time of a request that fills one forward, with nothing else there."""
        body = {**self.fields, "inputs": self.bench.long_texts}
        seconds = []
        for _ in range(FULL_BATCH_TRIES):
            started = time.monotonic()
            request_json(self.url, key=self.bench.keys[tenant], body=body)
            seconds.append(time.monotonic() - started)
        return percentile(seconds, 50)

    def totals(self) -> Totals:
        """The counters now."""
        return Totals.of(self.base, key=self.bench.keys[OPERATOR])
