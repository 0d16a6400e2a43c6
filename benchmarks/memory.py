"""Resident memory of the server's processes, read from /proc by the titles that Ray gives them."""

import os
import re
from pathlib import Path

from benchmarks import machine

TITLE = re.compile(r"ray::(ServeReplica:[^:]+:[^.\s\0]+|ProxyActor)")
"""`ray::ServeReplica:APPLICATION:DEPLOYMENT`, behind it the method that runs at the moment, and zeros."""

Memory = dict[str, int]
"""Bytes, by title and process id: a replica that was replaced is another one."""


def title_of(command_line: str) -> str | None:
    """Which part of the server a process is; None for others."""
    found = TITLE.match(command_line)
    return found[1].removeprefix("ServeReplica:") if found else None


def serving_memory() -> Memory:
    """Of every replica and proxy that descends from this process."""
    found: Memory = {}
    for pid in machine.own_processes():
        folder = Path("/proc", str(pid))
        try:
            title = title_of((folder / "cmdline").read_text(encoding="utf-8", errors="replace"))
            pages = int((folder / "statm").read_text(encoding="ascii").split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if title is not None:
            found[f"{title} ({pid})"] = pages * os.sysconf("SC_PAGE_SIZE")
    return found


def growth(before: Memory, after: Memory) -> Memory:
    """Bytes gained by each process that was there both times."""
    return {name: after[name] - before[name] for name in before if name in after}
