"""Measuring processes: a module of this package that reads its task as JSON and prints its result as JSON."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import machine
from benchmarks.server import PROJECT_ROOT

CHILD_EXTRA_S = 400.0
"""What a measuring process may take besides its windows: loading, the last slow requests, checking."""


def run_child(module: str, spec: dict[str, object], *, seconds: float) -> tuple[dict[str, Any], float]:
    """What `module` printed, and what others took of the CPUs meanwhile.

    Raises subprocess.CalledProcessError, and subprocess.TimeoutExpired CHILD_EXTRA_S after `seconds`.
    """
    command: Sequence[str] = [sys.executable, "-m", module]
    foreign_load = machine.ForeignLoad()
    done = subprocess.run(
        command,
        input=json.dumps(spec),
        stdout=subprocess.PIPE,
        text=True,
        cwd=PROJECT_ROOT,
        timeout=seconds + CHILD_EXTRA_S,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer, foreign_load.share()
