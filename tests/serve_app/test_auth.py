"""Keys to tenants: what is accepted, what a changed file does, and what never leaks."""

import hmac
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from batching.errors import TokenServeError
from deployments.quotas import Quota
from serve_app import auth
from serve_app.auth import (
    CHECK_INTERVAL_S,
    DEMO_KEYS,
    DemoKeysExposed,
    KeyRing,
    TenantsFileError,
    TenantStore,
    Unauthorized,
    digest_of,
    is_loopback,
    key_of,
    load_tenants,
    new_key,
)
from tests.serve_app.fakes import ACME, ACME_NEXT, ADMIN, GLOBEX, KEYS, TENANTS, Server, error_of, write_tenants

ROOT = Path(__file__).parents[2]


def tenants_file(folder: Path, content: object) -> Path:
    """A tenants file with this content: text as it is, anything else as YAML."""
    path = folder / "tenants.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return path


def entry(*keys: str, **more: Any) -> dict[str, Any]:
    """A tenant with these keys."""
    return {"keys_sha256": [digest_of(key) for key in keys], "revisions": ["*"], **more}


# ---- the headers -----------------------------------------------------------------------------------------------------

ACCEPTED = [
    pytest.param([("authorization", "Bearer k")], "k", id="bearer"),
    pytest.param([("authorization", "bearer k")], "k", id="scheme in lower case"),
    pytest.param([("authorization", "BEARER   k  ")], "k", id="blanks around the key"),
    pytest.param([("x-api-key", "k")], "k", id="x-api-key"),
    pytest.param([("x-api-key", " k ")], "k", id="x-api-key with blanks"),
    pytest.param([("authorization", "Bearer k"), ("x-api-key", "k")], "k", id="the same in both"),
    pytest.param([("authorization", "Bearer k"), ("authorization", "Bearer k")], "k", id="the same twice"),
    pytest.param([("accept", "x")], None, id="no key"),
    pytest.param([("x-api-key", "")], None, id="empty x-api-key"),
]
MALFORMED = [
    pytest.param([("authorization", "Bearer a"), ("x-api-key", "b")], id="different keys"),
    pytest.param([("authorization", "Bearer a"), ("authorization", "Bearer b")], id="different bearers"),
    pytest.param([("x-api-key", "a"), ("x-api-key", "b")], id="different x-api-keys"),
    pytest.param([("authorization", "Bearer a"), ("x-api-key", "")], id="a key and an empty one"),
    pytest.param([("authorization", "Basic a")], id="other scheme"),
    pytest.param([("authorization", "a")], id="no scheme"),
    pytest.param([("authorization", "Bearer")], id="no key"),
    pytest.param([("authorization", "Bearer  ")], id="blank key"),
    pytest.param([("authorization", "")], id="empty"),
    pytest.param([("authorization", "Basic a"), ("x-api-key", "k")], id="other scheme beside a key"),
]


