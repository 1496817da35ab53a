"""Refuse folders of pictures whose classes or splits are unclear."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from model.errors import DatasetError
from model.extensions.datasets.remarks import Remarks, unread_tables
from model.extensions.datasets.split_names import TRAIN, is_unlabelled, role_of
from model.extensions.datasets.splits import Split
from model.images.listing import MAX_LISTED, Listing, list_folder, listed
from model.label_texts import folded, hidden_character, is_visible


def refuse_flat_splits(listing: Listing) -> None:
    """Raise `DatasetError` if all folders have names of splits, but no class folders."""
    names = [folder.name for folder in listing.folders]
    roles = set(map(role_of, names))
    is_split = len(roles) > 1 or (len(names) == 1 and not list_folder(listing.folders[0]).folders)
    if is_split and all(role_of(name) or is_unlabelled(name) for name in names):
        files = [file for folder in listing.folders for file in list_folder(folder).files]
        tables = unread_tables(listing.path, (*listing.files, *files))
        verbs = ("are named like splits", "have") if names[1:] else ("is named like a split", "has")
        raise DatasetError(
            f"{listing.path}: {listed(f'{name}/' for name in names)} {verbs[0]}, but {verbs[1]} no "
            f"class folders{tables and f'; {tables}'}: put the pictures of each class into a "
            f"folder of its name, as {names[0]}/cat/"
        )


def check_roles(root: Path, splits: Sequence[Split], pick: str) -> None:
    """Raise `DatasetError` unless each split has a role of its own."""
    unclear = [f"{split.name}/" for split in splits if split.role is None]
    commands = " or ".join(f"{pick} {root / split.name}" for split in splits[:MAX_LISTED])
    if unclear:
        names = listed(f"{split.name}/" for split in splits)
        raise DatasetError(
            f"{root}: {names} look like splits: they have class folders and no pictures of their "
            f"own; {listed(unclear)}: not clear for what: rename to train, val or test, or name "
            f"the one to read: {commands} (if these are the classes, move their pictures up into "
            "them)"
        )
    for one, other in combinations(splits, 2):
        if one.role == other.role:
            raise DatasetError(
                f"{root}: {one.name}/ and {other.name}/ are both named like the {one.role} split; "
                f"keep one, or name the one to read: {commands}"
            )


def check_classes(split: Split, remarks: Remarks, least: int, pick: str) -> None:
    """Raise `DatasetError` unless there are enough classes with distinct, printable names.

    A single class is too few beside a table, which probably has the labels.

    Args:
        split: the classes.
        remarks: with the files outside the class folders of all splits.
        least: number of classes that are required.
        pick: option that names the folder to read, for messages.
    """
    root = remarks.root / split.name
    if not split.folders:
        count = Listing(root, (), tuple(remarks.ignored)).picture_count
        pictures = f"{count} pictures, but no class folders" if count else "no pictures"
        tables = unread_tables(remarks.root, remarks.ignored)
        raise DatasetError(
            f"{root}: {pictures}: expected one folder of them for each class"
            f"{tables and f'; {tables}'}: move each picture into a folder with the name of its "
            "label"
        )
    if len(split.folders) == 1:
        _check_only_class(split, remarks, least, pick)
    _check_labels(root, split.labels)


def _check_only_class(split: Split, remarks: Remarks, least: int, pick: str) -> None:
    """Raise `DatasetError` if one class is too few, or if its folders may be the classes."""
    [only] = split.folders
    listing = list_folder(only)
    files = [file for folder in (only, *listing.folders) for file in list_folder(folder).files]
    tables = unread_tables(remarks.root, [*remarks.ignored, *files])
    if not tables and least <= 1 and not listing.holds_folders_only:
        return
    hint = ""
    if listing.holds_folders_only:
        hint = f"; if its folders are the classes: {pick} {only}"
    if tables:
        hint += f"; {tables}: move each picture into a folder with the name of its label"
    raise DatasetError(
        f"{remarks.root / split.name}: one class ({split.labels[0]!r}): at least two classes are "
        f"required{hint or ': put the pictures of another class into a folder beside it'}"
    )


def _check_labels(root: Path, labels: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for label in labels:
        hidden = hidden_character(label)
        if hidden or not is_visible(label):  # labels are printed in answers, tables and pictures
            what = f"{hidden}, which" if hidden else "characters that"
            raise DatasetError(
                f"{root}: the name {label!a} has {what} cannot be printed: rename it"
            )
        other = seen.setdefault(folded(label), label)
        if other != label:
            raise DatasetError(
                f"{root}: the classes {other!r} and {label!r} differ only by case or spaces; "
                "rename or merge them"
            )
    if len(seen) < len(labels):
        raise DatasetError(
            f"{root}: two folders have the same name in different Unicode forms or but for spaces; "
            "merge them"
        )


def check_same_classes(root: Path, splits: Sequence[Split]) -> None:
    """Raise `DatasetError` unless all splits have the classes of the training split."""
    first = next((split for split in splits if split.role == TRAIN), splits[0])
    for split in splits:
        missing = [repr(label) for label in first.labels if label not in split.labels]
        additional = [repr(label) for label in split.labels if label not in first.labels]
        differences = [(first.name, missing), (split.name, additional)]
        parts = [f"{listed(labels)} only in {name}/" for name, labels in differences if labels]
        if parts:
            raise DatasetError(
                f"{root / split.name}: its classes differ from those of {first.name}/: "
                f"{', '.join(parts)}; give all splits the same class folders"
            )


def check_links(root: Path, splits: Sequence[Split]) -> None:
    """Raise `DatasetError` if links put one folder into two classes, or a folder into itself."""
    real_root = root.resolve()
    folders_by_target: dict[Path, Path] = {}
    for split in splits:
        for folder in split.folders:
            target = folder.resolve()
            if real_root.is_relative_to(target):
                raise DatasetError(f"{folder}: links to a folder around itself; remove the link")
            if target in folders_by_target:
                raise DatasetError(
                    f"{folder}: is the same folder as {folders_by_target[target]}; remove one of "
                    "the links"
                )
            folders_by_target[target] = folder
    for target, folder in folders_by_target.items():
        for parent in target.parents:
            if parent in folders_by_target:
                raise DatasetError(
                    f"{folder}: is inside {folders_by_target[parent]}, so its pictures have two "
                    "classes; remove the link"
                )
