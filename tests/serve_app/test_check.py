"""`python -m serve_app check`, `keys new` and `run`: what they say about good and bad files."""

import copy
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app import launch
from serve_app.__main__ import main
from serve_app.auth import DEMO_KEYS, digest_of, load_tenants
from serve_app.check import problems
from tests.serve_app.fakes import write_tenants

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))

Change = Callable[[dict[str, Any]], object]


def write(folder: Path, config: object) -> Path:
    """A config file; the tenants file of the shipped config is found beside the packages."""
    path = folder / "config.yaml"
    path.write_text(config if isinstance(config, str) else yaml.safe_dump(config), encoding="utf-8")
    return path


def changed(change: Change) -> dict[str, Any]:
    """The shipped config with one change."""
    config = copy.deepcopy(CONFIG)
    change(config)
    return config


def gateway(config: dict[str, Any]) -> dict[str, Any]:
    """The gateway application."""
    found: dict[str, Any] = config["applications"][0]
    return found


def ingress(config: dict[str, Any]) -> dict[str, Any]:
    """The gateway's deployment."""
    found: dict[str, Any] = gateway(config)["deployments"][0]
    return found


def revision(config: dict[str, Any]) -> dict[str, Any]:
    """The revision application."""
    found: dict[str, Any] = config["applications"][1]
    return found


def bucket(**more: Any) -> list[dict[str, Any]]:
    """One deployment entry for tokens-64."""
    return [{"name": "tokens-64", **more}]


RAY = "unknown key, which Ray would ignore"
REVISIONS = "applications[0].deployments[Ingress].user_config.revisions"
BAD = [
    pytest.param(lambda c: c.update(http_option={}), f"http_option: {RAY}", id="unknown key at the top"),
    pytest.param(lambda c: c["http_options"].update(prt=1), f"http_options.prt: {RAY}", id="unknown HTTP option"),
    pytest.param(
        lambda c: revision(c).update(routeprefix=None),
        f"applications[1].routeprefix: {RAY}",
        id="unknown key of an application",
    ),
    pytest.param(
        lambda c: revision(c).update(deployments=bucket(max_ongoing_request=5)),
        f"applications[1].deployments[0].max_ongoing_request: {RAY}",
        id="unknown key of a deployment",
    ),
    pytest.param(
        lambda c: revision(c).update(deployments=bucket(ray_actor_options={"num_gpu": 1})),
        f"applications[1].deployments[0].ray_actor_options.num_gpu: {RAY}",
        id="unknown actor option",
    ),
    pytest.param(
        lambda c: c["http_options"].update(port="x"), r"http_options\.port: .*integer", id="wrong type for Ray"
    ),
    pytest.param(
        lambda c: revision(c).update(deployments=bucket(max_ongoing_requests=-1)),
        r"applications\[1\]\.deployments\[0\]\.max_ongoing_requests: .*greater than 0",
        id="out of range for Ray",
    ),
    pytest.param(lambda c: c.pop("applications"), "applications: Field required", id="no applications"),
    pytest.param(
        lambda c: gateway(c)["args"].update(tenant_file="x"),
        "applications[0].args.tenant_file: unknown key",
        id="unknown gateway argument",
    ),
    pytest.param(
        lambda c: ingress(c)["user_config"].update(alias={}),
        "applications[0].deployments[0].user_config.alias: unknown key",
        id="unknown setting of the ingress",
    ),
    pytest.param(
        lambda c: ingress(c)["user_config"].update(aliases={"minilm": "minilm@v2"}),
        r"applications\[0\]\.deployments\[0\]\.user_config: .*aliases\.minilm: minilm@v2 is not among the revisions",
        id="alias of an unknown revision",
    ),
    pytest.param(
        lambda c: ingress(c).pop("user_config"),
        "applications[0].deployments: the deployment Ingress needs a user_config with `revisions`",
        id="no user_config",
    ),
    pytest.param(
        lambda c: gateway(c).pop("deployments"),
        "applications[0].deployments: the deployment Ingress needs a user_config with `revisions`",
        id="no deployments",
    ),
    pytest.param(
        lambda c: revision(c)["args"]["buckets"][0].update(max_token=1),
        "applications[1].args.buckets[0].max_token: unknown key",
        id="unknown key in a bucket",
    ),
    pytest.param(
        lambda c: revision(c)["args"]["buckets"].reverse(),
        r"applications\[1\]\.args: .*buckets: max_tokens must increase, got \[256, 64\]",
        id="buckets in wrong order",
    ),
    pytest.param(
        lambda c: revision(c).update(route_prefix="/minilm"),
        "applications[1].route_prefix: must be null, so that the model is reached through the gateway only",
        id="a revision with a route",
    ),
    pytest.param(
        lambda c: revision(c).update(deployments=[{"name": "tokens-65"}]),
        "applications[1].deployments[0].name: tokens-65 does not exist here; there is tokens-64, tokens-256",
        id="a bucket that does not exist",
    ),
    pytest.param(
        lambda c: revision(c).update(deployments=bucket(user_config={"max_row": 1})),
        "applications[1].deployments[0].user_config.max_row: unknown key",
        id="unknown setting of a bucket",
    ),
    pytest.param(
        lambda c: revision(c).update(deployments=bucket(user_config={"token_budget": 63})),
        r"applications\[1\]\.deployments\[tokens-64\]\.user_config\.token_budget: 63 is below .* 64 tokens",
        id="budget below the bucket",
    ),
    pytest.param(
        lambda c: ingress(c)["user_config"]["revisions"].update({"x@v1": "x"}),
        f"{REVISIONS}.x@v1: there is no revision application x in this file",
        id="a revision without its application",
    ),
    pytest.param(
        lambda c: revision(c)["args"].update(revision="minilm@v2"),
        f"{REVISIONS}.minilm@v1: application minilm-v1 serves minilm@v2",
        id="an application that serves another revision",
    ),
    pytest.param(
        lambda c: gateway(c)["args"].update(tenants_file="nothing.yaml"),
        r"applications\[0\]\.args\.tenants_file: no such file: .*nothing\.yaml",
        id="no tenants file",
    ),
    pytest.param(
        lambda c: c["http_options"].update(host="0.0.0.0"),
        r"http_options\.host: 0\.0\.0\.0 is not loopback, .*args\.tenants_file holds the published demo keys",
        id="demo keys on all interfaces",
    ),
    pytest.param(
        lambda c: c.pop("http_options"),
        r"http_options\.host: 0\.0\.0\.0, which is Ray's default, is not loopback, .*published demo keys",
        id="demo keys on Ray's default host",
    ),
    pytest.param(
        lambda c: c.update(applications=[revision(c)]),
        "applications[minilm-v1]: no gateway of this file lists it under `revisions`, so nothing can reach it",
        id="a revision without a gateway",
    ),
    pytest.param(
        lambda c: c["http_options"].update(port=70000),
        "http_options.port: must be from 1 to 65535",
        id="a port that is none",
    ),
]