def raw(headers: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """Headers as ASGI has them."""
    return [(name.encode(), value.encode()) for name, value in headers]


@pytest.mark.parametrize("headers", MALFORMED)
def test_malformed_or_contradicting_keys_are_refused(headers: list[tuple[str, str]]) -> None:
    """Two different keys are never guessed at, and a malformed header is not ignored."""
    with pytest.raises(Unauthorized):
        key_of(raw(headers))


@pytest.mark.parametrize(("headers", "expected"), ACCEPTED)
def test_key_of_headers(headers: list[tuple[str, str]], expected: str | None) -> None:
    """A key comes as a bearer token or in X-API-Key."""
    assert key_of(raw(headers)) == expected


UNAUTHORIZED = [
    *MALFORMED,
    pytest.param([], id="nothing"),
    pytest.param([("x-api-key", "")], id="empty x-api-key"),
    pytest.param([("x-api-key", "unknown")], id="unknown"),
    pytest.param([("authorization", f"Bearer {ACME[:-1]}")], id="a prefix of a key"),
    pytest.param([("authorization", f"Bearer {ACME}x")], id="a key and more"),
    pytest.param([("authorization", f"Bearer {ACME.upper()}")], id="other case"),
    pytest.param([("authorization", f"Bearer {digest_of(ACME)}")], id="the digest"),
    pytest.param([("authorization", f"Bearer {ACME}"), ("x-api-key", GLOBEX)], id="keys of two tenants"),
    pytest.param([("authorization", f"Bearer {ACME}"), ("x-api-key", ACME_NEXT)], id="two keys of one tenant"),
    pytest.param([("cookie", f"api_key={ACME}")], id="in a cookie"),
]


@pytest.mark.parametrize("headers", UNAUTHORIZED)
def test_401_says_how_to_send_a_key(headers: list[tuple[str, str]], server: Server) -> None:
    """Every way of not being known has the same answer, with WWW-Authenticate."""
    response = server.get("/v1/models", key=None, headers=headers)
    error = error_of(response, 401)
    assert response.headers["www-authenticate"] == 'Bearer realm="raggedserve"'
    assert error == {
        "code": "invalid_api_key",
        "message": "a valid API key is needed: send `Authorization: Bearer KEY` or `X-API-Key: KEY`",
        "type": "authentication_error",
        "param": None,
    }


ANY_BYTES = [
    pytest.param(b"\xff\xfe", id="no text"),
    pytest.param("schlüssel".encode(), id="UTF-8"),
    pytest.param(b"\xed\xa0\xbd", id="a surrogate"),
    pytest.param(b"k" * 100_000, id="100 kB"),
]


@pytest.mark.parametrize("value", ANY_BYTES)
def test_keys_of_any_bytes_are_just_unknown(value: bytes, server: Server) -> None:
    """Bytes that are no text, and very long ones, are 401 and no more."""
    (start, _) = server.run(server.asgi({"path": "/v1/models", "headers": [(b"x-api-key", value)]}))
    assert start["status"] == 401


@pytest.mark.parametrize(
    "headers",
    [[("authorization", f"Bearer {ACME}")], [("x-api-key", ACME)], [("x-api-key", ACME_NEXT)]],
    ids=["bearer", "x-api-key", "second key of a rotation"],
)
def test_both_headers_and_both_keys_work(headers: list[tuple[str, str]], server: Server) -> None:
    """A tenant may send any of its keys in either header."""
    assert server.get("/v1/models", key=None, headers=headers).status_code == 200


@pytest.mark.parametrize("name", ["api_key", "key", "token", "access_token", "authorization"])
def test_bl_206_key_in_the_query_is_not_accepted(name: str, server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """A key in the address is 401, and our log does not keep it."""
    with caplog.at_level(logging.DEBUG, logger="serve_app"):
        response = server.get(f"/v1/models?{name}={ACME}", key=None)
    error_of(response, 401)
    assert ACME not in response.text + caplog.text


OWNERS = [(ACME, "acme"), (ACME_NEXT, "acme"), (GLOBEX, "globex"), (ADMIN, "operator"), ("unknown", None)]


@pytest.mark.parametrize(("key", "expected"), OWNERS)
def test_bl_204_every_key_is_compared_in_constant_time(
    key: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever key comes, or none that is known, its digest is compared with every digest there is."""
    ring = load_tenants(tenants_file(tmp_path, {"tenants": TENANTS}))
    compared: list[tuple[str, str]] = []

    class CountingHmac:
        @staticmethod
        def compare_digest(left: str, right: str) -> bool:
            compared.append((left, right))
            return hmac.compare_digest(left, right)

    monkeypatch.setattr(auth, "hmac", CountingHmac)
    assert tenant_of(ring, key) == expected
    assert sorted(compared) == sorted((digest_of(key), digest_of(known)) for known in KEYS)


def tenant_of(ring: KeyRing, key: str) -> str | None:
    """Whose key it is."""
    try:
        return ring.authenticate(key).name
    except Unauthorized:
        return None


# ---- the file --------------------------------------------------------------------------------------------------------

BAD_FILES = [
    pytest.param({}, "tenants", id="empty mapping"),
    pytest.param("", "file", id="empty file"),
    pytest.param("[1]", "file", id="a list"),
    pytest.param("tenants: {", "not valid YAML", id="broken YAML"),
    pytest.param("tenants: 2024-13-45", "not valid YAML", id="a date that is none"),
    pytest.param({"tenants": []}, "tenants", id="tenants as list"),
    pytest.param({"tenants": {}, "tenant": {}}, "tenant", id="unknown key above"),
    pytest.param({"tenants": {"acme": entry("k", keys=[])}}, "tenants.acme.keys", id="unknown key"),
    pytest.param({"tenants": {"acme": {"revisions": []}}}, "tenants.acme.keys_sha256", id="keys missing"),
    pytest.param({"tenants": {"acme": entry()}}, "tenants.acme.keys_sha256", id="no keys"),
    pytest.param(
        {"tenants": {"acme": {"keys_sha256": ["rs_secret-in-clear"], "revisions": []}}},
        "tenants.acme.keys_sha256.0",
        id="a key in clear",
    ),
    pytest.param(
        {"tenants": {"acme": {"keys_sha256": [digest_of("k").upper()], "revisions": []}}},
        "tenants.acme.keys_sha256.0",
        id="a digest in upper case",
    ),
    pytest.param({"tenants": {"acme": entry("k", revisions="*")}}, "tenants.acme.revisions", id="revisions as text"),
    pytest.param({"tenants": {"acme": entry("k", admin="yes")}}, "tenants.acme.admin", id="admin as text"),
    pytest.param({"tenants": {"acme": entry("k", admin=1)}}, "tenants.acme.admin", id="admin as number"),
    pytest.param({"tenants": {"acme": entry("k", batch_group="")}}, "tenants.acme.batch_group", id="empty group"),
    pytest.param({"tenants": {"acme": entry("k", quotas={})}}, "tenants.acme.quotas", id="quotas as a mapping"),
    pytest.param(
        {"tenants": {"acme": entry("k", quotas=[{"tokens_per_s": 5}])}},
        "tenants.acme.quotas.0.revisions",
        id="a quota without revisions",
    ),
    pytest.param(
        {"tenants": {"acme": entry("k", quotas=[{"revisions": "*"}, {"revisions": "*", "token_per_s": 5}])}},
        "tenants.acme.quotas.1.token_per_s",
        id="unknown key in a quota",
    ),
    pytest.param(
        {"tenants": {"acme": entry("k", quotas=[{"revisions": "*", "burst_tokens": 5}])}},
        "burst_tokens: means nothing without tokens_per_s",
        id="a burst without its rate",
    ),
    pytest.param({"tenants": {"a b": entry("k")}}, "tenants.a b.[key]", id="a blank in a name"),
    pytest.param({"tenants": {"_probe": entry("k")}}, "tenants._probe.[key]", id="the probes' name"),
    pytest.param({"tenants": {7: entry("k")}}, "tenants.7.[key]", id="a number for a name"),
    pytest.param(
        {"tenants": {"acme": entry("k"), "globex": entry("j", "k")}},
        "one key belongs to both acme and globex",
        id="a key of two tenants",
    ),
    pytest.param(
        {"tenants": {"acme": entry("k", "k")}}, "one key belongs to both acme and acme", id="a key of one tenant twice"
    ),
]


@pytest.mark.parametrize(("content", "expected"), BAD_FILES)
def test_bad_file_is_refused_with_the_path(content: object, expected: str, tmp_path: Path) -> None:
    """Each mistake is named by its key, and no value of the file is repeated."""
    with pytest.raises(TenantsFileError) as caught:
        load_tenants(tenants_file(tmp_path, content))
    assert str(caught.value).startswith("tenants.yaml")
    assert expected in str(caught.value)
    assert "secret" not in str(caught.value)
    assert digest_of("k") not in str(caught.value).lower()


def test_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are a mistake in the file like any other."""
    path = tmp_path / "tenants.yaml"
    path.write_bytes(b"tenants: {\xff}")
    with pytest.raises(TenantsFileError, match="not valid YAML"):
        load_tenants(path)


@pytest.mark.parametrize(
    ("more", "expected"),
    [pytest.param({}, "tenant:acme", id="its own"), pytest.param({"batch_group": "shared"}, "shared", id="named")],
)
def test_batch_group(more: dict[str, Any], expected: str, tmp_path: Path) -> None:
    """Without a batch group a tenant has one that no other tenant can name by accident."""
    ring = load_tenants(tenants_file(tmp_path, {"tenants": {"acme": entry("k", **more)}}))
    assert ring.authenticate("k").batch_group == expected


def test_quotas_reach_the_tenant(tmp_path: Path) -> None:
    """Entries keep their order and their numbers, whole or not; without any there is no quota."""
    quotas = [{"revisions": "minilm@v1", "requests_per_s": 0.5}, {"revisions": "*", "tokens_per_s": 2000}]
    content = {"tenants": {"acme": entry("k", quotas=quotas), "globex": entry("j")}}
    ring = load_tenants(tenants_file(tmp_path, content))
    assert ring.authenticate("k").quotas == tuple(Quota.model_validate(each) for each in quotas)
    assert ring.authenticate("j").quotas == ()


def test_default_batch_group_cannot_be_joined_by_name(tmp_path: Path) -> None:
    """A tenant that names its group like another tenant does not share that tenant's default group."""
    content = {"tenants": {"acme": entry("k"), "globex": entry("j", batch_group="acme")}}
    ring = load_tenants(tenants_file(tmp_path, content))
    assert ring.authenticate("k").batch_group != ring.authenticate("j").batch_group


# ---- changes while serving -------------------------------------------------------------------------------------------


class Store:
    """A tenant store on a clock of its own."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tenants.yaml"
        write_tenants(self.path, {"acme": entry("old")})
        self.store = TenantStore(path=self.path, host="127.0.0.1")

    def knows(self, key: str, now: float) -> bool:
        """Whether `key` is accepted at `now`."""
        return tenant_of(self.store.ring(now), key) is not None


def test_changed_file_is_read_within_the_interval(tmp_path: Path) -> None:
    """A new file counts from the first request a second after the last look."""
    made = Store(tmp_path)
    assert made.knows("old", now=100.0)
    write_tenants(made.path, {"acme": entry("new")})
    assert made.knows("old", now=100.0 + CHECK_INTERVAL_S - 0.001)
    assert made.knows("new", now=100.0 + CHECK_INTERVAL_S)
    assert not made.knows("old", now=100.0 + CHECK_INTERVAL_S)


def test_rotation_of_a_key(tmp_path: Path) -> None:
    """Old and new key work together while both digests are listed."""
    made = Store(tmp_path)
    assert [made.knows(key, now=0.0) for key in ("old", "new")] == [True, False]
    write_tenants(made.path, {"acme": entry("old", "new")})
    assert [made.knows(key, now=2.0) for key in ("old", "new")] == [True, True]
    write_tenants(made.path, {"acme": entry("new")})
    assert [made.knows(key, now=4.0) for key in ("old", "new")] == [False, True]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"tenants: {", id="broken YAML"),
        pytest.param(b"", id="emptied"),
        pytest.param(b"tenants: {\xff}", id="no text"),
        pytest.param(b"tenants: {acme: {keys_sha256: [rs_secret], revisions: []}}", id="a key in clear"),
        pytest.param(None, id="deleted"),
    ],
)
def test_broken_new_file_keeps_the_old_keys(
    content: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that became unusable changes nothing but the log, which repeats no value of it."""
    made = Store(tmp_path)
    made.path.unlink()
    if content is not None:
        made.path.write_bytes(content)
    with caplog.at_level(logging.INFO, logger="serve_app"):
        assert made.knows("old", now=2.0)
    assert "the keys read before stay in force" in caplog.text
    assert "rs_secret" not in caplog.text


def test_repaired_file_counts_again(tmp_path: Path) -> None:
    """After a broken file a good one is taken."""
    made = Store(tmp_path)
    made.path.write_text("tenants: {", encoding="utf-8")
    assert made.knows("old", now=2.0)
    write_tenants(made.path, {"acme": entry("new")})
    assert made.knows("new", now=4.0)


def test_unchanged_file_is_not_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Looking at the file costs no parsing while it stays the same."""
    made = Store(tmp_path)
    with caplog.at_level(logging.INFO, logger="serve_app"):
        rings = [made.store.ring(now) for now in (0.0, 2.0, 4.0)]
    assert rings[0] is rings[1] is rings[2]
    assert caplog.records == []


def test_reload_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running server takes a new key and lets an old one go."""
    monkeypatch.setattr(auth, "CHECK_INTERVAL_S", 0.0)
    with Server(tmp_path) as server:
        assert server.get("/v1/models", key="fresh").status_code == 401
        write_tenants(server.tenants_file, {"acme": entry("fresh")})
        assert server.get("/v1/models", key="fresh").status_code == 200
        assert server.get("/v1/models", key=ACME).status_code == 401


# ---- demo keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "example.com", ""])
@pytest.mark.parametrize("key", DEMO_KEYS)
def test_demo_keys_are_refused_where_others_can_reach_them(host: str, key: str, tmp_path: Path) -> None:
    """The published keys are accepted on loopback only, and the message says what to do."""
    path = tenants_file(tmp_path, {"tenants": {"acme": entry("own", key)}})
    with pytest.raises(DemoKeysExposed) as caught:
        TenantStore(path=path, host=host)
    assert f"listens on {host}: set `http_options.host: 127.0.0.1`" in str(caught.value)
    assert "python -m serve_app keys new TENANT" in str(caught.value)


def test_demo_keys_that_appear_later_are_refused_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A reload cannot bring demo keys to an open interface."""
    path = tenants_file(tmp_path, {"tenants": {"acme": entry("own")}})
    store = TenantStore(path=path, host="0.0.0.0")
    write_tenants(path, {"acme": entry(DEMO_KEYS[0])})
    with caplog.at_level(logging.ERROR, logger="serve_app"):
        ring = store.ring(2.0)
    assert tenant_of(ring, "own") == "acme"
    assert tenant_of(ring, DEMO_KEYS[0]) is None
    assert "published demo keys" in caplog.text


def test_demo_file_has_the_published_keys() -> None:
    """The keys that the README shows open the demo file, with the tenants it names."""
    store = TenantStore(path=ROOT / "tenants.demo.yaml", host="127.0.0.1")
    tenants = [store.ring(0.0).authenticate(key) for key in DEMO_KEYS]
    assert [tenant.name for tenant in tenants] == ["acme", "globex", "operator"]
    assert [tenant.is_admin for tenant in tenants] == [False, False, True]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.0.1", False),
        ("localhost.example.com", False),
        ("127.0.0.1.example.com", False),
        ("", False),
    ],
)
def test_is_loopback(host: str, *, expected: bool) -> None:
    """Only addresses that nothing outside reaches count."""
    assert is_loopback(host) is expected


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_new_keys_are_long_and_different() -> None:
    """A key has 256 random bits behind a prefix that scanners can look for."""
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("rs_") and len(key) >= 46 for key in keys)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/nothing", "/v1/infer"])
def test_no_key_in_any_error_or_log(path: str, server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a known nor an unknown key is repeated in a reply or in our log."""
    with caplog.at_level(logging.DEBUG):
        texts = [
            json.dumps([dict(response.headers), response.text])
            for key in (*KEYS, "unknown-secret")
            for response in (server.get(path, key=key), server.post(path, {"bad": 1}, key=key))
        ]
    assert not [key for key in (*KEYS, "unknown-secret") if key in "".join(texts) + caplog.text]


def test_errors_of_this_module_are_ours() -> None:
    """A refusal is one of our errors, with a text and no argument that could hold a key."""
    error = Unauthorized()
    assert isinstance(error, TokenServeError)
    assert error.args == ()


def test_file_that_became_readable_again_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that failed is tried again, although the file has not changed since."""
    made = Store(tmp_path)
    write_tenants(made.path, {"acme": entry("new")})
    with monkeypatch.context() as unreadable:

        def refuse(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        unreadable.setattr("serve_app.auth.load_tenants", refuse)
        assert made.knows("old", now=10.0)
    assert made.knows("new", now=20.0)
