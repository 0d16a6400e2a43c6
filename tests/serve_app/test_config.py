"""`args` of both applications, and what the builders make of them."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.build_app import build_app

from deployments.settings import MAX_ROWS_PER_FORWARD
from serve_app import app
from serve_app.config import (
    PROJECT_ROOT,
    QUOTA_STORAGE_VARIABLE,
    GatewayArgs,
    RevisionArgs,
    find_file,
    quota_storage_uri,
)

REVISION: dict[str, Any] = {"revision": "minilm@v1", "model": "m", "task": "embed", "buckets": [{"max_tokens": 64}]}


def paths(model: Any, value: object) -> list[str]:
    """Where `value` is wrong, as dotted paths; empty when it is good."""
    try:
        model.model_validate(value)
    except ValidationError as error:
        return [".".join(map(str, item["loc"])) for item in error.errors()]
    return []


def messages(value: dict[str, Any]) -> list[str]:
    """What RevisionArgs says about `value`."""
    try:
        RevisionArgs.model_validate(value)
    except ValidationError as error:
        return [item["msg"] for item in error.errors()]
    return []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param({}, "tenants_file", id="tenants file missing"),
        pytest.param({"tenants_file": ""}, "tenants_file", id="tenants file empty"),
        pytest.param({"tenants_file": "t", "tenant_file": "t"}, "tenant_file", id="unknown key"),
        pytest.param({"tenants_file": "t", "max_body_bytes": 1023}, "max_body_bytes", id="body below 1 KiB"),
        pytest.param({"tenants_file": "t", "max_body_bytes": "16"}, "max_body_bytes", id="body as text"),
        pytest.param({"tenants_file": "t", "max_body_bytes": 2048.0}, "max_body_bytes", id="body as float"),
        pytest.param({"tenants_file": "t", "body_timeout_s": 0}, "body_timeout_s", id="no time"),
        pytest.param({"tenants_file": "t", "body_timeout_s": 601}, "body_timeout_s", id="too much time"),
        pytest.param({"tenants_file": "t", "public_readiness_details": 1}, "public_readiness_details", id="number"),
        pytest.param({"tenants_file": "t", "quota_storage": ""}, "quota_storage", id="storage empty"),
        pytest.param({"tenants_file": "t", "quota_storage": "memory://"}, "quota_storage", id="storage in memory"),
        pytest.param({"tenants_file": "t", "quota_storage": "redis://h"}, "quota_storage", id="storage without port"),
        pytest.param({"tenants_file": "t", "quota_storage": "redis://:6379"}, "quota_storage", id="without host"),
        pytest.param({"tenants_file": "t", "quota_storage": "redis://h:x"}, "quota_storage", id="port as text"),
        pytest.param({"tenants_file": "t", "quota_on_store_failure": "shut"}, "quota_on_store_failure", id="no choice"),
    ],
)
def test_bad_gateway_args_name_their_key(value: dict[str, Any], expected: str) -> None:
    """Each argument has a type and a range."""
    assert paths(GatewayArgs, value) == [expected]


@pytest.mark.parametrize(
    "uri",
    ["redis://:pass-word@h:6379", "rediss://user:pass-word@h:6379/2", "redis://h:6379?password=pass-word"],
)
def test_storage_with_a_password_is_refused(uri: str) -> None:
    """The message says where such a URI belongs, and does not repeat it."""
    with pytest.raises(ValidationError, match=QUOTA_STORAGE_VARIABLE) as caught:
        GatewayArgs.model_validate({"tenants_file": "t", "quota_storage": uri})
    assert "pass-word" not in str(caught.value)


@pytest.mark.parametrize(
    ("in_args", "in_environment", "expected"),
    [
        pytest.param(None, None, None, id="neither"),
        pytest.param("redis://a:6379", None, "redis://a:6379", id="args"),
        pytest.param("redis://user@a:6379/1", "", "redis://user@a:6379/1", id="empty variable"),
        pytest.param(None, "rediss://:secret@b:6379", "rediss://:secret@b:6379", id="environment"),
        pytest.param("redis://a:6379", "redis://:secret@b:6379", "redis://:secret@b:6379", id="environment wins"),
    ],
)
def test_where_quotas_are_stored(in_args: str | None, in_environment: str | None, expected: str | None) -> None:
    """The environment's URI, which may hold a password, comes before that of the args."""
    environment = {} if in_environment is None else {QUOTA_STORAGE_VARIABLE: in_environment}
    args = GatewayArgs(tenants_file="t", quota_storage=in_args)
    assert quota_storage_uri(args, environment) == expected


