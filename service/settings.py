"""Every setting of the service, typed and documented for an operator.

Each is read once at start-up, from the environment (`VIT_PORT`) or a flag of `vitserve serve`
(`--port`), which wins.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from model.errors import first_problem, nearest
from model.layer_config import Size
from service.addresses import is_loopback, parse_listen_hosts, tcp_hosts
from service.errors import SettingsError

ENV_PREFIX = "VIT_"

MEMORY = "memory://"
"""Pictures are kept in the memory of the service."""

PATHS = ("checkpoint", "preprocess", "labels", "keys", "base")
"""Settings of one checkpoint that may name a file."""

_SECRET = frozenset({"admin_key", "api_keys", "recent_url"})
"""Settings whose values are not shown."""


_NAMED_KEY = re.compile(r"([A-Za-z0-9_-]{1,64}):(.*)", re.DOTALL)


@dataclass(frozen=True)
class ApiKey:
    """A key, which is secret, and its name, which logs and metrics show."""

    name: str
    secret: bytes = field(repr=False)
    is_named: bool = False

    @property
    def owner(self) -> str:
        """Return the name that was given, else a digest, as places change; it is not shown, see
        `Examples.owner_of`.
        """
        return self.name if self.is_named else f"key-{hashlib.sha256(self.secret).hexdigest()[:16]}"


_DEFAULT_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"(?:\*\.)?(?:[a-z0-9_-]+\.)*[a-z0-9_-]+|\[[0-9a-f:.]+\]")
"""The host of an origin: `*.` before it stands for any subdomain."""


def _origin(text: str) -> str:
    """Return an origin as browsers write it: in small letters, without the default port and a slash
    at its end.
    """
    if text in ("*", "null"):
        return text
    wrong = f"{text!r} is not an origin; write SCHEME://HOST[:PORT], as in https://example.org or https://*.example.org"
    scheme, separator, authority = text.lower().rstrip("/").partition("://")
    host, port = re.fullmatch(r"(.*?)(?::(\d{1,5}))?", authority, re.DOTALL).groups()  # type: ignore[union-attr]
    if not separator or not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        raise ValueError(wrong)
    try:
        host = host.encode("idna").decode("ascii") if not host.isascii() else host
    except UnicodeError:
        raise ValueError(wrong) from None
    if not _HOST.fullmatch(host) or (port is not None and int(port) > 65535):
        raise ValueError(wrong)
    if port is None or int(port) == _DEFAULT_PORTS.get(scheme):
        return f"{scheme}://{host}"
    return f"{scheme}://{host}:{int(port)}"


def parse_origins(value: object) -> object:
    """Return the origins of a comma-separated or JSON list, as browsers write them; raises
    `ValueError`.
    """
    if not isinstance(value, str):
        return value
    return tuple(
        _origin(without_quotes(text))
        for text in _listed(value, "origins", '["https://example.org"]')
    )


def parse_hosts(value: object) -> object:
    """Return the names of a comma-separated or JSON list in small letters; raises `ValueError`."""
    if not isinstance(value, str):
        return value
    hosts = [
        without_quotes(text).lower().removesuffix(".")
        for text in _listed(value, "hosts", '["vit.example.org"]')
    ]
    for host in hosts:
        if host != "*" and not _HOST.fullmatch(host):
            raise ValueError(
                f"{host!r} is not a host's name; write it without scheme, port and path: vit.example.org"
            )
    return tuple(host.strip("[]") for host in hosts)


_ROOT_PATH = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~-]+)*")


def parse_root_path(value: str) -> str:
    """Return a path prefix with a slash before and none behind it, empty for `/`; raises
    `ValueError`.
    """
    path = value.strip("/")
    prefix = f"/{path}" if path else ""
    if not _ROOT_PATH.fullmatch(prefix):
        raise ValueError(
            "expected a path of letters, digits and ._~- such as /vit, without scheme and host"
        )
    return prefix


def parse_size(value: object) -> object:
    """Parse `384` or `384x256` (rows x columns)."""
    if not isinstance(value, str | int):
        return value
    match = re.fullmatch(r"(\d{1,5})(?:x(\d{1,5}))?", str(value).strip())
    if match is None:
        raise ValueError("expected pixels like 384, or rows x columns like 384x256")
    return int(match[1]), int(match[2] or match[1])


def _as_text(value: object) -> object:
    """Return a list, as TOML and JSON may have it, as the text that environment variables hold."""
    return json.dumps(value) if isinstance(value, list) else value


def _from_json(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise ValueError('expected JSON like {"cat": 0.4}') from None


_GPU = r"(?:\d+|(?:GPU|MIG)-[\w/-]{1,48})"
"""A GPU's number, or the identifier of a GPU or of an instance of MIG."""


