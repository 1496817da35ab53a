"""Files that hold a run's state; they are whole or absent, and never hold code."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any, Final

import torch

from model.errors import TrainingError
from model.training.recipe import Recipe, parse_recipe

_VERSION: Final = 1


def write_state(path: Path, recipe: Recipe, state: dict[str, Any]) -> None:
    """Replace the state on disk; an interruption leaves the old file or the new one."""
    part = path.with_name(f"{path.name}.part")
    torch.save({"version": _VERSION, "recipe": recipe.model_dump_json(), **state}, part)
    part.replace(path)


def read_state(path: Path, recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """Read the state that `write_state` wrote.

    Args:
        recipe: the run's recipe. The state's must equal it, with defaults for fields that it does not name.
        device: where the tensors go.

    Raises:
        TrainingError: no state there, unreadable, or of another recipe.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's remarks on pickles that it refuses
            state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except OSError as error:
        raise TrainingError(f"{path}: nothing to resume: {error.strerror}") from error
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        # Torch's own message advises to load it without the protection against code.
        raise TrainingError(f"{path}: not a training state, or damaged; start afresh in another folder") from error
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        raise TrainingError(f"{path}: not a training state of this version; start afresh in another folder")
    if parse_recipe(str(state.get("recipe")), str(path)) != recipe:
        raise TrainingError(f"{path}: made with another recipe; resume with that one or start in another folder")
    return state
