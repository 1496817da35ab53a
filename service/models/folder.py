"""The folder of models: each entry is a model with the entry's name.

    FOLDER/cats/            a checkpoint's folder
          /dogs.safetensors a file of weights, perhaps with settings in `dogs.toml`
          /birds.toml       the settings of one model, which name its `checkpoint`

Paths in a `NAME.toml` are relative to the folder, and lead to files below it, or below
VIT_CHECKPOINT_FOLDER. Other files, and names that begin with a dot, are not entries.
"""

import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any, Final, NamedTuple, TypeVar

from pydantic import ValidationError

import model
from model.errors import first_problem, nearest
from model.head_files import is_taught_head
from model.images.listing import is_junk
from service.errors import Forbidden, InvalidParameter
from service.model_settings import PATHS, ModelSettings
from service.models.paths import located

T = TypeVar("T")

# Suffixes of files with weights.
WEIGHTS: Final = frozenset({".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar", ".pkl", ".npz"})
_TOML: Final = ".toml"

# Files of one model's folder that a folder of models does not have.
_OF_ONE_MODEL: Final = (
    "config.json",
    "adapter_config.json",
    "preprocessor_config.json",
    "open_clip_config.json",
    "modules.json",
)

# The checkpoints of the service itself, which a `NAME.toml` may name by their paths.
_PACKAGED: Final = Path(model.__file__).resolve().parent / "weights"

_MAX_TOML_BYTES: Final = 1 << 20

# Most files of one entry, all of which are checked for changes.
_MAX_FILES: Final = 100_000

READ_SECONDS: Final = 30.0
"""Longest time for reading a folder."""

_NAME: Final = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,128}")


class FolderEntry(NamedTuple):
    """A model of the folder.

    Attributes:
        settings: settings of the model, which override the service's.
        files: size and time of change of each of its files, by path; other values mean another
            version of the model.
    """

    settings: Mapping[str, Any]
    files: Mapping[str, tuple[int, int]]


def check_name(name: str) -> str:
    """Return a model's name; raises `InvalidParameter` if it is not allowed."""
    if not _NAME.fullmatch(name):
        raise InvalidParameter(
            f"{name!r:.80}: a model's name has 1 to 128 of the characters A-Z a-z 0-9 . _ -"
        )
    return name


def model_settings(written: object) -> dict[str, Any]:
    """Return the settings of one model from a request or a file; raises `InvalidParameter`."""
    if not isinstance(written, Mapping):
        raise InvalidParameter("expected the settings of a model, by name")
    try:
        return ModelSettings.model_validate(written).model_dump(include=set(written))
    except ValidationError as error:
        raise InvalidParameter(first_problem(error) + _nearest_setting(error)) from None


def _nearest_setting(error: ValidationError) -> str:
    """Return a hint if an error is about an unknown name, or an empty text."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] != "extra_forbidden":
        return ""
    known = list(ModelSettings.model_fields)
    near = nearest(str(first["loc"][0]), known)
    return f": did you mean {near}?" if near else f"; available: {', '.join(known)}"


def in_time(read: Callable[[], T], what: str) -> T:
    """Run, on its own thread, a function that reads files, and return its result.

    Raises:
        TimeoutError: it takes longer than `READ_SECONDS`; its thread goes on until the process
            ends.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(read())
        except BaseException as error:  # noqa: BLE001  raised by `result.result`
            result.set_exception(error)

    Thread(target=run, name="read-folder", daemon=True).start()
    try:
        return result.result(READ_SECONDS)
    except TimeoutError:
        if result.done():
            raise
        raise TimeoutError(
            f"{what} was not read within {READ_SECONDS:g} s: is its file system available?"
        ) from None


def unread_names(folder: Path, entries: Mapping[str, FolderEntry]) -> list[str]:
    """Return the names of files and folders that are not read, except junk; raises `OSError`."""
    paths_read = {Path(path).absolute() for entry in entries.values() for path in entry.files}
    names = []
    for path in sorted(folder.iterdir()):
        if path.absolute() in paths_read or is_junk(path.name):
            continue
        if not _may_be_model(path) or _is_key_map(path):
            names.append(path.name)
    return names


def _may_be_model(path: Path) -> bool:
    return path.is_dir() or path.suffix.lower() in {*WEIGHTS, _TOML}


def _is_key_map(path: Path) -> bool:
    """Return whether a file maps the names of a state dict; `keys` in a `NAME.toml` names it."""
    if path.suffix.lower() != _TOML:
        return False
    try:
        written = _toml(path, path.parent)
    except (Forbidden, InvalidParameter, OSError, ValueError):
        return False
    return bool(written) and written.keys() <= {"weights", "tensor"}


