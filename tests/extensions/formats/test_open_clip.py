"""Folders of open_clip, as its code writes them.

The reference is timm, which has open_clip's towers, too.
"""

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from model.checkpoint import load_checkpoint
from tests.model.checkpoint.folders import put, refusal
from tests.model.checkpoint.parity import assert_same_embeddings, pictures, randomise
from tests.timm_reference import timm

pytestmark = pytest.mark.timeout(60)  # builds open_clip's towers

CONFIG: Final = "open_clip_config.json"
WIDTH: Final = 24  # size of the embedding

# timm's name, and open_clip's.
THEIRS: Final = (
    (r"^cls_token$", "class_embedding"),
    (r"^pos_embed$", "positional_embedding"),
    (r"^patch_embed\.proj\.", "conv1."),
    (r"^norm_pre\.", "ln_pre."),
    (r"^norm\.|^fc_norm\.", "ln_post."),
    (r"^blocks\.(\d)\.", r"transformer.resblocks.\1."),
    (r"\.norm([12])\.", r".ln_\1."),
    (r"attn\.qkv\.", "attn.in_proj_"),
    (r"attn\.proj\.", "attn.out_proj."),
    (r"mlp\.fc1\.", "mlp.c_fc."),
    (r"mlp\.fc2\.", "mlp.c_proj."),
    (r"\.ls([12])\.", r".ls_\1."),
    (r"^head\.weight$", "proj"),
)
SMALL: Final = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
# timm's name and arguments, arguments of open_clip's tower, and whether its activation is
# `quick_gelu`.
OWN: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any], bool]]] = {
    "openai": ("vit_base_patch16_clip_quickgelu_224", {}, {}, True),
    "laion": ("vit_base_patch16_clip_224", {}, {}, False),
    "mean, and the norm after it": (
        "vit_base_patch16_clip_224",
        {"global_pool": "avg", "fc_norm": True, "pre_norm": False, "init_values": 0.1},
        {"pool_type": "avg", "final_ln_after_pool": True, "no_ln_pre": True, "ls_init_value": 0.1},
        False,
    ),
    "mean": (
        "vit_base_patch16_clip_224",
        {"global_pool": "avg", "fc_norm": False},
        {"pool_type": "avg"},
        False,
    ),
}


def written(
    folder: Path, tensors: dict[str, Tensor], vision: dict[str, Any], *, quick: bool = False
) -> Path:
    """Write a folder of open_clip with a part of a text tower."""
    config = {
        "model_cfg": {
            "embed_dim": WIDTH,
            "quick_gelu": quick,
            "vision_cfg": vision,
            "text_cfg": {"width": 8},
        },
        "preprocess_cfg": {
            "mean": [0.5, 0.4, 0.3],
            "std": [0.2, 0.3, 0.4],
            "interpolation": "bilinear",
            "resize_mode": "squash",
        },
    }
    (folder / CONFIG).write_text(json.dumps(config))
    text = {"text_projection": torch.ones(8, WIDTH), "logit_scale": torch.ones(())}
    save_file(
        text | {f"visual.{name}": t.contiguous() for name, t in tensors.items()},
        folder / "open_clip_model.safetensors",
    )
    return folder


def own_folder(folder: Path, case: str) -> Any:
    """Write a tower of open_clip; return timm's model of it."""
    name, arguments, fields, quick = OWN[case]
    model = timm().create_model(name, **({"num_classes": WIDTH} | SMALL | arguments)).eval()
    randomise(model)
    with torch.no_grad():
        model.head.bias.zero_()
        if "no_ln_pre" in fields:  # open_clip then lacks this bias
            model.patch_embed.proj.bias.zero_()
    tensors = {}
    for ours, tensor in model.state_dict().items():
        theirs = ours
        for pattern, replacement in THEIRS:
            theirs = re.sub(pattern, replacement, theirs)
        tensors[theirs] = tensor.T if theirs == "proj" else tensor
    for name in ("head.bias", "conv1.bias"):
        tensors.pop(name, None)
    tensors["class_embedding"] = tensors["class_embedding"].flatten()
    tensors["positional_embedding"] = tensors["positional_embedding"][0]
    sizes = {"image_size": 32, "layers": 2, "width": 64, "head_width": 16, "patch_size": 8}
    written(folder, tensors, sizes | fields, quick=quick)
    return model


