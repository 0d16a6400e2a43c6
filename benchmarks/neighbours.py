"""`python -m benchmarks.neighbours`: what a quiet tenant notices of one that floods the server.

The quiet tenant sends one text at a time, first alone, then beside a neighbour that offers many times the capacity from
a bounded number of connections; then the same beside the named baseline, which knows no tenants. Both are open loops: a
slow answer does not slow the offer. Exit status 1 when a request to the server hung, failed to connect, was answered by
anything but 200, 429, 503 or 504, was refused without Retry-After, or was answered wrongly. Speed never fails it.
"""

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine
from benchmarks.replies import breaches, count, counts, milliseconds, outcome_table, punctuality
from benchmarks.server import PROJECT_ROOT, TRANSPORTS, ServerFailed, exit_on_sigterm
from benchmarks.streams import HANG, OK, OpenLoopResult, Reply, Stream
from benchmarks.table import percentile, render
from benchmarks.testbed import TARGETS, Bench, Served, Target

QUIET, FLOOD = "quiet", "flood"
QUIET_CONNECTIONS = 128
"""Enough that a quiet request never waits for one, unless answers take a minute."""
CAPACITY_TEXTS, CAPACITY_CONNECTIONS = 32, 4
CAPACITY_S = 5.0
MAX_RATIO = 2.0

