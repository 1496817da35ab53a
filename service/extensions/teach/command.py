"""`vitserve teach NAME FOLDER`: a head from a folder of pictures for each label, here or in a
running server.
"""

import argparse
from pathlib import Path

from model.data.folders import find_pictures
from model.data.listing import visible_folders
from model.data.split_names import TRAIN
from model.errors import InputError
from model.label_texts import checked_label
from service.cli.answers import add_server_flags, answers_from
from service.cli.image_files import handle_answers, print_notes
from service.cli.setting_flags import add_setting_flags
from service.extensions.teach.teachers import teacher_of
from service.models.folder import check_name
from vitserve.head_documents import Knowledge


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve teach`."""
    parser.add_argument(
        "name", metavar="NAME", help="of the head, which is then a model of this name"
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="one folder of pictures for each label"
    )
    add_server_flags(parser)
    add_setting_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Teach a head all pictures, print what it knows of itself, and return 1 if any file could not
    be used.

    So it does if there is no head then, or none that is fitted to all of them yet.
    """
    if Path(arguments.name).is_dir() and not arguments.folder.is_dir():
        meant = f"vitserve teach {arguments.folder} {arguments.name}"
        raise InputError(
            "name", f"{arguments.name}: is a folder: the name of the head comes first: {meant}"
        )
    name, output = check_name(arguments.name), Path(f"{arguments.name}.safetensors")
    labels = _labelled(arguments.folder, name)
    with answers_from(arguments) as source:
        teacher = teacher_of(source)
        answers = teacher.teach(name, labels)
        files: dict[int, Path] = {}

        def add(file: Path, number: int) -> None:
            files[number] = file

        code = handle_answers(answers, len(labels), add, "place among the examples")
        known = teacher.finish(name, labels, output)
    print(f"{name}: {_in_words(known)}")
    for each in known.suspects:
        example = files.get(each.number, f"example {each.number}")
        print(f"  {example}: {each.label!r}, or rather {each.likely!r}?")
    if known.needs_more:
        print(f"  more pictures are needed of: {', '.join(known.needs_more)}")
    if not arguments.url:
        print(f"{output}: a folder of --models takes it, beside the model that it was taught with")
    return int(code or known.accuracy is None or not getattr(known, "up_to_date", True))


def _labelled(folder: Path, name: str) -> dict[Path, str]:
    """Return the label of each picture, which is the name of its folder; of splits the training one
    is read.

    Raises:
        DatasetError: a folder that `train` would refuse, but for one of a single class.
        InputError: no folder, or no folders in it.
    """
    if folder.is_file():
        raise InputError(
            "path",
            f"{folder}: a file: expected a folder that has one folder of pictures for each label",
        )
    if not folder.is_dir():
        raise InputError("path", f"{folder}: no such folder")
    if not visible_folders(folder):
        raise InputError("path", f"{folder}: expected one folder of pictures for each label")
    pick = f"vitserve teach {name}"
    pictures = find_pictures(folder, least_classes=1, pick=pick)
    chosen, notes = pictures.choose([TRAIN], "teach", pick)
    print_notes(notes)
    files = pictures.sets[chosen]
    labels = [_label(folder, each) for each in pictures.labels]
    return {Path(files.name(number)): labels[label] for number, label in enumerate(files.labels)}


def _label(folder: Path, name: str) -> str:
    try:
        return checked_label(name)
    except InputError as error:
        raise InputError("path", f"{folder}: a folder's name is its label: {error}") from None


def _in_words(known: Knowledge) -> str:
    if known.accuracy is None:
        return getattr(known, "reason", None) or "it is not fitted"
    right = known.accuracy
    sure = f"{right.low:.1%} to {right.high:.1%} for pictures like these, with 95% confidence"
    return (
        f"{right.value:.1%} of {known.fitted_to} pictures right while they were held out ({sure})"
    )
