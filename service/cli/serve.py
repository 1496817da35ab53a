"""`vitserve serve`: runs the service, in one process or in several."""

import argparse
import errno
import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NoReturn

from service.addresses import UNIX, SocketFiles, listen
from service.cli.setting_flags import add_checkpoint, add_setting_flags, settings_from
from service.draining import exit_now
from service.engine.devices import fit_to_machine, uses_gpu
from service.engine.loading import load_predictor
from service.errors import SettingsError
from service.extension import Extension, check, extensions, naming
from service.models.configured import configured_models, notes_on_folder
from service.observe import logs
from service.process_memory import NEW_OBJECTS, bound_heaps
from service.setting_warnings import (
    check_variables,
    proxy_warnings,
    take_platform_port,
    unused_warnings,
)
from service.settings import Settings, settings_class

logger = logging.getLogger("vitserve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every setting as a flag."""
    add_checkpoint(parser)
    add_setting_flags(
        parser, [name for name in settings_class().model_fields if name != "checkpoint"]
    )


def run(arguments: argparse.Namespace) -> NoReturn:
    """Serve until a signal, then exit: with 0 after an orderly stop, with 1 after a failure."""
    gc.set_threshold(NEW_OBJECTS)  # imported objects live until the end
    bound_heaps()
    warnings = take_platform_port(vars(arguments), os.environ)
    settings = fit_to_machine(settings_from(arguments))
    logs.configure(settings.log_format, settings.log_level)
    logs.never_wait()
    warnings += [
        *check_variables(settings, os.environ),
        *proxy_warnings(os.environ),
        *unused_warnings(settings),
    ]
    for line in warnings:
        logger.warning("%s", line)
    if not settings.api_keys and not settings.is_local:
        logger.warning(
            "VIT_HOST=%s without VIT_API_KEYS: everybody who reaches this service may use it",
            settings.host,
        )
    check(settings)
    _check_address(settings)
    # A wrong folder ends the start. The models are read again later, because `prepared` may change
    # the settings.
    entries = configured_models(settings)
    for line in notes_on_folder(settings, entries):
        logger.warning("%s", line)
    logger.info("loading %s", settings.models or settings.checkpoint)
    with ExitStack() as contexts:
        for extension in extensions():
            if extension.prepared is not None:
                settings = contexts.enter_context(_prepared(extension, settings))
        code = _serve(settings)
    exit_now(code)


@contextmanager
def _prepared(extension: Extension, settings: Settings) -> Iterator[Settings]:
    """Enter the context of an extension's `prepared`; log an error at its end.

    Raises:
        ExtensionError: the start of the context failed.
    """
    assert extension.prepared is not None, "the caller has checked"
    with naming(extension, "prepared"):
        context = extension.prepared(settings)
        prepared = context.__enter__()
        if not isinstance(prepared, Settings):
            raise TypeError(f"{prepared!r} is not the settings of the service")
    try:
        yield prepared
    finally:
        try:
            context.__exit__(None, None, None)
        except Exception:
            logger.exception("the extension %r: the end of `prepared` failed", extension.name)


def _serve(settings: Settings) -> int:
    """Run the service in one process or in several, and return the exit code.

    With a GPU, the engine has its own process, so that web code does not slow it down.
    """
    in_processes = [extension for extension in extensions() if extension.serve is not None]
    if settings.one_process and not (uses_gpu(settings) and in_processes):
        from service.single_process import run_single_process  # noqa: PLC0415  slow to import

        return run_single_process(settings, load_predictor)
    if not in_processes:
        raise SettingsError("VIT_WORKERS, VIT_DEVICE: several processes need an extension")
    extension, *others = in_processes
    for other in others:
        logger.warning(
            "the extension %r: `serve` is not used: %r, the first by name, runs the processes",
            other.name,
            extension.name,
        )
    assert extension.serve is not None, "selected above"
    with naming(extension, "serve"):
        return extension.serve(settings, load_predictor)


def _check_address(settings: Settings) -> None:
    """End with one line if another program has the address, before a model is loaded."""
    try:
        [probes] = listen(settings.hosts, settings.port)
    except OSError as error:
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        is_socket = str(error.filename).startswith(UNIX)
        flag = "--port (VIT_PORT)" if is_port and not is_socket else "--host (VIT_HOST)"
        sys.exit(
            f"vitserve: cannot listen on {error.filename}: {error.strerror or error}; "
            f"{flag} chooses another"
        )
    SocketFiles(probes).remove()
    for probe in probes:
        probe.close()