def _device(value: str) -> str:
    if not re.fullmatch(rf"auto|cpu|all|cuda(:{_GPU})?(,cuda:{_GPU})*", value):
        raise ValueError(
            "expected auto, cpu, all, cuda, cuda:0, cuda:GPU-..., cuda:MIG-... or cuda:0,cuda:1"
        )
    devices = ["cuda:0" if device == "cuda" else device for device in value.split(",")]
    if len(set(devices)) < len(devices):
        raise ValueError("expected each device once")
    return value


_QUOTES = "\"'"
_NOT_IN_A_KEY = re.compile(r"[\x00-\x20\x7f\"'\u2018-\u201d;,\[\]]")
"""Characters of a list that was written another way, and those that no header can carry."""


def without_quotes(value: str) -> str:
    """Return a value without the spaces around it and without one pair of enclosing quotes, which
    env files may keep.

    Several quoted items, as in `"a red car","cat"`, keep their quotes.
    """
    text = value.strip()
    if len(text) < 2 or text[0] not in _QUOTES or text[0] != text[-1]:
        return text
    inner = text[1:-1].strip()
    is_one_item = text[0] not in inner or inner.startswith(("{", "["))
    return inner if is_one_item else text


def _check_key(secret: str) -> None:
    """Refuse a key that no caller can send, or that is a list written another way; the key itself
    is not shown.
    """
    wrong = _NOT_IN_A_KEY.search(secret)
    if wrong is not None:
        raise ValueError(
            f"a key contains {wrong[0]!r}; separate keys with commas, and use letters, digits and -._~+/= in them"
        )


def _listed(value: str, noun: str, example: str) -> list[str]:
    """Return the items of a list that is comma-separated or JSON."""
    if not value.lstrip().startswith("["):
        return [part.strip() for part in value.split(",") if part.strip()]
    try:
        items = json.loads(value)
    except (ValueError, RecursionError):
        items = None
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"expected {noun} separated by commas, or a JSON list of them: {example}")
    return [item.strip() for item in items]


def parse_keys(value: object) -> list[ApiKey]:
    """Return the keys of `NAME:KEY` or `KEY`; a key without a name is called by its place: `key1`
    is the first.

    Raises:
        ValueError: two keys have the same name, or are the same, or a name has no key: `web:$KEY`
            of a variable that is not set would otherwise be a key that can be guessed. So does
            `$ONE,$OTHER` not mean that all may call.
    """
    written: Any = (
        _listed(value, "keys", '["web:KEY1", "KEY2"]') if isinstance(value, str) else value
    )
    if value and not written:
        raise ValueError("expected a key")
    keys = []
    for place, text in enumerate(written, start=1):
        item = without_quotes(text)
        named = _NAMED_KEY.fullmatch(item)
        name = named[1] if named else f"key{place}"
        secret = without_quotes(named[2]) if named else item
        _check_key(secret)
        keys.append(ApiKey(name, secret.encode(), is_named=named is not None))
    if not all(key.secret for key in keys):
        raise ValueError("expected a key after each name, as in NAME:KEY")
    if min(len({key.name for key in keys}), len({key.secret for key in keys})) < len(keys):
        raise ValueError("expected each name and each key once")
    return keys


