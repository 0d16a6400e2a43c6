"""Figures to text: one window's outcome, percentiles, the spread of several windows, Markdown."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What one measured stretch of time gave; made in another process and sent as JSON."""

    tokens_per_s: float
    """Real tokens, never padding."""
    num_answers: int
    """Texts whose answer was compared with the reference, warm-up included."""
    lowest_cosine: float
    """Of those; not a number where an answer was none."""
    num_wrong: int = 0
    errors: list[str] = field(default_factory=list)
    """One line per request that got no answer."""
    latencies_s: list[float] = field(default_factory=list)
    client_cpu_share: float = 0.0
    """What the load generator took of all cores."""
    rows_per_forward: float | None = None
    foreign_cpu_share: float = 0.0
    """What everyone else took of all CPUs; of a result to trust, next to nothing."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Least, middle and most of a few windows."""

    least: float
    middle: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """The spread of at least one value."""
        return Spread(min(values), median(values), max(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank: the smallest value that at least `percent` of all do not exceed. Raises ValueError for none."""
    if not values:
        raise ValueError("no values")
    rank = max(1, math.ceil(percent / 100 * len(values)))
    return sorted(values)[rank - 1]


def render(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, first column left, the others right, padded so that it reads as text too."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    rule = [("-" * width if column == 0 else "-" * (width - 1) + ":") for column, width in enumerate(widths)]
    return "\n".join(_line(row, widths) for row in [header, rule, *rows])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        text.ljust(width) if column == 0 else text.rjust(width)
        for column, (text, width) in enumerate(zip(row, widths, strict=True))
    ]
    return f"| {' | '.join(cells)} |"
