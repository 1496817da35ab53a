"""More explanation methods: attention rollout and generic attention explainability."""

from typing import Final

from model.extension import ExplanationMethod, Extension

EXTENSION: Final = Extension(
    name="methods",
    methods=(
        ExplanationMethod(
            name="rollout",
            summary="attention through all layers",
            function="model.extensions.methods.rollout:rollout",
        ),
        ExplanationMethod(
            name="gae",
            summary="attention through all layers, weighted by its gradient",
            class_specific=True,
            function="model.extensions.methods.gae:gae",
        ),
    ),
)
