"""Types of settings: each parses the text of an environment variable, a flag or a TOML file.

Parsers raise `ValueError` with the expected form; `service.settings` adds the setting's name.
"""

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    SecretStr,
    ValidationInfo,
)
from pydantic_settings import NoDecode

from model.layer_config import Size
from service.addresses import parse_listen_hosts
from service.extension import extensions_by_scheme
from service.unique_names import DuplicateName, unique_names

MEMORY = "memory://"
"""The URL of the image store in the memory of the service."""

_NAMED_KEY = re.compile(r"([A-Za-z0-9_-]{1,64}):(.*)", re.DOTALL)
_KEY_EXAMPLE = '["web:KEY1", "KEY2"]'
_BEGINS_WITH_NAME = re.compile(r":|=[^=]")
"""Part of a key that begins with a name in another form, as in `web=KEY1` or `my.app:KEY1`."""

_QUOTES = "\"'"
_NOT_IN_A_KEY = re.compile(r"[^!-~]|[\"';,\[\]{}]|\A\$(?=\w+\Z)")
"""Characters that HTTP headers cannot carry safely, or that separate keys or expand a variable."""

_BYTES = re.compile(r"\d+(?:\.\d+)?\s*(?:b|[kmgtp](?:i?b)?|([kmgtp]i))?", re.ASCII | re.IGNORECASE)
_ANSWERS = frozenset(["true", "false", "yes", "no", "on", "off", "none", "null", "0", "1"])
"""Answers to yes-or-no settings, which are not keys, hosts or names of folders."""

_DEFAULT_PORTS = {"http": 80, "https": 443}
_ORIGIN_HOST = re.compile(r"(?:\*\.)?(?:[a-z0-9_-]+\.)*[a-z0-9_-]+|\[[0-9a-f:.]+\]")
"""The host of an origin; a leading `*.` matches any subdomain."""
_ORIGIN_FORM = "write SCHEME://HOST[:PORT], as in https://example.org or https://*.example.org"

_ROOT_PATH = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~-]+)*")

_GPU = r"(?:0|[1-9][0-9]*|(?:GPU|MIG)-[A-Za-z0-9_/-]{1,48})"
"""The number of a GPU, or the identifier of a GPU or of a MIG instance."""


@dataclass(frozen=True)
class ApiKey:
    """A secret key, and the name that logs and metrics show instead."""

    name: str
    secret: bytes = field(repr=False)
    is_named: bool = False

    @property
    def owner(self) -> str:
        """Return the configured name, or a digest of the secret.

        Default names are not used: they change with the list. Do not show the digest to callers.
        """
        return self.name if self.is_named else f"key-{hashlib.sha256(self.secret).hexdigest()[:16]}"


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


SERVICE_LINK = "tcp://"
"""Beginning of the values that Kubernetes sets for a Service, such as `VIT_PORT` for `vit`."""

COMMENT = re.compile(r"^#|\s#(\s|$)")
REMOVE_COMMENT = "remove the comment, which is part of the value in an env file"


def remedy_of(written: str) -> str:
    """Return an addition to the message about a wrong value that another program has written."""
    if written.startswith(SERVICE_LINK):
        return "; Kubernetes sets this variable for a Service named vit: set enableServiceLinks off"
    if " #" in written:
        return f"; {REMOVE_COMMENT}"
    return ""


def without_quotes(value: str) -> str:
    """Strip spaces and one pair of enclosing quotes, which env files may keep.

    Several quoted items, as in `"a red car","cat"`, keep their quotes.
    """
    text = value.strip()
    if len(text) < 2 or text[0] not in _QUOTES or text[0] != text[-1]:
        return text
    inner = text[1:-1].strip()
    is_one_item = text[0] not in inner or inner.startswith(("{", "["))
    return inner if is_one_item else text


def _list_items(value: str, noun: str, example: str) -> list[str]:
    """Return the items of a comma-separated or JSON list; a comma may follow the last one."""
    if not value.lstrip().startswith("["):
        parts = [part.strip() for part in value.strip().removesuffix(",").split(",")]
        if not all(parts):
            raise ValueError(f"expected {noun} between commas; one is empty: is a variable unset?")
        return parts
    try:
        items = json.loads(value)
    except (ValueError, RecursionError):
        items = None
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"expected {noun} separated by commas, or a JSON list of them: {example}")
    return [item.strip() for item in items]


def _list_of(parse: Callable[[str], str], noun: str, example: str) -> BeforeValidator:
    """Return the parser of a comma-separated or JSON list, whose items `parse` normalises."""

    def parse_list(value: object) -> object:
        if not isinstance(value, str):
            return value
        return tuple(parse(without_quotes(text)) for text in _list_items(value, noun, example))

    return BeforeValidator(parse_list)


