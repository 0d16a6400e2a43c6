"""`python -m benchmarks.gathering`: what waiting for company and choosing ahead change.

`max_wait_s` holds rows back so that forwards are fuller, `prepare_ahead_s` chooses the next batch before the running
one ends so that the model does not wait for it. For each: throughput and tokens per forward of one text per request
from 64 connections, and the latency of one text at a time on an idle server.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.server import PROJECT_ROOT, TRANSPORTS, ServerFailed, exit_on_sigterm, serving
from benchmarks.table import Window, percentile, render
from benchmarks.testbed import Bench, Served
from benchmarks.workload import LengthMix

TENANT = "acme"
VARIANTS: dict[str, dict[str, float]] = {
    "defaults": {},
    "max_wait_s 0.005": {"max_wait_s": 0.005},
    "max_wait_s 0.05": {"max_wait_s": 0.05},
    "prepare_ahead_s 0.005": {"prepare_ahead_s": 0.005},
    "prepare_ahead_s 0.05": {"prepare_ahead_s": 0.05},
}
BUSY_CONNECTIONS = 64
HEADER = ["settings", "busy tokens/s", "tokens/forward", "busy p50 ms", "busy p99 ms", "idle p50 ms", "idle p99 ms"]


def main() -> int:
    """Run what the command line asks for; the exit status."""
    exit_on_sigterm()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gathering", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="per cell")
    parser.add_argument("--transport", choices=list(TRANSPORTS), default="default")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        print(machine.heading(PROJECT_ROOT), flush=True)
        bench = Bench.prepare(Path(name), {TENANT: {}}, num_texts=1024, seed=given.seed)
        try:
            for variant, user_config in VARIANTS.items():
                with serving(_config(bench, user_config), transport=given.transport) as base:
                    lines.append([variant, *_measure(Served(bench=bench, base=base, is_ours=True), given.seconds)])
                    print(" ".join(lines[-1]), file=sys.stderr, flush=True)
        except (ServerFailed, OSError, subprocess.SubprocessError) as error:
            print(error, file=sys.stderr)
            return 1
    print("\n" + render(HEADER, lines))
    return 0


def _config(bench: Bench, user_config: dict[str, float]) -> dict[str, Any]:
    config = bench.config("one-bucket")
    for application in config["applications"]:
        if application["import_path"] == "serve_app.app:revision":
            application["deployments"] = [{"name": f"tokens-{LengthMix().max_tokens}", "user_config": user_config}]
    return config


def _measure(served: Served, seconds: float) -> list[str]:
    before = served.totals()
    busy = served.capacity(TENANT, texts=1, connections=BUSY_CONNECTIONS, seconds=seconds)
    done = served.totals().since(before)
    idle = served.capacity(TENANT, texts=1, connections=1, seconds=seconds)
    return [
        f"{busy.tokens_per_s:,.0f}",
        f"{done.computed_tokens / max(1, done.forwards):,.0f}",
        *_latencies_ms(busy),
        *_latencies_ms(idle),
    ]


def _latencies_ms(window: Window) -> list[str]:
    return [f"{percentile(window.latencies_s, percent) * 1000:,.0f}" for percent in (50, 99)]


if __name__ == "__main__":
    sys.exit(main())
