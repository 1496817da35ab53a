"""The arguments that a checkpoint may pass to a library's architecture."""

import re
from typing import Any, Final

_MAX_NUMBER: Final = 16384

_CHOICES: Final = re.compile(
    "(act|aa|norm)_layer|global_pool|pad_type|pos_embed|stem_type|weight_init"
)
# Arguments that size a network: the number of layers, choices by name, and widths.
_ARGUMENTS: Final = re.compile(
    f"{_CHOICES.pattern}"
    "|depths?|depth_token_only|layers|cls_attn_layers|num_blocks|reg_tokens"
    "|((attn|head|patch|path|pos|proj)_)?drop_rate|drop_(block|path)_rate"
    "|channels|class_token|conv_mlp|dims?|distilled|down_kernel_size|dynamic_img_size|embed_dims?"
    "|expand_ratio|fc_norm|final_norm|fix_init|growth_rate|head_dim|head_hidden_size"
    "|head_init_scale|head_norm_first|img_size|kernel_sizes?"
    "|(ls_init|layer_scale_init)_value|init_values|mlp_ratios?|no_embed_class|norm_eps"
    "|num_features|num_heads|patch_size|pre_norm|qk_norm|qkv_bias|stem_size|stem_width"
    "|strict_img_size|use_(abs_pos_emb|fc_norm|rel_pos_bias)|window_size|zero_init_last"
)
_CHOICE: Final = re.compile("[a-z0-9_]{0,40}")


def check_arguments(arguments: dict[str, Any]) -> None:
    """Refuse arguments that read a file, import code or change a pass's outputs.

    Raises:
        ValueError: an argument does not size a network, or its value is not a small number, a list
            of them, or the name of a choice.
    """
    for name, value in arguments.items():
        if not _ARGUMENTS.fullmatch(name):
            raise ValueError(
                f"argument {name!r:.100} is not one of those that size a network: remove it"
            )
        is_choice = _CHOICES.fullmatch(name) and isinstance(value, str)
        if is_choice and _CHOICE.fullmatch(value):
            continue
        if not all(_is_small_number(number) for number in _flat(value)):
            raise ValueError(
                f"argument {name} {value!r:.100}: expected numbers up to {_MAX_NUMBER}"
            )


def _is_small_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= _MAX_NUMBER


def _flat(value: object) -> list[object]:
    """Return the elements of a value that may be a list, or a list of lists."""
    if not isinstance(value, list | tuple):
        return [value]
    elements: list[object] = []
    for element in value:
        elements += element if isinstance(element, list | tuple) else [element]
    return elements
