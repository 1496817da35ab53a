"""Warnings and errors about settings without an effect, or with an unintended one."""

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping, MutableMapping

from model.errors import nearest
from service.addresses import UNIX
from service.errors import SettingsError
from service.setting_values import SERVICE_LINK, without_quotes
from service.settings import ENV_PREFIX, Settings, settings_class, variable_of

_NEEDS = {
    "key_max_requests": ("api_keys",),
    "metrics_public": ("api_keys",),
    "checkpoint_folder": ("admin_key", "models"),
    "strict": ("models",),
    "models_bytes": ("models",),
}
"""Settings that have no effect unless one of these others is set."""

_LIKENESS = 0.75
"""Lowest ratio of difflib at which an unknown variable resembles a setting."""

_MAX_LIKELY = 3
"""Most settings that a warning suggests for an unknown variable."""

_PRODUCT = "VITSERVE"
"""A prefix that operators may write instead of `VIT`."""


def unused_warnings(settings: Settings) -> list[str]:
    """Return a warning for each setting that has no effect because of another setting."""
    lines = []
    for name, needed in _NEEDS.items():
        if name in settings.model_fields_set and not any(
            getattr(settings, other, None) for other in needed
        ):
            others = " or ".join(variable_of(other) for other in needed)
            lines.append(f"{variable_of(name)} has no effect without {others}")
    if settings.drain_delay and settings.drain_delay >= settings.drain_timeout:
        lines.append(
            f"VIT_DRAIN_TIMEOUT={settings.drain_timeout:g} ends the process before "
            f"VIT_DRAIN_DELAY={settings.drain_delay:g} has passed: requests are cut off"
        )
    if settings.max_upload_bytes > settings.max_request_bytes:
        lines.append(
            f"VIT_MAX_UPLOAD_BYTES={settings.max_upload_bytes} has no effect above "
            f"VIT_MAX_REQUEST_BYTES={settings.max_request_bytes}"
        )
    return lines


def take_platform_port(flags: Collection[str], environment: MutableMapping[str, str]) -> list[str]:
    """Set VIT_PORT to PORT, which hosting platforms set, unless the operator chose a port.

    Args:
        flags: names of the settings that flags set.

    Returns:
        The warning that says whether PORT has an effect; none without PORT.
    """
    port = environment.get("PORT", "")
    if not port or "port" in flags or environment.get("VIT_PORT") == port:
        return []
    if environment.get("VIT_PORT"):
        return [f"PORT={port} is ignored, because VIT_PORT={environment['VIT_PORT']} is set"]
    if not re.fullmatch(r"[0-9]{1,5}", port):
        return [f"PORT={port!r:.50} is not a port and is ignored; set VIT_PORT"]
    environment["VIT_PORT"] = port
    return [f"listening on PORT={port}, because VIT_PORT is not set"]


def proxy_warnings(environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each item of FORWARDED_ALLOW_IPS that never matches a caller."""
    lines = []
    for item in environment.get("FORWARDED_ALLOW_IPS", "").split(","):
        proxy = item.strip()
        if proxy in ("", "*", UNIX):
            continue
        try:
            ipaddress.ip_network(proxy)
        except ValueError:
            lines.append(
                f"FORWARDED_ALLOW_IPS: {proxy!r} is not an IP address, a network such as "
                f"10.0.0.0/8, `*` or `{UNIX}`, and trusts no proxy"
            )
    return lines


def check_variables(settings: Settings, environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each value with kept quotes, and for each unknown `VIT_` variable.

    Raises:
        SettingsError: an unknown variable resembles a setting.
    """
    names = [name.upper() for name in settings_class().model_fields]
    lines = []
    for variable in sorted(environment):
        prefix, _, name = variable.upper().replace("-", "_").partition("_")
        value = environment[variable].strip()
        if f"{prefix}_" != ENV_PREFIX and not (prefix == _PRODUCT and name in names):
            continue
        if value.startswith(SERVICE_LINK):
            continue
        if variable.upper() == f"{ENV_PREFIX}{name}" and name in names:
            if without_quotes(value) != value:
                lines.append(
                    f"{variable}: the quotes around its value are ignored; "
                    "remove them from the env file"
                )
            continue
        hint = ""
        if not (variable == "VIT_API_KEY" and settings.api_keys):  # clients read it
            near = nearest(name, names, _LIKENESS)
            if near and value:
                raise SettingsError(
                    f"{variable} is not a setting: did you mean {variable_of(near)}? "
                    "If not, unset it"
                )
            likely = " or ".join(map(variable_of, _with_rarest_word(name, names)))
            hint = f"; did you mean {likely}?" if likely else ""
        lines.append(f"{variable} is not a setting and is ignored{hint}")
    return lines


def _with_rarest_word(name: str, names: Iterable[str]) -> list[str]:
    """Return the settings that have the rarest word of an unknown name.

    `BATCH_SIZE` gives `MAX_BATCH`, because fewer settings have `BATCH` than `SIZE`.
    """
    by_word = [[known for known in names if word in known.split("_")] for word in name.split("_")]
    return min(filter(None, by_word), key=len, default=[])[:_MAX_LIKELY]
