"""`vitserve teach NAME FOLDER`: fit a head to folders of pictures, here or in a running server."""

import argparse
from pathlib import Path

from model.errors import InputError
from model.extensions.datasets.folders import find_pictures
from model.extensions.datasets.split_names import TRAIN
from model.extensions.datasets.split_record import SplitRecord
from model.head_files import is_taught_head
from model.label_texts import checked_label
from service.cli.answers import LocalAnswers, add_server_flags, answers_from, handle_answers
from service.cli.image_files import print_notes, require_class_folders
from service.cli.setting_flags import add_setting_flags
from service.extensions.teach.teachers import LocalTeacher, ServerTeacher
from service.models.folder import check_name
from vitserve.head_documents import Knowledge


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve teach`."""
    parser.add_argument(
        "name", metavar="NAME", help="name of the head, which answers as a model of this name"
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="one folder of pictures for each label"
    )
    add_server_flags(parser)
    add_setting_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Teach a head all pictures, and print its accuracy and doubtful labels.

    Returns:
        1 if a file could not be used, or if no head is fitted to all pictures; else 0.
    """
    if Path(arguments.name).is_dir() and not arguments.folder.is_dir():
        meant = f"vitserve teach {arguments.folder} {arguments.name}"
        raise InputError(
            "name", f"{arguments.name}: a folder; the name of the head comes first: {meant}"
        )
    name = check_name(arguments.name)
    if not arguments.url and name.endswith(".safetensors"):
        raise InputError(
            "name", f"{name}: a file; give the head's name, {name.removesuffix('.safetensors')}"
        )
    if not arguments.url and name.startswith("."):
        raise InputError(
            "name", f"{name}: a folder of --models skips hidden files; leave out the dot"
        )
    output = Path(f"{arguments.name}.safetensors")
    is_replaced = output.exists()
    if not arguments.url and is_replaced and not is_taught_head(output):
        raise InputError(
            "name", f"{output}: exists and is not a taught head: move it, or choose another name"
        )
    labels = _labelled(arguments.folder, name)
    with answers_from(arguments) as source:
        teacher: LocalTeacher | ServerTeacher
        if isinstance(source, LocalAnswers):
            teacher = LocalTeacher(source, output)
        else:
            teacher = ServerTeacher(source)
        answers = teacher.teach(name, labels)
        files: dict[int, Path] = {}

        def add(file: Path, number: int) -> None:
            files[number] = file

        answer = "example number" if arguments.url else "features"
        code = handle_answers(answers, len(labels), add, answer)
        knowledge = teacher.finish(name, labels)
    print(f"{name}: {_in_words(knowledge)}")
    for suspect in knowledge.suspects:
        example = files.get(suspect.number, f"example {suspect.number}")
        print(f"  {example}: {suspect.label!r}, or rather {suspect.likely!r}?")
    if knowledge.needs_more:
        print(f"  needs more pictures: {', '.join(knowledge.needs_more)}")
    if not arguments.url:
        replaced = "replaces the head that it held; " if is_replaced else ""
        print(
            f"{output}: {replaced}put it into a folder of --models, beside the model that it was "
            "taught with"
        )
    return int(code or knowledge.accuracy is None or not getattr(knowledge, "up_to_date", True))


def _labelled(folder: Path, name: str) -> dict[Path, str]:
    """Return the label of each picture, which is the name of its folder.

    If the folder has splits, only the training split is read.

    Raises:
        DatasetError: `train` would refuse the folder, for a reason other than a single class.
        InputError: the folder is missing, or without class folders.
    """
    require_class_folders(folder)
    pick = f"vitserve teach {name}"
    pictures = find_pictures(folder, least_classes=1, pick=pick)
    chosen, notes = pictures.choose([TRAIN], "teach", pick)
    print_notes(notes)
    files = pictures.sets[chosen]
    labels = [checked_label(name_of_folder) for name_of_folder in pictures.labels]
    warning = SplitRecord.of({chosen: files}).contradictions({chosen: files}, labels)
    if warning:
        print_notes([f"{folder}: {warning}"])
    return {Path(files.name(number)): labels[label] for number, label in enumerate(files.labels)}


def _in_words(knowledge: Knowledge) -> str:
    if knowledge.accuracy is None:
        return getattr(knowledge, "reason", None) or "not fitted"
    accuracy = knowledge.accuracy
    sure = f"{accuracy.low:.1%} to {accuracy.high:.1%} for pictures like these, with 95% confidence"
    return f"{accuracy.value:.1%} accuracy on {knowledge.fitted_to} held-out pictures ({sure})"
