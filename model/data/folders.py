"""Folders of pictures: their classes and their splits; no file is opened.

A folder of pictures has a folder for each class. Either all in one place, or in splits, which each
have all classes:

    root/cat/1.jpg      root/train/cat/1.jpg     root/seg_train/seg_train/cat/1.jpg     root/cat/train/1.jpg
    root/dog/2.png      root/val/cat/7.jpg       root/seg_test/seg_test/cat/7.jpg       root/cat/test/7.jpg
                        root/test/cat/9.jpg

Splits are recognised by their structure (folders without pictures of their own that hold the same
folders), and told apart by their names. Where it is not clear which split is which, the folder is
refused.

Classes are the sorted names of the folders. Pictures may lie deeper. Names of `model.data.junk` are
skipped. Every other file in a class is a picture; what lies beside the classes is left out, and
`PictureFolder.notes` names it.
"""

import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Final, NoReturn

import numpy as np

from model.data.junk import is_junk
from model.data.pictures import PictureFiles
from model.errors import DatasetError, printable

TRAIN: Final = "train"
VALIDATION: Final = "validation"
TEST: Final = "test"

PICTURE_SUFFIXES: Final = frozenset(
    {
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".mpo",
        ".png",
        ".apng",
        ".webp",
        ".gif",
        ".bmp",
        ".dib",
        ".tif",
        ".tiff",
    }
    | {".avif", ".heic", ".heif"}
)

# Words of a folder's name, without accents and in lower case, that say which split it is.
_TRAIN_WORDS: Final = """
    train training trainings trn tr trainval learn learning lernen lern entrainement apprentissage
    entrenamiento aprendizaje addestramento treino treinamento обучение 训练 訓練 学習 훈련
"""
_VALIDATION_WORDS: Final = """
    val valid validate validation validating vali dev devel development validierung validacion
    validacao validazione валидация 验证 驗證 検証 검증
"""
_TEST_WORDS: Final = """
    test tests testing tst eval evaluate evaluation holdout heldout prufung pruefung essai prueba
    pruebas evaluacion teste prova тест 测试 測試 评估 テスト
"""
_WORDS: Final = {
    TRAIN: frozenset(_TRAIN_WORDS.split()),
    VALIDATION: frozenset(_VALIDATION_WORDS.split()),
    TEST: frozenset(_TEST_WORDS.split()),
}
_ENDINGS: Final = re.compile(
    r"(?<=..)(set|data|dataset|split|images|imgs|pictures|集|daten|satz|bilder)$"
)
# Of folders that have pictures without classes beside splits.
_UNLABELLED: Final = frozenset(
    {"pred", "predict", "prediction", "unlabeled", "unlabelled", "inference", "unknown"}
)
_LISTED: Final = 5


@dataclass(frozen=True)
class PictureFolder:
    """The pictures of a folder, by class and split.

    Attributes:
        root: the folder as its user wrote it.
        labels: names of the classes, in index order.
        sets: the pictures of `train`, `validation` and `test`, as far as there are such splits;
            without splits all are `train`.
        folders: the folder of each set, below `root`; empty without splits.
        notes: a line each on what is left out, and on what is read in a way that may surprise.
    """

    root: Path
    labels: tuple[str, ...]
    sets: dict[str, PictureFiles]
    folders: dict[str, str]
    notes: tuple[str, ...]

    def choose(
        self, wanted: Sequence[str], purpose: str, pick: str = "--data"
    ) -> tuple[str, tuple[str, ...]]:
        """Return the first wanted set that is there, and notes that say so; of a folder without
        splits all pictures.

        Raises:
            DatasetError: there are only other splits.
        """
        if not self.folders:
            return TRAIN, self.notes
        chosen = next((name for name in wanted if name in self.sets), None)
        if chosen is None:
            there = _listed(f"{folder}/" for folder in self.folders.values())
            example = self.root / next(iter(self.folders.values()))
            raise DatasetError(
                f"{self.root}: {there}: no {' or '.join(wanted)} split to {purpose}; "
                f"to use another split, name it: {pick} {example}"
            )
        others = [f"{folder}/" for name, folder in self.folders.items() if name != chosen]
        unused = f"; {_listed(others)} not used" if others else ""
        return chosen, (
            f"{self.root}: {self.folders[chosen]}/ is used to {purpose}{unused}",
            *self.notes,
        )