@pytest.mark.parametrize("case", OWN)
def test_open_clips_own_towers_are_read(case: str, tmp_path: Path) -> None:
    model = own_folder(tmp_path, case)
    checkpoint = load_checkpoint(str(tmp_path))
    pixels = pictures(checkpoint)
    with torch.inference_mode():
        assert_same_embeddings(checkpoint, pixels, {"head": model(pixels)})
    preprocess = checkpoint.preprocess
    assert (preprocess.size, preprocess.resize, preprocess.interpolation) == (
        (32, 32),
        "squash",
        "bilinear",
    )
    assert (preprocess.mean, preprocess.std) == ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


TIMMS: Final[dict[str, tuple[str, str, str | None]]] = {
    "SigLIP": ("test_vit3", "map", "none"),
    "a head that projects": ("vit_tiny_patch16_224", "token", None),
    "a projection": ("vit_relpos_medium_patch16_cls_224", "", "linear"),
}


@pytest.mark.parametrize("case", TIMMS)
def test_open_clips_timm_towers_are_read(case: str, tmp_path: Path) -> None:
    name, pool, projection = TIMMS[case]
    classes = WIDTH if projection is None else 0
    model = (
        timm()
        .create_model(name, num_classes=classes, **({"global_pool": pool} if pool else {}))
        .eval()
    )
    randomise(model)
    if classes:
        torch.nn.init.zeros_(model.head.bias)
    head = torch.nn.Linear(model.num_features, WIDTH, bias=False)
    tensors = {f"trunk.{name}": tensor for name, tensor in model.state_dict().items()}
    if projection == "linear":
        tensors["head.proj.weight"] = head.weight.detach()
    size = model.patch_embed.img_size[0]
    fields = {"timm_model_name": name, "timm_pool": pool, "timm_proj": projection, "timm_drop": 0.1}
    checkpoint = load_checkpoint(str(written(tmp_path, tensors, {"image_size": size} | fields)))
    pixels = pictures(checkpoint, 1)
    with torch.inference_mode():
        expected = head(model(pixels)) if projection == "linear" else model(pixels)
        assert_same_embeddings(checkpoint, pixels, {"head": expected})


REFUSED: Final[dict[str, tuple[str, object, str]]] = {
    "a ResNet": ("model_cfg.vision_cfg.layers", [3, 4, 6, 3], "its image tower is a ResNet"),
    "CoCa": (
        "model_cfg.vision_cfg.attentional_pool",
        True,
        "vision_cfg.attentional_pool: expected False",
    ),
    "norms of queries": (
        "model_cfg.vision_cfg.qk_norm",
        True,
        "vision_cfg.qk_norm: expected False",
    ),
    "another width": (
        "model_cfg.vision_cfg.width",
        128,
        "cls_token has shape [1, 1, 64], expected",
    ),
    "an unknown field": ("model_cfg.vision_cfg.new", 1, "vision_cfg.new: "),
    "padding": (
        "preprocess_cfg.resize_mode",
        "longest",
        "set VIT_PREPROCESS to another preprocessing",
    ),
    "a network of timm": (
        "model_cfg.vision_cfg.timm_model_name",
        "convnext_tiny",
        "plain Vision Transformers are read",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_open_clips_other_towers_are_refused(case: str, tmp_path: Path) -> None:
    own_folder(tmp_path, "laion")
    key, value, message = REFUSED[case]
    put(tmp_path / CONFIG, key, value)
    if case == "a network of timm":
        timm()
    assert message in refusal(tmp_path)


def test_image_towers_take_no_labels(tmp_path: Path) -> None:
    own_folder(tmp_path, "laion")
    assert "text tower is not read, so labels have no effect" in refusal(tmp_path, labels="cat,dog")


def test_a_lone_file_asks_for_its_folder(tmp_path: Path) -> None:
    own_folder(tmp_path, "laion")
    message = refusal(tmp_path / "open_clip_model.safetensors", architecture="vit")
    assert (
        "give its folder, where it is called open_clip_pytorch_model.bin or "
        "open_clip_model.safetensors" in message
    )
