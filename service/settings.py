"""The settings of the service.

Each setting is read once at start-up, from a flag of `vitserve serve` (`--port`) or else from the
environment (`VIT_PORT`). Extensions add fields of their own: `settings_class` has them all.
"""

import os
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    BaseModel,
    ByteSize,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings import SettingsError as UnreadableSetting

from model.errors import ExtensionError, first_problem
from model.extension import CORE, claim, resolve
from service.addresses import is_loopback
from service.errors import SettingsError
from service.extension import Extension, extensions
from service.model_settings import ModelSettings
from service.setting_values import (
    COMMENT,
    MEMORY,
    REMOVE_COMMENT,
    AdminKey,
    ApiKey,
    ApiKeys,
    Bytes,
    CacheFolder,
    Device,
    ExistingFolder,
    HostNames,
    ListenHosts,
    Name,
    Origins,
    RootPath,
    Seconds,
    ServedName,
    StoreUrl,
    remedy_of,
    without_quotes,
)

ENV_PREFIX = "VIT_"


class Settings(ModelSettings, BaseSettings):
    """The settings of the core; each field has its description."""

    # No `env_file`: an operator sees every source of a setting.
    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", env_ignore_empty=True
    )

    # Models.
    models: Name | None = Field(
        None,
        description="folder of models, instead of `checkpoint`: each folder, file of weights or "
        "`NAME.toml` is a model",
    )
    models_bytes: Bytes | None = Field(
        None,
        gt=0,
        description="memory of all backbones on each device; above it the least recently used "
        "ones are unloaded, except the default model's",
    )
    strict: bool = Field(
        False, description="end the start if an entry of `models` is broken, instead of logging it"
    )
    model_name: ServedName = Field(
        None,
        description="name in answers and metrics; with `models`, the default model, which "
        "cannot be deleted. Default: the checkpoint's, or the first by name",
    )

    # Computation.
    device: Device = Field(
        "auto",
        description="`auto`, `cpu`, `cuda`, `cuda:0` or `cuda:0,cuda:1` (one engine per device), "
        "`all` GPUs and MIG instances, or an identifier: `cuda:MIG-...`. Numbers "
        "count the visible devices",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="`auto`: OpenVINO on a CPU if it is installed, else torch; torch.compile "
        "and one CUDA graph per batch size on a GPU. `on`: torch.compile, on a CPU "
        "too. `off`: plain torch. A failure is logged and shown by /model",
    )
    cache_dir: CacheFolder = Field(
        None,
        description="folder that keeps OpenVINO's graphs and torch's compiled kernels for the "
        "next start, or `off`. `TORCHINDUCTOR_CACHE_DIR` may name another folder "
        "for kernels. Default: `vitserve` in the user's cache folder "
        "(`XDG_CACHE_HOME`, or `~/.cache`); a volume in the container",
    )

    # Addresses.
    host: ListenHosts = Field(
        "127.0.0.1",
        description="comma-separated addresses to listen on: IP addresses, names, `::` for all "
        "of IPv4 and IPv6, or `unix:/PATH` for a socket; `0.0.0.0` in the container",
    )
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 picks a free port")
    workers: int = Field(
        1,
        ge=1,
        le=256,
        description="web processes; with several, and on a GPU, each engine runs in a process "
        "of its own. Default: 1; on a GPU half of the cores, at most 24 per GPU",
    )

    keep_alive: Annotated[float, Field(ge=1, le=86_400, allow_inf_nan=False)] = Field(
        75,
        description="seconds that a connection may stay idle after an answer; set it above the "
        "load balancer's idle timeout",
    )

    root_path: RootPath = Field(
        "",
        description="path prefix of the service behind a proxy, `/vit`, whether the proxy "
        "strips it or not. `X-Forwarded-Prefix` from a proxy in FORWARDED_ALLOW_IPS "
        "takes precedence",
    )

    # Batches, queue.
    max_batch: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="largest batch. Default: 8 on the CPU, 64 on CUDA, or less if memory is short",
    )
    max_delay_ms: Annotated[float, Field(ge=0, le=10_000, allow_inf_nan=False)] = Field(
        0,
        description="milliseconds that an incomplete batch waits, counted from its oldest "
        "image; 0 never waits",
    )
    queue_size: int = Field(
        256,
        ge=1,
        le=1_000_000,
        description="images in the service at once, over all workers: received, decoded, queued "
        "or computed; further ones are refused (503). Default: 256, or two largest "
        "batches for each stream of each device, if that is more",
    )
    request_timeout: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = Field(
        10,
        description="seconds from the request's headers. An image that no batch has started by "
        "then gets 504, an incomplete body 408",
    )

    # Limits of requests.
    max_upload_bytes: Bytes = Field(
        ByteSize(20 << 20),
        gt=0,
        description="bytes of a file, else 413",
    )
    max_request_bytes: Bytes = Field(
        ByteSize(128 << 20), gt=0, description="bytes of a request's body, else 413"
    )
    max_image_pixels: int = Field(
        64_000_000,
        ge=1,
        description="pixels of a picture, else 413; decoding takes up to 6.5 bytes per pixel",
    )
    max_images_per_request: int = Field(64, ge=1, description="pictures of one request, else 413")
    scaled_decode: bool = Field(
        True, description="decode large JPEGs at 1/2, 1/4 or 1/8, never below twice the target size"
    )

    # Callers.
    api_keys: ApiKeys = Field(
        (),
        description="comma-separated or a JSON list, each KEY or NAME:KEY; if set, requests "
        "need `Authorization: Bearer KEY`",
    )
    key_max_requests: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="requests in flight for each key, over all workers; 0: no limit",
    )
    admin_key: AdminKey | None = Field(
        None,
        description="the holder of this key chooses the served models: PUT and DELETE /models/NAME",
    )
    checkpoint_folder: ExistingFolder = Field(
        None,
        description="folder of the checkpoints that requests with `admin_key` may name; without "
        "it they may not name a checkpoint. A `NAME.toml` of `models` may name files in it, too",
    )
    metrics_public: bool = Field(True, description="serve /metrics without a key if keys are set")

    allowed_hosts: HostNames = Field(
        (),
        description="comma-separated names accepted in `Host` besides IP addresses, else 421: "
        "`vit.example.org`, `*.example.org`, or `*` for any. Default: `localhost` "
        "and `*.localhost` if `host` is a loopback address, else any",
    )

    # Kept pictures.
    recent_ttl: Seconds = Field(
        600,
        description="seconds that a picture, as the model saw it, is kept for GET /attention; 0 "
        "keeps no pictures",
    )
    recent_bytes: Bytes = Field(
        ByteSize(256 << 20),
        ge=0,
        description="memory for kept pictures, oldest out first; 0 keeps no pictures",
    )

    recent_url: StoreUrl = Field(
        SecretStr(MEMORY),
        description="store of kept pictures: the service's memory, or a URL. Default: `memory://`",
    )

    # Shutdown, browsers, logs.
    drain_delay: Seconds = Field(
        2,
        description="seconds after SIGTERM during which new requests are still served while "
        "/readyz is 503, so that load balancers choose other replicas",
    )
    drain_timeout: Seconds = Field(
        30, description="seconds after SIGTERM until the process ends at the latest"
    )
    cors_origins: Origins = Field(
        (),
        description="comma-separated origins that browsers may call from: "
        "`https://example.org`, `https://*.example.org` for its subdomains, or `*` "
        "for any",
    )
    log_format: Literal["text", "json"] = Field("text", description="`json`: one object per line")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest severity that is logged"
    )

    @field_validator("*", mode="before")
    @classmethod
    def _without_quotes(cls, value: object, info: ValidationInfo) -> object:
        """Remove the quotes that an env file may keep; refuse an empty value of a flag."""
        if not isinstance(value, str) or value == cls.model_fields[info.field_name or ""].default:
            return value
        cleaned = without_quotes(value)
        if not cleaned:
            raise ValueError("expected a value; remove the setting to use its default")
        return cleaned

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices; each has an engine."""
        return tuple(self.device.split(","))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The addresses to listen on; see `service.addresses`."""
        return tuple(self.host.split(","))

    @property
    def is_local(self) -> bool:
        """Whether the service listens on loopback addresses and Unix sockets only."""
        return all(is_loopback(host) for host in self.hosts)

    @property
    def served_hosts(self) -> tuple[str, ...]:
        """The names accepted in `Host`; see `service.web.origins`."""
        if self.allowed_hosts:
            return self.allowed_hosts
        return ("localhost", "*.localhost") if self.is_local else ("*",)

    @property
    def one_process(self) -> bool:
        """Whether the web worker and the engine share one process."""
        return self.workers == 1 and len(self.devices) == 1


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    return f"{ENV_PREFIX}{name.upper()}"


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


