"""Plain state dicts, in one of the layouts of `layouts` or with a map of names (`VIT_KEYS`).

The operator states the architecture (`VIT_ARCHITECTURE`, see `stated_architecture`), unless the
tensors and the habits of the layout tell it. The refusal asks at once for all that is missing, with
a command that states it.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from model.checkpoint.checkpoint import Checkpoint, native_tensors
from model.checkpoint.files import Files, SingleFile
from model.checkpoint.local_files import validating
from model.checkpoint.options import CheckpointOptions
from model.checkpoint.own_heads import with_bias
from model.checkpoint.timm_architectures import runs_in_library
from model.config import NetworkConfig
from model.errors import CheckpointError
from model.extensions.formats.containers import Network, network_in, refuse_lone_head
from model.extensions.formats.inferred import InferredNetwork
from model.extensions.formats.key_map import KeyMap, mapped, read_key_map
from model.extensions.formats.layouts import in_layout
from model.extensions.formats.shapes import shape_of
from model.extensions.formats.single_files import content_of
from model.extensions.formats.stated_architecture import (
    OWN,
    USUAL,
    parse_architecture,
    refuse_contradiction,
    without_told,
)
from model.network import library

FORMAT: Final = "state_dict"

_PRESETS: Final = (
    "of the presets of preprocessing deit-224 is for DeiT's and most of timm's networks, "
    "google-224 and google-384 for networks that saw pixels from -1 to 1, torchvision-224 for "
    "torchvision's; any other is written as JSON"
)


def read(files: Files, options: CheckpointOptions) -> Checkpoint | None:
    """Read a state dict; return None for anything but a single file."""
    if not isinstance(files, SingleFile):
        return None
    keys = read_key_map(options.keys)
    name = ""
    arguments: dict[str, Any] = {}
    if options.architecture:
        name, arguments = parse_architecture(options.architecture)
    network = network_in(content_of(files), keys.weights, files.title)
    prepared = files.prepared(network.tensors)
    refuse_lone_head(prepared, files.title)
    tensors = mapped(prepared, keys)
    state_dict = _StateDict(files, options, network, name, arguments)
    if name not in ("", OWN) and runs_in_library(name, "VIT_ARCHITECTURE"):
        checkpoint = state_dict.of_library(tensors)
    else:
        checkpoint = state_dict.of_vit(tensors, keys)
    refuse_contradiction(checkpoint.config, arguments, files.title)
    return checkpoint


@dataclass(frozen=True)
class _StateDict:
    """A state dict with the operator's statements about it.

    Attributes:
        files: the file.
        options: options of the operator.
        network: the network within the file.
        name: name of the stated architecture; empty if none is stated.
        arguments: arguments of the stated architecture.
    """

    files: SingleFile
    options: CheckpointOptions
    network: Network
    name: str
    arguments: dict[str, Any]

    def of_library(self, tensors: Mapping[str, Tensor]) -> Checkpoint:
        """Return a network that timm's own code runs, with the classes that the head has."""
        self._require([], has_classes=True)
        where = self.files.title
        preprocess = self.options.preprocess_or(None, where)
        layers = library.published(self.name).get("classifier") or "head"
        head = layers if isinstance(layers, str) else layers[0]
        classes = shape_of(tensors, f"{head}.weight", where, 1, 2, 4)[0]
        with validating(where):
            config = library.library_config(
                self.name,
                without_told(self.arguments),
                classes,
                len(preprocess.mean),
                preprocess.size,
            )
        tensors = library.renamed_by_library(config, tensors)
        tensors = with_bias(tensors, library.linear_head(config) or "", self.files)
        return self._checkpoint(self.name, config, tensors)

    def of_vit(self, tensors: Mapping[str, Tensor], keys: KeyMap) -> Checkpoint:
        """Return a Vision Transformer that vitserve's own code runs."""
        where = self.files.title
        layout, tensors = in_layout(tensors, self.files)
        stated = {**layout.habits, **self.arguments}
        if keys.renames_fused_projections and "qkv_order" not in self.arguments:
            del stated["qkv_order"]  # the layout's habit does not hold for other names
        vit = InferredNetwork(where, self.name, self.arguments, layout, tensors, stated)
        architecture = self.name or vit.take_torchvision_model()
        missing = vit.missing_arguments()
        if not missing and not architecture:
            missing = ["architecture"]
        self._require(missing, has_classes=bool(vit.classes))
        config = vit.config(self.options.preprocess_or(None, where))
        return self._checkpoint(
            architecture, config, vit.native_tensors(config), vit.assumed(config)
        )

    def _checkpoint(
        self,
        architecture: str,
        config: NetworkConfig,
        tensors: Mapping[str, Tensor],
        assumed: tuple[str, ...] = (),
    ) -> Checkpoint:
        where = self.files.title
        return Checkpoint(
            name=self.files.file.stem,
            source=self.files.source,
            format=FORMAT,
            architecture=architecture,
            config=config,
            preprocess=self.options.preprocess_or(None, where),
            labels=self.options.labels_or(None, config.num_classes, where),
            tensors=native_tensors(tensors, config, where),
            notes=self.network.notes,
            assumed=assumed + self.network.assumed,
        )

    def _require(self, missing_arguments: Sequence[str], *, has_classes: bool) -> None:
        """Raise `CheckpointError` if something is missing, with a command that states it."""
        missing = list(missing_arguments)
        if self.options.preprocess is None:
            missing.append("preprocessing")
        if has_classes and self.options.labels is None:
            missing.append("labels")
        if not missing:
            return
        command = shlex.join(self._command(missing_arguments, has_classes=has_classes))
        hint = "these values are only usual; a name of timm says all of them"
        if self.options.preprocess is None:
            hint += f"; {_PRESETS}"
        if "num_classes" in missing:
            hint += "; num_classes=0 is a network without a head, which gives embeddings"
        raise CheckpointError(
            f"{self.files.title}: no file says its {', '.join(missing)}: with the values of its "
            f"training code, this serves it: {command} (to train from it: vitserve convert with "
            f"these settings and -o FOLDER, then --from FOLDER; {hint}: "
            "docs/checkpoints.md#plain-state-dicts)"
        )

    def _command(self, missing_arguments: Sequence[str], *, has_classes: bool) -> list[str]:
        """Return a command that serves the file, with examples of the missing arguments."""
        examples = {
            argument: USUAL.get(argument, False)
            for argument in missing_arguments
            if argument != "architecture"
        }
        architecture = [self.name or OWN]
        for argument, example in (self.arguments | examples).items():
            text = example if isinstance(example, str) else json.dumps(example)
            architecture.append(f"{argument}={text}")
        options = self.options
        labels = options.labels or ("numbers" if has_classes else None)
        settings = {
            "--checkpoint": self.files.source,
            "--architecture": ",".join(architecture),
            "--preprocess": options.preprocess or "deit-224",
            "--labels": labels,
            "--keys": options.keys,
            "--activation": options.activation,
        }
        command = ["vitserve", "serve"]
        for setting, value in settings.items():
            if value:
                command += [setting, value]
        return command