@dataclass
class _Remarks:
    """What is to be said of a folder that is read.

    Attributes:
        root: names are told relative to it.
        beside: files and folders beside the classes.
        irregular: pipes, sockets and devices in class folders.
        nested: folders below class folders, whose pictures count for the class.
    """

    root: Path
    beside: list[Path] = field(default_factory=list)
    irregular: list[Path] = field(default_factory=list)
    nested: set[Path] = field(default_factory=set)

    def lines(self) -> tuple[str, ...]:
        kinds = [("beside the class folders", self.beside), ("not regular files", self.irregular)]
        left_out = [f"{len(paths)} {kind} ({self._names(paths)})" for kind, paths in kinds if paths]
        lines = [f"{self.root}: left out: {'; '.join(left_out)}"] if left_out else []
        if self.nested:
            places = self._names(sorted(self.nested))
            lines.append(
                f"{self.root}: pictures in folders below a class folder count for the class: {places}"
            )
        return tuple(lines)

    def _names(self, paths: Iterable[Path]) -> str:
        return _listed(str(path.relative_to(self.root)) for path in paths)


@dataclass(frozen=True)
class _Listing:
    """The visible entries of a folder, sorted by name; links to folders are folders."""

    path: Path
    folders: tuple[Path, ...]
    files: tuple[Path, ...]

    @property
    def pictures(self) -> bool:
        """Whether pictures lie in the folder itself."""
        return any(file.suffix.lower() in PICTURE_SUFFIXES for file in self.files)

    @property
    def holds_folders_only(self) -> bool:
        return bool(self.folders) and not self.pictures

    @property
    def holds_splits(self) -> bool:
        """Whether all its folders have names of splits, and of different ones."""
        roles = [role_of(folder.name) for folder in self.folders]
        return None not in roles and len(set(roles)) > 1


@dataclass(frozen=True)
class _Split:
    """A split: its folder's name below the root, its role (None: unknown), and its class folders."""

    name: str
    role: str | None
    folders: tuple[Path, ...]
    labels: tuple[str, ...]


def find_pictures(root: Path, *, least_classes: int = 2, pick: str = "--data") -> PictureFolder:
    """Return the classes of a folder, and its pictures by their split.

    Args:
        root: holds class folders, or splits that do.
        least_classes: number of classes that are needed.
        pick: how a command is told the folder to read, for messages.

    Raises:
        DatasetError: no such folder, nothing in it, too few classes, an empty class, classes that
            differ by case only, pictures that belong to two classes by a link, splits whose classes
            differ, or splits of unclear names.
    """
    remarks = _Remarks(root)
    listing = _list(root)
    if _wraps_itself(listing):
        remarks.beside += listing.files
        listing = _list(listing.folders[0])
    splits = _find_splits(listing, remarks, pick)
    if splits is None:
        remarks.beside += listing.files
        _refuse_flat_splits(listing)
        plain = _Split(".", TRAIN, listing.folders, _labels(listing.folders))
        _check_classes(root, plain, listing, least_classes, pick)
        _check_links(root, [plain])
        return PictureFolder(
            root, plain.labels, {TRAIN: _read(plain, remarks)}, {}, remarks.lines()
        )
    _check_roles(root, splits, pick)
    for split in splits:
        _check_classes(root / split.name, split, None, least_classes, pick)
    _check_same_classes(root, splits)
    _check_links(root, splits)
    by_role = {split.role: split for split in splits}
    present = [by_role[role] for role in (TRAIN, VALIDATION, TEST) if role in by_role]
    sets = {str(split.role): _read(split, remarks) for split in present}
    names = {str(split.role): split.name for split in present}
    return PictureFolder(root, present[0].labels, sets, names, remarks.lines())


