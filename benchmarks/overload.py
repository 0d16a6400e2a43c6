"""`python -m benchmarks.overload`: what the server still gets done when it is offered more than it can do.

An open loop at several multiples of the measured capacity, half of the requests with a short deadline and half with a
long one; then probes, of the same tenant and of a bystander, until the server is as quick as when idle. Exit status 1
when a request hung, failed to connect, was answered by anything but 200, 429, 503 or 504, was refused without
Retry-After, or was answered wrongly. Speed never fails it.
"""

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine, overload_report
from benchmarks.memory import serving_memory
from benchmarks.overload_report import BYSTANDER, LOAD, TIMEOUTS_MS, Level
from benchmarks.replies import breaches
from benchmarks.server import PROJECT_ROOT, TRANSPORTS, ServerFailed, exit_on_sigterm
from benchmarks.streams import OK, OpenLoopResult, Stream
from benchmarks.table import percentile
from benchmarks.testbed import TARGETS, Bench, Served

PROBE_TIMEOUT_MS = 5000
PROBE_CONNECTIONS = 32
PROBES_PER_S = 5.0
IDLE_S = 5.0
"""How long an idle server is probed to learn what is normal."""
WATCH_S = 10.0
"""How long after the load."""
CAPACITY_S = 5.0
CAPACITY_ROWS = 64
"""Texts in flight when capacity is measured, in requests of the same size as the load's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Normal:
    """What holds for all levels."""

    capacity: float
    """Tokens per second, closed loop, with requests of the load's size."""
    idle_p50_s: float


def main() -> int:
    """Run what the command line asks for; the exit status."""
    exit_on_sigterm()
    given = _options()
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        print(machine.heading(PROJECT_ROOT), flush=True)
        bench = Bench.prepare(Path(name), {LOAD: {}, BYSTANDER: {}}, num_texts=given.num_texts, seed=given.seed)
        levels = []
        try:
            with bench.serving(given.buckets, transport=given.transport) as served:
                normal, idle = _normal(served, given)
                print(
                    f"{TARGETS[given.buckets]}, {given.transport} transport; capacity {normal.capacity:,.0f} tokens/s "
                    f"with {given.texts} texts per request; idle p50 {normal.idle_p50_s * 1000:,.0f} ms",
                    flush=True,
                )
                for factor in given.levels:
                    levels.append(_level(served, given, normal, factor=factor))
                    print(f"level {factor:g}x done", file=sys.stderr, flush=True)
        except (ServerFailed, OSError, subprocess.SubprocessError) as error:
            print(error, file=sys.stderr)
            return 1
    print(f"load      {machine.load_average()} after\n")
    print(overload_report.report(levels, idle_p50_s=normal.idle_p50_s))
    problems = breaches(idle.streams)
    for level in levels:
        problems += [f"{level.factor:g}x, {problem}" for problem in breaches(level.result.streams)]
    print("\n" + ("\n".join(f"BROKEN: {problem}" for problem in problems) or "nothing hung or broke"))
    return 1 if problems else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="per level")
    parser.add_argument("--levels", type=float, nargs="+", default=[0.5, 1.0, 2.0, 5.0], help="in capacities")
    parser.add_argument("--texts", type=int, default=1, help="per request")
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--buckets", choices=["one-bucket", "default"], default="default")
    parser.add_argument("--transport", choices=list(TRANSPORTS), default="default")
    parser.add_argument("--num-texts", type=int, default=1024, help="how many different texts")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if min(given.seconds, given.texts, given.connections, *given.levels) <= 0 or given.texts > given.num_texts:
        parser.error("all numbers must be positive, and --num-texts at least one request")
    return given


def _normal(served: Served, given: argparse.Namespace) -> tuple[Normal, OpenLoopResult]:
    full = served.capacity(
        LOAD,
        texts=given.texts,
        connections=max(4, CAPACITY_ROWS // given.texts),
        seconds=min(CAPACITY_S, given.seconds),
    )
    idle = served.play([_probe(served, BYSTANDER, starts_s=0.0, lasts_s=IDLE_S)])
    delays_s = [reply.delay_s for reply in idle.streams[f"probe of {BYSTANDER}"].replies if reply.outcome == OK]
    if not delays_s:
        raise ServerFailed("an idle server answered no probe", "")
    return Normal(capacity=full.tokens_per_s, idle_p50_s=percentile(delays_s, 50)), idle


def _probe(served: Served, tenant: str, *, starts_s: float, lasts_s: float) -> Stream:
    return Stream(
        name=f"probe of {tenant}",
        requests_per_s=PROBES_PER_S,
        starts_s=starts_s,
        lasts_s=lasts_s,
        connections=PROBE_CONNECTIONS,
        is_regular=True,
        timeouts_ms=[PROBE_TIMEOUT_MS],
        headers=served.headers(tenant),
        fields=served.fields,
    )


def _level(served: Served, given: argparse.Namespace, normal: Normal, *, factor: float) -> Level:
    load = Stream(
        name=LOAD,
        requests_per_s=factor * normal.capacity / (served.bench.mean_tokens * given.texts),
        lasts_s=given.seconds,
        connections=given.connections,
        shapes=[given.texts],
        timeouts_ms=TIMEOUTS_MS,
        seed=given.seed,
        headers=served.headers(LOAD),
        fields=served.fields,
    )
    probes = [_probe(served, tenant, starts_s=given.seconds, lasts_s=WATCH_S) for tenant in (LOAD, BYSTANDER)]
    totals, memory = served.totals(), serving_memory()
    result = served.play([load, *probes])
    return Level(
        factor=factor,
        seconds=given.seconds,
        offered=factor * normal.capacity,
        result=result,
        computed=served.totals().since(totals),
        memory_before=memory,
        memory_after=serving_memory(),
    )


if __name__ == "__main__":
    sys.exit(main())
