"""The model card: a trained checkpoint's description, origin and limits of use, by the templates beside this file."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from model.checkpoint import Checkpoint
from model.training.run_record import RunRecord

_ROBUSTNESS: Final = "## Robustness\n\n"
_LICENCE: Final = "## Licence\n"
"""The card's last heading."""
_MARKUP: Final = re.compile(r"[\\`*_\[\]|#!]")
_LISTED_CLASSES: Final = 20
"""Up to this many classes are named in the card's first sentence."""
_TABLED_CLASSES: Final = 100
"""Up to this many have a line each in its table; of more, the worst `_LISTED_CLASSES`."""


def _text(name: str) -> str:
    """Escape a name that comes from outside, so that Markdown shows it as it is."""
    return _MARKUP.sub(r"\\\g<0>", html.escape(name, quote=False))


_TEMPLATES: Final = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters |= {"fmt": format, "escaped": _text, "quoted": shlex.quote}


def model_card(run: RunRecord, checkpoint: Checkpoint, figures: Sequence[str] = ()) -> str:
    """Fill a run's measurements in `model_card.md.jinja`.

    `figures` are the names of the pictures that `write_figures` drew beside the card.
    """
    tabled = list(run.measured.per_class.items())
    if len(tabled) > _TABLED_CLASSES:
        tabled = sorted(tabled, key=lambda row: row[1])[:_LISTED_CLASSES]
    return _TEMPLATES.get_template("model_card.md.jinja").render(
        run=run,
        recipe=run.recipe,
        checkpoint=checkpoint,
        config=checkpoint.config,
        preprocess=checkpoint.preprocess,
        measured=run.measured,
        split="validation" if run.test is None else "test",
        listed_classes=_LISTED_CLASSES,
        tabled=tabled,
        figures=figures,
    )


def with_robustness(card: str, accuracies: Mapping[str, float], count: int) -> str:
    """Return a card with a section on `count` pictures as users send them, in place of the section that it may have.

    `accuracies` are by what was done to the pictures, untouched pictures first.
    """
    section = _TEMPLATES.get_template("robustness.md.jinja").render(
        accuracies=accuracies, first=next(iter(accuracies.values())), count=count
    )
    if _ROBUSTNESS in card:
        before, _, after = card.partition(_ROBUSTNESS)
        _, heading, rest = after.partition("\n## ")
        card = before + heading.lstrip("\n") + rest
    before, licence, after = card.rpartition(_LICENCE)
    return before + section + licence + after if licence else f"{card.rstrip()}\n\n{section.rstrip()}\n"
