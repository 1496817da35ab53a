"""`vitserve compile`: compiles a model before a service starts, which then finds the kernels in the cache."""

from __future__ import annotations

import argparse
import time

from service.cli.setting_flags import MODEL_FLAGS, add_setting_flags, settings_from
from service.engine.devices import fit_to_machine
from service.engine.loading import load_predictor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the settings that kernels depend on."""
    add_setting_flags(parser, (*MODEL_FLAGS, "compile", "max_batch"))


def run(arguments: argparse.Namespace) -> int:
    """Compile the model for the first of its devices, as the others find the same kernels; 1 if it is not compiled."""
    settings = fit_to_machine(settings_from(arguments))
    started = time.perf_counter()
    predictor, info = load_predictor(settings.model_copy(update={"device": settings.devices[0]}))
    predictor.warm_up()
    while predictor.compiled.startswith("compiling"):  # a CPU compiles on a thread
        time.sleep(0.1)
    seconds = time.perf_counter() - started
    print(f"{info.name} on {info.device} in {info.dtype}: {predictor.compiled}, {seconds:.0f} s")  # noqa: T201
    return int(not predictor.compiled.startswith("compiled"))
