"""`python -m serve_app run FILE`: `serve run` with the checks that a first start needs, and a line when it is ready."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from serve_app.auth import DEMO_KEYS, is_loopback
from serve_app.check import problems
from serve_app.yaml_file import read_yaml

POLL_S = 1.0
REMIND_S = 30.0
READ_TIMEOUT_S = 10.0


def run(path: Path) -> int:
    """Check the file and the port, start `serve run` in the foreground, announce readiness. The exit status."""
    found = problems(path)
    if found:
        print("\n".join([f"{path} cannot be served:", *found]), file=sys.stderr)
        return 2
    options = read_yaml(path).get("http_options") or {}
    host, port = str(options.get("host", "0.0.0.0")), int(options.get("port", 8000))
    with _held(port) as is_held:
        if not is_held or not _is_free(host, port):
            print(
                f"port {port} on {host} is in use; Ray would share it in silence. Stop the other server or change "
                f"`http_options.port` in {path}.",
                file=sys.stderr,
            )
            return 2
        return _serve(path, host, port)


def _serve(path: Path, host: str, port: int) -> int:
    command = [str(Path(sys.executable).with_name("serve")), "run", str(path)]
    if "RAY_ADDRESS" not in os.environ:
        command += ["--address", "local"]  # not whatever cluster was started on this machine last
    # Before the child starts: a background job of a shell ignores SIGINT and would hand that on; handlers it does not.
    stopping = _Stopping()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, stopping.on_signal)
    # A process group of its own, so that a terminal's Ctrl-C comes through us, once, and does not break clean-up off.
    process = stopping.process = subprocess.Popen(command, process_group=0)
    threading.Thread(target=_announce, args=(process, host, port), daemon=True).start()
    status = process.wait()
    print("stopped", flush=True)
    return 0 if stopping.num_signals else status


@contextmanager
def _held(port: int) -> Iterator[bool]:
    """Hold an exclusive lock on the port, or yield False: between probing it and Ray's bind, seconds pass."""
    path = Path(tempfile.gettempdir()) / f"raggedserve-{os.getuid()}-{port}.lock"
    with path.open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


def _is_free(host: str, port: int) -> bool:
    # Without SO_REUSEPORT, which Ray's proxies set, binding fails when anyone listens.
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


@dataclass(slots=True)
class _Stopping:
    """Hands stop signals on: `serve run` takes everything down on SIGINT. A second signal does not wait for that."""

    process: subprocess.Popen[bytes] | None = None
    num_signals: int = 0

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.num_signals += 1
        if self.process is None:
            raise SystemExit(128 + signum)
        self.process.send_signal(signal.SIGINT if self.num_signals == 1 else signal.SIGTERM)


def _announce(process: subprocess.Popen[bytes], host: str, port: int) -> None:
    base = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    started = reminded = time.monotonic()
    while process.poll() is None:
        body = _readiness(base)
        if body.get("ready") is True:
            is_demo = is_loopback(host) and _is_accepted(base, DEMO_KEYS[0])
            key = DEMO_KEYS[0] if is_demo else "$KEY"
            print(_ready_line(base, body, key=key, seconds=time.monotonic() - started), flush=True)
            return
        if time.monotonic() - reminded > REMIND_S:
            reminded = time.monotonic()
            print(f"still starting after {reminded - started:.0f} s: {_reasons(body)}", flush=True)
        time.sleep(POLL_S)


def _readiness(base: str) -> dict[str, object]:
    try:
        with urllib.request.urlopen(f"{base}/ready", timeout=READ_TIMEOUT_S) as response:
            body = json.load(response)
    except urllib.error.HTTPError as error:
        try:
            body = json.load(error)
        except ValueError:
            return {"status": error.code}
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def _reasons(body: dict[str, object]) -> str:
    revisions = body.get("revisions")
    if not isinstance(revisions, dict):
        return "the gateway does not answer yet"
    reasons = [f"{name}: {state.get('reason')}" for name, state in revisions.items() if not state.get("ready")]
    return "; ".join(reasons) or "the gateway has no revisions"


def _is_accepted(base: str, key: str) -> bool:
    request = urllib.request.Request(f"{base}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=READ_TIMEOUT_S):
            return True
    except OSError:  # 401 is one
        return False


def _ready_line(base: str, body: dict[str, object], *, key: str, seconds: float) -> str:
    revisions = body.get("revisions")
    names = sorted(revisions) if isinstance(revisions, dict) else []
    request = json.dumps({"revision": names[0] if names else "REVISION", "inputs": ["A first sentence."]})
    return "\n".join(
        [
            "",
            f"ready after {seconds:.0f} s: {', '.join(names)} at {base}. Try",
            f"  curl -s {base}/v1/infer -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' \\",
            f"    -d '{request}'",
            "Stop with Ctrl-C.",
            "",
        ]
    )