def _origin(text: str) -> str:
    """Return an origin as browsers write it: lower case, without default port and final slash."""
    if text in ("*", "null"):
        return text
    wrong = f"{text!r} is not an origin; {_ORIGIN_FORM}"
    scheme, separator, authority = text.lower().rstrip("/").partition("://")
    host, port = re.fullmatch(r"(.*?)(?::(\d{1,5}))?", authority, re.DOTALL).groups()  # type: ignore[union-attr]
    if not separator or not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        raise ValueError(wrong)
    host = _ascii_host(host)
    if not _ORIGIN_HOST.fullmatch(host) or (port is not None and int(port) > 65535):
        raise ValueError(wrong)
    if port is None or int(port) == _DEFAULT_PORTS.get(scheme):
        return f"{scheme}://{host}"
    return f"{scheme}://{host}:{int(port)}"


def _host_name(text: str) -> str:
    if text == "*":
        return text
    host = _ascii_host(text.lower().removesuffix("."))
    if not _ORIGIN_HOST.fullmatch(host) or host in _ANSWERS:
        raise ValueError(
            f"{text!r} is not a host's name; write it without scheme, port and path: "
            "vit.example.org, or *.example.org"
        )
    return host.strip("[]")


def _ascii_host(host: str) -> str:
    """Return a host with its international names encoded, an empty text if that is impossible."""
    try:
        return host if host.isascii() else host.encode("idna").decode("ascii")
    except UnicodeError:
        return ""


def parse_root_path(value: str) -> str:
    """Return a path prefix with a leading slash and without a final slash; `/` becomes empty."""
    path = value.strip("/")
    prefix = f"/{path}" if path else ""
    if not _ROOT_PATH.fullmatch(prefix):
        raise ValueError(
            "expected a path of letters, digits and ._~- such as /vit, without scheme and host"
        )
    return prefix


def parse_bytes(value: object) -> object:
    """Return a number of bytes in a form that pydantic reads: `8Gi` becomes `8GiB`."""
    if not isinstance(value, str):
        return value
    match = _BYTES.fullmatch(value.strip())
    if match is None:
        raise ValueError("expected bytes, such as 20971520, 20MB or 20MiB")
    return f"{match[0]}B" if match[1] else match[0]


def parse_size(value: object) -> object:
    """Parse `384` or `384x256` (rows x columns) into (rows, columns)."""
    if not isinstance(value, str | int):
        return value
    match = re.fullmatch(r"([0-9]{1,5})(?:x([0-9]{1,5}))?", str(value).strip())
    if match is None:
        raise ValueError("expected pixels like 384, or rows x columns like 384x256")
    return int(match[1]), int(match[2] or match[1])


def _as_text(value: object) -> object:
    """Return a list or table from TOML or JSON as the text that environment variables hold."""
    return json.dumps(value, default=str) if isinstance(value, list | dict) else value


def _from_json(value: object) -> object:
    parsed = value
    if isinstance(value, str):
        try:
            parsed = json.loads(value, object_pairs_hook=unique_names)
        except DuplicateName:
            raise
        except (ValueError, RecursionError):
            parsed = value
    if parsed is None or isinstance(parsed, dict):
        return parsed
    raise ValueError('expected JSON like {"cat": 0.4}')


def _device(value: str) -> str:
    text = re.sub(r"\s*,\s*", ",", value)
    if not re.fullmatch(rf"auto|cpu|all|cuda(:{_GPU})?(,cuda:{_GPU})*", text):
        raise ValueError(
            "expected auto, cpu, all, cuda, cuda:0, cuda:GPU-..., cuda:MIG-... or cuda:0,cuda:1"
        )
    devices = ["cuda:0" if device == "cuda" else device for device in text.split(",")]
    if len(set(devices)) < len(devices):
        raise ValueError("expected each device once")
    return text


def _check_key(secret: str) -> None:
    """Refuse a key that no caller can send, and a list, a path or a word such as `true`.

    The message shows one character, never the key.
    """
    if secret.lower() in _ANSWERS:
        raise ValueError("expected a key; remove the setting to serve without keys")
    if secret.startswith(("/", "@/")) and os.path.exists(secret.removeprefix("@")):  # noqa: PTH110  any text
        raise ValueError('expected a key, not the path of a file: "$(cat FILE)" is its content')
    wrong = _NOT_IN_A_KEY.search(secret)
    if wrong is not None:
        raise ValueError(
            f"a key contains {wrong[0]!r}: separate keys with commas, and use letters, digits and "
            "-._~+/= in them"
        )


def _keys(items: list[str]) -> Iterator[ApiKey]:
    for position, text in enumerate(items, start=1):
        item = without_quotes(text)
        named = _NAMED_KEY.fullmatch(item)
        if named is None and _BEGINS_WITH_NAME.search(item):
            raise ValueError(
                "expected KEY or NAME:KEY; a name has at most 64 letters, digits, - and _"
            )
        name = named[1] if named else f"key{position}"
        secret = without_quotes(named[2]) if named else item
        _check_key(secret)
        yield ApiKey(name, secret.encode(), is_named=named is not None)