HEADER = ["quiet tenant, from due to answered", "requests", "not 200", "p50 ms", "p99 ms", "max ms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one target gave."""

    target: Target
    capacity: float
    """Tokens per second, closed loop."""
    full_batch_s: float
    alone: OpenLoopResult
    beside: OpenLoopResult


def main() -> int:
    """Run what the command line asks for; the exit status."""
    exit_on_sigterm()
    given = _options()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        print(machine.heading(PROJECT_ROOT), flush=True)
        group: dict[str, object] = {"batch_group": "both"} if given.shared_group else {}
        bench = Bench.prepare(Path(name), {QUIET: group, FLOOD: group}, num_texts=given.texts, seed=given.seed)
        try:
            for target in [*given.buckets, *([] if given.no_plain else ["plain"])]:
                with bench.serving(target, transport=given.transport) as served:
                    outcomes.append(_measure(target, served, given))
        except (ServerFailed, OSError, subprocess.SubprocessError) as error:
            print(error, file=sys.stderr)
            return 1
    print(f"load      {machine.load_average()} after\n")
    print(render(HEADER, [line for outcome in outcomes for line in _lines(outcome)]))
    problems = []
    for outcome in outcomes:
        print(f"\n{_details(outcome)}", flush=True)
        if outcome.target != "plain":
            problems += [*breaches(outcome.alone.streams), *breaches(outcome.beside.streams)]
    print("\n" + "\n".join(f"BROKEN: {problem}" for problem in problems) if problems else "\nnothing hung or broke")
    return 1 if problems else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.neighbours", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="alone, and as long again beside the flood")
    parser.add_argument("--buckets", nargs="+", choices=["one-bucket", "default"], default=["one-bucket", "default"])
    parser.add_argument("--no-plain", action="store_true", help="leave the baseline out")
    parser.add_argument("--quiet-rate", type=float, default=2.0, help="requests per second of the quiet tenant")
    parser.add_argument("--factor", type=float, default=10.0, help="the flood, in capacities")
    parser.add_argument("--flood-texts", type=int, nargs="+", default=[8], help="texts per request, in turn")
    parser.add_argument("--flood-connections", type=int, default=64)
    parser.add_argument("--timeout-ms", type=int, nargs="*", default=[], help="of the flood's requests, in turn")
    parser.add_argument("--shared-group", action="store_true", help="both tenants in one batch group")
    parser.add_argument("--transport", choices=list(TRANSPORTS), default="default")
    parser.add_argument("--texts", type=int, default=1024, help="how many different texts")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if min(given.seconds, given.quiet_rate, given.factor, given.flood_connections, *given.flood_texts) <= 0:
        parser.error("all numbers must be positive")
    if max(given.flood_texts) > given.texts:
        parser.error("--texts must be at least one request of the flood")
    return given


def _measure(target: Target, served: Served, given: argparse.Namespace) -> Outcome:
    full = served.capacity(
        FLOOD, texts=CAPACITY_TEXTS, connections=CAPACITY_CONNECTIONS, seconds=min(CAPACITY_S, given.seconds)
    )
    print(
        f"{TARGETS[target]}: {full.tokens_per_s:,.0f} tokens/s; {len(full.errors)} errors", file=sys.stderr, flush=True
    )
    full_batch_s = served.full_batch_s(QUIET)
    quiet = Stream(
        name=QUIET,
        requests_per_s=given.quiet_rate,
        lasts_s=given.seconds,
        connections=QUIET_CONNECTIONS,
        seed=given.seed,
        headers=served.headers(QUIET),
        fields=served.fields,
    )
    tokens_per_request = served.bench.mean_tokens * sum(given.flood_texts) / len(given.flood_texts)
    flood = Stream(
        name=FLOOD,
        requests_per_s=given.factor * full.tokens_per_s / tokens_per_request,
        lasts_s=given.seconds,
        connections=given.flood_connections,
        shapes=given.flood_texts,
        timeouts_ms=given.timeout_ms if served.is_ours else [],
        seed=given.seed + 1,
        headers=served.headers(FLOOD),
        fields=served.fields,
    )
    alone = served.play([quiet])
    beside = served.play([quiet, flood])
    return Outcome(target=target, capacity=full.tokens_per_s, full_batch_s=full_batch_s, alone=alone, beside=beside)


def _delays_s(result: OpenLoopResult) -> list[float]:
    return [reply.delay_s for reply in result.streams[QUIET].replies if reply.outcome == OK]


def _lines(outcome: Outcome) -> list[list[str]]:
    """Alone, beside, and one by the other."""
    lines = []
    for name, result in {"alone": outcome.alone, "beside the flood": outcome.beside}.items():
        quiet = result.streams[QUIET]
        lines.append(
            [
                f"{TARGETS[outcome.target]}, {name}",
                str(quiet.num_due),
                str(quiet.num_due - count(quiet.replies, OK)),
                *(milliseconds(_delays_s(result), percent) for percent in (50, 99, 100)),
            ]
        )
    alone_s, beside_s = _delays_s(outcome.alone), _delays_s(outcome.beside)
    if not alone_s or not beside_s:
        return lines
    ratios = [f"{percentile(beside_s, percent) / percentile(alone_s, percent):.1f}" for percent in (50, 99, 100)]
    return [*lines, [f"{TARGETS[outcome.target]}, beside / alone", "", "", *ratios]]


def _details(outcome: Outcome) -> str:
    quiet, flood = outcome.beside.streams[QUIET], outcome.beside.streams[FLOOD]
    offered = flood.num_due / max(1, len(flood.replies)) * sum(reply.num_tokens for reply in flood.replies)
    hangs = sum(count(result.replies, HANG) for result in (quiet, flood, outcome.alone.streams[QUIET]))
    return "\n".join(
        [
            f"## {TARGETS[outcome.target]}\n",
            f"capacity {outcome.capacity:,.0f} tokens/s (closed loop, {CAPACITY_TEXTS} texts x {CAPACITY_CONNECTIONS} "
            f"connections); one full batch alone {outcome.full_batch_s * 1000:,.0f} ms",
            f"flood: {offered:,.0f} tokens due; {punctuality(flood)}",
            f"quiet: {punctuality(quiet)}; not 200 beside the flood: {counts(quiet.replies)}",
            f"alone: {outcome.alone.conditions}; beside: {outcome.beside.conditions}; hangs {hangs}\n",
            "the flood's requests, from sending to the end of the reply:\n",
            outcome_table(flood.replies),
            "",
            _verdict(outcome, quiet.replies),
        ]
    )


def _verdict(outcome: Outcome, replies: list[Reply]) -> str:
    alone_s, beside_s = _delays_s(outcome.alone), _delays_s(outcome.beside)
    rule = f"quiet p99 beside <= {MAX_RATIO:g}x max(p99 alone, one full batch)"
    if not alone_s or not beside_s:
        return f"{rule}: no (nothing to compare)"
    limit_s = MAX_RATIO * max(percentile(alone_s, 99), outcome.full_batch_s)
    is_met = percentile(beside_s, 99) <= limit_s
    none_refused = count(replies, OK) == len(replies)
    return "\n".join(
        [
            f"{rule}: {'yes' if is_met else 'no'} ({milliseconds(beside_s, 99)} ms, limit {limit_s * 1000:,.0f} ms)",
            f"quiet tenant always answered: {'yes' if none_refused else 'no'}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
