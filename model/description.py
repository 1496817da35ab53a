"""Everything about a checkpoint that serving it needs besides its tensors. No torch is needed."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from pydantic import Field, SerializeAsAny

from model.calibration import Calibration
from model.config import NetworkConfig, PreprocessConfig, ViTConfig
from model.features import Floats
from model.heads import SOFTMAX, Form, Head, ZeroShot


@dataclass(frozen=True)
class Description:
    """A model's architecture and everything else that an answer depends on, except its weights.

    Attributes:
        name: its name in answers, metrics and /model.
        source: path or hub id that it was read from, as the operator wrote it.
        format: the reader that read it, such as `timm`.
        architecture: the format's own name for the architecture, such as
            `deit_tiny_patch16_224`.
        config, preprocess: see `model.config`.
        labels: a human description for each class, in index order; may repeat.
        temperature: divisor of the logits before the softmax (Guo et al. 2017).
        form: form of the scores, if not a softmax.
        multi_label: whether scores are independent sigmoids instead of one softmax.
        revision: commit of a hub id; None for a local path.
        assumed: facts that the files do not state and a name implied, each with the setting that
            states it.
        notes: other decisions about the files (tensors left aside, names inferred).
        zero_shot: how labels of a request are compared, if the checkpoint has a text tower.
        embed_texts: the text tower: texts to features, float32 [N, D].
        calibration: numbers for sets of labels, if the checkpoint is calibrated.
        unused_calibration: why the folder's calibration is not used, with the remedy; else empty.
        content: digest of the stored tensors, the architecture, the preprocessing, the labels and
            the calibration, 16 hexadecimal digits; empty if it was not read from files.
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
    unused_calibration: str = ""
    content: str = ""

    @property
    def head(self) -> Head:
        """Return the checkpoint's own head, whose logits the network's pass gives."""
        is_normalized = isinstance(self.config, ViTConfig) and self.config.normalized_head
        is_one_class = self.config.num_classes == 1 and not is_normalized
        return Head(
            self.labels,
            self.multi_label or is_one_class,
            self.temperature,
            self.form,
            normalized=is_normalized,
        )
