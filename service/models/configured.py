"""The models that the settings name: entries of the folder of models, or a single checkpoint."""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from model.head_files import is_taught_head
from service.engine.backbones import PROBLEM
from service.errors import InvalidParameter, SettingsError
from service.model_settings import PATHS, ModelSettings
from service.models.folder import FolderEntry, in_time, read_folder, unread_names
from service.settings import Settings

logger = logging.getLogger("vitserve")


def configured_models(
    settings: Settings,
    before: Mapping[str, FolderEntry] = MappingProxyType({}),
) -> dict[str, FolderEntry]:
    """Return the entries of the folder of models by name, or one entry without a name.

    A broken entry is a model that fails with the entry's problem.

    Args:
        settings: the service's settings.
        before: entries of the previous read; an entry that is broken now stays as it was then.

    Raises:
        SettingsError: the folder is empty, or the default model is missing; or, if the settings
            are strict, an entry is broken.
    """
    if settings.models is None:
        return {"": FolderEntry({}, {})}
    if settings.checkpoint != ModelSettings.model_fields["checkpoint"].default:
        raise SettingsError(
            f"VIT_CHECKPOINT={settings.checkpoint!r}: VIT_MODELS={settings.models!r} already names "
            "the models: set one of them"
        )
    entries, problems = _read(settings, settings.models)
    where = f"VIT_MODELS={settings.models!r}"
    if problems and settings.strict:
        raise SettingsError(f"{where}: {next(iter(problems.values()))}")
    if not entries:
        reason = _lone_head(settings.models)
        if problems:
            reason = f": {next(iter(problems.values()))}"
        raise SettingsError(f"{where}: this folder has no models{reason}")
    for name, problem in problems.items():
        if name in before:
            logger.error("not reloaded: %s", problem)
        entries[name] = before.get(name, FolderEntry({PROBLEM: problem}, {}))
    if settings.model_name not in (None, *entries):
        names = ", ".join(entries)
        raise SettingsError(
            f"VIT_MODEL_NAME={settings.model_name!r}: unknown model; "
            f"available in VIT_MODELS: {names:.1000}"
        )
    return entries


def _lone_head(models: str) -> str:
    """Return an addition to the message about a folder without models, if it has a taught head."""
    for path in sorted(Path(models).expanduser().iterdir()):
        if is_taught_head(path):
            return f": {path.name} is a taught head: add the model that it was taught with"
    return ""


def _read(settings: Settings, models: str) -> tuple[dict[str, FolderEntry], dict[str, str]]:
    """Return the entries of the folder of models, and the problems of its broken ones."""
    folder = Path(models).expanduser()
    others = () if settings.checkpoint_folder is None else (Path(settings.checkpoint_folder),)
    try:
        return in_time(partial(read_folder, folder, others), "the folder")
    except NotADirectoryError:
        remedy = "expected a folder of models; --checkpoint (VIT_CHECKPOINT) serves one file"
        raise SettingsError(f"VIT_MODELS={models!r}: {remedy}") from None
    except OSError as error:
        raise SettingsError(f"VIT_MODELS={models!r}: {error.strerror or error}") from None
    except InvalidParameter as error:
        raise SettingsError(f"VIT_MODELS={models!r}: {error}") from None


def notes_on_folder(settings: Settings, entries: Mapping[str, FolderEntry]) -> list[str]:
    """Return a line for each setting or file of the folder that is not used."""
    if settings.models is None:
        return []
    lines = []
    folder = Path(settings.models).expanduser()
    names = in_time(partial(unread_names, folder, entries), "the folder")
    if names:
        lines.append(f"VIT_MODELS={settings.models!r}: not read: {', '.join(names):.1000}")
    for setting in PATHS:
        if setting == "checkpoint" or getattr(settings, setting) is None:
            continue
        overriding = [
            name for name, entry in entries.items() if entry.settings.get(setting) is not None
        ]
        if overriding:
            lines.append(
                f"VIT_{setting.upper()} is not read for {', '.join(overriding):.1000}: "
                f"they have {setting} of their own"
            )
    return lines
