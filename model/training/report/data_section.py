"""What a model card says of the pictures that a model was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class DataDescription:
    """Markdown sentences, each complete.

    Attributes:
        name: name of the data, as it stands in a sentence.
        pictures: what they are: "small colour pictures".
        source: where they come from.
        terms: what their owners allow.
        purpose: what a model of them is for.
        limits: what else it does not do.
        licence: of the checkpoint.
        bundled_recipe: `vitserve train` without `--recipe` is the recipe for them.
    """

    name: str
    pictures: str
    source: str
    terms: str
    purpose: str
    limits: str
    licence: str
    bundled_recipe: bool = False


CIFAR10: Final = DataDescription(
    name="CIFAR-10",
    pictures="small colour pictures",
    source="""CIFAR-10 (Alex Krizhevsky, *Learning Multiple Layers of Features from Tiny Images*, 2009,
<https://www.cs.toronto.edu/~kriz/cifar.html>), binary version.""",
    terms="""its page asks users to cite that report and states no licence; the pictures were collected from the web
and their rights stay with their owners. The checkpoint contains none of them.""",
    purpose="Trying vitserve out, tests, and teaching: it starts in seconds and needs no download.",
    limits="""Every
picture is shrunk to 32 x 32 pixels before the model sees it, and the model has only ever seen pictures that were that
small from the start, mostly with one object that fills them: expect less than the figure above on photographs.""",
    licence="Apache-2.0, as vitserve itself; for the data see above.",
    bundled_recipe=True,
)


def describe(name: str) -> DataDescription:
    """Return what is known of data by their name: CIFAR-10, or a folder of which only the trainer knows more."""
    if name == CIFAR10.name:
        return CIFAR10
    return DataDescription(
        name=f"`{name}`",
        pictures="pictures",
        source=f"A folder of pictures named `{name}`, one subfolder a class. Where they come from is not recorded:\n"
        "whoever passes the checkpoint on should say it here.",
        terms="not recorded. Those of the pictures, and of the checkpoint that was started from, go with the weights.",
        purpose="Telling apart pictures like those it was trained on.",
        limits="Pictures\nfrom another camera, place or time than those it was trained on may be answered worse than "
        "the figure above says.",
        licence="Not recorded: that of whoever trained it, within the terms of the data and the original checkpoint.",
    )
