"""`python -m benchmarks.quotas`: a tenant at five times its quota, and how much of it gets in.

One ingress replica that counts in its memory, then two that share a Redis which this starts. The tenant may use 2,000
tokens per second and 4,000 at once; what is admitted in `--seconds` should be the rate times the time and the burst.
Then refunds: requests that a replica refuses (a deadline that cannot be met) must leave the quota as it was. Exit
status 1 when more than two percent too much or too little got in, or a refund is missing.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import urllib.error
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.redis_server import RedisServer
from benchmarks.replies import breaches, counts, outcome_table
from benchmarks.server import PROJECT_ROOT, ServerFailed, exit_on_sigterm, request_json, serving
from benchmarks.streams import OK, Stream
from benchmarks.table import render
from benchmarks.testbed import Bench, Served

LIMITED = "limited"
TOKENS_PER_S, BURST_TOKENS = 2000, 4000
FACTOR = 5
TEXTS = 8
"""Per request: small ones, so that what is left of the quota is not lost to their size."""
CONNECTIONS = 256
TOLERANCE = 0.02
REFUSED_REQUESTS = 20

HEADER = ["ingress replicas", "counted in", "offered tokens", "admitted", "quota + burst", "difference", "refunded"]


def main() -> int:
    """Run what the command line asks for; the exit status."""
    exit_on_sigterm()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quotas", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    lines, problems = [], []
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        print(machine.heading(PROJECT_ROOT), flush=True)
        quota = {"revisions": "*", "tokens_per_s": TOKENS_PER_S, "burst_tokens": BURST_TOKENS}
        bench = Bench.prepare(Path(name), {LIMITED: {"quotas": [quota]}}, num_texts=1024, seed=given.seed)
        try:
            store = RedisServer(Path(name))
            with ExitStack() as stack:
                stack.callback(store.stop)
                store.start()
                for num_ingresses, storage in ((1, None), (2, store.uri)):
                    line, problem = _measure(bench, num_ingresses, storage, seconds=given.seconds)
                    lines.append(line)
                    problems += problem
        except (ServerFailed, OSError, subprocess.SubprocessError) as error:
            print(error, file=sys.stderr)
            return 1
    print("\n" + render(HEADER, lines))
    print("\n".join(f"BROKEN: {problem}" for problem in problems) or "\nnothing broke")
    return 1 if problems else 0


def _measure(bench: Bench, num_ingresses: int, storage: str | None, *, seconds: float) -> tuple[list[str], list[str]]:
    with serving(_config(bench, num_ingresses, storage)) as base:
        served = Served(bench=bench, base=base, is_ours=True)
        refunded = _refunds(served)
        time.sleep(BURST_TOKENS / TOKENS_PER_S + 1)  # the quota is whole again
        stream = Stream(
            name=LIMITED,
            requests_per_s=FACTOR * TOKENS_PER_S / (TEXTS * bench.mean_tokens),
            lasts_s=seconds,
            connections=CONNECTIONS,
            shapes=(TEXTS,),
            is_regular=True,
            headers=served.headers(LIMITED),
            fields=served.fields,
        )
        result = served.play([stream])
    replies = result.streams[LIMITED].replies
    admitted = sum(reply.num_tokens for reply in replies if reply.outcome == OK)
    # From the first request that was sent to the last: what a full machine does to the client is not the quota's doing.
    lasted_s = max(reply.sent_s for reply in replies) - min(reply.sent_s for reply in replies)
    expected = TOKENS_PER_S * lasted_s + BURST_TOKENS
    difference = admitted / expected - 1
    print(f"\n{num_ingresses} ingress, {storage or 'memory'}: {lasted_s:.1f} s; {result.conditions}")
    print(outcome_table(replies), flush=True)
    problems = [*breaches(result.streams)]
    if abs(difference) > TOLERANCE:
        problems.append(f"{num_ingresses} ingress: {difference:+.1%} of quota and burst; not 200: {counts(replies)}")
    if not refunded:
        problems.append(f"{num_ingresses} ingress: refused requests stayed charged")
    offered = sum(reply.num_tokens for reply in replies)
    store = "memory" if storage is None else "Redis"
    figures = [f"{offered:,}", f"{admitted:,}", f"{expected:,.0f}", f"{difference:+.2%}", "yes" if refunded else "NO"]
    return [str(num_ingresses), store, *figures], problems


def _config(bench: Bench, num_ingresses: int, storage: str | None) -> dict[str, Any]:
    config = bench.config("one-bucket")
    for application in config["applications"]:
        if application["name"] == "gateway":
            (ingress,) = application["deployments"]
            ingress["num_replicas"] = num_ingresses
            if storage is not None:
                application["args"]["quota_storage"] = storage
    return config


def _refunds(served: Served) -> bool:
    """Whether the whole burst is there after many times of it was charged for requests that a replica refused."""
    key, long_texts = served.bench.keys[LIMITED], served.bench.long_texts
    for _ in range(REFUSED_REQUESTS):
        try:
            request_json(served.url, key=key, body={**served.fields, "inputs": long_texts[:6], "timeout_ms": 20})
        except urllib.error.HTTPError as error:
            if error.code == 429:
                return False
    try:
        # As much as the burst holds at once, and a second ago the quota was whole but for what was refused.
        request_json(served.url, key=key, body={**served.fields, "inputs": [*long_texts, *long_texts[:7]]})
    except urllib.error.HTTPError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
