"""The files of subcommands: find and read pictures, report answers, write results."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from model.config import PreprocessConfig
from model.data.junk import is_junk
from model.data.listing import PICTURE_SUFFIXES
from model.errors import ImageError, InputError
from model.images.preprocess import ModelInput, model_input
from service.settings import Settings

_Answer = TypeVar("_Answer")


def find_images(paths: Iterable[Path]) -> list[Path]:
    """Return the named files, and the sorted images below each folder except junk (`__MACOSX`).

    Raises:
        InputError: a path does not exist, or a folder holds no images.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            images = sorted(file for file in path.rglob("*") if _is_image(file, path))
            if not images:
                raise InputError("path", f"{path}: no pictures in this folder")
            files += images
        elif path.exists():
            files.append(path)
        else:
            raise InputError("path", f"{path}: no such file or folder{_hint(path)}")
    return files


def _hint(path: Path) -> str:
    """Return a likely remedy for a path that does not exist; empty if its name suggests none."""
    if path.parts[:1] in (("http:",), ("https:",)):
        return ": download the picture first, and name the file"
    if path.name == "-":
        return ": standard input is not read; write the picture to a file"
    if any(character in path.name for character in "*?["):
        return ": no file matches this pattern"
    return ""


def _is_image(file: Path, folder: Path) -> bool:
    """Return whether a file has a picture's suffix, and no part of its path is junk."""
    if file.suffix.lower() not in PICTURE_SUFFIXES:
        return False
    if any(map(is_junk, file.relative_to(folder).parts)):
        return False
    return file.is_file()


def print_notes(notes: Iterable[str]) -> None:
    """Print notes on stderr about used and unused files of a folder, one line each."""
    for note in notes:
        print(f"vitserve: {note}", file=sys.stderr)


def read_input(file: Path, config: PreprocessConfig, settings: Settings) -> ModelInput | str:
    """Return a file's picture in the model's input size, or why it cannot be read."""
    try:
        return model_input(
            file.read_bytes(),
            config,
            max_pixels=settings.max_image_pixels,
            scaled_decode=settings.scaled_decode,
        )
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
    """Call `handle` with each file and its answer; return 1 if any file fails.

    A bar on stderr shows the progress.

    Args:
        answers: files, each with its answer or the reason for its failure.
        count: number of files.
        handle: called with each answer; an `ImageError` that it raises becomes the file's reason.
        name: noun for an answer, as in "2 of 9 files have no embedding".
        failure: called with each failed file and the reason; None: print both on stderr.
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
    """Raise `InputError` if the path exists and is not an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("output", f"{folder}: exists and is not an empty folder")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` from writing this file into an `InputError` of one line."""
    try:
        yield
    except OSError as error:
        raise InputError(
            "output", f"{path}: cannot be written: {error.strerror or error}"
        ) from None
