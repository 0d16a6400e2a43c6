"""`python -m benchmarks.example --lengths 10,50,100`: one request through a live server, and what the server counted.

The worked example of padding: three rows of 10, 50 and 100 tokens cost 300 positions side by side and 160 end to end.
Rows are token ids, so that lengths are exact. Exit status 1 when a counter is not what the arithmetic says.
"""

import argparse
import sys
import urllib.error
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.server import ServerFailed, project_config, request_json, serving
from benchmarks.table import render

REVISION = "minilm"
ADMIN_KEY = "demo-admin-key"
MAX_TOKENS = 256
MAX_ROWS = 8
"""Eight rows charged 256 tokens each are the default budget of one forward on a CPU."""
FIRST_TOKEN_ID = 2000
"""Ordinary words of a BERT vocabulary lie from here on."""
COUNTERS = ("forwards", "rows", "tokens", "computed_tokens", "charged_tokens")

Counts = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to serve the rows, as `args` of the revision say it."""

    name: str
    ceilings: tuple[int, ...] = ()
    """Of the padded layout; none: the rows are laid end to end."""

    def config(self) -> dict[str, Any]:
        """`serve_config.yaml` with this layout in one bucket."""
        args: dict[str, object] = {"buckets": [{"max_tokens": MAX_TOKENS}]}
        if self.ceilings:
            args |= {"layout": "padded", "ceilings": list(self.ceilings)}
        return project_config(**args)

    def expected(self, lengths: Sequence[int]) -> Counts:
        """What one request with rows of `lengths` adds to each counter."""
        common = {"rows": len(lengths), "tokens": sum(lengths)}
        if not self.ceilings:
            return {"forwards": 1, **common, "computed_tokens": sum(lengths), "charged_tokens": sum(lengths)}
        groups: dict[int, list[int]] = {}
        for length in lengths:
            groups.setdefault(next(ceiling for ceiling in self.ceilings if length <= ceiling), []).append(length)
        return {
            "forwards": len(groups),
            **common,
            "computed_tokens": sum(padded_tokens(group) for group in groups.values()),
            "charged_tokens": sum(ceiling * len(group) for ceiling, group in groups.items()),
        }


PACKED = Layout(name="ragged, one 256-token bucket")
PADDED = (
    Layout(name="padded, ceilings 16/64/256", ceilings=(16, 64, 256)),
    Layout(name="padded, one ceiling 256", ceilings=(256,)),
)


def padded_tokens(lengths: Sequence[int]) -> int:
    """Positions of the rectangle around the rows."""
    return len(lengths) * max(lengths)


def arithmetic(lengths: Sequence[int]) -> str:
    """The example in numbers, no server needed."""
    padded, packed = padded_tokens(lengths), sum(lengths)
    padded_pairs, packed_pairs = len(lengths) * max(lengths) ** 2, sum(length**2 for length in lengths)
    return "\n".join(
        [
            f"rows of {', '.join(map(str, lengths))} tokens",
            f"padded {padded}, packed {packed}, ratio {padded / packed:g}, waste {1 - packed / padded:.1%}",
            f"attention pairs {padded_pairs}/{packed_pairs}, ratio {padded_pairs / packed_pairs:.2f}",
        ]
    )


def main() -> int:
    """Run what the command line asks for; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.example", description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=_lengths, default=[10, 50, 100], help="tokens of each row: 10,50,100")
    parser.add_argument("--url", help="a running server whose revision has one bucket; default: start them here")
    parser.add_argument("--key", default=ADMIN_KEY, help="an administrator's key, for the stats of all tenants")
    parser.add_argument("--revision", default=REVISION)
    given = parser.parse_args()
    print(arithmetic(given.lengths))
    try:
        if given.url is not None:
            return 0 if _check(PACKED, given.url.rstrip("/"), given) else 1
        results = []
        for layout in (PACKED, *PADDED):
            with serving(layout.config()) as base:
                results.append(_check(layout, base, given))
    except urllib.error.HTTPError as error:
        print(f"{error.url} answered {error.code}: {error.read(500).decode(errors='replace')}", file=sys.stderr)
        return 1
    except (ServerFailed, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0 if all(results) else 1


def _lengths(text: str) -> list[int]:
    lengths = [int(part) for part in text.split(",")]
    if not 1 <= len(lengths) <= MAX_ROWS or not 1 <= min(lengths) <= max(lengths) <= MAX_TOKENS:
        raise argparse.ArgumentTypeError(f"1 to {MAX_ROWS} lengths of 1 to {MAX_TOKENS}, so that one forward has room")
    return lengths


def _check(layout: Layout, base: str, given: argparse.Namespace) -> bool:
    """Send the request, print the counters before and after, and say whether they rose as they must."""
    inputs = [list(range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + length)) for length in given.lengths]
    before = _counts(base, given)
    answer = request_json(f"{base}/v1/infer", key=given.key, body={"revision": given.revision, "inputs": inputs})
    after = _counts(base, given)
    expected = layout.expected(given.lengths)
    rows = [
        [name, str(before[name]), str(after[name]), f"+{after[name] - before[name]}", f"+{expected[name]}"]
        for name in COUNTERS
    ]
    usage = {"num_tokens": expected["tokens"], "computed_tokens": expected["computed_tokens"]}
    agrees = all(after[name] - before[name] == expected[name] for name in COUNTERS) and answer["usage"] == usage
    print(f"\n{layout.name}\n\n{render(['counter', 'before', 'after', 'rose by', 'expected'], rows)}\n")
    print(f"usage in the answer: {answer['usage']}")
    print("the counters agree" if agrees else "THE COUNTERS DISAGREE", flush=True)
    return agrees


def _counts(base: str, given: argparse.Namespace) -> Counts:
    """Counters of the revision, all its buckets and replicas together."""
    revisions = request_json(f"{base}/v1/stats", key=given.key)["revisions"]
    models = request_json(f"{base}/v1/models", key=given.key)["data"]
    name = next((entry["id"] for entry in models if given.revision in (entry["id"], *entry["aliases"])), given.revision)
    return {counter: sum(bucket[counter] for bucket in revisions[name].values()) for counter in COUNTERS}


if __name__ == "__main__":
    sys.exit(main())
