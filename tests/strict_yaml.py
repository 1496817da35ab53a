"""YAML as Compose v2, Prometheus and Kubernetes read it: a repeated key is an error."""

from pathlib import Path
from typing import Any

import yaml


class UniqueKeyLoader(yaml.SafeLoader):
    """A loader that refuses duplicate keys; PyYAML's loaders silently keep the last."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        # Checked before `<<` is resolved: a key that overrides a merged key is not a duplicate.
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(
                    "while composing a mapping",
                    node.start_mark,
                    f"found duplicate key {key.value!r}",
                    key.start_mark,
                )
            seen.add((key.tag, key.value))
        return node


def load_documents(path: Path) -> list[Any]:
    """Return the documents of a file; raise `yaml.YAMLError` with the line if one is invalid."""
    with path.open(encoding="utf-8") as file:
        return list(yaml.load_all(file, Loader=UniqueKeyLoader))


def load_document(path: Path) -> dict[str, Any]:
    """Return the only document of a file, a mapping."""
    document: dict[str, Any]
    (document,) = load_documents(path)
    return document
