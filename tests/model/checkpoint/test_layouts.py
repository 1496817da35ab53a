"""State dicts of known libraries, torchvision's too, are read by their own names; others are refused with advice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from model.checkpoint import PREPROCESS_PRESETS, load_checkpoint
from model.checkpoint import state_dict as reader
from model.checkpoint.layouts import in_layout
from model.errors import CheckpointError
from model.network.vit import count_parameters
from tests.model.checkpoint import test_huggingface
from tests.model.checkpoint.home_made import PLAIN, load, made
from tests.model.checkpoint.parity import (
    TOLERANCE,
    assert_same_logits,
    pictures,
    preprocess_file,
    randomise,
    relative_error,
)
from tests.timm_reference import declare_torchvision_operators, torchvision


def vit_pytorch() -> Any:
    declare_torchvision_operators()
    pytest.importorskip("einops", reason="einops is not installed")
    return pytest.importorskip("vit_pytorch", reason="vit-pytorch is not installed")


SMALL = {"image_size": 16, "patch_size": 4, "num_classes": 5, "dim": 48, "depth": 2, "mlp_dim": 64}


@pytest.mark.parametrize(
    ("kind", "options", "architecture"),
    [
        ("ViT", {"heads": 4, "dim_head": 16}, "vit,num_heads=4"),  # inner width 64
        ("ViT", {"heads": 3, "dim_head": 16, "pool": "mean"}, "vit,num_heads=3"),
        ("ViT", {"heads": 2, "dim_head": 24, "mlp_dim": 48}, "vit,num_heads=2"),  # square layers
        ("SimpleViT", {"heads": 3, "dim_head": 16}, "vit,num_heads=3"),  # positions that no tensor holds
    ],
)
def test_vit_pytorch(kind: str, options: dict[str, Any], architecture: str, tmp_path: Path) -> None:
    model = getattr(vit_pytorch(), kind)(**(SMALL | options)).eval()
    randomise(model)
    with pytest.raises(CheckpointError, match=r"its num_heads: .* --architecture vit,num_heads=N --"):
        load(model.state_dict(), tmp_path)
    checkpoint = load(model.state_dict(), tmp_path, architecture)
    assert_same_logits(checkpoint, model, f"vit-pytorch {kind} {options}")
    assert "act_layer=gelu, as vit-pytorch has it (VIT_ARCHITECTURE)" in checkpoint.assumed


class EncoderViT(nn.Module):
    """A ViT around torch's own encoder, which most people's second attempt is."""

    def __init__(self, *, norm_first: bool, activation: str = "gelu", hidden: int = 64) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, 48, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 48))
        self.pos_embedding = nn.Parameter(torch.zeros(1, 17, 48))
        layer = nn.TransformerEncoderLayer(
            48, 3, hidden, activation=activation, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(48), enable_nested_tensor=False)
        self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(48, 5))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.pos_embedding
        y: Tensor = self.classifier(self.encoder(x)[:, 0])
        return y


@pytest.mark.parametrize(("order", "activation", "hidden"), [("pre", "relu", 64), ("post", "gelu", 48)])
def test_torchs_own_encoder(order: str, activation: str, hidden: int, tmp_path: Path) -> None:
    model = EncoderViT(norm_first=order == "pre", activation=activation, hidden=hidden).eval()
    randomise(model)
    with pytest.raises(CheckpointError, match=r"norm_order=pre,act_layer=gelu,global_pool=token.*only usual"):
        load(model.state_dict(), tmp_path)
    given = f"vit,num_heads=3,norm_order={order},act_layer={activation},global_pool=token"
    assert_same_logits(load(model.state_dict(), tmp_path, given), model, f"TransformerEncoder {order}")


@pytest.mark.parametrize("original", [True, False])
def test_a_state_dict_of_transformers_without_its_config(original: bool, tmp_path: Path) -> None:
    model = test_huggingface.make("vit", tmp_path, save_original_format=original)
    source = tmp_path / "model.safetensors"
    source.rename(tmp_path / "alone.safetensors")
    preprocess = preprocess_file(tmp_path, model.config.image_size, model.config.image_size)
    given = f"vit,num_heads={model.config.num_attention_heads}"
    checkpoint = load_checkpoint(
        str(tmp_path / "alone.safetensors"), architecture=given, preprocess=preprocess, labels="numbers"
    )
    assert_same_logits(checkpoint, lambda pixels: model(pixels).logits, "transformers without a config")


@pytest.mark.parametrize("names", [["conv1.weight", "bn1.weight"], ["patch_embed.proj.weight", "h.0.kqv.weight"]])
def test_names_of_no_known_layout_are_shown_with_the_way_out(names: list[str], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a layout that is not known .*, such as '.*VIT_KEYS says which") as said:
        load({name: torch.zeros(4, 4) for name in names}, tmp_path, "vit_tiny_patch16_224")
    assert "\n" not in str(said.value)


def test_a_post_norm_network_under_timms_names_is_never_taken_for_a_pre_norm_one(tmp_path: Path) -> None:
    """The names and shapes are the same."""
    model = made(norm_first=False)
    given = "vit_tiny_patch16_224,embed_dim=48,depth=2,num_heads=3,patch_size=4"
    with pytest.raises(CheckpointError, match="norm_order=pre"):
        load(model.state_dict(), tmp_path, given)
    assert_same_logits(load(model.state_dict(), tmp_path, f"{given},norm_order=post"), model, "post-norm")


def test_what_a_name_says_and_no_file_is_listed_with_the_option_that_says_it(tmp_path: Path) -> None:
    model = made(width=192, hidden=768, depth=12)
    given = "vit_tiny_patch16_224,patch_size=4,act_layer=gelu"
    assert load(model.state_dict(), tmp_path, given).assumed == tuple(
        f"{value}, as vit_tiny_patch16_224 has it (VIT_ARCHITECTURE)"
        for value in ("num_heads=3", "norm_order=pre", "norm_eps=1e-06", "global_pool=token")
    )


@pytest.mark.parametrize(
    "given", [PLAIN, "vit_tiny_patch16_224,embed_dim=48,depth=2,patch_size=4,num_heads=3,norm_order=pre"]
)
def test_a_backbone_without_a_head_is_one_where_that_is_stated(given: str, tmp_path: Path) -> None:
    model = made(hidden=192)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head.")}
    with pytest.raises(
        CheckpointError, match=r"no file says its num_classes: .*,num_classes=0 --preprocess \S+ \(.*without a head"
    ):
        load(state, tmp_path, given, labels=None)
    checkpoint = load(state, tmp_path, f"{given},num_classes=0", labels=None)
    assert checkpoint.labels == ()
    pixels = pictures(checkpoint)
    model.head = nn.Identity()
    with torch.inference_mode():
        assert relative_error(checkpoint.build()(pixels).embeddings["head"], model(pixels)) < TOLERANCE
    with pytest.raises(CheckpointError, match="tell num_classes=5, but VIT_ARCHITECTURE says num_classes=0"):
        load(made().state_dict(), tmp_path, f"{given},num_classes=0")


def test_what_is_absent_has_to_be_stated_and_what_is_there_cannot_be_denied(tmp_path: Path) -> None:
    state = dict(made().state_dict())
    without = {name: tensor for name, tensor in state.items() if not name.startswith("norm.")}
    with pytest.raises(CheckpointError, match="final_norm=false"):
        load(without, tmp_path, PLAIN)
    with pytest.raises(CheckpointError, match=r"final_norm=false, but 'norm\.weight' is there"):
        load(state, tmp_path, f"{PLAIN},final_norm=false")


@pytest.mark.parametrize(("patch", "size"), [(16, 32), (32, 96)])
def test_torchvision_logits(patch: int, size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = torchvision().models.VisionTransformer(size, patch, 2, 4, 48, 96, num_classes=7).eval()
    randomise(model)
    state = model.state_dict()
    # As releases of before 2022 name the layers of the MLP.
    old = {n.replace(".mlp.0.", ".mlp.linear_1.").replace(".mlp.3.", ".mlp.linear_2."): t for n, t in state.items()}
    save_file(state, tmp_path / "mine.safetensors")
    torch.save(old, tmp_path / "old.pth")
    options: dict[str, Any] = {"preprocess": preprocess_file(tmp_path, size, size), "labels": "numbers"}
    with pytest.raises(CheckpointError, match=r"no file says its num_heads: .* --architecture vit,num_heads=N"):
        load_checkpoint(str(tmp_path / "mine.safetensors"), **options)
    checkpoint = load_checkpoint(str(tmp_path / "mine.safetensors"), architecture="vit,num_heads=4", **options)
    assert_same_logits(checkpoint, model, f"torchvision's class in another size, patch {patch}")
    monkeypatch.setitem(reader.TORCHVISION, (48, patch, 2, 96), ("vit_b_16", 4))  # the real sizes take seconds each
    for name in ("mine.safetensors", "old.pth"):
        checkpoint = load_checkpoint(str(tmp_path / name), **options)
        assert checkpoint.architecture == "vit_b_16"
        assert_same_logits(checkpoint, model, f"torchvision {name}, patch {patch}")


@pytest.mark.parametrize("name", ["vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14"])
def test_torchvisions_models_are_told_apart_and_have_its_parameters(name: str) -> None:
    with torch.device("meta"):
        theirs = getattr(torchvision().models, name)()
    _, tensors = in_layout(theirs.state_dict(), name)
    width, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    sizes = (width, patch, len(theirs.encoder.layers), len(tensors["blocks.0.mlp.fc1.weight"]))
    assert reader.TORCHVISION[sizes] == (name, theirs.encoder.layers[0].num_heads)
    assert sum(tensor.numel() for tensor in tensors.values()) == count_parameters(theirs)


def test_torchvisions_published_transforms_are_those_of_the_presets() -> None:
    presets = {
        (preset.size[0], preset.resize_size[0], preset.interpolation, preset.mean, preset.std): name
        for name, preset in PREPROCESS_PRESETS.items()
        if name.startswith("torchvision")
    }
    for enum in ("ViT_B_16_Weights", "ViT_B_32_Weights", "ViT_L_16_Weights", "ViT_L_32_Weights", "ViT_H_14_Weights"):
        for weights in getattr(torchvision().models, enum):
            published = weights.transforms()
            sizes = published.crop_size[0], published.resize_size[0], published.interpolation.value
            assert (*sizes, tuple(published.mean), tuple(published.std)) in presets, weights