def _require_folder_of_models(folder: Path) -> None:
    """Raise `InvalidParameter` if the folder is one model's."""
    part = next((name for name in _OF_ONE_MODEL if (folder / name).is_file()), None)
    if part is not None:
        raise InvalidParameter(
            f"this is the folder of one model, because it has {part}: "
            f"--checkpoint {folder} (VIT_CHECKPOINT) serves it; "
            "a folder of models has a folder or a file for each model"
        )


def read_folder(
    folder: Path, others: Sequence[Path] = ()
) -> tuple[dict[str, FolderEntry], dict[str, str]]:
    """Return the models of a folder by name, sorted, and the problem of each broken entry.

    Args:
        folder: the folder of models.
        others: further folders that may contain the files of a `NAME.toml`.

    Raises:
        OSError: the folder cannot be read.
        InvalidParameter: it is the folder of one model.
    """
    _require_folder_of_models(folder)
    parts: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        name = path.name if path.is_dir() else path.stem
        if not _may_be_model(path) or is_junk(path.name):
            continue
        if not is_taught_head(path) and not _is_key_map(path):
            parts.setdefault(name, []).append(path)
    entries: dict[str, FolderEntry] = {}
    problems: dict[str, str] = {}
    for name, paths in sorted(parts.items()):
        try:
            entries[check_name(name)] = _entry(folder, paths, others)
        except (Forbidden, InvalidParameter, OSError, ValueError) as error:
            problems[name] = f"{paths[0]}: {error}"
    return entries, problems


def _entry(folder: Path, paths: list[Path], others: Sequence[Path]) -> FolderEntry:
    """Return the model that these paths make up.

    Raises:
        Forbidden, InvalidParameter, OSError, ValueError: the entry is broken.
    """
    weights = [path for path in paths if path.is_dir() or path.suffix.lower() != _TOML]
    tomls = [path for path in paths if path not in weights]
    for several in (weights, tomls):
        if len(several) > 1:
            names = ", ".join(path.name for path in several)
            raise InvalidParameter(f"several models have this name: {names}")
    settings = model_settings(_toml(tomls[0], folder)) if tomls else {}
    if weights and "checkpoint" in settings:
        raise InvalidParameter(
            f"it names a checkpoint, but the folder also has {weights[0].name}: remove one of them"
        )
    if not weights and "checkpoint" not in settings:
        raise InvalidParameter(
            "it does not name a checkpoint, and the folder has no weights of this name"
        )
    if weights and weights[0].is_dir() and not any(map(_is_part, weights[0].iterdir())):
        raise InvalidParameter("this folder has neither weights nor a configuration")
    files = list(paths)
    for setting in PATHS:
        value = settings.get(setting)
        if value is None or (setting == "checkpoint" and _is_packaged(value)):
            continue
        path = located(setting, value, folder, others)
        if path is not None:
            settings[setting] = path
            files.append(Path(path))
    if weights:
        # The entry itself may be a link out of the folder, because the operator has set it.
        is_link = weights[0].is_symlink()
        checkpoint = weights[0].resolve() if is_link else weights[0].absolute()
        settings["checkpoint"] = str(checkpoint)
    return FolderEntry(settings, dict(_times(files)))


def _is_packaged(checkpoint: str) -> bool:
    return Path(os.path.realpath(checkpoint)).is_relative_to(_PACKAGED)


def _is_part(path: Path) -> bool:
    """Return whether a file shows that its folder is a checkpoint's, perhaps a broken one."""
    return path.suffix.lower() in WEIGHTS or path.name.endswith("config.json")


def _toml(path: Path, folder: Path) -> dict[str, Any]:
    """Return the content of a `NAME.toml`.

    Raises:
        Forbidden, InvalidParameter, OSError, ValueError: the file cannot be read.
    """
    if not path.resolve().is_relative_to(folder.resolve()):
        raise Forbidden("a symbolic link out of its folder: put the file itself there")
    # A plain `open` of a pipe without a writer would not return.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InvalidParameter("a device, pipe, socket or folder, expected a regular file")
        content = file.read(_MAX_TOML_BYTES + 1)
    if len(content) > _MAX_TOML_BYTES:
        raise InvalidParameter(f"larger than {_MAX_TOML_BYTES} bytes")
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except (UnicodeDecodeError, RecursionError):
        raise InvalidParameter("it is not UTF-8, or nested too deeply") from None


def _times(paths: list[Path]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the size and time of change of each regular file.

    Raises:
        InvalidParameter: the entry has too many files.
    """
    count = 0
    for path in sorted(paths):
        for file in path.rglob("*") if path.is_dir() else [path]:
            count += 1
            if count > _MAX_FILES:
                raise InvalidParameter(f"it has more than {_MAX_FILES} files")
            status = file.stat() if file.is_file() else None
            if status is not None:
                yield str(file), (status.st_size, status.st_mtime_ns)
