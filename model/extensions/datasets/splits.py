"""Find the splits of a folder by its structure, above the classes or below each class."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from model.errors import DatasetError
from model.extensions.datasets.remarks import Remarks
from model.extensions.datasets.split_names import is_unlabelled, role_of
from model.images.listing import Listing, list_folder


@dataclass(frozen=True)
class Split:
    """A split of a folder.

    Attributes:
        name: its folder below the root; `.` for a folder without splits.
        role: train, validation or test; None if the name does not say.
        folders: its class folders.
    """

    name: str
    role: str | None
    folders: tuple[Path, ...]
    labels: tuple[str, ...]

    @classmethod
    def of_folders(cls, name: str, role: str | None, folders: Sequence[Path]) -> "Split":
        """Return a split whose classes are the names of its folders."""
        return cls(name, role, tuple(folders), tuple(label_of(folder.name) for folder in folders))


def label_of(name: str) -> str:
    """Return the label of a class folder: its name in Unicode's composed form, without spaces."""
    return unicodedata.normalize("NFC", name).strip()


def wraps_itself(listing: Listing) -> bool:
    """Return whether a folder holds no pictures and one folder, which has the same name."""
    if len(listing.folders) != 1 or listing.picture_count:
        return False
    return listing.folders[0].name.casefold() == listing.path.resolve().name.casefold()


def _unwrapped(listing: Listing) -> Listing:
    """Return the entries of the only folder, if that has this name or the class folders."""
    if len(listing.folders) != 1 or listing.picture_count:
        return listing
    inner = list_folder(listing.folders[0])
    if wraps_itself(listing) or inner.holds_folders_only:
        return Listing(listing.path, inner.folders, (*listing.files, *inner.files))
    return listing


def _holds_splits(listing: Listing) -> bool:
    """Return whether all folders have names of splits, with at least two different splits."""
    roles = [role_of(folder.name) for folder in listing.folders]
    return None not in roles and len(set(roles)) > 1


def find_splits(
    listing: Listing, remarks: Remarks, pick: str, *, wrapped: bool = False
) -> list[Split] | None:
    """Return the splits of a folder, or of the only folder in it; None without splits.

    Args:
        listing: entries of the folder.
        remarks: gets the ignored files and folders.
        pick: option that names the folder to read, for messages.
        wrapped: whether the folder is the only folder in the folder around it.

    Raises:
        DatasetError: the folder has splits, but also folders that do not fit them.
    """
    children = [list_folder(folder) for folder in listing.folders]
    splits = None
    if len(children) == 1 and not wrapped:
        only = children[0]
        if _holds_splits(only) or role_of(only.path.name) is None:
            splits = find_splits(only, remarks, pick, wrapped=True)
    if splits is None:
        unnamed = [child for child in children if role_of(child.path.name) is None]
        if any(map(_holds_splits, unnamed)):
            splits = _splits_below_classes(children, remarks)
    if splits is None:
        splits = _splits_above_classes(list(map(_unwrapped, children)), remarks, pick)
    if splits is not None:
        remarks.ignored += listing.files
    return splits


def _splits_above_classes(
    children: Sequence[Listing], remarks: Remarks, pick: str
) -> list[Split] | None:
    """Return the splits if each has a folder with all classes (`train/cat`), else None."""
    candidates = [child for child in children if child.holds_folders_only]
    if not any(role_of(child.path.name) for child in candidates) and not _share_classes(candidates):
        _refuse_unlabelled(children, candidates, pick)
        return None
    for child in children:
        name = child.path.name
        if child.picture_count and role_of(name) is None and not is_unlabelled(name):
            split = candidates[0].path
            raise DatasetError(
                f"{child.path}: has pictures of its own, but {split.name}/ beside it has folders "
                f"like a split; if they are the classes: {pick} {split}; else put the pictures "
                f"into {split.name}/ itself"
            )
        if child.picture_count and child.folders:
            raise DatasetError(
                f"{child.path}: is named like a split, and has pictures beside its class folders: "
                "move them into the class folders, or out of the split"
            )
        if child not in candidates:
            remarks.ignored.append(child.path)
    splits = []
    for child in candidates:
        remarks.ignored += child.files
        name = str(child.path.relative_to(remarks.root))
        splits.append(Split.of_folders(name, role_of(child.path.name), child.folders))
    return splits


def _refuse_unlabelled(
    children: Sequence[Listing], candidates: Sequence[Listing], pick: str
) -> None:
    """Refuse `unlabeled` next to the folder of the classes: both would become classes."""
    others = [child for child in children if child not in candidates]
    if len(candidates) == len(others) == 1 and "unlabel" in others[0].path.name.casefold():
        labelled = candidates[0].path
        raise DatasetError(
            f"{others[0].path}: is named like pictures without labels, and {labelled.name}/ beside "
            f"it has folders like classes: {pick} {labelled}"
        )


def _share_classes(children: Sequence[Listing]) -> bool:
    """Return whether two folders share the names of at least two folders."""
    names = [{folder.name.casefold() for folder in child.folders} for child in children]
    return any(len(one & other) > 1 for one, other in combinations(names, 2))


def _splits_below_classes(classes: Sequence[Listing], remarks: Remarks) -> list[Split] | None:
    """Return the splits if each class has a folder for each (`cat/train`), else None.

    Raises:
        DatasetError: a class has other folders, pictures of its own, or two folders for one split.
    """
    split_classes = [listing for listing in classes if _holds_splits(listing)]
    inner_folders = [folder for listing in split_classes for folder in listing.folders]
    if any(list_folder(folder).holds_folders_only for folder in inner_folders):
        return None
    example = split_classes[0]
    members_by_role: dict[str, list[tuple[str, Path]]] = {}
    for listing in classes:
        roles = [role_of(folder.name) for folder in listing.folders]
        is_split = bool(roles) and None not in roles and len(set(roles)) == len(roles)
        if listing.picture_count or not is_split:
            expected = " and ".join(f"{folder.name}/" for folder in example.folders)
            raise DatasetError(
                f"{listing.path}: is not split like {example.path.name}/, which has {expected}: "
                "give every class the same"
            )
        for role, folder in zip(roles, listing.folders, strict=True):
            member = label_of(listing.path.name), folder
            members_by_role.setdefault(str(role), []).append(member)
        remarks.ignored += listing.files
    parent = example.path.parent.relative_to(remarks.root)
    splits = []
    for role, members in members_by_role.items():
        labels, folders = zip(*members, strict=True)
        splits.append(Split(str(parent / "*" / folders[0].name), role, folders, labels))
    return splits
