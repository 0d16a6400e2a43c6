"""The README's tables and paths against the code."""

import ast
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from deployments.settings import BucketSettings, GatewaySettings
from serve_app.config import GatewayArgs, RevisionArgs
from serve_app.http_errors import ERROR_TABLE, INTERNAL_ERROR

REPOSITORY = Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text()


def table(marker: str) -> list[list[str]]:
    """Cells of the table after an HTML comment that starts with `marker`, without the two head lines."""
    lines = README.split(f"<!-- {marker}", 1)[1].splitlines()[1:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows[2:]


def test_error_table_is_the_code_s() -> None:
    """Every code with its status is in the README, and nothing else is."""
    documented = {(int(status), code.strip("`")) for status, code, _ in table("errors:")}
    assert documented == {(row.status, row.code) for row in (*ERROR_TABLE.values(), INTERNAL_ERROR)}


def test_error_table_marks_retry_after() -> None:
    """Exactly the errors that carry a time to come back say so."""
    marked = {code.strip("`") for _, code, text in table("errors:") if "`Retry-After`" in text}
    carrying = {row.code for row in ERROR_TABLE.values() if row.status in {429, 503}}
    assert marked == carrying


@pytest.mark.parametrize(
    ("where", "model"),
    [
        ("gateway `args`", GatewayArgs),
        ("`Ingress` `user_config`", GatewaySettings),
        ("revision `args`", RevisionArgs),
        ("`tokens-N` `user_config`", BucketSettings),
    ],
)
def test_settings_table_is_the_code_s(where: str, model: type[BaseModel]) -> None:
    """Every setting is documented where it belongs, in order, with its default when that is a plain value."""
    rows, current = [], ""
    for place, key, default, _ in table("settings:"):
        current = place or current
        if current == where:
            rows.append((key.strip("`"), default))
    assert [key for key, _ in rows] == list(model.model_fields)
    for key, default in rows:
        field = model.model_fields[key]
        if field.is_required():
            assert default == "required"
        elif isinstance(field.default, bool | int | float):
            assert default == str(field.default).lower()


@pytest.mark.parametrize("step", re.findall(r"^\d\. `([\w/]+\.py):(\w+)`", README, re.MULTILINE))
def test_steps_name_functions_that_exist(step: tuple[str, str]) -> None:
    """Each of the nine steps points at a function of that file."""
    path, function = step
    tree = ast.parse((REPOSITORY / path).read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert function in names


def test_there_are_nine_steps() -> None:
    """The walk through the code has nine steps."""
    assert len(re.findall(r"^\d\. `[\w/]+\.py:\w+`", README, re.MULTILINE)) == 9


@pytest.mark.parametrize(
    "document", ["README.md", *sorted(p.relative_to(REPOSITORY).as_posix() for p in (REPOSITORY / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(document: str) -> None:
    """Relative links of a document point at files of the repository."""
    path = REPOSITORY / document
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_version_agrees() -> None:
    """The changelog has an Unreleased section or one of the packaged version."""
    version = re.search(r'^version = "(.+)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()
    assert "## Unreleased" in changelog or f"## {version.group(1)}" in changelog
