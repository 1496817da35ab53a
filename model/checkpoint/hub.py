"""Checkpoints from the Hugging Face Hub, through `huggingface_hub` (the optional extra `hub`).

Its cache, offline mode (HF_HUB_OFFLINE), endpoint (HF_ENDPOINT), token (HF_TOKEN or `hf auth
login`) and progress bars apply as everywhere. Files are fetched when a reader asks for them, the
config first: a repository that is not a ViT costs no download of weights.
"""

import re
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Final

from model.checkpoint.files import MODEL_FILES, Files
from model.checkpoint.local_files import resolved_part
from model.errors import CheckpointError, first_line

_HUB_ID: Final = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[\w./-]{1,200}))?"
    r"(?::(?P<subfolder>\w[\w.-]*(?:/\w[\w.-]*)*))?"
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_TIMEOUT: Final = 10.0  # seconds to wait for a file's metadata
_ANSWER_TIMEOUT: Final = 5.0  # seconds within which the hub answers, else only the cache is read


def is_hub_id(source: str) -> bool:
    """Return whether it has the form `owner/name[@revision][:subfolder]`."""
    return _HUB_ID.fullmatch(source) is not None


class Repository(Files):
    """A model repository on the hub, at one revision; a snapshot in the client's cache where the
    hub is not reached.

    Attributes:
        from_cache: why only the cache is read, or an empty text where the hub is asked.

    Args:
        source: `owner/name[@revision][:subfolder]`; a branch, a tag or a commit.

    Raises:
        CheckpointError: `huggingface_hub` is not installed, or the cache alone is read and has
        nothing of it.
    """

    def __init__(self, source: str) -> None:
        match = _HUB_ID.fullmatch(source)
        assert match is not None
        super().__init__(Path(source), source)
        self._id, self._repository, self._revision = source, match["repo"], match["revision"]
        self._subfolder = match["subfolder"] or ""
        self._hub = _huggingface_hub(source)
        self._found: dict[str, Path | None] = {}
        # The bases are the HTTP client's errors, whichever client this version of the hub's has.
        self._failures = (
            OSError,
            ValueError,
            RuntimeError,
            *self._hub.errors.HfHubHTTPError.__bases__,
        )
        self.from_cache = (
            "offline mode (HF_HUB_OFFLINE) is on" if self._hub.constants.HF_HUB_OFFLINE else ""
        )
        try:
            if not self.from_cache:  # the client itself retries for long
                self._hub.utils.get_session().head(
                    self._hub.constants.ENDPOINT, timeout=_ANSWER_TIMEOUT
                )
        except self._failures as error:
            self.from_cache = f"the hub cannot be reached: {first_line(error)}"
        if not self.from_cache:
            return
        try:
            found = self._hub.snapshot_download(
                self._repository, revision=self._revision, local_files_only=True
            )
        except self._failures:
            raise self._not_here(f"it is not in the cache and {self.from_cache}") from None
        self.folder, self.revision = Path(found) / self._subfolder, Path(found).name
        self.place += f" (from the cache: {self.from_cache})"

    @property
    def name(self) -> str:
        """The repository's name."""
        return self._repository

    def path(self, name: str) -> Path | None:
        """Return the file's path in the local cache; it is fetched if it is not there yet.

        Raises:
            CheckpointError: the repository, the revision or the network is not there, or access is
            refused.
        """
        if self.from_cache:
            return super().path(name)
        if name not in self._found:
            self._found[name] = self._fetch(name)
        return self._found[name]

    def where(self, name: str) -> str:
        """Return the name of the file `name` in messages."""
        return f"{self._id}/{name}"

    def _within(self, name: str) -> Files:
        base, _, within = self._id.partition(":")
        return Repository(f"{base}:{f'{within}/' * bool(within)}{name}")

    def models_within(self) -> list[str]:
        """Return the paths of the repository's folders that hold a model; none if the hub does not
        list them.
        """
        if self.from_cache:
            return super().models_within()
        try:
            hub = self._hub.HfApi(endpoint=self._hub.constants.ENDPOINT)
            names = hub.list_repo_files(self._repository, revision=self.revision or self._revision)
        except (self._hub.errors.HfHubHTTPError, *self._failures):
            return []
        paths = [PurePosixPath(name) for name in names]
        return sorted(
            {str(path.parent) for path in paths if path.name in MODEL_FILES and path.parent.name}
        )

    def _fetch(self, name: str) -> Path | None:
        errors, revision = self._hub.errors, self.revision or self._revision
        refusals = {
            errors.GatedRepoError: "gated: accept its terms on its page, then set HF_TOKEN or run `hf auth login`",
            errors.RevisionNotFoundError: f"the repository has no revision {self._revision!r}",
            errors.RepositoryNotFoundError: (
                "no such repository, or a private one that this token (HF_TOKEN) may not read"
            ),
        }
        try:
            found = self._hub.hf_hub_download(
                self._repository,
                name,
                subfolder=self._subfolder,
                revision=revision,
                etag_timeout=_TIMEOUT,
            )
            path = Path(found)
        except (errors.EntryNotFoundError, *self._failures) as error:
            if isinstance(error, errors.EntryNotFoundError) and not isinstance(
                error, errors.LocalEntryNotFoundError
            ):
                return None
            failure = f"{name} could not be fetched: {first_line(error.__cause__ or error)}"
            known = (text for kind, text in refusals.items() if isinstance(error, kind))
            raise self._not_here(next(known, failure)) from None
        if self.revision is None:  # all files are of the same commit
            self.revision = next(filter(_COMMIT.fullmatch, reversed(path.parts)), None)
        return resolved_part(path.parent, path.name, self.where(name))

    def _not_here(self, failure: str) -> CheckpointError:
        """Return the error for a failure of the hub, which leads with the folder where nothing of
        the id was found.
        """
        place = f"{self._id}: " if self.revision else _no_folder(self._id)
        return CheckpointError(f"{place}on the hub: {failure}")


def _no_folder(source: str) -> str:
    return f"no folder {source} here (write ./ before a folder's name); "


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