def role_of(name: str) -> str | None:
    """Return the split that a folder's name says it is (`seg_train`, `Testing`, `验证集`), or None."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", name) if not unicodedata.combining(c))
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", plain)
    words = re.findall(r"[^\W\d_]+", unicodedata.normalize("NFC", spaced).casefold())
    whole = "".join(words)
    for candidates in ([whole], words):
        bare = {_ENDINGS.sub("", word) for word in candidates} | set(candidates)
        roles = [role for role, known in _WORDS.items() if bare & known]
        if len(roles) == 1:
            return roles[0]
    return None


def visible_folders(root: Path) -> tuple[Path, ...]:
    """Return the folders in a folder that are not junk, sorted by name.

    Raises:
        DatasetError: it cannot be read.
    """
    return _list(root).folders


def _list(root: Path) -> _Listing:
    folders: list[Path] = []
    files: list[Path] = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if is_junk(entry.name):
                    continue
                paths = folders if entry.is_dir() else files
                paths.append(root / entry.name)
    except OSError as error:
        raise DatasetError(f"{root}: cannot be read: {error.strerror}") from error
    return _Listing(root, tuple(sorted(folders, key=str)), tuple(sorted(files, key=str)))


def _wraps_itself(listing: _Listing) -> bool:
    """Return whether all that lies in a folder is a folder of its name, and no picture."""
    if len(listing.folders) != 1 or listing.pictures:
        return False
    return listing.folders[0].name.casefold() == listing.path.resolve().name.casefold()


def _unwrapped(listing: _Listing) -> _Listing:
    """Return the only folder in a folder if it has its name (`seg_train/seg_train`) or the class
    folders.
    """
    if len(listing.folders) != 1 or listing.pictures:
        return listing
    inner = _list(listing.folders[0])
    if _wraps_itself(listing) or inner.holds_folders_only:
        return _Listing(listing.path, inner.folders, (*listing.files, *inner.files))
    return listing


def _find_splits(
    listing: _Listing, remarks: _Remarks, pick: str, *, wrapped: bool = False
) -> list[_Split] | None:
    """Return the splits of a folder, or of the only folder in it; None if its folders are the
    classes.
    """
    children = [_list(folder) for folder in listing.folders]
    splits = None
    if (
        len(children) == 1
        and not wrapped
        and (children[0].holds_splits or role_of(children[0].path.name) is None)
    ):
        splits = _find_splits(children[0], remarks, pick, wrapped=True)
    if splits is None and any(
        child.holds_splits for child in children if role_of(child.path.name) is None
    ):
        splits = _splits_below_classes(children, remarks)
    if splits is None:
        splits = _splits_above_classes([_unwrapped(child) for child in children], remarks, pick)
    if splits is not None:
        remarks.beside += listing.files
    return splits


def _splits_above_classes(
    children: Sequence[_Listing], remarks: _Remarks, pick: str
) -> list[_Split] | None:
    """Return the splits where each has a folder with all classes (`train/cat`), or None."""
    candidates = [child for child in children if child.holds_folders_only]
    if not any(role_of(child.path.name) for child in candidates) and not _share_classes(candidates):
        return None
    for child in children:
        name = child.path.name
        if child.pictures and role_of(name) is None and not _is_unlabelled(name):
            split = candidates[0].path
            raise DatasetError(
                f"{child.path}: has pictures of its own, but {split.name}/ beside it has folders like a split; "
                f"if they are the classes: {pick} {split}; else put the pictures into {split.name}/ itself"
            )
        if child not in candidates:
            remarks.beside.append(child.path)
    splits = []
    for child in candidates:
        remarks.beside += child.files
        name = str(child.path.relative_to(remarks.root))
        splits.append(_Split(name, role_of(child.path.name), child.folders, _labels(child.folders)))
    return splits


def _splits_below_classes(classes: Sequence[_Listing], remarks: _Remarks) -> list[_Split] | None:
    """Return the splits where each class has a folder for each (`cat/train`), or None if they have
    classes below.

    Raises:
        DatasetError: a class has other folders, pictures of its own, or two folders for one split.
    """
    split = [each for each in classes if each.holds_splits]
    if any(_list(inner).holds_folders_only for each in split for inner in each.folders):
        return None
    like = split[0]
    by_role: dict[str, list[tuple[str, Path]]] = {}
    for each in classes:
        roles = [role_of(folder.name) for folder in each.folders]
        if each.pictures or not roles or None in roles or len(set(roles)) < len(roles):
            expected = " and ".join(f"{folder.name}/" for folder in like.folders)
            raise DatasetError(
                f"{each.path}: is not split like {like.path.name}/, which has {expected}: give every class the same"
            )
        for role, inner in zip(roles, each.folders, strict=True):
            by_role.setdefault(str(role), []).append((each.path.name, inner))
        remarks.beside += each.files
    return [
        _split_below(like.path.parent.relative_to(remarks.root), role, found)
        for role, found in by_role.items()
    ]


def _split_below(place: Path, role: str, found: Sequence[tuple[str, Path]]) -> _Split:
    name = found[0][1].name
    labels = tuple(unicodedata.normalize("NFC", label) for label, _ in found)
    return _Split(str(place / "*" / name), role, tuple(folder for _, folder in found), labels)


def _share_classes(children: Sequence[_Listing]) -> bool:
    """Return whether two folders have two folders of the same name."""
    names = [{folder.name.casefold() for folder in child.folders} for child in children]
    return any(len(one & other) > 1 for one, other in combinations(names, 2))


def _is_unlabelled(name: str) -> bool:
    return bool(set(re.findall(r"[a-z]+", name.casefold())) & _UNLABELLED)


def _labels(folders: Iterable[Path]) -> tuple[str, ...]:
    return tuple(unicodedata.normalize("NFC", folder.name) for folder in folders)


def _refuse_flat_splits(listing: _Listing) -> None:
    roles = [role_of(folder.name) for folder in listing.folders]
    if len(set(roles)) > 1 and all(
        role or _is_unlabelled(folder.name)
        for role, folder in zip(roles, listing.folders, strict=True)
    ):
        names = _listed(f"{folder.name}/" for folder in listing.folders)
        raise DatasetError(
            f"{listing.path}: {names} are named like splits, but have no class folders: put the pictures of each class "
            f"into a folder of its name, as {listing.folders[0].name}/cat/"
        )


def _check_roles(root: Path, splits: Sequence[_Split], pick: str) -> None:
    """Raise `DatasetError` unless each split has a role of its own."""
    unclear = [split for split in splits if split.role is None]
    commands = " or ".join(f"{pick} {root / split.name}" for split in splits[:_LISTED])
    if unclear:
        names = _listed(f"{split.name}/" for split in splits)
        raise DatasetError(
            f"{root}: {names} look like splits: they have class folders and no pictures of their own; "
            f"{_listed(f'{split.name}/' for split in unclear)}: not clear for what: rename to train, val or test, "
            f"or name the one to read: {commands} (if these are the classes, move their pictures up into them)"
        )
    for one, other in combinations(splits, 2):
        if one.role == other.role:
            raise DatasetError(
                f"{root}: {one.name}/ and {other.name}/ are both named like the {one.role} split; keep one, "
                f"or name the one to read: {commands}"
            )


def _check_classes(
    root: Path, split: _Split, listing: _Listing | None, least: int, pick: str
) -> None:
    """Raise `DatasetError` unless there are enough classes, of names that differ and can be
    printed.
    """
    expected = "expected one folder of them for each class"
    if not split.folders:
        count = (
            0
            if listing is None
            else sum(file.suffix.lower() in PICTURE_SUFFIXES for file in listing.files)
        )
        found = f"{count} pictures, but no class folders" if count else "no pictures"
        raise DatasetError(f"{root}: {found}: {expected}")
    if len(split.folders) < least:
        [only] = split.folders
        hint = (
            f"; if its folders are the classes: {pick} {only}"
            if _list(only).holds_folders_only
            else ""
        )
        raise DatasetError(
            f"{root}: one class ({only.name!r}): at least two classes are required{hint}"
        )
    seen: dict[str, str] = {}
    for label in split.labels:
        if not label.isprintable():  # it becomes a label, in answers, tables and pictures
            raise DatasetError(f"{root}: the name {label!a} has characters that cannot be printed")
        other = seen.setdefault(label.casefold(), label)
        if other != label:
            raise DatasetError(f"{root}: the classes {other!r} and {label!r} differ by case alone")
    if len(seen) < len(split.labels):
        raise DatasetError(
            f"{root}: two folders have the same name in different Unicode forms; merge them"
        )


def _check_same_classes(root: Path, splits: Sequence[_Split]) -> None:
    first = next((split for split in splits if split.role == TRAIN), splits[0])
    for split in splits:
        more = [repr(label) for label in split.labels if label not in first.labels]
        fewer = [repr(label) for label in first.labels if label not in split.labels]
        differences = [(first.name, fewer), (split.name, more)]
        alone = [f"{_listed(labels)} only in {name}/" for name, labels in differences if labels]
        if alone:
            raise DatasetError(
                f"{root / split.name}: its classes are not those of {first.name}/: {', '.join(alone)}; "
                "give all splits the same class folders"
            )


def _check_links(root: Path, splits: Sequence[_Split]) -> None:
    """Raise `DatasetError` where links make one folder part of two classes, or a class of the
    folder around it.
    """
    here = root.resolve()
    targets: dict[Path, Path] = {}
    for folder in (folder for split in splits for folder in split.folders):
        target = folder.resolve()
        if here.is_relative_to(target):
            raise DatasetError(f"{folder}: links to a folder around itself; remove the link")
        if target in targets:
            raise DatasetError(
                f"{folder}: is the same folder as {targets[target]}; remove one of the links"
            )
        targets[target] = folder
    for target, folder in targets.items():
        around = next((targets[parent] for parent in target.parents if parent in targets), None)
        if around is not None:
            raise DatasetError(
                f"{folder}: lies in {around}, so its pictures have two classes; remove the link"
            )


def _read(split: _Split, remarks: _Remarks) -> PictureFiles:
    """List the pictures of a split; labels are indices of its classes, in order.

    Raises:
        DatasetError: a class is empty, or a folder cannot be read.
    """
    paths: list[Path] = []
    counts: list[int] = []
    for folder in split.folders:
        files = _files(folder, remarks)
        if not files:
            raise DatasetError(
                f"{folder}: the class has no pictures; add some, or remove the folder"
            )
        paths += files
        counts.append(len(files))
    return PictureFiles.of(paths, np.repeat(np.arange(len(counts), dtype=np.int64), counts))


def _files(folder: Path, remarks: _Remarks) -> list[Path]:
    """List every file of a class, at any depth, sorted; a link to a folder or to nothing is a file
    that is bad.
    """
    files = []
    for place, folders, names in os.walk(folder, onerror=_cannot_be_read):
        here = Path(place)
        folders[:] = [name for name in folders if not is_junk(name)]
        found = [here / name for name in (*folders, *names) if not is_junk(name)]
        pictures = [path for path in found if path.is_file() or path.is_symlink()]
        remarks.irregular += [
            path for path in found if path not in set(pictures) and not path.is_dir()
        ]
        if pictures and here != folder:
            remarks.nested.add(here)
        files += pictures
    return sorted(files)


def _cannot_be_read(error: OSError) -> NoReturn:
    raise DatasetError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _listed(names: Iterable[str]) -> str:
    """Return the first names of files or folders, and the number of the others."""
    every = [printable(name) for name in names]
    more = f" and {len(every) - _LISTED} more" if len(every) > _LISTED else ""
    return f"{', '.join(every[:_LISTED])}{more}"