@pytest.mark.parametrize("uri", ["http://:pass-word@h:1", "redis://:pass-word@h", "redis://:pass-word@h:port"])
def test_bad_uri_in_the_environment_is_not_repeated(uri: str) -> None:
    """The variable is named and its value is not."""
    with pytest.raises(ValueError, match=f"^environment variable {QUOTA_STORAGE_VARIABLE}: must be redis:") as caught:
        quota_storage_uri(GatewayArgs(tenants_file="t"), {QUOTA_STORAGE_VARIABLE: uri})
    assert "pass-word" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param({"revision": ""}, "revision", id="revision empty"),
        pytest.param({"revisions": "x"}, "revisions", id="unknown key"),
        pytest.param({"model": 7}, "model", id="model number"),
        pytest.param({"task": "embedding"}, "task", id="unknown task"),
        pytest.param({"layout": "packed"}, "layout", id="unknown layout"),
        pytest.param({"dtype": "int8"}, "dtype", id="unknown dtype"),
        pytest.param({"threads": 0}, "threads", id="no threads"),
        pytest.param({"device": ""}, "device", id="device empty"),
        pytest.param({"buckets": []}, "buckets", id="no buckets"),
        pytest.param({"buckets": [64]}, "buckets.0", id="bucket as number"),
        pytest.param({"buckets": [{"max_tokens": 0}]}, "buckets.0.max_tokens", id="bucket of 0"),
        pytest.param({"buckets": [{"max_tokens": 64.0}]}, "buckets.0.max_tokens", id="bucket of a float"),
        pytest.param({"buckets": [{"max_token": 64}]}, "buckets.0.max_token", id="unknown key in a bucket"),
        pytest.param({"layout": "padded", "ceilings": [0]}, "ceilings.0", id="ceiling of 0"),
        pytest.param({"layout": "padded", "ceilings": []}, "ceilings", id="no ceilings"),
        pytest.param({"layout": "padded", "ceilings": "16"}, "ceilings", id="ceilings as text"),
    ],
)
def test_bad_revision_args_name_their_key(change: dict[str, Any], expected: str) -> None:
    """Each argument has a type and a range, at every depth."""
    assert expected in paths(RevisionArgs, REVISION | change)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(
            {"buckets": [{"max_tokens": 64}, {"max_tokens": 16}]},
            "buckets: max_tokens must increase, got [64, 16]",
            id="buckets in wrong order",
        ),
        pytest.param(
            {"buckets": [{"max_tokens": 64}, {"max_tokens": 64}]},
            "buckets: max_tokens must increase, got [64, 64]",
            id="one bucket twice",
        ),
        pytest.param({"ceilings": [16]}, "ceilings: only the padded layout has them", id="ceilings of ragged"),
        pytest.param(
            {"layout": "padded", "ceilings": [32, 16]},
            "ceilings: must increase, got [32, 16]",
            id="ceilings in wrong order",
        ),
        pytest.param(
            {"layout": "padded", "ceilings": [16, 128]},
            "ceilings: 128 is above the largest bucket, 64",
            id="ceiling above the buckets",
        ),
    ],
)
def test_revision_args_that_contradict_each_other(change: dict[str, Any], expected: str) -> None:
    """What arguments say together is checked, and the message has the values."""
    assert messages(REVISION | change) == [f"Value error, {expected}"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param({}, [(), ()], id="ragged has none"),
        pytest.param({"layout": "padded"}, [(16, 32, 50), (16, 32, 64, 128, 200)], id="powers of two up to the bucket"),
        pytest.param({"layout": "padded", "ceilings": [20, 100]}, [(20, 50), (20, 100, 200)], id="as configured"),
        pytest.param({"layout": "padded", "ceilings": [50, 200]}, [(50,), (50, 200)], id="equal to the buckets"),
    ],
)
def test_ceilings_of_each_bucket(change: dict[str, Any], expected: list[tuple[int, ...]]) -> None:
    """A bucket has the ceilings below its limit and the limit itself, so that every row has one."""
    args = RevisionArgs.model_validate(REVISION | {"buckets": [{"max_tokens": 50}, {"max_tokens": 200}]} | change)
    assert [args.replica_settings(bucket).ceilings for bucket in args.buckets] == expected