@pytest.mark.parametrize(("change", "expected"), BAD)
def test_bad_config(change: Change, expected: str, tmp_path: Path) -> None:
    """Each mistake in an otherwise good file is one line, which begins with the path of the key."""
    (found,) = problems(write(tmp_path, changed(change)))
    assert found == expected or re.match(expected, found)


SEVERAL = [
    pytest.param(
        lambda c: gateway(c).update(args="tenants.demo.yaml"),
        {"applications[0].args"},
        id="args as text",
    ),
    pytest.param(
        lambda c: ingress(c).update(name="ingress"),
        {"applications[0].deployments[0].name", "applications[0].deployments"},
        id="another name for the ingress",
    ),
    pytest.param(
        lambda c: revision(c).pop("route_prefix"),
        {"applications", "applications[1].route_prefix"},
        id="a revision with Ray's default route",
    ),
    pytest.param(
        lambda c: revision(c).update(import_path="serve_app.app:revison"),
        {"applications[1].import_path", f"{REVISIONS}.minilm@v1"},
        id="a misspelt import path",
    ),
]


@pytest.mark.parametrize(("change", "expected"), SEVERAL)
def test_mistake_with_consequences(change: Change, expected: set[str], tmp_path: Path) -> None:
    """A mistake that makes something else wrong is reported at each place."""
    assert {line.partition(":")[0] for line in problems(write(tmp_path, changed(change)))} == expected


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    """One run shows all mistakes of a file, Ray's and ours."""

    def spoil(config: dict[str, Any]) -> None:
        config["http_options"].update(prt=1)
        gateway(config)["args"].update(tenant_file="x")
        revision(config)["args"].update(tsk="embed")

    found = problems(write(tmp_path, changed(spoil)))
    assert [line.partition(":")[0] for line in found] == [
        "http_options.prt",
        "applications[0].args.tenant_file",
        "applications[1].args.tsk",
    ]


GOOD: list[Any] = [
    pytest.param(lambda c: None, id="as shipped"),
    pytest.param(lambda c: c["http_options"].update(host="::1"), id="loopback of IPv6"),
    pytest.param(lambda c: ingress(c)["user_config"].update(aliases={}), id="no aliases"),
    pytest.param(
        lambda c: revision(c).update(deployments=bucket(user_config={"token_budget": 64}, num_replicas=2)),
        id="budget of exactly the bucket",
    ),
    pytest.param(lambda c: revision(c)["args"].update(layout="padded", ceilings=[16, 64, 256]), id="padded"),
]


@pytest.mark.parametrize("change", GOOD)
def test_good_config(change: Change, tmp_path: Path) -> None:
    """A file without a mistake has no problems."""
    assert problems(write(tmp_path, changed(change))) == []


def test_own_keys_may_listen_anywhere(tmp_path: Path) -> None:
    """Without demo keys any host is fine."""
    tenants = tmp_path / "tenants.yaml"
    write_tenants(tenants, {"acme": {"keys_sha256": [digest_of("own")], "revisions": ["*"]}})

    def expose(config: dict[str, Any]) -> None:
        config["http_options"].update(host="0.0.0.0")
        gateway(config)["args"].update(tenants_file=str(tenants))

    assert problems(write(tmp_path, changed(expose))) == []


