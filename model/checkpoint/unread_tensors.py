"""Tensors in forms that are not read: adapters, quantised or factored weights."""

import re
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from model.errors import CheckpointError

# Names of PEFT, loralib, kohya and diffusers.
_LORA: Final = re.compile(
    r"(^|[._])lora[._](A|B|down|up|embedding|magnitude|linear_layer)", re.IGNORECASE
)
# Names that torch, torchao, bitsandbytes, GPTQ, HQQ, AQLM, VPTQ, compressed-tensors, EETQ, quanto,
# Neural Compressor, NNCF and Brevitas give to parts of quantised weights, or to their observers.
_QUANTISED: Final = re.compile(
    r".+[._](qweight|qzeros|g_idx|SCB|absmax|quant_map|zero_point|weights?_scales?(_inv)?|"
    r"weight\._(data|scale)|weight\.(qdata|scale)|weight:_.+|(in|out)put_scale|weight_packed|"
    r"quant_state\..+|packed_params\..+|codebooks|centroids\.weight|"
    r"weight_quant\..+|pre_ops\..+|(activation_post_process|weight_fake_quant)\..+)"
)
QUANTISED_REMEDY: Final = (
    "quantised weights are not read: save floating-point weights, "
    "model.dequantize().save_pretrained(FOLDER), or give the model that was quantised"
)
# Names of tensors that are not read, and the remedy. torch's weight norm saves two factors, its
# pruning and its spectral norm save the weight and a mask or vectors.
_UNREAD: Final = (
    (
        re.compile(r"(.+\.)?(head|dino_head|ibot_head)\.last_layer\.(weight_g|param.+original0)"),
        "the projection head of a training without labels, such as DINO's, is not read: save the "
        "backbone of the copy to serve alone, torch.save({name.removeprefix('backbone.'): tensor "
        "for name, tensor in state_dict.items() if name.startswith('backbone.')}, FILE)",
    ),
    (
        re.compile(r".+\.weight_g"),
        "weights in two factors are not read: save the model after "
        "torch.nn.utils.remove_weight_norm(layer)",
    ),
    (
        re.compile(r".+\.parametrizations\.weight\.original0"),
        "weights in two factors are not read: save the model after "
        "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')",
    ),
    (
        re.compile(r".+\.\w+_orig"),
        "weights with a mask or a spectral norm are not read: save the model after "
        "torch.nn.utils.prune.remove(layer, 'weight') or remove_spectral_norm(layer)",
    ),
)


def refuse_quantised(content: Mapping[Any, Any], where: str) -> None:
    """Raise `CheckpointError` for quantised weights in the content of a file.

    Args:
        content: tensors and other objects by name; torch packs a quantised layer into a tuple.
        where: name of the file in messages.
    """
    for name, value in content.items():
        if _QUANTISED.fullmatch(str(name)) or _is_quantised(str(name), value):
            raise CheckpointError(f"{where}: holds {name!r:.100}: {QUANTISED_REMEDY}")


def _is_quantised(name: str, value: Any) -> bool:
    """Return whether a value is a tensor of torch's quantised types, or a weight of integers."""
    if not isinstance(value, Tensor):
        return False
    is_matrix = name.endswith(("weight", "W_q")) and value.ndim > 1
    is_of_integers = not value.is_floating_point() and not value.is_complex()
    return value.is_quantized or (is_matrix and is_of_integers)


def refuse_unread_tensors(tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse tensors that are not the plain weights of a network.

    Args:
        tensors: tensors by the names of the file.
        where: name of the file in messages.

    Raises:
        CheckpointError: an adapter without its base, an adapter that is not merged, factored
            weights, or tensors without numbers.
    """
    _refuse_adapter(tensors, where)
    for pattern, remedy in _UNREAD:
        name = next(filter(pattern.fullmatch, tensors), None)
        if name is not None:
            raise CheckpointError(f"{where}: holds {name!r:.100}: {remedy}")
    empty = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    if empty is not None:
        raise CheckpointError(
            f"{where}: {empty!r:.100} is on the meta device, without its numbers: load the weights "
            "where it was made, and save it again"
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
