"""Plain state dicts of timm and of DINOv2 are read exactly."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from model.checkpoint import load_checkpoint
from model.checkpoint.checkpoint import backbone_and_head
from model.checkpoint.files import SingleFile
from model.checkpoint.timm_architectures import architectures
from model.errors import CheckpointError
from model.extensions.formats.layouts import in_layout
from tests.extensions.formats.home_made import PLAIN, load, made
from tests.model.checkpoint import folders
from tests.model.checkpoint.parity import (
    TOLERANCE,
    assert_same_logits,
    pictures,
    preprocess_file,
    randomise,
    relative_error,
)
from tests.timm_reference import timm

Change = Callable[[dict[str, Tensor]], Any]

STATE: dict[str, tuple[str, dict[str, Any], Change]] = {
    "timm": ("vit_tiny_patch16_224,pre_norm=false", {}, lambda s: s),
    "data-parallel": (
        "vit_tiny_patch16_224",
        {},
        lambda s: {"state_dict": {f"module.{n}": t for n, t in s.items()}},
    ),
    "prefixes": (
        "vit_tiny_patch16_224",
        {},
        lambda s: {f"_orig_mod.module.backbone.{n}": t for n, t in s.items()},
    ),
    "distilled": ("deit_tiny_distilled_patch16_224", {}, lambda s: s),
    "deit3-gamma": (
        "deit3_small_patch16_224",
        {},
        lambda s: {
            n.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): t
            for n, t in s.items()
        },
    ),
    "mae-finetuned": ("vit_tiny_patch16_224,global_pool=avg", {"global_pool": "avg"}, lambda s: s),
    "linear-patches": (
        "vit_tiny_patch16_224",
        {},
        lambda s: s | {"patch_embed.proj.weight": s["patch_embed.proj.weight"].flatten(1)},
    ),
    "hybrid": ("vit_tiny_r_s16_p8_224", {"img_size": 64}, lambda s: s),
    "eva02": ("eva02_base_patch14_448,use_rot_pos_emb=true", {"img_size": 42}, lambda s: s),
    "rope-mixed": ("vit_small_patch16_rope_mixed_224", {}, lambda s: s),
    "dinov3": ("vit_small_patch16_dinov3", {}, lambda s: s),
    "perception-encoder": ("vit_pe_core_tiny_patch16_384", {}, lambda s: s),
    "beit-shared-table": (
        "beit_base_patch16_224",
        {"use_shared_rel_pos_bias": True, "use_rel_pos_bias": False},
        lambda s: s,
    ),
    # Like Microsoft's files, with indices that follow from the grid.
    "beit": (
        "beit_base_patch16_224",
        {},
        lambda s: {
            "model": s
            | {"blocks.0.attn.relative_position_index": torch.zeros(10, 10, dtype=torch.int64)}
        },
    ),
}


def assert_read_exactly(
    model: Any, state: Any, file: Path, architecture: str, size: tuple[int, int]
) -> None:
    """Save a state dict as `file`, read it, and compare it with a model."""
    if file.suffix == ".pth":
        torch.save(state, file)
    else:
        save_file({n: t.contiguous() for n, t in state.items()}, file)
    preprocess = preprocess_file(file.parent, *size)
    checkpoint = load_checkpoint(
        str(file), architecture=architecture, preprocess=preprocess, labels="numbers"
    )
    assert checkpoint.config.num_classes == model.num_classes
    assert_same_logits(checkpoint, model, f"state dict {architecture}")


SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 3}


@pytest.mark.parametrize("case", STATE)
def test_plain_state_dicts(case: str, tmp_path: Path) -> None:
    architecture, options, change = STATE[case]
    size = options.get("img_size", 48)
    model = (
        timm()
        .create_model(
            architecture.split(",")[0], **({"img_size": size, "num_classes": 6} | SMALL | options)
        )
        .eval()
    )
    randomise(model)
    state = change(dict(model.state_dict()))
    given = architecture + "".join(f",{key}={value}" for key, value in SMALL.items())
    given += (
        ",norm_order=pre"
        if architectures()[architecture.split(",")[0]].get("family") != "eva"
        else ""
    )
    suffix = ".safetensors" if case in ("timm", "prefixes") else ".pth"
    assert_read_exactly(model, state, tmp_path / f"weights{suffix}", given, (size, size))


def test_pickled_parameters_are_plain_weights(tiny: Path, tmp_path: Path) -> None:
    trained = {name: nn.Parameter(tensor) for name, tensor in torch.load(tiny).items()}
    torch.save(trained, tmp_path / "trained.pth")
    options: dict[str, Any] = {
        "architecture": "vit_tiny_patch16_224",
        "preprocess": preprocess_file(tmp_path, 48, 48),
        "labels": "numbers",
    }
    name, head = backbone_and_head(load_checkpoint(str(tmp_path / "trained.pth"), **options))
    assert name == backbone_and_head(load_checkpoint(str(tiny), **options))[0]
    assert head is not None


def test_image_size_resizes_a_state_dict(tmp_path: Path) -> None:
    model = (
        timm().create_model("vit_small_patch14_dinov2", **SMALL, img_size=70, num_classes=4).eval()
    )
    randomise(model)
    torch.save(model.state_dict(), tmp_path / "dinov2.pth")
    given = "vit_small_patch14_dinov2,norm_order=pre" + "".join(
        f",{key}={value}" for key, value in SMALL.items()
    )
    options: dict[str, Any] = {
        "architecture": given,
        "preprocess": preprocess_file(tmp_path, 28, 28),
    }
    with pytest.raises(
        CheckpointError, match="gives 28x28 pixels, the model takes 70x70: --image-size 28x28"
    ):
        load_checkpoint(str(tmp_path / "dinov2.pth"), labels="numbers", **options)
    checkpoint = load_checkpoint(
        str(tmp_path / "dinov2.pth"), labels="numbers", image_size=(28, 28), **options
    )
    model.set_input_size((28, 28))
    assert_same_logits(checkpoint, model, "a state dict at 28")


def test_dinov2s_own_names_with_registers(tmp_path: Path) -> None:
    model = (
        timm()
        .create_model(
            "vit_giant_patch14_reg4_dinov2", embed_dim=48, depth=2, img_size=42, num_classes=4
        )
        .eval()
    )
    randomise(model)
    state = dict(model.state_dict())
    position = torch.randn(1, 1, 48)
    original = {
        n.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3"): t for n, t in state.items()
    }
    original["register_tokens"] = original.pop("reg_token")
    original["cls_token"] = original["cls_token"] - position
    original["pos_embed"] = torch.cat((position, original["pos_embed"]), dim=1)
    original["mask_token"] = torch.zeros(1, 48)
    for name, shape in (
        ("register_tokens", (4, 48)),
        ("pos_embed", (10, 48)),
        ("pos_embed", (1, 1, 48)),
    ):
        with pytest.raises(
            CheckpointError,
            match=rf"^a: .*{name} has shape {re.escape(str(list(shape)))}.*width\]$",
        ):
            in_layout(original | {name: torch.zeros(shape)}, SingleFile(Path("a"), "a"))
    given = "vit_giant_patch14_reg4_dinov2,embed_dim=48,depth=2,num_heads=24,norm_order=pre"
    assert_read_exactly(model, original, tmp_path / "dinov2.pth", given, (42, 42))


def test_preprocessing_tells_an_oblong_grid(tmp_path: Path) -> None:
    model = (
        timm()
        .create_model("vit_tiny_patch16_224", img_size=(32, 128), depth=2, num_classes=3)
        .eval()
    )
    randomise(model)
    given = "vit_tiny_patch16_224,depth=2,norm_order=pre"
    assert_read_exactly(model, model.state_dict(), tmp_path / "weights.pth", given, (32, 128))


@pytest.mark.parametrize(
    "names", [["conv1.weight", "bn1.weight"], ["patch_embed.proj.weight", "h.0.kqv.weight"]]
)
def test_unknown_layout_names_the_remedy(names: list[str], tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"a layout that is not known .*, such as '.*VIT_KEYS says which"
    ) as said:
        load({name: torch.zeros(4, 4) for name in names}, tmp_path, "vit_tiny_patch16_224")
    assert "\n" not in str(said.value)


def test_post_norm_is_not_taken_for_pre_norm(
    tmp_path: Path,
) -> None:
    """Check that the names and shapes are the same."""
    model = made(norm_first=False)
    given = "vit_tiny_patch16_224,embed_dim=48,depth=2,num_heads=3,patch_size=4"
    with pytest.raises(
        CheckpointError, match=r"norm_order=pre.*to train from it: vitserve convert"
    ):
        load(model.state_dict(), tmp_path, given)
    assert_same_logits(
        load(model.state_dict(), tmp_path, f"{given},norm_order=post"), model, "post-norm"
    )


@pytest.mark.parametrize("options", [{"no_embed_class": True}, {"init_values": 0.1}])
def test_tensors_tell_their_networks_sizes(options: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_classes": 5}
    model = timm().create_model("vit_tiny_patch16_224", **sizes, **options).eval()
    randomise(model)
    assert_same_logits(
        load(model.state_dict(), tmp_path, PLAIN), model, f"told by tensors: {options}"
    )


def test_a_network_of_timms_own_code_is_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
    model = timm().create_model("convnext_atto", num_classes=5, **sizes).eval()
    randomise(model)
    file = tmp_path / "weights.pth"
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": state}, file)
    with pytest.raises(
        CheckpointError,
        match=r"no file says its preprocessing, labels: .*convnext_atto.*--labels n",
    ):
        load_checkpoint(str(file), architecture="convnext_atto")
    options: dict[str, Any] = {"preprocess": preprocess_file(tmp_path, 32, 64), "labels": "numbers"}
    architecture = "convnext_atto,depths=[1,1,1,1],dims=[8,8,16,16]"
    checkpoint = load_checkpoint(str(file), architecture=architecture, **options)
    shown = pictures(checkpoint)
    with torch.inference_mode():
        logits = checkpoint.network()(shown).logits
        assert relative_error(logits, model(shown)) < TOLERANCE
    with pytest.raises(CheckpointError, match=r"weights.pth: missing key .* \(and \d+ more\)"):
        load_checkpoint(str(file), architecture="convnext_atto", **options)


def test_activation_is_a_setting(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(folders.tiny(), file)
    options: dict[str, Any] = {"preprocess": preprocess_file(tmp_path, 16, 16), "labels": "numbers"}
    sizes = "patch_size=8,embed_dim=16,depth=2,num_heads=2,mlp_ratio=2,norm_order=pre"
    options["architecture"] = f"vit_tiny_patch16_224,{sizes}"
    assert not load_checkpoint(str(file), **options).head.independent
    assert load_checkpoint(str(file), **options, activation="sigmoid").head.independent
