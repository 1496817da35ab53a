"""Checkpoints from the Hugging Face Hub, through `huggingface_hub` (the optional extra `hub`).

Its cache, offline mode (HF_HUB_OFFLINE), endpoint (HF_ENDPOINT), token (HF_TOKEN or `hf auth login`)
and progress bars apply as everywhere. Files are fetched when a reader asks for them, the config
first: a repository that is not a ViT costs no download of weights.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from model.checkpoint.files import CONFIG_FILE, Files
from model.checkpoint.refusals import first_line
from model.errors import CheckpointError

_HUB_ID: Final = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[\w./-]{1,200}))?"
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_TIMEOUT: Final = 10.0
"""Seconds to wait for a file's metadata."""
_OFFLINE: Final = "not in the cache, and offline mode (HF_HUB_OFFLINE) is on"


def is_hub_id(source: str) -> bool:
    """Return whether it has the form `owner/name[@revision]`."""
    return _HUB_ID.fullmatch(source) is not None


class Repository(Files):
    """A model repository on the hub, at one revision.

    Args:
        source: `owner/name[@revision]`; a branch, a tag or a commit.

    Raises:
        CheckpointError: `huggingface_hub` is not installed.
    """

    def __init__(self, source: str) -> None:
        match = _HUB_ID.fullmatch(source)
        assert match is not None
        super().__init__(source, source)
        self.repository: str = match["repo"]
        self.wanted: str | None = match["revision"]
        self._hub = _huggingface_hub(source)
        self._found: dict[str, Path | None] = {}

    def path(self, name: str) -> Path | None:
        """Return the file's path in the local cache; it is fetched if it is not there yet.

        Raises:
            CheckpointError: the repository, the revision or the network is not there, or access is refused.
        """
        if name not in self._found:
            self._found[name] = self._fetch(name)
        return self._found[name]

    def _fetch(self, name: str) -> Path | None:
        errors = self._hub.errors
        arguments: dict[str, Any] = {"revision": self.revision or self.wanted, "etag_timeout": _TIMEOUT}
        try:
            path = Path(self._hub.hf_hub_download(self.repository, name, **arguments))
        except errors.GatedRepoError:
            raise CheckpointError(
                f"{self.source}: gated: accept its terms on its page, then set HF_TOKEN or run `hf auth login`"
            ) from None
        except errors.RevisionNotFoundError:
            raise CheckpointError(f"{self.source}: the repository has no revision {self.wanted!r}") from None
        except errors.RepositoryNotFoundError:
            raise CheckpointError(
                f"{self.source}: no such folder here and no such repository on the hub, "
                "or a private one that this token (HF_TOKEN) may not read"
            ) from None
        except errors.LocalEntryNotFoundError as error:
            return self._not_cached(name, error)
        except errors.EntryNotFoundError:
            return None
        except errors.OfflineModeIsEnabled:
            raise CheckpointError(f"{self.source}: {_OFFLINE}") from None
        except errors.HfHubHTTPError as error:
            status = getattr(error.response, "status_code", "no status")
            raise CheckpointError(f"{self.source}: the hub answered {status} for {name}: {first_line(error)}") from None
        except (OSError, ValueError, RuntimeError, *errors.HfHubHTTPError.__bases__) as error:
            # The bases are those of the HTTP client's errors, whichever client this version is built on.
            raise CheckpointError(f"{self.source}: {name} could not be fetched: {first_line(error)}") from None
        if self.revision is None:
            self._pin(path)
        return path

    def _not_cached(self, name: str, error: BaseException) -> Path | None:
        """Return None for a part that the cached repository lacks; refuse one that only the network could give."""
        if not self._hub.constants.HF_HUB_OFFLINE:
            cause = first_line(error.__cause__ or error)
            raise CheckpointError(
                f"{self.source}: {name} is not in the cache and the hub cannot be reached: {cause}"
            ) from None
        if self._found.get(CONFIG_FILE) is None:
            raise CheckpointError(f"{self.source}: {_OFFLINE}") from None
        return None

    def _pin(self, path: Path) -> None:
        """Remember the commit, so that all files are of the same one."""
        for part in path.parts:
            if _COMMIT.fullmatch(part):
                self.revision = part


def _huggingface_hub(source: str) -> ModuleType:
    try:
        import huggingface_hub  # noqa: PLC0415 - an optional extra
        import huggingface_hub.constants  # noqa: PLC0415
        import huggingface_hub.errors  # noqa: PLC0415
    except ImportError:
        raise CheckpointError(
            f"{source}: no such folder or file; a hub id needs huggingface_hub: pip install -e '.[hub]' in the clone"
        ) from None
    return huggingface_hub