# ---- builders --------------------------------------------------------------------------------------------------------


def build(builder: Any, args: dict[str, Any]) -> list[Any]:
    """The deployments that Ray makes of `args`, the root first."""
    application = call_user_app_builder_with_args_if_necessary(builder, args)
    built = build_app(application, name="app", default_runtime_env={})
    return sorted(built.deployments, key=lambda deployment: deployment.name != built.ingress_deployment_name)


@pytest.mark.parametrize(
    ("builder", "args", "key"),
    [
        pytest.param(app.gateway, {"tenants_fil": "x"}, "tenants_fil", id="gateway"),
        pytest.param(app.revision, REVISION | {"bucket": []}, "bucket", id="revision"),
        pytest.param(app.revision, REVISION | {"buckets": [{"max_token": 64}]}, r"buckets\.0\.max_token", id="nested"),
    ],
)
def test_misspelt_args_fail_at_deploy_time(builder: Any, args: dict[str, Any], key: str) -> None:
    """Ray itself hands checked args to the builder, so a typo stops the deployment with its path."""
    with pytest.raises(ValidationError, match=rf"(?m)^{key}$"):
        build(builder, args)


def test_gateway_is_one_deployment() -> None:
    """The gateway application has the deployment Ingress, which the YAML names."""
    (ingress,) = build(app.gateway, {"tenants_file": "tenants.demo.yaml"})
    assert ingress.name == "Ingress"


def test_revision_has_a_deployment_per_bucket() -> None:
    """Every bucket is deployed under its name with its own settings, the first as the root."""
    built = build(app.revision, REVISION | {"buckets": [{"max_tokens": 16}, {"max_tokens": 64}, {"max_tokens": 256}]})
    settings = [deployment.init_args[0] for deployment in built]
    assert [deployment.name for deployment in built] == ["tokens-16", "tokens-64", "tokens-256"]
    assert [each.max_tokens for each in settings] == [16, 64, 256]
    assert {each.buckets[-1].deployment for each in settings} == {"tokens-256"}


def test_replica_takes_as_many_requests_as_a_batch_holds_rows() -> None:
    """A full batch is never held back by Ray's limit on ongoing requests."""
    (replica,) = build(app.revision, REVISION)
    assert replica.max_ongoing_requests >= MAX_ROWS_PER_FORWARD


# ---- files -----------------------------------------------------------------------------------------------------------


def test_relative_file_is_found_beside_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas run in another folder: a path is tried there and then beside the packages."""
    monkeypatch.chdir(tmp_path)
    assert find_file("tenants.demo.yaml") == PROJECT_ROOT / "tenants.demo.yaml"
    (tmp_path / "tenants.demo.yaml").touch()
    assert find_file("tenants.demo.yaml") == tmp_path / "tenants.demo.yaml"
    assert find_file(str(tmp_path / "tenants.demo.yaml")) == tmp_path / "tenants.demo.yaml"


@pytest.mark.parametrize("path", ["nothing.yaml", "/nowhere/nothing.yaml"])
def test_missing_file_names_what_was_tried(path: str) -> None:
    """The error has the places where it looked."""
    with pytest.raises(FileNotFoundError, match=f"no such file: .*{path}"):
        find_file(path)
