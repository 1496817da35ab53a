"""The folder of models: each entry is a model named as the entry, whatever it is made of.

    FOLDER/cats/            a checkpoint's folder
          /dogs.safetensors a file of weights, perhaps with `dogs.toml` beside it
          /birds.toml       the settings of one model, with the `checkpoint` that it is made of

Names of files in a `NAME.toml` are relative to the folder. Other files, and what begins with a dot, are no entries.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from model.errors import first_problem
from model.taught_heads import is_taught_head
from service.errors import InvalidParameter
from service.settings import ModelSettings

# Suffixes of files of weights.
WEIGHTS: Final = frozenset({".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar", ".pkl", ".npz"})

# Settings that may name a file.
_TOML: Final = ".toml"
PATHS: Final = ("checkpoint", "preprocess", "labels", "keys", "base")

_NAME: Final = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,128}")


class Entry(NamedTuple):
    """A model of the folder.

    Attributes:
        settings: its own, instead of the service's.
        files: sizes and times of change of what it is made of, by path: where they differ it is another version.
    """

    settings: Mapping[str, Any]
    files: Mapping[str, tuple[int, int]]


def check_name(name: str) -> str:
    """Return the name of a model; raises `InvalidParameter` where it is none."""
    if not _NAME.fullmatch(name):
        raise InvalidParameter(f"{name!r:.80}: a model's name has 1 to 128 of the characters A-Z a-z 0-9 . _ -")
    return name


def model_settings(written: object) -> dict[str, Any]:
    """Return the settings of one model as a caller or a file gives them; raises `InvalidParameter`."""
    if not isinstance(written, Mapping):
        raise InvalidParameter("expected the settings of a model, by name")
    try:
        return ModelSettings.model_validate(written).model_dump(include=set(written))
    except ValidationError as error:
        raise InvalidParameter(first_problem(error)) from None


def read_folder(folder: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the models of a folder by name, in order, and a line for each entry that is none.

    Raises:
        OSError: the folder cannot be read.
    """
    parts: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        name = path.name if path.is_dir() else path.stem
        is_one = path.is_dir() or path.suffix.lower() in {*WEIGHTS, _TOML}
        if is_one and not path.name.startswith(".") and not is_taught_head(path):
            parts.setdefault(name, []).append(path)
    entries, problems = dict[str, Entry](), dict[str, str]()
    for name, paths in sorted(parts.items()):
        try:
            entries[check_name(name)] = _entry(folder, paths)
        except (InvalidParameter, OSError, ValueError) as error:
            problems[name] = f"{paths[0]}: {error}"
    return entries, problems


def _entry(folder: Path, paths: list[Path]) -> Entry:
    """Return the model that is made of some paths; raises InvalidParameter, OSError or ValueError."""
    weights = [path for path in paths if path.is_dir() or path.suffix.lower() != _TOML]
    tomls = [path for path in paths if path not in weights]
    for several in (weights, tomls):
        if len(several) > 1:
            raise InvalidParameter(f"there are several models of this name: {', '.join(path.name for path in several)}")
    settings = _read_settings(tomls[0]) if tomls else {}
    if weights and "checkpoint" in settings:
        raise InvalidParameter(f"it names a checkpoint, and {weights[0].name} lies beside it")
    if not weights and "checkpoint" not in settings:
        raise InvalidParameter("it names no checkpoint, and no weights of this name lie beside it")
    if weights:
        if weights[0].is_dir() and not any(map(_is_part, weights[0].iterdir())):
            raise InvalidParameter("there are neither weights nor a configuration in this folder")
        settings["checkpoint"] = str(weights[0].absolute())
    files = list(paths)
    for setting in PATHS:
        given = settings.get(setting)
        if isinstance(given, str) and (folder / given).exists():
            settings[setting] = str((folder / given).absolute())
            files.append(folder / given)
    return Entry(settings, dict(_times(files)))


def _is_part(path: Path) -> bool:
    """Return whether a file of a folder makes that a checkpoint's, perhaps a broken one."""
    return path.suffix.lower() in WEIGHTS or path.name.endswith("config.json")


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a `NAME.toml`; raises InvalidParameter, OSError or ValueError."""
    try:
        return model_settings(tomllib.loads(path.read_text("utf-8-sig")))
    except (UnicodeDecodeError, RecursionError):
        raise InvalidParameter("it is not UTF-8, or nested too deeply") from None


def _times(paths: list[Path]) -> list[tuple[str, tuple[int, int]]]:
    every = [path for each in paths for path in (each.rglob("*") if each.is_dir() else [each])]
    return [(str(path), (path.stat().st_size, path.stat().st_mtime_ns)) for path in sorted(every) if path.is_file()]
