"""A repository of the Hugging Face Hub as the files of a checkpoint.

The client's cache, offline mode (HF_HUB_OFFLINE), endpoint (HF_ENDPOINT), token (HF_TOKEN or `hf
auth login`) and progress bars apply as everywhere. A file is fetched when a reader asks for it, the
config first, so that a repository without a ViT costs no download of weights.
"""

import os
import re
from pathlib import Path
from types import ModuleType
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from model.checkpoint.files import Files
from model.checkpoint.local_files import resolved_part
from model.errors import CheckpointError, first_line

_HUB_ID: Final = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[\w./-]{1,200}))?"
    r"(?::(?P<subfolder>\w[\w.-]*(?:/\w[\w.-]*)*))?"
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_METADATA_TIMEOUT: Final = 10.0  # seconds to wait for a file's metadata
PROBE_TIMEOUT: Final = 5.0  # seconds to wait for the hub before only the cache is read


def open_id(source: str) -> Files | None:
    """Return the repository `owner/name[@revision][:subfolder]`; None for another source."""
    return Repository(source) if _HUB_ID.fullmatch(source) else None


class Repository(Files):
    """A model repository on the hub, at one revision.

    If the hub cannot be reached, it is a snapshot in the client's cache.

    Args:
        source: `owner/name[@revision][:subfolder]`, with a branch, a tag or a commit.

    Attributes:
        from_cache: why only the cache is read; empty if the hub is asked.

    Raises:
        CheckpointError: `huggingface_hub` is not installed, or only the cache is read and does not
            have the repository.
    """

    is_remote = True

    def __init__(self, source: str) -> None:
        match = _HUB_ID.fullmatch(source)
        assert match is not None
        super().__init__(Path(source), source)
        self._id = source
        self._repository = match["repo"]
        self._requested_revision = match["revision"]
        self._subfolder = match["subfolder"] or ""
        self._hub = _huggingface_hub(source)
        self._paths: dict[str, Path | None] = {}
        # The bases are the errors of the HTTP client, which depends on the version.
        self._failures = (
            OSError,
            ValueError,
            RuntimeError,
            *self._hub.errors.HfHubHTTPError.__bases__,
        )
        self.from_cache = self._why_from_cache()
        if self.from_cache:
            self._use_cache()

    def _why_from_cache(self) -> str:
        """Return why the hub cannot be asked; empty if it answers."""
        constants = self._hub.constants
        if constants.HF_HUB_OFFLINE:
            return "offline mode (HF_HUB_OFFLINE) is on"
        try:  # because the client itself retries for long
            self._hub.utils.get_session().head(constants.ENDPOINT, timeout=PROBE_TIMEOUT)
        except (ImportError, *self._failures) as error:
            return f"the hub cannot be reached{_through_proxy(constants.ENDPOINT, error)}"
        return ""

    def _use_cache(self) -> None:
        try:
            snapshot = self._hub.snapshot_download(
                self._repository, revision=self._requested_revision, local_files_only=True
            )
        except self._failures:
            raise self._error(f"it is not in the cache and {self.from_cache}") from None
        self.folder = Path(snapshot) / self._subfolder
        self.revision = Path(snapshot).name
        self.title += f" (from the cache: {self.from_cache})"
        self.notes = (self.title,)

    @property
    def name(self) -> str:
        """The repository's name."""
        return self._repository

    def path(self, name: str) -> Path | None:
        """Return the file's path in the local cache; fetch the file if it is not cached.

        Raises:
            CheckpointError: the repository or revision does not exist, the network fails, or access
                is refused.
        """
        if self.from_cache:
            return super().path(name)
        if name not in self._paths:
            self._paths[name] = self._fetch(name)
        return self._paths[name]

    def where(self, name: str) -> str:
        """Return the name of a file in messages."""
        return f"{self._id}/{name}"

    def _within(self, name: str) -> Files:
        base, _, outer = self._id.partition(":")
        return Repository(f"{base}:{outer}/{name}" if outer else f"{base}:{name}")

    def names(self) -> list[str]:
        """Return the paths of the repository's files; empty if the hub fails."""
        if self.from_cache:
            return super().names()
        revision = self.revision or self._requested_revision
        try:
            api = self._hub.HfApi(endpoint=self._hub.constants.ENDPOINT)
            return sorted(api.list_repo_files(self._repository, revision=revision))
        except (self._hub.errors.HfHubHTTPError, *self._failures):
            return []

    def _fetch(self, name: str) -> Path | None:
        errors = self._hub.errors
        try:
            cached = self._hub.hf_hub_download(
                self._repository,
                name,
                subfolder=self._subfolder,
                revision=self.revision or self._requested_revision,
                etag_timeout=_METADATA_TIMEOUT,
            )
            path = Path(cached)
        except (errors.EntryNotFoundError, *self._failures) as error:
            is_local = isinstance(error, errors.LocalEntryNotFoundError)
            if isinstance(error, errors.EntryNotFoundError) and not is_local:
                return None
            raise self._error(self._reason(error, name)) from None
        if self.revision is None:  # so that all files are of the same commit
            self.revision = next(filter(_COMMIT.fullmatch, reversed(path.parts)), None)
        return resolved_part(path.parent, path.name, self.where(name))

    def _reason(self, error: Exception, name: str) -> str:
        """Return why a file could not be fetched, and the remedy."""
        errors = self._hub.errors
        reasons = {
            errors.GatedRepoError: (
                "gated: accept its terms on its page, then set HF_TOKEN or run `hf auth login`"
            ),
            errors.RevisionNotFoundError: (
                f"the repository has no revision {self._requested_revision!r}"
            ),
            errors.RepositoryNotFoundError: (
                "no such repository, or a private one that this token (HF_TOKEN) may not read"
            ),
        }
        for kind, reason in reasons.items():
            if isinstance(error, kind):
                return reason
        return f"{name} could not be fetched: {first_line(error.__cause__ or error)}"

    def _error(self, reason: str) -> CheckpointError:
        """Return the error for a failure of the hub; it also mentions a missing folder."""
        # If a file was found before, the operator did mean a hub id.
        start = f"{self._id}: " if self.revision else _no_folder(self._id)
        return CheckpointError(f"{start}on the hub: {reason}")


