"""Who calls: API keys to tenants, from a file that holds digests only and is read again when it changes.

Keys are long random strings, so a plain SHA-256 of each is enough; a slow hash would only slow requests down.
"""

import hmac
import ipaddress
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from batching.errors import TokenServeError
from batching.row import Priority
from deployments.quotas import Quota
from deployments.requests import Tenant
from serve_app.yaml_file import YamlError, read_yaml

logger = logging.getLogger(__name__)

KEY_PREFIX = "rs_"
TENANT_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
DEMO_KEYS = ("demo-acme-key", "demo-globex-key", "demo-admin-key")
"""Published in the README and therefore worthless: accepted on loopback only."""
CHECK_INTERVAL_S = 1.0
"""How often the file is looked at."""


class Unauthorized(TokenServeError):
    """No key, or none that is known: one answer for both."""

    @property
    def detail(self) -> str:
        """Say how to send a key."""
        return "a valid API key is needed: send `Authorization: Bearer KEY` or `X-API-Key: KEY`"


class TenantsFileError(Exception):
    """The tenants file cannot be used; the text names the key and never repeats a value."""


class DemoKeysExposed(Exception):
    """Demo keys in use on an interface that others can reach."""

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self.host = host

    def __str__(self) -> str:
        return (
            f"the tenants file contains the published demo keys, and the server listens on {self.host}: set "
            "`http_options.host: 127.0.0.1`, or make keys of your own with `python -m serve_app keys new TENANT`"
        )


class TenantEntry(BaseModel):
    """One tenant in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    keys_sha256: Annotated[list[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]], Field(min_length=1)]
    """Digests of the tenant's keys; several during a rotation."""
    revisions: list[str]
    """Globs on revisions that the tenant may use."""
    batch_group: Annotated[str, Field(min_length=1)] | None = None
    """Tenants with the same batch group may share a forward. Default: a group of its own."""
    admin: bool = False
    """May read the stats of all tenants."""
    weight: Annotated[float, Field(ge=0.01, le=1000, allow_inf_nan=False)] = 1.0
    """Share of a busy model, beside the weights of the other tenants that wait: twice the weight, twice the share."""
    priority: Priority = "interactive"
    """Of requests that name none, and the highest that they may name: batch, or interactive."""
    max_timeout_s: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] | None = None
    """Longest time that a request may ask for; the gateway's own limit holds too."""
    quotas: list[Quota] = []
    """What it may use of its revisions: the first whose glob covers a revision applies. Default: no limit."""


class TenantsFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    tenants: Annotated[dict[Annotated[str, Field(pattern=f"^{TENANT_NAME}$")], TenantEntry], ...]


@dataclass(frozen=True, slots=True)
class KeyRing:
    """Digest to tenant, as one value that a request uses from start to end."""

    tenants_by_digest: Mapping[str, Tenant]

    def authenticate(self, key: str) -> Tenant:
        """The tenant of `key`. Raises Unauthorized. Time does not depend on which key, or whether any, matches."""
        digest = sha256(key.encode("utf-8", errors="surrogateescape")).hexdigest()
        found: Tenant | None = None
        for known, tenant in self.tenants_by_digest.items():
            if hmac.compare_digest(digest, known):
                found = tenant
        if found is None:
            raise Unauthorized()
        return found

    def has_demo_keys(self) -> bool:
        """Whether a published key would be accepted."""
        return any(digest_of(key) in self.tenants_by_digest for key in DEMO_KEYS)


@dataclass(slots=True)
class TenantStore:
    """The key ring in force, read again when the file changes. A file that became unusable leaves the old one."""

    path: Path
    host: str
    """Address the server listens on."""
    _ring: KeyRing = field(init=False)
    _seen: tuple[int, ...] | None = field(init=False)
    _checked: float = field(init=False, default=float("-inf"))

    def __post_init__(self) -> None:
        self._seen = self._signature()
        self._ring = self._load()

    def ring(self, now: float) -> KeyRing:
        """The keys in force at `now` (monotonic seconds)."""
        if now - self._checked >= CHECK_INTERVAL_S:
            self._checked = now
            self._reload_if_changed()
        return self._ring

    def _reload_if_changed(self) -> None:
        try:
            signature = self._signature()
            if signature == self._seen:
                return
            self._seen = signature
            self._ring = self._load()
        except OSError as error:
            self._seen = None  # unreadable now is no property of its content: look again
            logger.error("tenants file not read, the keys read before stay in force: %s", error.strerror)
            return
        except (TenantsFileError, DemoKeysExposed) as error:
            logger.error("tenants file not reloaded, the keys read before stay in force: %s", error)
            return
        logger.info("tenants file reloaded: %d keys", len(self._ring.tenants_by_digest))

    def _load(self) -> KeyRing:
        ring = load_tenants(self.path)
        if ring.has_demo_keys() and not is_loopback(self.host):
            raise DemoKeysExposed(self.host)
        return ring

    def _signature(self) -> tuple[int, ...]:
        status = self.path.stat()
        return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def load_tenants(path: Path) -> KeyRing:
    """Read a tenants file. Raises TenantsFileError, OSError."""
    try:
        parsed = TenantsFile.model_validate(read_yaml(path))
    except ValidationError as error:
        raise TenantsFileError(f"{path.name}: {_describe(error)}") from None
    except YamlError as error:
        raise TenantsFileError(f"{path.name}: {error}") from None
    tenants: dict[str, Tenant] = {}
    for name, entry in parsed.tenants.items():
        tenant = Tenant(
            name=name,
            revisions=tuple(entry.revisions),
            batch_group=entry.batch_group or f"tenant:{name}",
            is_admin=entry.admin,
            weight=entry.weight,
            priority=entry.priority,
            max_timeout_s=entry.max_timeout_s,
            quotas=tuple(entry.quotas),
        )
        for digest in entry.keys_sha256:
            if digest in tenants:
                raise TenantsFileError(f"{path.name}: one key belongs to both {tenants[digest].name} and {name}")
            tenants[digest] = tenant
    return KeyRing(tenants)


def key_of(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """The API key among ASGI headers, None without one.

    Raises Unauthorized for a malformed or contradicting pair: two different keys in one request are never guessed at.
    """
    keys: set[str] = set()
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").strip().partition(" ")
            if scheme.lower() != "bearer" or not key.strip():
                raise Unauthorized()
            keys.add(key.strip())
        elif name == b"x-api-key":
            keys.add(value.decode("latin-1").strip())
    if len(keys) > 1:
        raise Unauthorized()
    return next(iter(keys), None) or None


def new_key() -> str:
    """A fresh key with 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """What the tenants file holds for `key`."""
    return sha256(key.encode()).hexdigest()


def is_loopback(host: str) -> bool:
    """Whether nothing outside this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _describe(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(str(part) for part in item['loc']) or 'file'}: {item['msg']}" for item in error.errors()[:5]
    )
