"""JSON and YAML of label files: keys that stand twice are refused, and YAML's values stay texts."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from model.checkpoint.local_files import reading
from model.errors import CheckpointError

# PyYAML reads about a megabyte a second.
_MAX_YAML_CHARACTERS: Final = 1 << 20


def parsed(text: str, where: str, suffix: str) -> Any:
    """Return the value of a JSON or YAML file; a dictionary as Python prints it is YAML, too."""
    if suffix in (".yaml", ".yml"):
        return _parsed_yaml(text, where)
    try:
        return parsed_json(text, where)
    except CheckpointError:
        if suffix == ".json":
            raise
    return _parsed_yaml(text, where)


def parsed_json(text: str, where: str) -> Any:
    """Return a JSON value; refuse a key that stands twice, because `json` keeps only the last."""
    with reading(where, "not JSON", ValueError, RecursionError):
        return json.loads(text, object_pairs_hook=partial(_object, where=where))


def _object(pairs: Sequence[tuple[str, Any]], where: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise CheckpointError(
                f"{where}: {key!r:.100} is there twice: {result[key]!r:.100} and {value!r:.100}"
            )
        result[key] = value
    return result


def _parsed_yaml(text: str, where: str) -> Any:
    """Return a YAML value whose numbers and words stay texts: `no` is a label, and not false."""
    try:
        import yaml  # noqa: PLC0415 - optional: the hub's client brings it
    except ImportError:
        raise CheckpointError(
            f"{where}: YAML needs PyYAML: pip install pyyaml, or write the labels as JSON"
        ) from None
    if len(text) > _MAX_YAML_CHARACTERS:
        raise CheckpointError(
            f"{where}: larger than {_MAX_YAML_CHARACTERS} characters of YAML; write it as JSON"
        )
    seen: set[int] = set()

    def value_of(node: Any) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return node.value
        line = node.start_mark.line + 1
        if id(node) in seen:  # a short alias can expand to a value of any size
            raise CheckpointError(f"{where}: line {line}: write the values out instead of an alias")
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            return [value_of(item) for item in node.value]
        pairs = [(str(value_of(key)), value_of(value)) for key, value in node.value]
        return _object(pairs, f"{where}: line {line}")

    refusal = "not YAML" if where.lower().endswith((".yaml", ".yml")) else "neither JSON nor YAML"
    with reading(where, refusal, yaml.YAMLError, ValueError, RecursionError):
        node = yaml.compose(text, Loader=yaml.BaseLoader)
        return None if node is None else value_of(node)
