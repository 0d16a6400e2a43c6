"""`python -m benchmarks.serve`: throughput in tokens of real text per second, one table from one run on one machine.

(a) packed forwards in one process, (b) this server over HTTP, (c) plain Ray Serve; see the files of these names. Each
cell is measured in several windows, and every window has a fresh process or server: all targets take their first
window, then all their second, so that a machine that slows down or speeds up shows as a spread and not as a ratio.
Exit status 1 when a request failed or an answer was wrong: a wrong fast server is no result.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import machine, plain_serve
from benchmarks.children import run_child
from benchmarks.in_process import InProcessSpec
from benchmarks.load import LoadSpec
from benchmarks.report import CELLS, report
from benchmarks.server import (
    PROJECT_ROOT,
    TRANSPORTS,
    ServerFailed,
    Transport,
    exit_on_sigterm,
    project_config,
    serving,
    with_tenants,
    write_tenants,
)
from benchmarks.table import Window
from benchmarks.testbed import MODEL, OPERATOR, REVISION, Totals
from benchmarks.workload import LengthMix, make_workload
from deployments.model import find_folder

TENANT = "acme"
TENANTS_FILE = "tenants.yaml"
SHAPES = {"32x4": (32, 4), "1x64": (1, 64)}
"""Texts per request and connections."""

Measure = Callable[[int], dict[str, Window]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for on the command line, and where the texts are."""

    seconds: float
    windows: int
    warmup_s: float
    num_texts: int
    seed: int
    only: list[str]
    transport: Transport
    folder: Path
    keys: dict[str, str]
    """By tenant; made for this run."""

    @property
    def window_s(self) -> float:
        """Length of one of the windows of a cell."""
        return self.seconds / self.windows

    def first_text(self, window: int) -> int:
        """Windows begin in different places, so that slow cells do not see the same few texts each time."""
        return window * self.num_texts // self.windows


def main() -> int:
    """Run what the command line asks for; the exit status."""
    exit_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        options = _options(Path(name))
        print(machine.heading(PROJECT_ROOT))
        print(
            f"texts     {options.num_texts}, {LengthMix()}, seed {options.seed}; {options.seconds:g} s per cell in "
            f"{options.windows} windows, each in a fresh process after {options.warmup_s:g} s or more of warm-up; "
            f"{options.transport} transport",
            flush=True,
        )
        make_workload(find_folder(MODEL), num_texts=options.num_texts, seed=options.seed).save(options.folder)
        try:
            windows = _measure_all(options)
        except ServerFailed as error:
            print(error, file=sys.stderr)
            return 1
    print(f"load      {machine.load_average()} after\n")
    text, is_good = report(windows)
    print(text)
    return 0 if is_good else 1


def _options(folder: Path) -> Options:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="measured per cell, in all windows together")
    parser.add_argument("--windows", type=int, default=3, help="windows per cell, each in a fresh process")
    parser.add_argument("--warmup", type=float, default=3.0, help="seconds of load before each window, at least")
    parser.add_argument("--texts", type=int, default=1024, help="how many different texts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(CELLS), metavar="CELL", help=f"of {', '.join(CELLS)}")
    parser.add_argument("--transport", choices=list(TRANSPORTS), default="default", help="Ray's own, for (b) and (c)")
    given = parser.parse_args()
    if given.seconds <= 0 or given.windows < 1 or given.texts < max(rows for rows, _ in SHAPES.values()):
        parser.error("--seconds and --windows must be positive, and --texts at least one large request")
    return Options(
        seconds=given.seconds,
        windows=given.windows,
        warmup_s=given.warmup,
        num_texts=given.texts,
        seed=given.seed,
        only=given.only or list(CELLS),
        transport=given.transport,
        folder=folder,
        keys=write_tenants(folder / TENANTS_FILE, {TENANT: {}, OPERATOR: {"admin": True}}),
    )


def _measure_all(options: Options) -> dict[str, list[Window]]:
    tenants = options.folder / TENANTS_FILE
    one_bucket = project_config(buckets=[{"max_tokens": LengthMix().max_tokens}])
    targets: dict[str, Measure] = {
        "process": partial(_in_process, options),
        "server": partial(_over_http, options, "server", with_tenants(project_config(), tenants)),
        "one-bucket": partial(_over_http, options, "one-bucket", with_tenants(one_bucket, tenants)),
        "plain": partial(_over_http, options, "plain", plain_serve.config(str(find_folder(MODEL)))),
    }
    wanted = [target for target in targets if any(cell.startswith(f"{target}-") for cell in options.only)]
    found: dict[str, list[Window]] = defaultdict(list)
    for window in range(options.windows):
        for target in wanted:
            for cell, result in targets[target](window).items():
                found[cell].append(result)
                print(f"window {window + 1}, {cell}: {result.tokens_per_s:,.0f} tokens/s", file=sys.stderr, flush=True)
    return {cell: found[cell] for cell in CELLS if cell in found}


def _in_process(options: Options, window: int) -> dict[str, Window]:
    spec = InProcessSpec(
        model=MODEL,
        max_tokens=LengthMix().max_tokens,
        workload=str(options.folder),
        warmup_s=options.warmup_s,
        window_s=options.window_s,
        first_text=options.first_text(window),
    )
    answer, foreign = run_child(
        "benchmarks.in_process", asdict(spec), seconds=2 * (options.warmup_s + options.window_s)
    )
    cells = {f"process-{name}": Window(**{**fields, "foreign_cpu_share": foreign}) for name, fields in answer.items()}
    return {cell: result for cell, result in cells.items() if cell in options.only}


def _over_http(options: Options, target: str, config: dict[str, Any], window: int) -> dict[str, Window]:
    results = {}
    with serving(config, transport=options.transport) as base:
        for shape in SHAPES:
            if f"{target}-{shape}" in options.only:
                results[f"{target}-{shape}"] = _load(options, target, base, shape=shape, window=window)
    return results


def _load(options: Options, target: str, base: str, *, shape: str, window: int) -> Window:
    rows_per_request, connections = SHAPES[shape]
    is_ours = target != "plain"
    spec = LoadSpec(
        url=f"{base}/v1/infer",
        workload=str(options.folder),
        rows_per_request=rows_per_request,
        connections=connections,
        warmup_s=options.warmup_s,
        window_s=options.window_s,
        first_text=options.first_text(window),
        headers={"Content-Type": "application/json", "X-API-Key": options.keys[TENANT]},
        fields={"revision": REVISION} if is_ours else {},
    )
    before = Totals.of(base, key=options.keys[OPERATOR]) if is_ours else None
    fields, foreign = run_child("benchmarks.load", asdict(spec), seconds=options.warmup_s + options.window_s)
    fields["foreign_cpu_share"] = foreign
    if before is not None:
        done = Totals.of(base, key=options.keys[OPERATOR]).since(before)
        fields["rows_per_forward"] = done.rows / max(1, done.forwards)
    return Window(**fields)


if __name__ == "__main__":
    sys.exit(main())