def _no_folder(source: str) -> str:
    return f"no folder {source} here (write ./ before a folder's name); "


def _through_proxy(endpoint: str, error: Exception) -> str:
    """Return why the hub cannot be reached, with the proxy that the environment sets for it."""
    url = urlsplit(endpoint)
    proxies = getproxies()
    scheme = url.scheme if url.scheme in proxies else "all"
    host = url.hostname or ""
    if scheme not in proxies or proxy_bypass(host):
        return f": {first_line(error)}"
    # The variable in lower case wins. Proxies of the operating system do not have a variable.
    names = (f"{scheme}_proxy", f"{scheme}_proxy".upper())
    setting = next(filter(os.environ.get, names), "of the system's settings")
    start, _, address = proxies[scheme].rpartition("://")
    address = address.rpartition("@")[2]  # without its password
    shown = f"{start or 'http'}://{address}".rstrip("/")
    reason = first_line(error)
    if isinstance(error, ImportError):
        reason = "it needs the package socksio: pip install 'httpx[socks]'"
    return (
        f" through the proxy {shown} ({setting}): {reason}; to connect without it, add {host} to "
        "NO_PROXY"
    )


def _huggingface_hub(source: str) -> ModuleType:
    try:
        import huggingface_hub  # noqa: PLC0415 - an optional extra
        import huggingface_hub.constants  # noqa: PLC0415
        import huggingface_hub.errors  # noqa: PLC0415
        import huggingface_hub.utils  # noqa: PLC0415
    except ImportError:
        raise CheckpointError(
            f"{_no_folder(source)}a hub id needs huggingface_hub: pip install 'vitserve[hub]'"
        ) from None
    return huggingface_hub
