"""Rules of the house that can be read off the source: who imports whom, and how large things get."""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("batching", "deployments", "serve_app")
"""Lowest first; each may import itself and those before it."""
MAX_FUNCTION_LINES = 50
MAX_FILE_LINES = 350
BATCHING_NEEDS = {"numpy"}
BROAD_HANDLERS = {
    "batching/batcher.py": 1,  # around the forward: whatever a model raises ends its own batch only
}
"""Where `except Exception` and broader may stand, and how often."""

FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _files(*packages: str) -> Any:
    """Parametrize a test over the files of some packages."""
    chosen = [path for path in FILES if path.relative_to(ROOT).parts[0] in packages]
    return pytest.mark.parametrize("path", chosen, ids=_name)


def _imports(path: Path) -> Iterator[str]:
    """Full names of imported modules, wherever in the file they stand."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def _imported_tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in _imports(path)}


@_files(*PACKAGES)
def test_imports_point_downwards(path: Path) -> None:
    """A file imports of our packages only its own and lower ones."""
    own = PACKAGES.index(path.relative_to(ROOT).parts[0])
    assert _imported_tops(path) & {*PACKAGES} <= {*PACKAGES[: own + 1]}


@_files("batching")
def test_policy_imports_no_framework(path: Path) -> None:
    """`batching` needs the standard library, numpy and itself."""
    assert _imported_tops(path) - sys.stdlib_module_names <= BATCHING_NEEDS | {"batching"}


@_files(*PACKAGES)
def test_production_code_imports_no_tests(path: Path) -> None:
    """Nothing that is served depends on tests or benchmarks."""
    assert not _imported_tops(path) & {"tests", "benchmarks", "pytest", "hypothesis"}


@_files(*PACKAGES)
def test_annotations_are_not_postponed(path: Path) -> None:
    """Ray reads annotations as objects, so nobody imports them from the future."""
    assert "__future__" not in _imported_tops(path)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_init_is_a_docstring(package: str) -> None:
    """A package's own file says what it is for and runs nothing."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    assert (len(tree.body), bool(ast.get_docstring(tree))) == (1, True)


def _is_broad(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
    return bool(names & {"Exception", "BaseException"})


def test_broad_handlers_stand_where_allowed() -> None:
    """Named errors are caught by name; the exceptions to this are listed, and each exists."""
    found = Counter(
        _name(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler) and _is_broad(node)
    )
    assert found == BROAD_HANDLERS


@_files(*PACKAGES)
def test_functions_fit_on_a_screen(path: Path) -> None:
    """No function is longer than the limit."""
    lengths = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


@_files(*PACKAGES)
def test_files_stay_small(path: Path) -> None:
    """No file is longer than the limit."""
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@_files(*PACKAGES)
def test_files_say_what_they_are(path: Path) -> None:
    """Every module begins with a docstring."""
    assert ast.get_docstring(ast.parse(path.read_text()))
