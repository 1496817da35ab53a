"""Tensors that people take for a checkpoint: a lone head, a lone adapter, quantised weights."""

import re
from collections.abc import Mapping
from typing import Final

from torch import Tensor

from model.errors import CheckpointError

# Names of PEFT, loralib, kohya and diffusers.
_LORA: Final = re.compile(
    r"(^|[._])lora[._](A|B|down|up|embedding|magnitude|linear_layer)", re.IGNORECASE
)
# Names that bitsandbytes, GPTQ, compressed-tensors, EETQ, HQQ, quanto, torchao and torch give to
# parts of quantised weights.
_QUANTISED: Final = re.compile(
    r".+[._](qweight|qzeros|g_idx|SCB|absmax|quant_map|zero_point|weight_scales?(_inv)?|W_q|"
    r"weight\._(data|scale)|weight:_.+|(in|out)put_scale|weight_packed|quant_state\..+|"
    r"packed_params\..+)"
)
# Names of the two factors of a weight, as torch's weight norm saves them.
_FACTORED: Final = re.compile(r".+\.(weight_g|parametrizations\.weight\.original0)")
QUANTISED_REMEDY: Final = (
    "quantised weights are not read: save floating-point weights, "
    "model.dequantize().save_pretrained(FOLDER), or give the model that was quantised"
)
# Names of linear layers that do not look like parts of a backbone.
_LAYER: Final = re.compile(
    r"(?!.*(conv|norm|bn\d|embed|block|attn|qkv|kqv|token))(.+\.)?(weight|bias)"
)
# A head of four layers has eight tensors; a block alone has more.
_MAX_HEAD_TENSORS: Final = 8


def refuse_incomplete(tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse tensors that are not a whole network.

    Args:
        tensors: tensors by the names of the file.
        where: name of the file in messages.

    Raises:
        CheckpointError: a head alone, an adapter without its base, an adapter that is not merged,
            quantised or factored weights, or tensors without numbers.
    """
    _refuse_adapter(tensors, where)
    quantised = next(filter(_QUANTISED.fullmatch, tensors), None)
    if quantised is not None:
        raise CheckpointError(f"{where}: holds {quantised!r:.100}: {QUANTISED_REMEDY}")
    factored = next(filter(_FACTORED.fullmatch, tensors), None)
    if factored is not None:
        raise CheckpointError(
            f"{where}: holds {factored!r:.100}: weights in two factors are not read: save the "
            "model after torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')"
        )
    empty = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    if empty is not None:
        raise CheckpointError(
            f"{where}: {empty!r:.100} is on the meta device, without its numbers: load the weights "
            "where it was made, and save it again"
        )
    is_small = 0 < len(tensors) <= _MAX_HEAD_TENSORS
    if is_small and all(
        tensor.ndim <= 2 and _LAYER.fullmatch(name) for name, tensor in tensors.items()
    ):
        shown = ", ".join(f"{name!r:.100} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise CheckpointError(
            f"{where}: a head alone, {shown}, without the backbone whose features it reads: save "
            "both in one file, torch.save(model.state_dict(), FILE) of the whole model"
        )


def _refuse_adapter(tensors: Mapping[str, Tensor], where: str) -> None:
    lora = [name for name in tensors if _LORA.search(name)]
    if not lora:
        return
    is_alone = 2 * len(lora) > len(tensors)
    adapter = "a LoRA adapter without its base" if is_alone else "a LoRA adapter not merged"
    count = f"{len(lora)} of {len(tensors)} tensors"
    raise CheckpointError(
        f"{where}: {adapter}, {count}, such as {lora[0]!r:.100}: give the folder with "
        "adapter_config.json and adapter_model.safetensors, as PEFT saves them, and the base as "
        "--base CHECKPOINT (VIT_BASE), or save the model where it was trained after "
        "merge_and_unload()"
    )
