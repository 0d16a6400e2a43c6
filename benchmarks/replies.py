"""From replies to figures: what came how often and how fast, what arrived in time, when it was normal again."""

from collections.abc import Mapping, Sequence

from benchmarks.streams import HANG, OK, Reply, StreamResult
from benchmarks.table import percentile, render

EXPECTED_STATUSES = ("200", "429", "503", "504")
"""Answers that a server under load may give to a well-formed request."""
WITH_RETRY_AFTER = ("429", "503")

OUTCOME_HEADER = ["outcome", "requests", "texts", "p50 ms", "p99 ms", "max ms", "Retry-After p50 s", "max s"]


def milliseconds(seconds: Sequence[float], percent: float) -> str:
    """A percentile as text, `-` of nothing."""
    return f"{percentile(seconds, percent) * 1000:,.0f}" if seconds else "-"


def outcome_table(replies: Sequence[Reply]) -> str:
    """One line per outcome: how many, and how long each took from sending to the end of the reply."""
    by_outcome: dict[str, list[Reply]] = {}
    for reply in replies:
        by_outcome.setdefault(reply.outcome, []).append(reply)
    return render(OUTCOME_HEADER, [_outcome_line(outcome, by_outcome[outcome]) for outcome in sorted(by_outcome)])


def _outcome_line(outcome: str, replies: Sequence[Reply]) -> list[str]:
    latencies_s = [reply.latency_s for reply in replies]
    retries_s = [reply.retry_after_s for reply in replies if reply.retry_after_s is not None]
    return [
        outcome,
        f"{len(replies):,}",
        f"{sum(reply.num_texts for reply in replies):,}",
        *(milliseconds(latencies_s, percent) for percent in (50, 99, 100)),
        *(f"{percentile(retries_s, percent):g}" if retries_s else "" for percent in (50, 100)),
    ]


def count(replies: Sequence[Reply], outcome: str) -> int:
    """How many ended like that."""
    return sum(reply.outcome == outcome for reply in replies)


def counts(replies: Sequence[Reply]) -> str:
    """All outcomes but 200 in one line."""
    found: dict[str, int] = {}
    for reply in replies:
        if reply.outcome != OK:
            found[reply.outcome] = found.get(reply.outcome, 0) + 1
    return ", ".join(f"{number:,} x {outcome}" for outcome, number in sorted(found.items())) or "none"


def breaches(streams: Mapping[str, StreamResult]) -> list[str]:
    """What no load excuses: no reply, no connection, another status, a refusal without Retry-After, a wrong answer."""
    lines = []
    for name, result in streams.items():
        strange = [reply for reply in result.replies if not _is_expected(reply)]
        if strange:
            lines.append(f"{name}: {counts(strange)}")
        unsaid = [
            reply
            for reply in result.replies
            if reply.outcome.startswith(WITH_RETRY_AFTER) and reply.retry_after_s is None
        ]
        if unsaid:
            lines.append(f"{name}: no usable Retry-After in {counts(unsaid)}")
        if result.num_wrong:
            lines.append(f"{name}: {result.num_wrong} of {result.num_checked} texts answered wrongly")
    return lines


def _is_expected(reply: Reply) -> bool:
    return reply.outcome != HANG and reply.outcome.startswith(EXPECTED_STATUSES)


def is_in_time(reply: Reply) -> bool:
    """Answered, and within the time that the request named, by the client's clock."""
    return reply.outcome == OK and (reply.timeout_s is None or reply.latency_s <= reply.timeout_s)


def goodput(replies: Sequence[Reply], *, seconds: float) -> float:
    """Tokens per second that were answered in time and within the first `seconds`."""
    return sum(reply.num_tokens for reply in replies if is_in_time(reply) and reply.ended_s <= seconds) / seconds


def recovered_s(probes: Sequence[Reply], *, after_s: float, normal_s: float) -> float | None:
    """How long after `after_s` the first probe was due that took at most `normal_s`; None if none did."""
    moments = [
        reply.due_s for reply in probes if reply.due_s >= after_s and reply.outcome == OK and reply.delay_s <= normal_s
    ]
    return min(moments) - after_s if moments else None


def punctuality(result: StreamResult) -> str:
    """Whether the load was what it claims to be: how late the generator was, and what the connections did not carry."""
    waited_s = [reply.sent_s - reply.due_s for reply in result.replies if reply.had_to_wait]
    late_s = [reply.sent_s - reply.due_s for reply in result.replies if not reply.had_to_wait]
    return (
        f"{result.num_due:,} due, {len(result.replies):,} sent, {result.num_never_sent:,} never sent; "
        f"{len(waited_s):,} waited for a connection (p99 {milliseconds(waited_s, 99)} ms), the others were sent "
        f"{milliseconds(late_s, 99)} ms late at p99; {result.num_checked:,} texts checked, {result.num_wrong} wrong"
    )
