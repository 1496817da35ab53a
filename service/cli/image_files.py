"""The files of subcommands: find and read pictures, check and write results."""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from model.config import PreprocessConfig
from model.errors import ImageError, InputError
from model.images.formats import format_of
from model.images.listing import PICTURE_SUFFIXES, list_folder, listed
from model.images.preprocess import ModelInput, model_input
from service.settings import Settings
from vitserve.pictures import read_file

# Bytes of a file that are read to recognise its format.
_HEAD_BYTES = 256


def find_images(paths: Iterable[Path]) -> list[Path]:
    """Return the named files, and the sorted images below each folder except junk (`__MACOSX`).

    A note on stderr names pictures of a folder that lack the suffix of a picture.

    Raises:
        InputError: a path does not exist or is not a file, or a folder holds no images.
        DatasetError: a folder cannot be read.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += _find_in_folder(path)
        elif path.is_file() or _is_pipe_of_shell(path):
            files.append(path)
        elif path.exists():
            raise InputError(
                "path", f"{path}: not a file: write the picture to a file, and name it"
            )
        else:
            raise InputError("path", f"{path}: no such file or folder{_hint(path)}")
    return files


def _is_pipe_of_shell(path: Path) -> bool:
    """Return whether a path is an open pipe, as of `<(...)`; a named pipe may never be written."""
    return path.is_fifo() and os.path.realpath(path).rpartition("/")[2].startswith("pipe:")


def require_class_folders(folder: Path) -> None:
    """Raise `InputError` unless a path is a folder, which may then have labelled pictures."""
    if folder.is_dir():
        return
    problem = "not a folder" if folder.exists() else f"no such folder{_hint(folder)}"
    raise InputError(
        "data",
        f"{folder}: {problem}: give a folder with one subfolder of pictures per class",
    )


def _find_in_folder(folder: Path) -> list[Path]:
    """Return the sorted images below a folder; raise as `find_images`."""
    images: list[Path] = []
    unrecognised: list[Path] = []
    for file in _files_below(folder):
        if file.suffix.lower() in PICTURE_SUFFIXES:
            images.append(file)
        elif _begins_like_a_picture(file):
            unrecognised.append(file.relative_to(folder))
    if unrecognised:
        names = listed(map(str, sorted(unrecognised)))
        print_notes(
            [
                f"{folder}: left out, because the names do not end like a picture's (.jpg, .png): "
                f"{names}; rename these files, or name each of them"
            ]
        )
    if not images:
        raise InputError("path", f"{folder}: no pictures in this folder")
    return sorted(images)


def _files_below(folder: Path, parents: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield the regular files and broken links below a folder, without junk.

    Args:
        folder: the folder; links to folders are followed.
        parents: real paths of the folders above, which a link does not enter again.
    """
    real = os.path.realpath(folder)
    if real in parents:
        return
    listing = list_folder(folder)
    for file in listing.files:
        if file.is_file() or file.is_symlink():
            yield file
    for inner in listing.folders:
        yield from _files_below(inner, (*parents, real))


def _begins_like_a_picture(file: Path) -> bool:
    """Return whether a file begins like a supported format."""
    try:
        with file.open("rb") as stream:
            format_of(stream.read(_HEAD_BYTES))
    except (ImageError, OSError):
        return False
    return True


def _hint(path: Path) -> str:
    """Return a likely remedy for a path that does not exist; empty if its name suggests none."""
    start = path.parts[:1]
    hint = ""
    if start in (("http:",), ("https:",)):
        hint = ": download the picture first, and name the file"
    elif start == ("file:",):
        hint = ": leave out file://"
    elif start == ("~",) or "$" in str(path):
        hint = ": the shell does not expand ~ and $ in quotes"
    elif path.name == "-":
        hint = ": standard input is not read; write the picture to a file"
    elif any(character in path.name for character in "*?["):
        hint = ": no file matches this pattern"
    elif path.name.startswith("@") and path.with_name(path.name[1:]).exists():
        hint = ": leave out the @, which is only for curl"
    return hint


def print_notes(notes: Iterable[str]) -> None:
    """Print notes on stderr about used and unused files of a folder, one line each."""
    for note in notes:
        print(f"vitserve: {note}", file=sys.stderr)


def read_input(file: Path, config: PreprocessConfig, settings: Settings) -> ModelInput | str:
    """Return a file's picture in the model's input size, or why it cannot be read."""
    try:
        return model_input(
            read_file(file),
            config,
            max_pixels=settings.max_image_pixels,
            scaled_decode=settings.scaled_decode,
        )
    except (ImageError, OSError) as error:
        return str(error)


def add_output_flag(parser: ArgumentParser, metavar: str, text: str, *, required: bool) -> None:
    """Add `-o`, by either of its usual names; `arguments.output` is then a path or None."""
    parser.add_argument(
        "-o", "--output", "--out", type=Path, required=required, metavar=metavar, help=text
    )


def require_output_file(file: Path, suffix: str) -> None:
    """Raise `InputError` unless a file of this name and suffix can be written."""
    if file.is_dir():
        raise InputError("output", f"{file}: is a folder: name a file in it")
    if not file.parent.is_dir():
        raise InputError(
            "output",
            f"{file}: the folder {file.parent} does not exist{_hint(file)}: make it first",
        )
    if file.suffix.lower() != suffix:
        raise InputError(
            "output",
            f"{file}: expected a name that ends in {suffix}, such as {file.with_suffix(suffix)}",
        )


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