def _admin_key(value: SecretStr, info: ValidationInfo) -> SecretStr:
    key = value.get_secret_value().strip()  # a file's line break, which no header could bring
    if not key:
        raise ValueError("expected a key")
    _check_key(key)
    if key.encode() in [each.secret for each in info.data.get("api_keys", ())]:
        raise ValueError(
            "expected a key that is none of VIT_API_KEYS: whoever has it decides what is served"
        )
    return SecretStr(key)


def _recent_url(value: SecretStr) -> SecretStr:
    url = value.get_secret_value()
    if url != MEMORY and not re.match(r"(rediss?|unix)://.", url):
        raise ValueError(f"expected {MEMORY}, redis://HOST, rediss://HOST or unix://PATH")
    try:
        _ = urlsplit(url).port
    except ValueError:
        raise ValueError("expected a port from 0 to 65535 after the host") from None
    if url != MEMORY and not _is_installed("redis"):
        raise ValueError("it needs the package redis: pip install 'vitserve[redis]'")
    return value


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even what it is a part of
        return False


def _of_known_home(value: str | None) -> str | None:
    try:
        Path(value or "").expanduser()
    except RuntimeError:
        raise ValueError(
            "expected a folder: the home folder before its first / is not known"
        ) from None
    return value


def _grpc_port(value: int, info: ValidationInfo) -> int:
    if value and value == info.data.get("port"):
        raise ValueError("expected another port than VIT_PORT")
    if not tcp_hosts(info.data.get("host", "127.0.0.1").split(",")):
        raise ValueError(
            "gRPC needs a host beside the Unix socket, as in VIT_HOST=unix:/PATH,127.0.0.1"
        )
    # An older one does not bound the memory that callers without a key may take.
    found = importlib.metadata.version("grpcio").split(".") if _is_installed("grpc") else []
    if [int(part) for part in found[:2]] < [1, 81]:
        raise ValueError("it needs grpcio 1.81 or newer: pip install 'vitserve[grpc]'")
    return value