@cache
def settings_class() -> type[Settings]:
    """Return `Settings` with the fields of all installed extensions.

    Raises:
        ExtensionError: an extension's settings cannot be loaded, or have the name of others.
    """
    owners = dict.fromkeys(map(variable_of, [*dir(Settings), *Settings.model_fields]), CORE)
    added = []
    for extension in extensions():
        if extension.settings is None:
            continue
        fields = resolve(extension.settings, extension)
        if not (isinstance(fields, type) and issubclass(fields, BaseModel)):
            raise ExtensionError(
                f"the extension {extension.name!r}: {extension.settings} is not a pydantic model"
            )
        claim(map(variable_of, fields.model_fields), "the setting", extension, owners)
        _require_optional(fields, extension)
        added.append(fields)
    bases: Any = (*added, Settings)
    combined = cast(type[Settings], create_model("AllSettings", __base__=bases))
    for extension in extensions():
        for name in extension.notes:
            if name not in combined.model_fields:
                raise ExtensionError(
                    f"the extension {extension.name!r}: `notes` names the unknown setting {name!r}"
                )
    return combined


def _require_optional(fields: type[BaseModel], extension: Extension) -> None:
    """Raise `ExtensionError` if these fields would end each start, or change other settings."""
    required = [name for name, field in fields.model_fields.items() if field.is_required()]
    if required:
        raise ExtensionError(
            f"the extension {extension.name!r}: the setting {variable_of(required[0])} has no "
            "default: give it one, such as None"
        )
    options = fields.model_config.keys() - Settings.model_config.keys()
    if options:
        raise ExtensionError(
            f"the extension {extension.name!r}: {min(options)!r} in the `model_config` of "
            f"{extension.settings} would apply to all settings: remove it"
        )


