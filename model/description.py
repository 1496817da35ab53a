"""All of a checkpoint that serving it needs beside its tensors. No torch is needed."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from pydantic import Field, SerializeAsAny

from model.calibration import Calibration
from model.config import NetworkConfig, PreprocessConfig, ViTConfig
from model.heads import SOFTMAX, Floats, Form, Head, ZeroShot


@dataclass(frozen=True)
class Description:
    """A model's architecture and everything else that an answer depends on; its graph stands for
    its weights.

    Attributes:
        name: what answers, metrics and /model call it.
        source: where it was read from, as the operator wrote it.
        format: the reader that read it, e.g. `timm`.
        architecture: the format's own name for the architecture, e.g. `deit_tiny_patch16_224`.
        config, preprocess: see `model.config`.
        labels: a human description for each class, in index order; may repeat.
        temperature: logits are divided by it before the softmax (Guo et al. 2017).
        form: of what takes the place of the softmax.
        multi_label: scores are independent sigmoids instead of one softmax.
        revision: commit of a hub id; None for a local path.
        assumed: what the files do not say and was chosen by a name, each with the setting that says
        it.
        notes: what else was done with the files (tensors left aside, names inferred).
        zero_shot: how labels of a request are compared, where the checkpoint has a text tower.
        embed_texts: that tower: texts to features, float32 [N, D].
        calibration: what the sets of labels are made by, where the checkpoint was calibrated.
        content: 16 hexadecimal digits that stand for the tensors as stored, the architecture, the
            preprocessing, the labels and the calibration; empty where it was not read from files.
    """

    name: str
    source: str
    format: str
    architecture: str
    config: SerializeAsAny[NetworkConfig]
    preprocess: PreprocessConfig
    labels: tuple[str, ...]
    _: KW_ONLY
    temperature: float = 1.0
    form: Form = SOFTMAX
    multi_label: bool = False
    revision: str | None = None
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    zero_shot: ZeroShot | None = None
    embed_texts: Annotated[Callable[[Sequence[str]], Floats] | None, Field(exclude=True)] = None
    calibration: Calibration | None = None
    content: str = ""

    @property
    def head(self) -> Head:
        """Return the head whose logits the network's pass gives."""
        compared = isinstance(self.config, ViTConfig) and self.config.normalized_head
        independent = self.multi_label or (self.config.num_classes == 1 and not compared)
        return Head(self.labels, independent, self.temperature, self.form, normalized=compared)