Seconds = Annotated[float, Field(ge=0, le=31_536_000, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]
Score = Annotated[float, Field(ge=0, le=1)]


class ModelSettings(BaseModel):
    """The settings that are of one checkpoint: what a `NAME.toml` of the folder of models may say."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: Name = Field(
        "bundled",
        description="`bundled`, a folder, a file, or a hub id `owner/name[@revision][:subfolder]`",
    )
    preprocess: Name | None = Field(
        None,
        description="JSON, a file of it, or a preset's name, for formats that carry no preprocessing. "
        "Default: the checkpoint's",
    )
    labels: Annotated[Name | None, BeforeValidator(_as_text)] = Field(
        None,
        description='names, comma-separated (`cat,dog,"a red car"`) or a JSON array; a file with one a line, JSON, CSV '
        "or a data set's YAML; `imagenet-1k` or `numbers`. Default: the checkpoint's",
    )
    activation: Literal["softmax", "sigmoid"] | None = Field(
        None,
        description="what makes scores of logits: `sigmoid` for a model of several labels a picture, whose files do "
        "not say so. Default: the checkpoint's",
    )
    architecture: Name | None = Field(
        None,
        description="for plain state dicts: timm's name of the architecture, or `vit` for the tensors' own sizes, and "
        "arguments after commas. Default: the checkpoint's",
    )
    base: Name | None = Field(
        None,
        description="checkpoint that a LoRA folder adapts. Default: the one that the folder names",
    )
    keys: Name | None = Field(
        None,
        description="TOML file that maps the names of a state dict, and says which copy of a network is served",
    )
    image_size: Annotated[Size | None, BeforeValidator(parse_size), NoDecode] = Field(
        None,
        description="`384` or `384x256` (rows x columns); position embeddings are resized. Default: the checkpoint's",
    )
    coverage: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="`0.95`: answers have the set of labels that holds the right one for 95 % of pictures like those "
        "that `vitserve calibrate` was given, or `abstained`: for callers who prefer no answer to a wrong one",
    )
    thresholds: Annotated[dict[str, Score] | None, BeforeValidator(_from_json), NoDecode] = Field(
        None,
        description='`{"cat": 0.4}`: least scores of predictions, by label; see docs/models.md',
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="`auto`: the fastest dtype native to the device; where the model overflows in float16, float32. "
        "`bfloat16` is refused where it is only emulated",
    )


class Settings(ModelSettings, BaseSettings):
    """All settings; see each field's description."""

    # No `env_file`: nothing is read behind the operator's back.
    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", env_ignore_empty=True
    )

    # The model, or several.
    models: Name | None = Field(
        None,
        description="folder of models, instead of `checkpoint`: each folder, file of weights or `NAME.toml` is one",
    )
    models_bytes: ByteSize | None = Field(
        None,
        gt=0,
        description="memory of all backbones, on each device; beyond it they are unloaded, least recently "
        "used first, but the default model's",
    )
    teach: Name | None = Field(
        None,
        description="folder of taught heads, made if absent; without it nothing is taught. See docs/teach.md",
    )
    teach_thumbnails: bool = Field(
        False,
        description="whether the name of an example's file and a picture of 64 pixels are kept with it, for the page; "
        "else of a picture only its features are. `make run` sets it",
    )
    strict: bool = Field(
        False, description="whether a broken entry of `models` ends the start, or is logged alone"
    )
    model_name: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="name in answers, metrics and /v2; with `models` which of them is the default, which may not be "
        "deleted. Default: the checkpoint's, or the first by name",
    )

    # What computes it, and how.
    device: Annotated[str, AfterValidator(_device)] = Field(
        "auto",
        description="`auto`, `cpu`, `cuda`, `cuda:0` or `cuda:0,cuda:1` (one engine a device), `all` GPUs and "
        "instances of MIG, or a device by its identifier: `cuda:MIG-...`. Numbers count the visible devices",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="`auto`: on a CPU OpenVINO where it is installed, else torch; on a GPU torch.compile, and one CUDA "
        "graph a batch size. `on`: torch.compile, on a CPU too. `off`: plain torch. A failure is logged, and shown by "
        "/model",
    )
    cache_dir: Annotated[Name | None, AfterValidator(_of_known_home)] = Field(
        None,
        description="folder that keeps OpenVINO's graphs and torch's compiled kernels for the next start, or `off`. "
        "`TORCHINDUCTOR_CACHE_DIR` may name another one for kernels. Default: `vitserve` in the "
        "user's cache folder (`XDG_CACHE_HOME`, or `~/.cache`); a volume in the container",
    )

    # Where it listens.
    host: Annotated[Name, AfterValidator(parse_listen_hosts)] = Field(
        "127.0.0.1",
        description="addresses to listen on, comma-separated: IP addresses, names, `::` for all of IPv4 and IPv6, or "
        "`unix:/PATH` for a socket; `0.0.0.0` in the container",
    )
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 picks a free port")
    grpc_port: Annotated[int, Field(ge=0, le=65535), AfterValidator(_grpc_port)] | None = Field(
        None,
        description="port of the Open Inference Protocol over gRPC, on the same host; 0 picks a free port. It needs "
        "the extra `grpc`. Default: no gRPC",
    )
    workers: int = Field(
        1,
        ge=1,
        le=256,
        description="web processes; with several, and on a GPU, each engine is a process of its own. Default: 1; on "
        "a GPU half of the cores, at most 24 a GPU",
    )

    keep_alive: Annotated[float, Field(ge=1, le=86_400, allow_inf_nan=False)] = Field(
        75,
        description="seconds that a connection may be idle after an answer: longer than the load balancer keeps it",
    )

    root_path: Annotated[str, AfterValidator(parse_root_path)] = Field(
        "",
        description="path prefix under which a proxy shows the service, `/vit`, whether it cuts it off or not. "
        "`X-Forwarded-Prefix` of a proxy in FORWARDED_ALLOW_IPS counts before it",
    )

    # Batches and the queue.
    max_batch: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="largest batch. Default: 8 on the CPU, 64 on CUDA, or less where memory is short",
    )
    max_delay_ms: Annotated[float, Field(ge=0, le=10_000, allow_inf_nan=False)] = Field(
        0,
        description="hold an incomplete batch back until its oldest image is this old; 0 never waits",
    )
    queue_size: int = Field(
        256,
        ge=1,
        le=1_000_000,
        description="images in the service at once, over all workers: received, decoded, queued or computed; more are "
        "refused (503). Default: 256, or two largest batches a stream of each device where that is more",
    )
    request_timeout: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = Field(
        10,
        description="seconds from the request's head; an image that is not launched by then is answered 504, an "
        "incomplete body 408",
    )

    # What may be sent.
    max_upload_bytes: ByteSize = Field(
        ByteSize(20 << 20),
        gt=0,
        description="bytes of a file, else 413; `20MiB` and `20MB` work too",
    )
    max_request_bytes: ByteSize = Field(
        ByteSize(128 << 20), gt=0, description="bytes of a request's body, else 413"
    )
    max_image_pixels: int = Field(
        64_000_000,
        ge=1,
        description="pixels of a picture, else 413; decoding takes up to 6.5 bytes for each",
    )
    max_images_per_request: int = Field(
        64, ge=1, description="files of one POST /classify/batch, else 413"
    )
    scaled_decode: bool = Field(
        True, description="decode large JPEGs at 1/2, 1/4 or 1/8, never below twice the target size"
    )

    # Who may ask.
    api_keys: Annotated[tuple[ApiKey, ...], BeforeValidator(parse_keys), NoDecode] = Field(
        (),
        description="comma-separated or a JSON list, each KEY or NAME:KEY; when set, `Authorization: Bearer KEY` is "
        "needed",
    )
    key_max_requests: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="requests in flight that each key may have, over all workers; 0: no limit",
    )
    admin_key: Annotated[SecretStr, AfterValidator(_admin_key)] | None = Field(
        None,
        description="key of PUT and DELETE /models/NAME, of DELETE /heads/NAME and of /v2/repository: who has it "
        "decides what is served",
    )
    checkpoint_folder: Name | None = Field(
        None,
        description="folder below which such a request may name a checkpoint; without it none is named. Files that a "
        "`NAME.toml` of `models` names may lie below it, too",
    )
    metrics_public: bool = Field(True, description="whether /metrics is open when keys are set")

    allowed_hosts: Annotated[tuple[str, ...], BeforeValidator(parse_hosts), NoDecode] = Field(
        (),
        description="comma-separated names in `Host` that are served besides IP addresses, else 421: "
        "`vit.example.org`, `*.example.org`, or `*` for any. Default: `localhost` and `*.localhost` where `host` is a "
        "loopback address, else any",
    )

    # Pictures that are kept.
    recent_ttl: Seconds = Field(
        600,
        description="seconds that a picture, as the model saw it, is kept for GET /attention; 0 keeps none",
    )
    recent_bytes: ByteSize = Field(
        ByteSize(256 << 20),
        ge=0,
        description="memory for kept pictures, oldest out first; 0 keeps none",
    )

    recent_url: Annotated[SecretStr, AfterValidator(_recent_url)] = Field(
        SecretStr(MEMORY),
        description="where pictures are kept: in the service, or by `redis://...` for all replicas together. "
        "Default: `memory://`",
    )

    # How it stops, and the rest.
    drain_delay: Seconds = Field(
        2,
        description="seconds after SIGTERM during which new work is still served, while /readyz is 503 so that load "
        "balancers look away",
    )
    drain_timeout: Seconds = Field(
        30, description="seconds after SIGTERM at which the process ends at the latest"
    )
    cors_origins: Annotated[tuple[str, ...], BeforeValidator(parse_origins), NoDecode] = Field(
        (),
        description="comma-separated origins that browsers may call from: `https://example.org`, "
        "`https://*.example.org` for its subdomains, or `*` for any",
    )
    log_format: Literal["text", "json"] = Field("text", description="`json`: one object a line")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe message logged"
    )

    @field_validator("*", mode="before")
    @classmethod
    def _without_quotes(cls, value: object) -> object:
        """Clean every value as an env file may have left it."""
        if not isinstance(value, str) or not value:
            return value
        cleaned = without_quotes(value)
        if not cleaned:
            raise ValueError("expected a value; remove the setting to use its default")
        return cleaned

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the devices, of which each has an engine."""
        return tuple(self.device.split(","))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the addresses to listen on; see `service.addresses`."""
        return tuple(self.host.split(","))

    @property
    def is_local(self) -> bool:
        """Return whether the service listens on loopback addresses and Unix sockets alone."""
        return all(is_loopback(host) for host in self.hosts)

    @property
    def served_hosts(self) -> tuple[str, ...]:
        """Return the names in `Host` that are served; see `service.web.origins`."""
        if self.allowed_hosts:
            return self.allowed_hosts
        return ("localhost", "*.localhost") if self.is_local else ("*",)

    @property
    def one_process(self) -> bool:
        """Return whether web worker and engine share the only process."""
        return self.workers == 1 and len(self.devices) == 1


