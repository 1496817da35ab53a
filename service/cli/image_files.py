"""Image files as the subcommands take them, what they print of answers, and what they write."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from model.config import PreprocessConfig
from model.data.folders import PICTURE_SUFFIXES
from model.data.junk import is_junk
from model.errors import ImageError, InputError
from model.images.preprocess import ModelInput, model_input
from service.settings import Settings

_Answer = TypeVar("_Answer")


def find_images(paths: Iterable[Path]) -> list[Path]:
    """Return the files as they are named, and the images below each folder, sorted, but for junk
    (`__MACOSX`).

    Raises:
        InputError: a path does not exist, or a folder holds no images.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            images = sorted(p for p in path.rglob("*") if _is_image(p, path))
            if not images:
                raise InputError("path", f"{path}: no pictures in this folder")
            files += images
        elif path.exists():
            files.append(path)
        else:
            raise InputError("path", f"{path}: no such file or folder{_hint(path)}")
    return files


def _hint(path: Path) -> str:
    """Return what to do about a path that does not exist; nothing if its name says nothing."""
    if path.parts[:1] in (("http:",), ("https:",)):
        return ": download the picture first, and name the file"
    if path.name == "-":
        return ": standard input is not read; write the picture to a file"
    if any(character in path.name for character in "*?["):
        return ": nothing matches this pattern"
    return ""


def _is_image(file: Path, folder: Path) -> bool:
    """Return whether a file below a folder is named like a picture, and nothing on the way to it
    like junk.
    """
    if file.suffix.lower() not in PICTURE_SUFFIXES or any(
        map(is_junk, file.relative_to(folder).parts)
    ):
        return False
    return file.is_file()


def print_notes(notes: Iterable[str]) -> None:
    """Print a line each on stderr on what of a folder is used, and on what is left out."""
    for note in notes:
        print(f"vitserve: {note}", file=sys.stderr)


def read_input(file: Path, config: PreprocessConfig, settings: Settings) -> ModelInput | str:
    """Return a file as a picture of the model's input size, within the settings' limits, or why it
    cannot be read.
    """
    pixels, scaled = settings.max_image_pixels, settings.scaled_decode
    try:
        return model_input(file.read_bytes(), config, max_pixels=pixels, scaled_decode=scaled)
    except (ImageError, OSError) as error:
        return str(error)


def handle_answers(
    answers: Iterable[tuple[Path, _Answer | str]],
    count: int,
    handle: Callable[[Path, _Answer], object],
    name: str,
    *,
    failure: Callable[[Path, str], object] | None = None,
) -> int:
    """Call `handle` with each file and its answer, and show progress; return 1 if any file has
    none.

    Args:
        handle: may raise `ImageError`: the file has no answer then.
        count: of all files.
        name: what an answer is called in the line that says how many files have none.
        failure: called with each file without an answer, and why it has none; None: a line on
        stderr says so.
    """
    failed = 0
    for file, answer in tqdm(answers, total=count, unit="image", disable=count < 2 or None):
        try:
            if isinstance(answer, str):
                raise ImageError(answer)
            handle(file, answer)
        except (ImageError, OSError) as error:
            failed += 1
            if failure is None:  # a line above the progress bar
                tqdm.write(f"vitserve: {file}: {error}", file=sys.stderr)
            else:
                failure(file, str(error))
    if failed:
        print(f"vitserve: {failed} of {count} files have no {name}", file=sys.stderr)
    return int(failed > 0)


def require_empty(folder: Path) -> None:
    """Raise `InputError` where something else than an empty folder is there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("output", f"{folder}: exists and is not an empty folder")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` that writing this file raises into an `InputError` of one line."""
    try:
        yield
    except OSError as error:
        raise InputError(
            "output", f"{path}: cannot be written: {error.strerror or error}"
        ) from None
