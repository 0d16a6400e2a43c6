"""YAML as we read it: safe, UTF-8, and no key twice, because the second one would silently win."""

from pathlib import Path
from typing import Any

import yaml


class YamlError(Exception):
    """The file is not YAML that can be used; the text names the place and repeats nothing of the content."""


class _UniqueKeyLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise YamlError(f"line {key.start_mark.line + 1}: this key stands in the same mapping twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: Path) -> Any:
    """The content of a YAML file. Raises OSError and YamlError."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark is not None else ""
        raise YamlError(f"not valid YAML{where}") from None
    except (ValueError, RecursionError) as error:
        # Bytes that are not UTF-8, an impossible date, thousands of levels.
        raise YamlError(f"not valid YAML: {type(error).__name__}") from None