def test_bad_tenants_file_is_a_problem(tmp_path: Path) -> None:
    """A mistake in the tenants file is found with its path, and no value is repeated."""
    tenants = tmp_path / "tenants.yaml"
    write_tenants(tenants, {"acme": {"keys_sha256": ["rs_secret"], "revisions": ["*"]}})
    (found,) = problems(write(tmp_path, changed(lambda c: gateway(c)["args"].update(tenants_file=str(tenants)))))
    assert found.startswith("applications[0].args.tenants_file: tenants.yaml: tenants.acme.keys_sha256.0:")
    assert "rs_secret" not in found


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param("applications: [", "not valid YAML", id="broken YAML"),
        pytest.param("since: 2024-13-45", "not valid YAML", id="a date that is none"),
        pytest.param("[]", "must be a mapping with the key `applications`", id="a list"),
        pytest.param("", "must be a mapping with the key `applications`", id="empty"),
    ],
)
def test_file_that_is_no_config(content: str, expected: str, tmp_path: Path) -> None:
    """What cannot be read as a mapping is one problem."""
    (found,) = problems(write(tmp_path, content))
    assert found.startswith(f"{tmp_path / 'config.yaml'}: {expected}")


@pytest.mark.parametrize(
    ("applications", "expected"),
    [(7, "applications"), ([7], "applications[0]"), ({"a": 1}, "applications.a")],
    ids=["number", "list of numbers", "mapping"],
)
def test_applications_of_a_wrong_type(applications: object, expected: str, tmp_path: Path) -> None:
    """Ray's own check finds them, and ours does not fall over them."""
    (found,) = problems(write(tmp_path, CONFIG | {"applications": applications}))
    assert found.startswith(f"{expected}:")


def test_file_that_is_no_text(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are a problem and no traceback."""
    path = tmp_path / "config.yaml"
    path.write_bytes(b"applications: \xff")
    (found,) = problems(path)
    assert "not valid YAML" in found


# ---- the command line ------------------------------------------------------------------------------------------------


def test_check_of_a_good_file(capsys: pytest.CaptureFixture[str]) -> None:
    """The shipped file is good: exit status 0 and a line that says so."""
    assert main(["check", str(ROOT / "serve_config.yaml")]) == 0
    assert capsys.readouterr().out.endswith("serve_config.yaml: no problems found\n")


def test_check_of_a_bad_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad file: exit status 1 and a line per problem."""
    assert main(["check", str(write(tmp_path, changed(lambda c: c.update(x=1, y=2))))]) == 1
    assert capsys.readouterr().out == f"x: {RAY}\ny: {RAY}\n"


def test_check_of_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is not there is a problem."""
    assert main(["check", str(tmp_path / "nothing.yaml")]) == 1
    assert "No such file" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["keys"], ["chek", "x"], ["check"], ["keys", "new"], ["run"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Anything else is exit status 2 with the usage."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m serve_app" in capsys.readouterr().err


def test_new_key_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `keys new` prints, pasted into a tenants file, lets the printed key in and holds no key."""
    assert main(["keys", "new", "acme"]) == 0
    before, _, lines = capsys.readouterr().out.partition("For a new tenant")
    key = next(word for word in before.split() if word.startswith("rs_"))
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants:\n" + lines.partition("\n")[2], encoding="utf-8")
    tenant = load_tenants(path).authenticate(key)
    assert (tenant.name, tenant.may_use("minilm@v1"), tenant.is_admin) == ("acme", True, False)
    assert key not in lines


@pytest.mark.parametrize("tenant", ["", "a b", "x: y", "\u00dcn\u00ef", "-a", "a" * 64])
def test_new_key_for_a_name_that_is_none(tenant: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that the tenants file would refuse gets no key."""
    assert main(["keys", "new", "--", tenant]) == 2
    assert capsys.readouterr().out == ""


def test_new_keys_differ(capsys: pytest.CaptureFixture[str]) -> None:
    """Two calls never print the same key, nor a published one."""
    keys = set()
    for _ in range(2):
        main(["keys", "new", "acme"])
        keys |= {word for word in capsys.readouterr().out.split() if word.startswith("rs_")}
    assert len(keys) == 2
    assert not keys & set(DEMO_KEYS)


def test_run_refuses_a_bad_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is started for a file with problems."""
    path = write(tmp_path, changed(lambda c: c.update(x=1)))
    assert main(["run", str(path)]) == 2
    assert capsys.readouterr().err == f"{path} cannot be served:\nx: {RAY}\n"


def test_run_refuses_a_port_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ray would share a busy port in silence, so nothing is started."""
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        path = write(tmp_path, changed(lambda c: c["http_options"].update(port=port)))
        assert launch.run(path) == 2
    assert f"port {port} on 127.0.0.1 is in use" in capsys.readouterr().err
