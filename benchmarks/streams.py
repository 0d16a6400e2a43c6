"""What an open loop is asked to send, and what came of it: plain values that travel between processes as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.report import MAX_FOREIGN_SHARE

HANG_EXTRA_S = 5.0
"""A request without a reply this long after its time is over hangs."""
DEFAULT_TIMEOUT_S = 60.0
"""What the server gives a request that names no time."""
OK, HANG = "200", "hang"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Requests of one tenant."""

    name: str
    requests_per_s: float
    lasts_s: float
    connections: int
    shapes: Sequence[int] = (1,)
    """Texts per request, in turn."""
    texts: Sequence[int] = ()
    """First and last (excluded) text of the workload that it takes; none: all."""
    timeouts_ms: Sequence[int] = ()
    """`timeout_ms` of the requests, in turn, each for all shapes; none: not sent."""
    starts_s: float = 0.0
    is_regular: bool = False
    """Equal gaps; else exponential ones, so that requests come as from many independent callers."""
    seed: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    """What the body has besides `inputs` and `timeout_ms`."""

    @property
    def ends_s(self) -> float:
        """Nothing is sent from here on."""
        return self.starts_s + self.lasts_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoopSpec:
    """Where to, and what."""

    url: str
    workload: str
    """Folder of the texts."""
    streams: Sequence[Stream]

    @staticmethod
    def of_json(content: Mapping[str, Any]) -> "OpenLoopSpec":
        """The inverse of `dataclasses.asdict`."""
        return OpenLoopSpec(**{**content, "streams": [Stream(**stream) for stream in content["streams"]]})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One request that was sent. Moments are seconds since the loop began."""

    due_s: float
    sent_s: float
    ended_s: float
    outcome: str
    """`200`, another status and its code, `hang`, or `error` and what kind."""
    num_texts: int
    num_tokens: int
    timeout_s: float | None
    had_to_wait: bool
    """For a connection: none was free when it was due."""
    retry_after_s: float | None = None

    @property
    def latency_s(self) -> float:
        """From sending to the end of the reply: what the server can be held to."""
        return self.ended_s - self.sent_s

    @property
    def delay_s(self) -> float:
        """From when it was due: what a caller sees."""
        return self.ended_s - self.due_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamResult:
    """What became of a stream."""

    num_due: int
    replies: list[Reply]
    num_checked: int = 0
    """Texts whose answer was compared with the reference."""
    num_wrong: int = 0

    @property
    def num_never_sent(self) -> int:
        """Due, but no connection was free until the end."""
        return self.num_due - len(self.replies)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoopResult:
    """What became of all streams, by name."""

    streams: dict[str, StreamResult]
    client_cpu_share: float
    """Of all CPUs, from the first due request to the last reply."""
    foreign_cpu_share: float = 0.0
    """What everyone but client and server took of them; filled by whoever started the process."""
    is_favoured: bool = False
    """Whether the client may run as soon as it has something to do."""

    @property
    def conditions(self) -> str:
        """What the figures depend on, in words."""
        priority = "" if self.is_favoured else "; the client had no priority, so see how late it was"
        noisy = " (NOISY)" if self.foreign_cpu_share > MAX_FOREIGN_SHARE else ""
        return (
            f"client CPU {self.client_cpu_share:.0%}, foreign CPU {self.foreign_cpu_share:.0%}{noisy} of all CPUs"
            f"{priority}"
        )

    @staticmethod
    def of_json(content: Mapping[str, Any]) -> "OpenLoopResult":
        """The inverse of `dataclasses.asdict`."""
        streams = {
            name: StreamResult(**{**fields, "replies": [Reply(**reply) for reply in fields["replies"]]})
            for name, fields in content["streams"].items()
        }
        return OpenLoopResult(**{**content, "streams": streams})
