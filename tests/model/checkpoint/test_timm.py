"""Models saved by timm: logits, embeddings and attention rows of one pass."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from model.checkpoint import load_checkpoint
from model.checkpoint.timm_architectures import architectures
from model.checkpoint.timm_arguments import parse_arguments
from model.checkpoint.timm_names import native_names
from model.errors import CheckpointError
from model.network.layers.block import Mlp, SwiGLU
from model.network.vit import VisionTransformer
from tests.model.blocks import blocks
from tests.model.checkpoint.folders import edit, edit_tensors, put, timm_folder
from tests.model.checkpoint.parity import (
    assert_same_embeddings,
    assert_same_logits,
    assert_same_rows,
    pictures,
    randomise,
)
from tests.timm_reference import timm

pytestmark = pytest.mark.timeout(60)  # imports timm

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {"img_size": 64}),
    "vit-patch14-336": (
        "vit_small_patch14_dinov2",
        {"img_size": 336, "embed_dim": 48, "num_heads": 2, "num_classes": 5},
    ),
    "vit-no-qkv-bias": ("vit_base_patch16_224_miil", {"img_size": 32, "embed_dim": 48}),
    "vit-no-projection-bias": ("vit_tiny_patch16_224", {"img_size": 32, "proj_bias": False}),
    "vit-greyscale": ("vit_tiny_patch16_224", {"img_size": 32, "in_chans": 1}),
    "vit-relu": ("vit_tiny_patch16_224", {"img_size": 32, "act_layer": "relu"}),
    "vit-mean-pool": ("vit_tiny_patch16_224", {"img_size": 32, "global_pool": "avg"}),
    "vit-max-pool": ("vit_tiny_patch16_224", {"img_size": 32, "global_pool": "max"}),
    "vit-mean-max-pool": ("vit_tiny_patch16_224", {"img_size": 32, "global_pool": "avgmax"}),
    "vit-cls-fc-norm": ("vit_tiny_patch16_224", {"img_size": 32, "fc_norm": True}),
    "vit-no-final-norm": (
        "vit_intern300m_patch14_448",
        {"img_size": 28, "embed_dim": 48, "num_heads": 3, "num_classes": 5},
    ),
    "vit-qk-norm": ("vit_tiny_patch16_224", {"img_size": 32, "qk_norm": True}),
    "dynamic": ("test_vit", {"img_size": 96}),
    "clip": ("vit_base_patch16_clip_quickgelu_224", {"img_size": 32, "embed_dim": 48}),
    "vit-gap": ("vit_medium_patch16_gap_240", {"img_size": 48, "embed_dim": 48, "num_heads": 4}),
    "deit": ("deit_tiny_patch16_224", {"img_size": 32}),
    "deit-distilled": ("deit_tiny_distilled_patch16_224", {"img_size": 48}),
    "deit3": ("deit3_small_patch16_224", {"img_size": 32, "embed_dim": 48, "num_heads": 3}),
    "registers-gap": (
        "vit_little_patch16_reg4_gap_256",
        {"img_size": 48, "embed_dim": 48, "num_heads": 3},
    ),
    "dinov2-registers": (
        "vit_base_patch14_reg4_dinov2",
        {"img_size": 42, "embed_dim": 48, "num_classes": 9},
    ),
    "dinov2-swiglu": (
        "vit_giant_patch14_dinov2",
        {"img_size": 28, "embed_dim": 48, "num_classes": 9},
    ),
    "map": ("vit_so150m_patch16_reg4_map_256", {"img_size": 48, "embed_dim": 56, "num_heads": 7}),
    "map-prefix": ("test_vit3", {"img_size": 32}),
    "siglip-map": (
        "vit_so400m_patch14_siglip_384",
        {"img_size": 46, "embed_dim": 64, "num_classes": 5},
    ),
    "beit": ("beit_base_patch16_224", {"img_size": 48, "embed_dim": 48, "num_heads": 4}),
    "beit-token": (
        "beitv2_base_patch16_224",
        {"img_size": (32, 80), "embed_dim": 48, "num_heads": 3, "global_pool": "token"},
    ),
    "relpos": ("vit_relpos_small_patch16_224", {"img_size": 48, "embed_dim": 48, "num_heads": 3}),
    "relpos-shared": (
        "vit_srelpos_small_patch16_224",
        {"img_size": (32, 80), "embed_dim": 48, "num_heads": 3},
    ),
    "relpos-cls": (
        "vit_relpos_medium_patch16_cls_224",
        {"img_size": 48, "embed_dim": 48, "num_heads": 3},
    ),
    "relpos-res-post-norm": (
        "vit_relpos_base_patch32_plus_rpn_256",
        {"img_size": 96, "embed_dim": 48, "num_heads": 3},
    ),
    "beit3": ("beit3_base_patch16_224", {"img_size": 48, "embed_dim": 48, "num_heads": 3}),
    "res-post-norm": (
        "vit_base_patch16_rpn_224",
        {"img_size": 48, "embed_dim": 48, "num_heads": 3},
    ),
    "eva": ("eva_giant_patch14_224", {"img_size": 28, "embed_dim": 48, "num_heads": 4}),
    "eva02": ("eva02_tiny_patch14_336", {"img_size": (42, 28), "embed_dim": 48}),
    "eva02-apart": ("eva02_base_patch14_448", {"img_size": 42, "embed_dim": 48, "num_classes": 9}),
    "eva02-clip": (
        "eva02_large_patch14_clip_224",
        {"img_size": (28, 56), "embed_dim": 64, "num_classes": 9},
    ),
    "eva02-resized": (
        "eva02_tiny_patch14_336",
        {"img_size": 64, "patch_size": 16, "embed_dim": 48},
    ),
    "eva02-res-post-norm": (
        "eva02_enormous_patch14_clip_224",
        {"img_size": 28, "embed_dim": 48, "num_heads": 3, "num_classes": 9},
    ),
    "rope-resized": ("vit_medium_patch16_rope_reg1_gap_256", {"img_size": 48, "embed_dim": 64}),
    "rope-gap": ("vit_betwixt_patch16_rope_reg4_gap_256", {"img_size": (48, 32), "embed_dim": 80}),
    "rope": ("vit_small_patch16_rope_224", {"img_size": (48, 80), "embed_dim": 48}),
    "rope-mixed": ("vit_small_patch16_rope_mixed_224", {"img_size": (48, 80), "embed_dim": 48}),
    "rope-mixed-ape": ("vit_base_patch16_rope_mixed_ape_224", {"img_size": 48, "embed_dim": 96}),
    "dinov3": (
        "vit_small_patch16_dinov3",
        {"img_size": (48, 32), "embed_dim": 48, "num_classes": 9},
    ),
    "dinov3-swiglu-cls": (
        "vit_small_plus_patch16_dinov3_qkvb",
        {
            "img_size": (48, 32),
            "embed_dim": 72,
            "mlp_ratio": 3.1,
            "num_classes": 9,
            "global_pool": "token",
        },
    ),
    "pe-core": (
        "vit_pe_core_small_patch16_384",
        {"img_size": (48, 80), "embed_dim": 48, "num_classes": 9},
    ),
    "pe-lang": (
        "vit_pe_lang_large_patch14_448",
        {"img_size": 28, "embed_dim": 64, "num_classes": 9},
    ),
    "hybrid-root": ("vit_tiny_r_s16_p8_224", {"img_size": 64}),
    "hybrid-r26": ("vit_small_r26_s32_224", {"img_size": 64, "embed_dim": 48}),
}

RESIZED = [
    "vit",
    "registers-gap",
    "deit-distilled",
    "eva02-resized",
    "rope-resized",
    "rope-mixed-ape",
    "pe-core",
]


def make(case: str, folder: Path, **more: Any) -> Any:
    """Save a random model of a case with two blocks; return it in evaluation mode."""
    library = timm()
    name, options = CASES[case]
    torch.manual_seed(0)
    model = library.create_model(name, **({"depth": 2} | more | options)).eval()
    randomise(model)
    labels = {"label_names": [f"n{i}" for i in range(model.num_classes)]}
    library.models.save_for_hf(model, folder, model_config=labels, safe_serialization=True)
    return model


@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_timms(case: str, tmp_path: Path) -> None:
    model = make(case, tmp_path, num_classes=7)
    checkpoint = load_checkpoint(str(tmp_path))
    config = checkpoint.vit
    pixels = assert_same_logits(checkpoint, model, f"timm {case}")
    whole: list[torch.Tensor] = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_pre_hook(lambda _, weights: whole.append(weights[0]))
    with torch.inference_mode():
        tokens = model.forward_features(pixels)
        expected = {"head": model.forward_head(tokens, pre_logits=True)}
        # If timm's final norm follows its pooling, our norm follows each of these poolings.
        norm = model.fc_norm if config.norm_after_pool else torch.nn.Identity()
        expected["mean"] = norm(tokens[:, config.prefix_tokens :].mean(dim=1))
        if config.class_token:
            expected["cls"] = norm(tokens[:, 0])
    assert_same_embeddings(checkpoint, pixels, expected)
    assert_same_rows(checkpoint, pixels, torch.stack(whole, dim=1))


NUMBERS = ("embed_dim", "depth", "num_heads", "mlp_ratio", "patch_size")


def test_architectures_have_timms_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, arguments in architectures().items():
        entry = timm().models.model_entrypoint(name)
        built = Mock()
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[entry.__module__], "build_model_with_cfg", built)
            entry()
        given = parse_arguments(
            arguments | {"img_size": arguments.get("img_size", 224), "num_classes": 3}
        )
        passed = built.call_args.kwargs
        numbers = (
            NUMBERS[:4] if "stem_layers" in arguments else NUMBERS
        )  # a hybrid's patches are its stem's
        assert [getattr(given, n) for n in numbers] == [
            passed.get(n, getattr(given, n)) for n in numbers
        ], name
        assert numbers[0] not in arguments or arguments["embed_dim"] == passed["embed_dim"], name
        assert given.vit_config().depth == passed.get("depth", 12), name


def test_architectures_have_timms_parameters() -> None:
    """Compare one block, because all blocks are alike. The kinds differ by more than sizes."""
    sizes = {*NUMBERS, "img_size", "init_values", "ref_feat_shape", "stem_layers"}
    kinds = {
        str(sorted((k, v) for k, v in given.items() if k not in sizes)): n
        for n, given in architectures().items()
    }
    for name in kinds.values():
        with torch.device("meta"), torch.no_grad():
            theirs = timm().create_model(name, num_classes=3, depth=1)
        given = architectures()[name] | {
            "img_size": theirs.patch_embed.img_size,
            "num_classes": 3,
            "depth": 1,
        }
        parsed = parse_arguments(given)
        config = parsed.vit_config()
        with torch.device("meta"):
            ours = VisionTransformer(config)
        expected = native_names(theirs.state_dict(), parsed, config, "folder")
        shapes = {name: tensor.shape for name, tensor in ours.state_dict().items()}
        assert shapes == {name: tensor.shape for name, tensor in expected.items()}, name
        first = theirs.blocks[0]
        assert (config.heads, config.norm_eps) == (first.attn.num_heads, first.norm1.eps), name
        assert (config.grid, config.prefix_tokens) == (
            theirs.patch_embed.grid_size,
            theirs.num_prefix_tokens,
        ), name
        mlp = blocks(ours)[0].mlp
        values = torch.linspace(-3, 3, 50)
        assert isinstance(mlp, Mlp | SwiGLU)
        torch.testing.assert_close(mlp.activation(values), first.mlp.act(values), atol=1e-6, rtol=0)


def test_dynamic_model_takes_its_input_size(tmp_path: Path) -> None:
    make("dynamic", tmp_path)
    assert load_checkpoint(str(tmp_path)).config.image_size == (160, 160)


def test_dynamic_model_resizes_positions_once(tmp_path: Path) -> None:
    model = make("dynamic", tmp_path)
    checkpoint = load_checkpoint(str(tmp_path), image_size=(96, 64))
    assert_same_logits(checkpoint, model, "timm dynamic at 96x64")


@pytest.mark.parametrize("case", RESIZED)
def test_resized_positions_equal_timms(case: str, tmp_path: Path) -> None:
    model = make(case, tmp_path)
    if (
        case == "deit-distilled"
    ):  # this class does not support resizing after construction; its function is the reference
        from timm.layers import resample_abs_pos_embed

        model.pos_embed.data = resample_abs_pos_embed(
            model.pos_embed.data, (6, 4), (3, 3), num_prefix_tokens=2
        )
        model.patch_embed.strict_img_size = False
    else:
        model.set_input_size((96, 64))
    assert_same_logits(
        load_checkpoint(str(tmp_path), image_size=(96, 64)), model, f"timm {case} at another size"
    )


def test_image_size_mends_another_input_size(tmp_path: Path) -> None:
    model = make("vit", tmp_path)
    put(tmp_path / "config.json", "pretrained_cfg.input_size", [3, 96, 96])
    own = load_checkpoint(str(tmp_path), image_size=(64, 64))
    assert_same_logits(own, model, "the model's own size")
    model.set_input_size((96, 96))
    assert_same_logits(
        load_checkpoint(str(tmp_path), image_size=(96, 96)), model, "the input's size"
    )


def test_pooling_query_gives_the_last_map(tmp_path: Path) -> None:
    model = make("map", tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    assert checkpoint.vit.attention_source == "pool_query"
    pixels = pictures(checkpoint, 2)
    pool = model.attn_pool
    with torch.inference_mode():
        x = model.forward_features(pixels)[:, model.num_prefix_tokens :]
        q = pool.q(pool.latent.expand(2, -1, -1)).reshape(2, 1, pool.num_heads, -1).transpose(1, 2)
        k = pool.kv(x).reshape(2, x.shape[1], 2, pool.num_heads, -1).permute(2, 0, 3, 1, 4)[0]
        expected = ((q * pool.scale) @ k.transpose(-2, -1)).softmax(-1)[:, :, 0]
        rows = checkpoint.build()(pixels, (0, 1)).attention
    assert rows is not None
    prefix = checkpoint.vit.prefix_tokens
    torch.testing.assert_close(rows[:, 1, :, prefix:], expected, atol=1e-5, rtol=0)
    assert (rows[:, 1, :, :prefix] == 0).all()
    torch.testing.assert_close(rows.sum(-1), torch.ones(2, 2, 7), atol=1e-5, rtol=0)
    assert (rows[:, 0, :, :prefix] > 0).all()


def test_timms_imagenet_tag_gives_the_labels(tmp_path: Path) -> None:
    make("deit", tmp_path)
    edit(tmp_path / "config.json", lambda config: config.pop("label_names"))
    checkpoint = load_checkpoint(str(tmp_path))
    assert checkpoint.labels[207] == "golden retriever"
    assert any("imagenet-1k" in note for note in checkpoint.assumed)


def test_one_statistic_is_for_all_channels(tmp_path: Path) -> None:
    folder = timm_folder(tmp_path)
    put(folder / "config.json", "pretrained_cfg.mean", [0.25])
    put(folder / "config.json", "pretrained_cfg.std", 0.5)
    preprocess = load_checkpoint(str(folder)).preprocess
    assert preprocess.mean == (0.25, 0.25, 0.25)
    assert preprocess.std == (0.5, 0.5, 0.5)


def test_labels_of_timms_first_folders(tmp_path: Path) -> None:
    folder = timm_folder(tmp_path)

    def flatten(config: dict[str, Any]) -> None:
        config |= config.pop("pretrained_cfg")
        config["labels"] = config.pop("label_names")

    edit(folder / "config.json", flatten)
    assert load_checkpoint(str(folder)).labels == ("a", "b", "c")


def test_a_stated_norm_has_timms_epsilon(tmp_path: Path) -> None:
    folder = timm_folder(tmp_path)
    put(folder / "config.json", "architecture", "vit_base_patch16_clip_224")
    put(folder / "config.json", "model_args.pre_norm", False)
    assert load_checkpoint(str(folder)).vit.norm_eps == 1e-5
    put(folder / "config.json", "model_args.norm_layer", "layernorm")
    assert load_checkpoint(str(folder)).vit.norm_eps == 1e-6


def test_a_folder_of_timm_without_a_head(tmp_path: Path) -> None:
    folder = timm_folder(tmp_path)
    headed = load_checkpoint(str(folder))
    pixels = torch.randn(2, 3, 16, 16)
    edit(folder / "config.json", lambda config: config.update(num_classes=0))
    edit_tensors(
        folder,
        lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("head.")],
    )
    ours, expected = (
        each.build()(pixels).embeddings["head"] for each in (load_checkpoint(str(folder)), headed)
    )
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("case", ["clip", "eva02-clip", "pe-core"])
def test_clips_projection_gives_embeddings(case: str, tmp_path: Path) -> None:
    model = make(case, tmp_path)
    edit(tmp_path / "config.json", lambda config: config.pop("label_names"))
    with pytest.raises(CheckpointError, match="no labels for its"):
        load_checkpoint(str(tmp_path))
    torch.nn.init.zeros_(model.head.bias)
    edit_tensors(tmp_path, lambda tensors: tensors["head.bias"].zero_())
    checkpoint = load_checkpoint(str(tmp_path))
    assert checkpoint.config.num_classes == 0
    pixels = pictures(checkpoint)
    with torch.inference_mode():
        assert_same_embeddings(checkpoint, pixels, {"head": model(pixels)})
    assert load_checkpoint(str(tmp_path), labels="numbers").config.num_classes == model.num_classes
