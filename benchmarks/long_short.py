"""`python -m benchmarks.long_short`: long documents against short queries, in one bucket and across buckets.

Texts are those of the usual mix: the shortest half are queries, the longest twentieth documents. First the queries come
alone, then beside documents that alone would fill the model; then single documents come beside a flood of queries. Each
kind is a tenant of its own. Exit status 1 when a request hung, broke, or was answered wrongly; speed never fails it.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import machine
from benchmarks.replies import breaches, count, counts, milliseconds
from benchmarks.server import PROJECT_ROOT, TRANSPORTS, ServerFailed, exit_on_sigterm
from benchmarks.streams import OK, OpenLoopResult, Stream
from benchmarks.table import render
from benchmarks.testbed import TARGETS, Bench, Served, Target
from benchmarks.workload import Workload

SHORT, LONG = "short", "long"
NUM_TEXTS = 1000
SHORT_PER_S = 5.0
LONG_TEXTS = 8
SHORT_FLOOD_TEXTS = 16
CONNECTIONS = 64
CAPACITY_S = 5.0
HEADER = ["target", "who", "beside", "requests", "not 200", "p50 ms", "p99 ms", "max ms"]


def main() -> int:
    """Run what the command line asks for; the exit status."""
    exit_on_sigterm()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_short", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the three loads")
    parser.add_argument("--transport", choices=list(TRANSPORTS), default="default")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    lines, problems = [], []
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        print(machine.heading(PROJECT_ROOT), flush=True)
        bench = Bench.prepare(Path(name), {SHORT: {}, LONG: {}}, num_texts=NUM_TEXTS, seed=given.seed)
        lengths = _sort_by_length(Path(name))
        print(
            f"queries   {lengths[0]} to {lengths[NUM_TEXTS // 2 - 1]} tokens, {SHORT_PER_S:g} a second; documents "
            f"{lengths[-NUM_TEXTS // 20]} to {lengths[-1]} tokens, {LONG_TEXTS} in a request",
            flush=True,
        )
        targets: list[Target] = ["one-bucket", "default"]
        try:
            for target in targets:
                with bench.serving(target, transport=given.transport) as served:
                    found, broken = _measure(target, served, lengths, seconds=given.seconds)
                    lines += found
                    problems += broken
        except (ServerFailed, OSError, subprocess.SubprocessError) as error:
            print(error, file=sys.stderr)
            return 1
    print("\n" + render(HEADER, lines))
    print("\n".join(f"BROKEN: {problem}" for problem in problems) or "\nnothing hung or broke")
    return 1 if problems else 0


def _sort_by_length(folder: Path) -> list[int]:
    """Put the workload's texts in order of their lengths, which are returned."""
    workload = Workload.load(folder)
    order = sorted(range(len(workload.lengths)), key=lambda index: workload.lengths[index])
    Workload(
        texts=[workload.texts[index] for index in order],
        lengths=[workload.lengths[index] for index in order],
        reference=workload.reference[order],
    ).save(folder)
    return [workload.lengths[index] for index in order]


def _measure(
    target: Target, served: Served, lengths: list[int], *, seconds: float
) -> tuple[list[list[str]], list[str]]:
    capacity = served.capacity(SHORT, texts=32, connections=4, seconds=CAPACITY_S).tokens_per_s
    longs, shorts = lengths[-NUM_TEXTS // 20 :], lengths[: NUM_TEXTS // 2]
    tokens_of_long, tokens_of_short = sum(longs) / len(longs), sum(shorts) / len(shorts)
    queries = _stream(served, SHORT, SHORT_PER_S, seconds, texts=1)
    documents = _stream(served, LONG, capacity / (tokens_of_long * LONG_TEXTS), seconds, texts=LONG_TEXTS)
    flood = _stream(
        served, SHORT, 2 * capacity / (tokens_of_short * SHORT_FLOOD_TEXTS), seconds, texts=SHORT_FLOOD_TEXTS
    )
    single = _stream(served, LONG, 0.5, seconds, texts=1)
    lines, problems = [], []
    for streams, beside in (([queries], "nothing"), ([queries, documents], LONG), ([single, flood], SHORT)):
        result = served.play(streams)
        problems += breaches(result.streams)
        lines.append(_line(target, streams[0].name, beside, result))
        if len(streams) == 2:
            lines.append(_line(target, streams[1].name, streams[0].name, result))
        print(f"{target}: {result.conditions}", file=sys.stderr, flush=True)
    return lines, problems


def _stream(served: Served, name: str, requests_per_s: float, seconds: float, *, texts: int) -> Stream:
    span = (0, NUM_TEXTS // 2) if name == SHORT else (NUM_TEXTS - NUM_TEXTS // 20, NUM_TEXTS)
    return Stream(
        name=name,
        requests_per_s=requests_per_s,
        lasts_s=seconds,
        connections=CONNECTIONS,
        shapes=(texts,),
        texts=span,
        headers=served.headers(name),
        fields=served.fields,
    )


def _line(target: Target, name: str, beside: str, result: OpenLoopResult) -> list[str]:
    replies = result.streams[name].replies
    delays_s = [reply.delay_s for reply in replies if reply.outcome == OK]
    not_ok = len(replies) - count(replies, OK)
    return [
        TARGETS[target],
        name,
        beside,
        str(len(replies)),
        f"{not_ok} ({counts(replies)})" if not_ok else "0",
        *(milliseconds(delays_s, percent) for percent in (50, 99, 100)),
    ]


if __name__ == "__main__":
    sys.exit(main())