def described(name: str) -> tuple[str, str]:
    """Return the meaning of a setting and its default in words, `none` if it has none."""
    field = Settings.model_fields[name]
    meaning, _, default = str(field.description).partition(". Default: ")
    if isinstance(field.default, ByteSize):
        default = f"{field.default // 2**20}MiB"
    elif field.default is not None and field.default != () and not default:
        default = (
            str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        )
    return meaning, default or "none"


def load_settings(flags: Mapping[str, Any] | None = None) -> Settings:
    """Read the settings from the environment and the flags that were given, field name to value.

    Raises:
        SettingsError: one line that names the setting, the value and what is allowed.
    """
    try:
        return Settings(**(flags or {}))
    except ValidationError as error:
        where, _, message = first_problem(error).partition(": ")
        name = where.split(".")[0]
        variable = f"{ENV_PREFIX}{name.upper()}"
        # The value as the operator wrote it, before any parsing.
        written = (flags or {}).get(name, os.environ.get(variable, error.errors()[0]["input"]))
        value = "***" if name in _SECRET else repr(written)
        raise SettingsError(f"{variable}={value}: {message[:1].lower()}{message[1:]}") from None


_EXPORTERS = {
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
}
"""OpenTelemetry's variables that choose an exporter, and the value for which one is installed."""


