"""The tables of `benchmarks.overload` and what is expected of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.memory import Memory, growth
from benchmarks.replies import count, goodput, outcome_table, punctuality, recovered_s
from benchmarks.streams import HANG, OK, OpenLoopResult, Reply
from benchmarks.table import render
from benchmarks.testbed import Totals

LOAD, BYSTANDER = "load", "bystander"
TIMEOUTS_MS = (500, 5000)
"""Half of the requests each."""
LEAST_OF_BEST = 0.9
NORMAL_IN_S = 2.0
NORMAL_FACTOR = 2.0
FLAT_SHARE, FLAT_BYTES = 0.1, 16 * 2**20
"""What a process may gain over all levels after the first and still count as flat: both, since small ones breathe."""
MIB = 2**20

LEVEL_HEADER = [
    "offered load",
    "tokens/s",
    "goodput",
    *(f"within {timeout} ms" for timeout in TIMEOUTS_MS),
    "sent",
    "answered",
    "refused",
    "504",
    "late 200",
    "hangs",
    "computed in vain: texts",
    "tokens",
    "normal after: same tenant",
    "bystander",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One load, and what came of it."""

    factor: float
    """In capacities."""
    seconds: float
    offered: float
    """Tokens per second."""
    result: OpenLoopResult
    computed: Totals
    """By how much the server's counters rose, probes included."""
    memory_before: Memory
    memory_after: Memory

    @property
    def replies(self) -> list[Reply]:
        """Of the load."""
        return self.result.streams[LOAD].replies

    @property
    def goodput(self) -> float:
        """Tokens per second answered in time."""
        return goodput(self.replies, seconds=self.seconds)

    @property
    def answered(self) -> list[Reply]:
        """Every 200, late ones and probes included."""
        return [reply for stream in self.result.streams.values() for reply in stream.replies if reply.outcome == OK]

    @property
    def texts_in_vain(self) -> int:
        """Texts that got a value in the replica, and whose client got none."""
        return self.computed.rows - sum(reply.num_texts for reply in self.answered)

    @property
    def tokens_in_vain(self) -> int:
        """The same for positions that the model processed; with padding, that is in here too."""
        return self.computed.computed_tokens - sum(reply.num_tokens for reply in self.answered)

    def recovered_s(self, tenant: str, *, idle_p50_s: float) -> float | None:
        """How long after the load `tenant` was answered about as fast as by an idle server."""
        probes = self.result.streams[f"probe of {tenant}"].replies
        return recovered_s(probes, after_s=self.seconds, normal_s=NORMAL_FACTOR * idle_p50_s)


def report(levels: Sequence[Level], *, idle_p50_s: float) -> str:
    """All tables, then the expectations. At least one level."""
    parts = [
        "tokens per second of real text; `late 200` came after the request's own time\n",
        render(LEVEL_HEADER, [_level_line(level, idle_p50_s) for level in levels]),
    ]
    for level in levels:
        parts.append(f"\n### {level.factor:g}x: {punctuality(level.result.streams[LOAD])}; {level.result.conditions}\n")
        parts.append(outcome_table(level.replies))
    header = ["resident MiB, start → end", *(f"{level.factor:g}x" for level in levels), "gained since the first"]
    parts += ["", render(header, _memory_lines(levels)), "", *expectations(levels, idle_p50_s=idle_p50_s)]
    return "\n".join(parts)


def expectations(levels: Sequence[Level], *, idle_p50_s: float) -> list[str]:
    """One line each, with yes or no and the figures behind it."""
    best, most = max(level.goodput for level in levels), max(levels, key=lambda level: level.factor)
    times = {
        tenant: [level.recovered_s(tenant, idle_p50_s=idle_p50_s) for level in levels] for tenant in (LOAD, BYSTANDER)
    }
    grown = {name: gained for name, gained in _gained(levels).items() if not _is_flat(levels, name, gained)}
    lines = [
        f"goodput at {most.factor:g}x at least {LEAST_OF_BEST:.0%} of the best: {_yes(most.goodput >= 0.9 * best)} "
        f"({most.goodput:,.0f} of {best:,.0f} tokens/s)",
        f"memory flat: {_yes(not grown)}"
        + "".join(f"; {name} +{gained / MIB:.0f} MiB" for name, gained in grown.items()),
    ]
    for tenant, name in ((LOAD, "same tenant"), (BYSTANDER, "bystander")):
        is_quick = all(seconds is not None and seconds <= NORMAL_IN_S for seconds in times[tenant])
        each = ", ".join(_seconds(seconds) for seconds in times[tenant])
        lines.append(f"normal within {NORMAL_IN_S:g} s, {name}: {_yes(is_quick)} ({each})")
    return lines


def _level_line(level: Level, idle_p50_s: float) -> list[str]:
    replies = level.replies
    by_timeout = [[reply for reply in replies if reply.timeout_s == timeout / 1000] for timeout in TIMEOUTS_MS]
    late = [reply for reply in replies if reply.outcome == OK and reply.latency_s > (reply.timeout_s or 0.0)]
    return [
        f"{level.factor:g}x",
        f"{level.offered:,.0f}",
        f"{level.goodput:,.0f}",
        *(f"{goodput(own, seconds=level.seconds):,.0f}" for own in by_timeout),
        f"{len(replies):,}",
        f"{count(replies, OK):,}",
        f"{sum(reply.outcome.startswith(('429', '503')) for reply in replies):,}",
        f"{sum(reply.outcome.startswith('504') for reply in replies):,}",
        str(len(late)),
        str(count(replies, HANG)),
        f"{level.texts_in_vain:,}",
        f"{level.tokens_in_vain:,}",
        *(_seconds(level.recovered_s(tenant, idle_p50_s=idle_p50_s)) for tenant in (LOAD, BYSTANDER)),
    ]


def _memory_lines(levels: Sequence[Level]) -> list[list[str]]:
    gained = _gained(levels)
    names = sorted({name for level in levels for name in (*level.memory_before, *level.memory_after)})
    return [
        [
            name,
            *(f"{_mib(level.memory_before, name)} → {_mib(level.memory_after, name)}" for level in levels),
            f"{gained[name] / MIB:+.0f}" if name in gained else "replaced",
        ]
        for name in names
    ]


def _gained(levels: Sequence[Level]) -> Memory:
    # From the end of the first level on: until then allocators and caches fill.
    return growth(levels[0].memory_after, levels[-1].memory_after)


def _is_flat(levels: Sequence[Level], name: str, gained: int) -> bool:
    return gained <= FLAT_BYTES + FLAT_SHARE * levels[0].memory_after[name]


def _mib(memory: Memory, name: str) -> str:
    return f"{memory[name] / MIB:,.0f}" if name in memory else "-"


def _seconds(seconds: float | None) -> str:
    return "not seen" if seconds is None else f"{seconds:.1f} s"


def _yes(is_met: bool) -> str:
    return "yes" if is_met else "no"