ExtensionSettings = TypeVar("ExtensionSettings", bound=BaseModel)


def settings_of(settings: Settings, fields: type[ExtensionSettings]) -> ExtensionSettings:
    """Return the settings as an extension sees them, with its own fields."""
    assert isinstance(settings, fields), "load_settings includes the fields of each extension"
    return settings


def _is_secret(name: str) -> bool:
    """Return whether messages hide the value: its type is a secret, perhaps optional or a list."""
    if name not in settings_class().model_fields:
        return False
    written_type = repr(settings_class().model_fields[name].annotation)
    return SecretStr.__name__ in written_type or ApiKey.__name__ in written_type


def load_settings(flags: Mapping[str, Any] | None = None, *, are_typed: bool = False) -> Settings:
    """Read the settings from flags, by field name, and from the environment.

    Args:
        are_typed: whether the operator typed the flags; errors then name the flag.

    Raises:
        SettingsError: names the setting, its value and the allowed values in one line.
    """
    for name in settings_class().model_fields.keys() - (flags or {}).keys():
        value = os.environ.get(variable_of(name), "")
        if COMMENT.search(value):
            raise SettingsError(
                f"{variable_of(name)}={_shown(name, value)}: {REMOVE_COMMENT}; "
                f"if it is none, use {flag_of(name)}"
            )
    try:
        return settings_class()(**(flags or {}))
    except UnreadableSetting as error:  # of a list or dictionary
        name = str(error).split('"')[1]
        written = os.environ.get(variable_of(name))
        raise SettingsError(f"{variable_of(name)}={written!r}: expected JSON") from None
    except ValidationError as error:
        where, _, message = first_problem(error).partition(": ")
        name = where.split(".")[0]
        variable = variable_of(name)
        # The operator's text, before any parsing.
        written = (flags or {}).get(name, os.environ.get(variable, error.errors()[0]["input"]))
        message = f"{message[:1].lower()}{message[1:]}{remedy_of(str(written))}"
        is_flag = are_typed and flags is not None and name in flags
        source = flag_of(name) if is_flag else variable
        raise SettingsError(f"{source}={_shown(name, written)}: {message}") from None


def _shown(name: str, written: object) -> str:
    """Return the value of a setting for a message, which hides secrets."""
    return "***" if _is_secret(name) else repr(written)
