"""What a result is worth nothing without: when, where, with which versions, and how busy the machine was."""

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("ray", "torch", "transformers", "sentence-transformers", "tokenizers", "numpy")


def describe(folder: Path) -> list[str]:
    """Lines on the machine and the software; `folder` is the checkout that is measured."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        f"date      {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        f"machine   {_processor()}, {len(os.sched_getaffinity(0))} CPUs, {memory_gib:.0f} GiB, {platform.system()} "
        f"{platform.release()}",
        f"versions  raggedserve {_commit(folder)}, Python {platform.python_version()}, "
        + ", ".join(f"{package} {version(package)}" for package in PACKAGES),
    ]


def heading(folder: Path) -> str:
    """What stands above every table."""
    return "\n".join([*describe(folder), f"load      {load_average()} before"])


def load_average() -> str:
    """The load average over 1, 5 and 15 minutes, as `uptime` prints it."""
    return ", ".join(f"{load:.2f}" for load in os.getloadavg())


class ForeignLoad:
    """Watches what everyone else takes of the CPUs while something is measured: other processes, other machines."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._foreign_s = _foreign_s()

    def share(self) -> float:
        """Of all CPUs, since this was made. Processes that this one started must be running still or waited for."""
        elapsed_s = time.monotonic() - self._started
        return max(0.0, _foreign_s() - self._foreign_s) / elapsed_s / (os.cpu_count() or 1)


def _foreign_s() -> float:
    ticks = [int(field) for field in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    idle = ticks[3] + ticks[4]  # idle, and idle while a disk works
    return (sum(ticks) - idle - _own_ticks()) / os.sysconf("SC_CLK_TCK")


def own_processes() -> list[int]:
    """Ids of this process and of its descendants."""
    parents = {pid: int(fields[1]) for pid, fields in _stat().items()}
    return [pid for pid in parents if _descends(pid, parents)]


def _own_ticks() -> int:
    """CPU time of this process, of its descendants, and of those children that were waited for."""
    found = _stat()
    parents = {pid: int(fields[1]) for pid, fields in found.items()}
    used = {
        pid: sum(int(field) for field in fields[11 : 15 if pid == os.getpid() else 13]) for pid, fields in found.items()
    }
    return sum(ticks for pid, ticks in used.items() if _descends(pid, parents))


def _stat() -> dict[int, list[str]]:
    """Of every process: state ppid ... utime stime cutime cstime, and so on."""
    found: dict[int, list[str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, which may hold anything.
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[int(path.parent.name)] = fields
    return found


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != os.getpid():
        pid = parents[pid]
    return pid == os.getpid()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit(folder: Path) -> str:
    commit = _git(folder, "rev-parse", "--short", "HEAD")
    if not commit:
        return version("raggedserve")
    return f"{commit} with changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else commit


def _git(folder: Path, *arguments: str) -> str:
    command: Sequence[str] = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
