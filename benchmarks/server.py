"""A server the way a user starts it: `serve run` on a file, in a process of its own, waited for, and stopped by its id.

The cluster is thrown away afterwards: its own temporary folder, a free port, loopback only.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import yaml

from serve_app.auth import digest_of, new_key

PROJECT_ROOT = Path(__file__).resolve().parent.parent
PORTS = range(20_000, 32_000)
"""Below those that outgoing connections get."""
MAX_PROBES = 200
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.25
LOG_LINES = 60

THROWAWAY_RAY = {
    "RAY_AUTH_MODE": "disabled",  # on purpose: a token would be left in the home folder, and nothing else can reach it
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # makes 127.0.0.1 the node's address, so that Ray's own ports bind there
    "RAY_USAGE_STATS_ENABLED": "0",
}

Transport = Literal["default", "fast"]
FAST_TRANSPORT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # 30 s of waiting at each stop otherwise
}
"""Ray's HAProxy in front, and its settings for throughput; it listens on all interfaces."""
TRANSPORTS: Mapping[Transport, Mapping[str, str]] = {"default": {}, "fast": FAST_TRANSPORT}


class ServerFailed(Exception):
    """The server ended or did not get ready; the text ends with its log."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(reason, log)
        self.reason = reason
        self.log = log

    def __str__(self) -> str:
        return f"{self.reason}; its log ends with\n{self.log}"


def exit_on_sigterm() -> None:
    """End on SIGTERM as on any other way out, so that servers are stopped."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))


def free_port(candidates: range = PORTS) -> int:
    """A port of 127.0.0.1 that nobody listens on. Raises OSError when there is none.

    Ray's proxies set SO_REUSEPORT and would share a taken port in silence; the probe does not, so it fails then.
    """
    for port in random.SystemRandom().sample(candidates, min(len(candidates), MAX_PROBES)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port between {candidates.start} and {candidates.stop}")


def project_config(**revision_args: object) -> dict[str, Any]:
    """`serve_config.yaml` as it is, with `revision_args` in place of the same keys of its revision."""
    config: dict[str, Any] = yaml.safe_load((PROJECT_ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
    for application in config["applications"]:
        if application["import_path"] == "serve_app.app:revision":
            application["args"].update(revision_args)
    return config


def write_tenants(path: Path, tenants: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """A tenants file with a fresh key for each; the keys, by tenant. Published keys work on loopback only."""
    keys = {tenant: new_key() for tenant in tenants}
    entries = {
        tenant: {"revisions": ["*"], "keys_sha256": [digest_of(keys[tenant])], **settings}
        for tenant, settings in tenants.items()
    }
    path.write_text(yaml.safe_dump({"tenants": entries}), encoding="utf-8")
    return keys


def with_tenants(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """`config` with the tenants file `path` in place of its gateway's."""
    changed: dict[str, Any] = deepcopy(dict(config))
    for application in changed["applications"]:
        if application["import_path"] == "serve_app.app:gateway":
            application["args"]["tenants_file"] = str(path)
    return changed


@contextmanager
def serving(config: Mapping[str, Any], *, transport: Transport = "default") -> Iterator[str]:
    """The base URL of a server of `config` on a free port, ready; it is gone afterwards. Raises ServerFailed."""
    # Short, because Ray puts sockets into it and their paths may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="rs", dir="/tmp"))
    log = folder / "serve.log"
    port = free_port()
    process = _start(config, port=port, folder=folder, log=log, transport=transport)
    base = f"http://127.0.0.1:{port}"
    try:
        _await_ready(process, base, log)
        yield base
    finally:
        _stop(process)
        shutil.rmtree(folder, ignore_errors=True)


def request_json(url: str, *, key: str, body: object = None) -> Any:
    """GET, or POST where there is a body. Raises urllib.error.HTTPError for anything but an answer."""
    request = urllib.request.Request(url, headers={"X-API-Key": key, "Content-Type": "application/json"})
    request.data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def _start(
    config: Mapping[str, Any], *, port: int, folder: Path, log: Path, transport: Transport
) -> subprocess.Popen[bytes]:
    changed = deepcopy(dict(config))
    changed["http_options"] = {**changed.get("http_options", {}), "host": "127.0.0.1", "port": port}
    path = folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump(changed), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("serve")), "run", str(path), "--address", "local"]
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=PROJECT_ROOT,
            env={**os.environ, **THROWAWAY_RAY, **TRANSPORTS[transport], "RAY_TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a process group to end at last, and no Ctrl-C behind our back
            preexec_fn=_heed_interrupt,
        )


def _heed_interrupt() -> None:
    # A shell script starts its background jobs with SIGINT ignored, children inherit that, and SIGINT is how we stop.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _await_ready(process: subprocess.Popen[bytes], base: str, log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerFailed(f"`serve run` ended with status {process.returncode}", _tail(log))
        if _is_ready(base):
            return
        time.sleep(POLL_S)
    raise ServerFailed(f"not ready after {READY_TIMEOUT_S:.0f} s", _tail(log))


def _is_ready(base: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base}/ready", timeout=10) as response:
            return bool(json.load(response)["ready"])
    except (OSError, ValueError):  # URLError and HTTPError are OSErrors
        return False


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print(f"`serve run` did not stop within {STOP_TIMEOUT_S:.0f} s and is killed", file=sys.stderr)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the usual case: nobody of the group is left
    process.wait()