def exports_spans(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether spans are exported: OpenTelemetry's variables ask for it, and the extra `otel`
    is installed.

    Raises:
        SettingsError: they ask for an exporter that is not there.
    """
    exporter = environment.get("OTEL_TRACES_EXPORTER")
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    wanted = exporter or any(environment.get(name) for name in endpoints)
    disabled = (
        exporter == "none" or environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    )
    if not wanted or disabled or not _is_installed("opentelemetry.instrumentation.asgi"):
        return False
    for name, allowed in _EXPORTERS.items():
        if environment.get(name, "") not in ("", allowed):
            raise SettingsError(f"{name}={environment[name]!r}: expected {allowed}")
    return True


def variable_warnings(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a line for each variable that is not a setting, with the nearest name, and for each
    with kept quotes.
    """
    known = [name.upper() for name in Settings.model_fields]
    lines = []
    for variable in sorted(environment):
        if not variable.upper().startswith(ENV_PREFIX):
            continue
        name = variable.upper().removeprefix(ENV_PREFIX)
        value = environment[variable].strip()
        if name not in known:
            near = nearest(name, known, 0.75)
            meant = f": did you mean {ENV_PREFIX}{near}?" if near else ""
            lines.append(f"{variable} is not a setting and is ignored{meant}")
        elif without_quotes(value) != value:
            lines.append(
                f"{variable}: the quotes around its value are ignored; remove them from the env file"
            )
    return lines
