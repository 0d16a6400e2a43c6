"""The table of `benchmarks.serve`, its ratios, and whether it may be believed."""

from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.table import Spread, Window, percentile, render

CELLS = {
    "process-ids": "(a) packed forward in process, token ids given",
    "process-texts": "(a) packed forward in process, tokenising too",
    "server-32x4": "(b) server, 32 texts per request, 4 connections",
    "server-1x64": "(b) server, 1 text per request, 64 connections",
    "one-bucket-32x4": "(b) ONE 256-token bucket, 32 texts, 4 connections",
    "one-bucket-1x64": "(b) ONE 256-token bucket, 1 text, 64 connections",
    "plain-32x4": "(c) plain Ray Serve, 32 texts, 4 connections",
    "plain-1x64": "(c) plain Ray Serve, 1 text, 64 connections",
}
"""What can be measured, in the order of the table."""

MAX_FOREIGN_SHARE = 0.05
"""Above this the table says that it is no result: the model's threads wait for one another, so others' work that takes
a quarter of the CPUs can cost far more than a quarter of the throughput, and not the same in each cell."""

HEADER = [
    "tokens of real text per second",
    "min",
    "median",
    "max",
    "b/a ids",
    "b/a texts",
    "b/c",
    "p50 ms",
    "p99 ms",
    "requests",
    "errors",
    "rows/forward",
    "client CPU",
    "foreign CPU",
]


def report(windows: Mapping[str, Sequence[Window]]) -> tuple[str, bool]:
    """The table with what must be known to read it, and whether all requests were answered and all answers right."""
    everything = [window for of_cell in windows.values() for window in of_cell]
    errors = [error for window in everything for error in window.errors]
    num_wrong = sum(window.num_wrong for window in everything)
    lowest = min(window.lowest_cosine for window in everything)
    lines = [
        render(HEADER, [_row(cell, windows) for cell in windows]),
        "",
        "b/a and b/c divide medians; b/c compares the same load shape. Latencies are of all windows together; client "
        "CPU is the load generator's share of all CPUs, foreign CPU what others took of them in the worst window.",
        f"{sum(window.num_answers for window in everything)} answers compared with sentence-transformers: "
        f"{num_wrong} wrong, lowest cosine {lowest:.7f}; {len(errors)} requests failed.",
        *sorted(set(errors))[:5],
        *_doubt(everything),
    ]
    is_good = not errors and num_wrong == 0 and all(window.num_answers for window in everything)
    return "\n".join(lines), is_good


def _doubt(windows: Sequence[Window]) -> list[str]:
    disturbed = sum(window.foreign_cpu_share > MAX_FOREIGN_SHARE for window in windows)
    if not disturbed:
        return []
    return [
        f"NOISY: in {disturbed} of {len(windows)} windows others took more than {MAX_FOREIGN_SHARE:.0%} of the CPUs; "
        "the ratios compare windows with different disturbance, so run it again on a quiet machine."
    ]


def _row(cell: str, windows: Mapping[str, Sequence[Window]]) -> list[str]:
    own = windows[cell]
    spread = Spread.of([window.tokens_per_s for window in own])
    latencies_s = [latency for window in own for latency in window.latencies_s]
    rows_per_forward = [window.rows_per_forward for window in own if window.rows_per_forward is not None]
    is_ours = cell.startswith(("server-", "one-bucket-"))
    shape = cell.rpartition("-")[2]
    baselines = ("process-ids", "process-texts", f"plain-{shape}")
    is_http = bool(latencies_s)
    return [
        CELLS[cell],
        *(f"{figure:,.0f}" for figure in (spread.least, spread.middle, spread.most)),
        *(_ratio(spread.middle, windows.get(baseline)) if is_ours else "" for baseline in baselines),
        f"{percentile(latencies_s, 50) * 1000:,.0f}" if is_http else "",
        f"{percentile(latencies_s, 99) * 1000:,.0f}" if is_http else "",
        f"{len(latencies_s)}" if is_http else "",
        str(sum(len(window.errors) for window in own)),
        f"{median(rows_per_forward):.1f}" if rows_per_forward else "",
        f"{median(window.client_cpu_share for window in own):.1%}" if is_http else "",
        f"{max(window.foreign_cpu_share for window in own):.0%}",
    ]


def _ratio(ours: float, baseline: Sequence[Window] | None) -> str:
    if baseline is None:
        return "-"
    return f"{ours / median(window.tokens_per_s for window in baseline):.2f}"
