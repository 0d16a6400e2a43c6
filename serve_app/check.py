"""`python -m serve_app check FILE`: everything wrong with a Serve config that can be known without starting it.

Ray ignores keys that it does not know (`max_ongoing_request`, `num_gpu`), so this walks Ray's own schema as well as our
`args` and `user_config`, and looks at what the parts say about each other.
"""

import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from deployments.settings import BucketSettings, GatewaySettings
from serve_app.auth import TenantsFileError, is_loopback, load_tenants
from serve_app.config import GatewayArgs, RevisionArgs, find_file
from serve_app.yaml_file import YamlError, read_yaml

GATEWAY = "serve_app.app:gateway"
REVISION = "serve_app.app:revision"
OURS = "serve_app."
RAY_DEFAULT_HOST = "0.0.0.0"


def problems(path: Path) -> list[str]:
    """One line per problem, each starting with the path of the key; empty when the file is good."""
    try:
        config = read_yaml(path)
    except OSError as error:
        return [f"{path}: {error.strerror}"]
    except YamlError as error:
        return [f"{path}: {error}"]
    if not isinstance(config, dict):
        return [f"{path}: must be a mapping with the key `applications`"]
    found = [*_unknown_keys(ServeDeploySchema, config, "")]
    if not found:
        found += _invalid(ServeDeploySchema, config, "")
    found += _port_problems(config)
    applications = config.get("applications")
    if isinstance(applications, list):
        for index, application in enumerate(applications):
            if isinstance(application, dict):
                found += _application_problems(application, f"applications[{index}]")
        found += _cross_problems(config, [app for app in applications if isinstance(app, dict)])
    return found


def _application_problems(application: Mapping[str, object], path: str) -> Iterator[str]:
    args = application.get("args") or {}
    if application.get("import_path") == GATEWAY:
        yield from _invalid(GatewayArgs, args, f"{path}.args")
        yield from _deployment_problems(application, path, {"Ingress": GatewaySettings})
        if "user_config" not in _deployment(application, "Ingress"):
            yield f"{path}.deployments: the deployment Ingress needs a user_config with `revisions`"
    elif str(application.get("import_path")).startswith(OURS) and application.get("import_path") != REVISION:
        yield f"{path}.import_path: {application['import_path']} does not exist; there is {GATEWAY} and {REVISION}"
    elif application.get("import_path") == REVISION:
        invalid = list(_invalid(RevisionArgs, args, f"{path}.args"))
        yield from invalid
        if application.get("route_prefix", "/") is not None:
            yield f"{path}.route_prefix: must be null, so that the model is reached through the gateway only"
        if not invalid:
            buckets = {bucket.deployment: bucket for bucket in RevisionArgs.model_validate(args).buckets}
            yield from _deployment_problems(application, path, dict.fromkeys(buckets, BucketSettings))
            for name, bucket in buckets.items():
                yield from _budget_problems(application, path, name, max_tokens=bucket.max_tokens)


def _deployment_problems(
    application: Mapping[str, object], path: str, models: Mapping[str, type[BaseModel]]
) -> Iterator[str]:
    for index, deployment in enumerate(_deployments(application)):
        name = str(deployment.get("name"))
        if name not in models:
            yield f"{path}.deployments[{index}].name: {name} does not exist here; there is {', '.join(models)}"
        elif "user_config" in deployment:
            yield from _invalid(models[name], deployment["user_config"], f"{path}.deployments[{index}].user_config")


def _budget_problems(application: Mapping[str, object], path: str, name: str, *, max_tokens: int) -> Iterator[str]:
    user_config = _deployment(application, name).get("user_config")
    try:
        BucketSettings.model_validate(user_config or {}).batch_limits(
            max_tokens=max_tokens, default_token_budget=max_tokens
        )
    except ValidationError:
        return  # reported with its path already
    except ValueError as error:
        yield f"{path}.deployments[{name}].user_config.{error}"


def _cross_problems(config: Mapping[str, object], applications: list[dict[str, object]]) -> Iterator[str]:
    serves = {
        str(application.get("name")): str(_mapping(application.get("args")).get("revision"))
        for application in applications
        if application.get("import_path") == REVISION
    }
    listed: set[str] = set()
    gateways = [index for index, application in enumerate(applications) if application.get("import_path") == GATEWAY]
    for index in gateways:
        path = f"applications[{index}]"
        user_config = _mapping(_deployment(applications[index], "Ingress").get("user_config"))
        for revision, target in _mapping(user_config.get("revisions")).items():
            listed.add(str(target))
            where = f"{path}.deployments[Ingress].user_config.revisions.{revision}"
            if str(target) not in serves:
                yield f"{where}: there is no revision application {target} in this file"
            elif serves[str(target)] != revision:
                yield f"{where}: application {target} serves {serves[str(target)]}"
        yield from _tenants_problems(config, _mapping(applications[index].get("args")), f"{path}.args.tenants_file")
    if listed or not gateways:  # a gateway that lists nothing is reported already
        for name in sorted(serves.keys() - listed):
            yield f"applications[{name}]: no gateway of this file lists it under `revisions`, so nothing can reach it"


def _tenants_problems(config: Mapping[str, object], args: Mapping[str, object], path: str) -> Iterator[str]:
    if not isinstance(args.get("tenants_file"), str):
        return  # reported already
    try:
        ring = load_tenants(find_file(str(args["tenants_file"])))
    except (OSError, TenantsFileError) as error:
        yield f"{path}: {error}"
        return
    options = _mapping(config.get("http_options"))
    host = str(options.get("host", RAY_DEFAULT_HOST))
    if ring.has_demo_keys() and not is_loopback(host):
        source = "" if "host" in options else ", which is Ray's default,"
        yield f"http_options.host: {host}{source} is not loopback, and {path} holds the published demo keys"


def _port_problems(config: Mapping[str, object]) -> Iterator[str]:
    port = _mapping(config.get("http_options")).get("port", 8000)
    if isinstance(port, int) and not 1 <= port <= 65535:
        yield "http_options.port: must be from 1 to 65535"


def _unknown_keys(model: type[BaseModel], value: object, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        where = f"{path}.{key}" if path else str(key)
        field = model.model_fields.get(key)
        if field is None:
            yield f"{where}: unknown key, which Ray would ignore"
            continue
        nested = _nested_model(field.annotation)
        if nested is not None and isinstance(item, list):
            for index, element in enumerate(item):
                yield from _unknown_keys(nested, element, f"{where}[{index}]")
        elif nested is not None:
            yield from _unknown_keys(nested, item, where)


def _nested_model(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_nested_model, typing.get_args(annotation))), None)


def _invalid(model: type[BaseModel], value: object, path: str) -> Iterator[str]:
    try:
        model.model_validate(value)
    except ValidationError as error:
        for item in error.errors(include_url=False, include_input=False):
            location = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"])
            message = "unknown key" if item["type"] == "extra_forbidden" else item["msg"]
            yield f"{path}{location}".lstrip(".") + f": {message}"


def _deployments(application: Mapping[str, object]) -> list[dict[str, object]]:
    deployments = application.get("deployments")
    return [item for item in deployments if isinstance(item, dict)] if isinstance(deployments, list) else []


def _deployment(application: Mapping[str, object], name: str) -> dict[str, object]:
    return next((item for item in _deployments(application) if item.get("name") == name), {})


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}
