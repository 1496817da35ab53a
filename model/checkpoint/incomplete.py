"""Parts of a network that people take for a checkpoint: a head alone, or an adapter without its
base.
"""

import re
from collections.abc import Mapping
from typing import Final

from torch import Tensor

from model.errors import CheckpointError

# Names of PEFT, loralib, kohya and diffusers.
_LORA: Final = re.compile(
    r"(^|[._])lora[._](A|B|down|up|embedding|magnitude|linear_layer)", re.IGNORECASE
)
# Names of linear layers that do not look like parts of a backbone.
_LAYER: Final = re.compile(
    r"(?!.*(conv|norm|bn\d|embed|block|attn|qkv|kqv|token))(.+\.)?(weight|bias)"
)
# A head of four layers; a block alone has more tensors.
_MOST_OF_A_HEAD: Final = 8


def refuse_incomplete(tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse tensors that are no whole network.

    Args:
        tensors: by the names of the file.
        where: what messages call the file.

    Raises:
        CheckpointError: a head alone, an adapter without its base, or one that is not merged.
    """
    lora = [name for name in tensors if _LORA.search(name)]
    if lora:
        found = (
            "a LoRA adapter without its base"
            if 2 * len(lora) > len(tensors)
            else "a LoRA adapter not merged"
        )
        raise CheckpointError(
            f"{where}: {found}, {len(lora)} of {len(tensors)} tensors, such as {lora[0]!r:.100}: give the folder with "
            "adapter_config.json and adapter_model.safetensors, as PEFT saves them, and the base as --base CHECKPOINT "
            "(VIT_BASE), or save the model where it was trained after merge_and_unload()"
        )
    is_small = 0 < len(tensors) <= _MOST_OF_A_HEAD and all(
        _LAYER.fullmatch(name) for name in tensors
    )
    if is_small and all(tensor.ndim <= 2 for tensor in tensors.values()):
        shown = ", ".join(f"{name!r:.100} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise CheckpointError(
            f"{where}: a head alone, {shown}, without the backbone whose features it reads: save both in one file, "
            "torch.save(model.state_dict(), FILE) of the whole model"
        )