def parse_keys(value: object) -> list[ApiKey]:
    """Return the keys of `NAME:KEY` or `KEY`; the first key without a name is called `key1`.

    Raises:
        ValueError: two keys or two names are equal, or a name lacks its key. With unset variables,
            `web:$KEY` would otherwise be a key that can be guessed, and `$ONE,$OTHER` would open
            the service to everybody.
    """
    items: Any = _list_items(value, "keys", _KEY_EXAMPLE) if isinstance(value, str) else value
    if value and not items:
        raise ValueError("expected a key")
    keys = list(_keys(items))
    if not all(key.secret for key in keys):
        raise ValueError("expected a key after each name, as in NAME:KEY")
    names = {key.name for key in keys}
    secrets = {key.secret for key in keys}
    if min(len(names), len(secrets)) < len(keys):
        raise ValueError("expected each name and each key once")
    return keys


def _admin_key(value: SecretStr, info: ValidationInfo) -> SecretStr:
    key = value.get_secret_value().strip()  # a file's line break cannot be sent in a header
    if not key:
        raise ValueError("expected a key")
    _check_key(key)
    if _NAMED_KEY.fullmatch(key):
        raise ValueError("expected a key without a name")
    if key.encode() in [caller_key.secret for caller_key in info.data.get("api_keys", ())]:
        raise ValueError(
            "expected a key that is not in VIT_API_KEYS, because it allows loading of models"
        )
    return SecretStr(key)


def _recent_url(value: SecretStr) -> SecretStr:
    url = value.get_secret_value()
    if url == MEMORY:
        return value
    schemes = sorted(extensions_by_scheme())
    chosen, _, rest = url.partition("://")
    if chosen not in schemes or not rest:
        others = "".join(f" or {scheme}://..." for scheme in schemes)
        raise ValueError(f"expected {MEMORY}{others}")
    try:
        _ = urlsplit(url).port
    except ValueError:
        raise ValueError("expected a port from 0 to 65535 after the host") from None
    return value


def _folder(value: str) -> str:
    if value.lower() in _ANSWERS:
        raise ValueError(
            f"expected the path of a folder; write ./{value} for a folder of this name"
        )
    if "$" in value:
        raise ValueError("expected the path of a folder; a variable after $ is not expanded")
    if "://" in value:
        raise ValueError("expected the path of a folder on this machine, not a URL")
    try:
        path = Path(value).expanduser()
    except RuntimeError:
        raise ValueError(
            f"expected a folder: there is no home folder {value.partition('/')[0]}"
        ) from None
    if os.path.isfile(path):  # noqa: PTH113  `is_file` raises some errors
        raise ValueError("expected the path of a folder; this is a file")
    return value


def _served_name(value: str) -> str:
    if "," in value or value == "*":
        raise ValueError("expected a name without commas, because `model=a,b` names two models")
    if not value.isprintable():
        raise ValueError("expected a name without line breaks and other control characters")
    return value


def _cache_folder(value: str) -> str:
    return "off" if value.lower() == "off" else _folder(value)


def _existing_folder(value: str) -> str:
    path = Path(_folder(value)).expanduser().absolute()
    if not os.path.isdir(path):  # noqa: PTH112  `is_dir` raises some errors
        raise ValueError(f"there is no folder {path}: correct the path, or create it")
    return str(path)


Name = Annotated[str, Field(min_length=1)]
Score = Annotated[float, Field(ge=0, le=1, strict=True)]
Seconds = Annotated[float, Field(ge=0, le=31_536_000, allow_inf_nan=False)]

AdminKey = Annotated[SecretStr, AfterValidator(_admin_key)]
ApiKeys = Annotated[tuple[ApiKey, ...], BeforeValidator(parse_keys), NoDecode]
Device = Annotated[str, AfterValidator(_device)]
Bytes = Annotated[ByteSize, BeforeValidator(parse_bytes)]
Folder = Annotated[Name, AfterValidator(_folder)] | None
ExistingFolder = Annotated[Name, AfterValidator(_existing_folder)] | None
CacheFolder = Annotated[Name, AfterValidator(_cache_folder)] | None
HostNames = Annotated[
    tuple[str, ...], _list_of(_host_name, "hosts", '["vit.example.org"]'), NoDecode
]
ImageSize = Annotated[Size | None, BeforeValidator(parse_size), NoDecode]
ListOrTable = Annotated[Name | None, BeforeValidator(_as_text)]
ListenHosts = Annotated[Name, AfterValidator(parse_listen_hosts)]
Origins = Annotated[
    tuple[str, ...], _list_of(_origin, "origins", '["https://example.org"]'), NoDecode
]
RootPath = Annotated[str, AfterValidator(parse_root_path)]
ServedName = (
    Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_served_name)] | None
)
StoreUrl = Annotated[SecretStr, AfterValidator(_recent_url)]
Thresholds = Annotated[dict[str, Score] | None, BeforeValidator(_from_json), NoDecode]
