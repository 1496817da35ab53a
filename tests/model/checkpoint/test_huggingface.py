"""Models saved by transformers: outputs, and scores of whole CLIP and SigLIP checkpoints."""

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.checkpoint import Checkpoint, load_checkpoint, native
from model.checkpoint.huggingface import FAMILIES
from model.checkpoint.huggingface.families import CLIP, SIGLIP
from model.errors import CheckpointError
from model.explanation.explain import explain
from model.outputs import EmbeddingRequest, MapRequest, RequestedOutputs
from model.runtime.predictor import Predictor
from model.runtime.torch_pass import Normalise
from tests.model.checkpoint import whole_models
from tests.model.checkpoint.folders import edit, edit_tensors, put, refusal
from tests.model.checkpoint.parity import (
    EXACT,
    assert_same_embeddings,
    assert_same_logits,
    assert_same_rows,
    pictures,
    randomise,
    relative_error,
)
from tests.model.checkpoint.transformers_models import CASES, SMALL, make, write_preprocessor
from tests.model.runtime.predictions import MODES
from tests.timm_reference import transformers

pytestmark = pytest.mark.timeout(60)  # imports transformers

_OTHERS = """
Bit ConvNext ConvNextV2 Cvt Dinat DonutSwin EfficientNet FocalNet HGNetV2 Hiera ImageGPT Levit
MobileNetV1 MobileNetV2 MobileViT MobileViTV2 PPLCNet PoolFormer Pvt PvtV2 RegNet ResNet
Segformer ShieldGemma2 Siglip2 SwiftFormer Swin Swinv2 TextNet
"""
NO_PLAIN_TRANSFORMERS = {f"{name}ForImageClassification" for name in _OTHERS.split()} | {
    "LevitForImageClassificationWithTeacher",
    *(
        f"PerceiverForImageClassification{kind}"
        for kind in ("Learned", "Fourier", "ConvProcessing")
    ),
}
"""Architectures with convolutions, windows, pyramids, decoders, or pictures of any aspect."""


@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_transformers(case: str, tmp_path: Path) -> None:
    model = make(case, tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    pixels = assert_same_logits(
        checkpoint, lambda pixels: model(pixels).logits, f"transformers {case}"
    )
    assert checkpoint.labels == tuple(f"LABEL_{i}" for i in range(checkpoint.config.num_classes))
    read: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("classifier"):
            module.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    with torch.inference_mode():
        whole = torch.stack(
            model(pixels, output_attentions=True).attentions, dim=1
        )  # [B, layers, heads, N, N]
    assert len(read) == (2 if case == "deit-teacher" else 1)
    # Two heads read two features, and timm takes their mean.
    assert_same_embeddings(checkpoint, pixels, {"head": torch.stack(read).mean(dim=0)})
    assert_same_rows(checkpoint, pixels, whole)


@pytest.mark.parametrize(
    "case", ["vit", "deit-teacher", "dinov2-swiglu", "dinov2-registers", "beit", "vit-msn"]
)
def test_names_in_memory_are_read(case: str, tmp_path: Path) -> None:
    model = make(case, tmp_path, save_original_format=False)
    assert_same_logits(load_checkpoint(str(tmp_path)), lambda pixels: model(pixels).logits, case)


def test_every_plain_transformer_is_read() -> None:
    transformers()
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES as CLASSES,
    )

    names = {
        name
        for value in CLASSES.values()
        for name in ((value,) if isinstance(value, str) else value)
    }
    classifiers = {family.class_name for family in FAMILIES if family not in (CLIP, SIGLIP)}
    assert names - NO_PLAIN_TRANSFORMERS == classifiers | {"TimmWrapperForImageClassification"}


# Fields of a class's config that readers ignore, because they change neither logits nor features.
_WITHOUT_EFFECT = """
return_dict output_attentions output_hidden_states dtype chunk_size_feed_forward
is_encoder_decoder transformers_version
_name_or_path
hidden_dropout_prob attention_probs_dropout_prob attention_dropout drop_path_rate
initializer_range initializer_factor layerscale_value logit_scale_init_value
use_mask_token encoder_stride pooler_act pooler_output_size
out_features out_indices stage_names apply_layernorm reshape_hidden_states add_fpn pool_scales
use_auxiliary_head auxiliary_loss_weight auxiliary_channels auxiliary_num_convs
auxiliary_concat_input
semantic_loss_ignore_index pad_token_id projection_size
"""
"""Fields of outputs, types, training, other heads and tasks, and shapes that the tensors have."""
_READ = """
architectures model_type vision_config text_config id2label label2id problem_type
hidden_size num_hidden_layers num_attention_heads intermediate_size mlp_ratio num_channels
image_size patch_size
hidden_act layer_norm_eps qkv_bias num_register_tokens use_swiglu_ffn layer_scale_init_value
projection_dim
use_absolute_position_embeddings use_mean_pooling use_relative_position_bias
use_shared_relative_position_bias
vocab_size max_position_embeddings bos_token_id eos_token_id vision_use_head
"""


def test_every_config_field_is_known() -> None:
    known = {*_READ.split(), *_WITHOUT_EFFECT.split()}
    for family in FAMILIES:
        config = getattr(transformers(), family.class_name).config_class().to_dict()
        towers = [config.get(name) or {} for name in ("vision_config", "text_config")]
        assert {*config, *towers[0], *towers[1]} <= known, family.class_name


def test_sharded_safetensors_are_read(tmp_path: Path) -> None:
    model = make("vit", tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert not (tmp_path / "model.safetensors").exists()
    assert_same_logits(
        load_checkpoint(str(tmp_path)), lambda pixels: model(pixels).logits, "sharded"
    )


@pytest.mark.parametrize("is_sharded", [False, True])
def test_weights_that_the_config_names_are_read(is_sharded: bool, tmp_path: Path) -> None:
    named = "mine.safetensors.index.json" if is_sharded else "mine.safetensors"
    model = make("vit", tmp_path, max_shard_size="50KB" if is_sharded else "1GB")
    usual = "model.safetensors.index.json" if is_sharded else "model.safetensors"
    (tmp_path / usual).rename(tmp_path / named)
    tensors = dict(model.state_dict())
    other = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    save_file(other, tmp_path / "model.safetensors")
    put(tmp_path / "config.json", "transformers_weights", named)
    checkpoint = load_checkpoint(str(tmp_path))
    assert_same_logits(checkpoint, lambda pixels: model(pixels).logits, "named weights")
    assert not [note for note in checkpoint.notes if "transformers_weights" in note]
    for wrong in ("absent.safetensors", "model.pt", 3, "../mine.safetensors"):
        put(tmp_path / "config.json", "transformers_weights", wrong)
        refusal(tmp_path)


def test_pickled_state_dict_is_read(tmp_path: Path) -> None:
    model = make("vit", tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert_same_logits(
        load_checkpoint(str(tmp_path)), lambda pixels: model(pixels).logits, "pytorch_model.bin"
    )


def test_sharded_pickles_are_read_by_index(tmp_path: Path) -> None:
    model = make("vit", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = {
        name: f"pytorch_model-0000{1 + index % 2}-of-00002.bin"
        for index, name in enumerate(tensors)
    }
    for file in set(names.values()):
        torch.save(
            {name: tensor for name, tensor in tensors.items() if names[name] == file},
            tmp_path / file,
        )
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    assert_same_logits(
        load_checkpoint(str(tmp_path)), lambda pixels: model(pixels).logits, "sharded pickles"
    )
    put(tmp_path / "pytorch_model.bin.index.json", "weight_map.x", "../x.bin")
    assert "is not the name of a .bin file: the shards are in" in refusal(tmp_path)


@pytest.mark.parametrize("wanted", [(48, 48), (32, 32)])
def test_a_size_mends_a_processor_of_another(wanted: tuple[int, int], tmp_path: Path) -> None:
    model = make("vit", tmp_path)
    write_preprocessor(tmp_path, 48, 48)
    assert "the preprocessing gives 48x48 pixels" in refusal(tmp_path)
    checkpoint = load_checkpoint(str(tmp_path), image_size=wanted)
    assert checkpoint.config.image_size == checkpoint.preprocess.size == wanted
    reference = lambda pixels: model(pixels, interpolate_pos_encoding=True).logits  # noqa: E731
    assert_same_logits(checkpoint, reference, f"vit at {wanted}")


@pytest.mark.parametrize(
    ("case", "size"),
    [
        *(
            ("dinov2", (16, 16)),
            ("dinov2", (24, 40)),
            ("dinov2-registers", (24, 40)),
            ("dinov2-registers", (40, 40)),
        ),
        *(("beit", (48, 48)), ("beit-absolute-cls", (48, 48))),
    ],
)
def test_positions_resize_as_in_their_class(
    case: str, size: tuple[int, int], tmp_path: Path
) -> None:
    model = make(case, tmp_path)
    write_preprocessor(tmp_path, *size)
    checkpoint = load_checkpoint(str(tmp_path))
    assert checkpoint.config.image_size == size
    assert_same_logits(checkpoint, lambda pixels: model(pixels).logits, f"{case} at {size}")


@pytest.mark.parametrize("size", [(24, 40), (48, 48)])
def test_resizing_equals_transformers(size: tuple[int, int], tmp_path: Path) -> None:
    model = make("vit", tmp_path)
    checkpoint = load_checkpoint(str(tmp_path), image_size=size)
    assert checkpoint.preprocess.size == size
    reference = lambda pixels: model(pixels, interpolate_pos_encoding=True).logits  # noqa: E731
    assert_same_logits(checkpoint, reference, f"vit at {size}")


def test_a_converted_folder_resizes_as_its_source(tmp_path: Path) -> None:
    make("vit", tmp_path)
    native.write(tmp_path / "converted", load_checkpoint(str(tmp_path)))
    resized = [
        load_checkpoint(str(folder), image_size=(24, 16)).tensors["pos_embed"]
        for folder in (tmp_path, tmp_path / "converted")
    ]
    assert torch.equal(*resized)


@pytest.mark.parametrize(("case", "size"), [("vit", (24, 16)), ("dinov2", (48, 24))])
def test_positions_are_not_resized_twice(case: str, size: tuple[int, int], tmp_path: Path) -> None:
    make(case, tmp_path)
    converted = tmp_path / "converted"
    native.write(converted, load_checkpoint(str(tmp_path), image_size=size))
    assert load_checkpoint(str(converted), image_size=size).config.image_size == size
    with pytest.raises(CheckpointError, match=r"resized from .* convert SOURCE --image-size 64x64"):
        load_checkpoint(str(converted), image_size=(64, 64))


def test_dinov2_positions_are_resized_once(tmp_path: Path) -> None:
    model = make("dinov2", tmp_path)
    write_preprocessor(tmp_path, 16, 16)
    checkpoint = load_checkpoint(str(tmp_path), image_size=(48, 24))
    assert_same_logits(checkpoint, lambda pixels: model(pixels).logits, "dinov2 16 -> 48x24")


IMAGE_TOWERS = {
    "CLIPVisionModel": "pooler_output",
    "CLIPVisionModelWithProjection": "image_embeds",
    "SiglipVisionModel": "pooler_output",
}


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("name", IMAGE_TOWERS)
def test_image_tower_gives_its_embedding(name: str, original: bool, tmp_path: Path) -> None:
    kind = getattr(transformers(), name)
    model = kind(kind.config_class(**SMALL)).eval()
    randomise(model)
    model.save_pretrained(tmp_path, save_original_format=original)
    write_preprocessor(tmp_path, 32, 32)
    checkpoint = load_checkpoint(str(tmp_path))
    pixels = pictures(checkpoint)
    with torch.inference_mode():
        expected = getattr(model(pixels), IMAGE_TOWERS[name])
        got = checkpoint.build()(pixels, (), 0, True).embeddings["head"]
    assert relative_error(got, expected) < EXACT


def test_beit_without_a_head_gives_the_mean(tmp_path: Path) -> None:
    model = make("beit", tmp_path)
    model.beit.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    pixels = pictures(checkpoint)
    with torch.inference_mode():
        expected = model.beit(pixels).pooler_output
    assert_same_embeddings(checkpoint, pixels, {"head": expected})


@pytest.mark.parametrize(
    ("case", "size", "message"),
    [
        ("beit", [32, 24], "config.json: image_size: its class reads square sizes only"),
        ("beit", 40, ": blocks.0.attn.relative_position_bias_table has shape"),
        ("beit-both", 40, ": shared.relative_position_bias_table has shape"),
        ("beit-absolute-cls", 40, ": pos_embed has shape"),
        ("dinov2", 40, ": pos_embed has shape"),
        ("dinov2", [32, 24], ": 12 positions are not a square, as its class needs"),
    ],
)
def test_unsupported_size_is_refused(case: str, size: Any, message: str, tmp_path: Path) -> None:
    make(case, tmp_path)
    put(tmp_path / "config.json", "image_size", size)
    assert re.match(f"{tmp_path}[^:]*{re.escape(message)}", refusal(tmp_path))


def test_config_gives_labels(tmp_path: Path) -> None:
    make("vit", tmp_path)
    labels = {str(i): f"class {i}" for i in range(5)}
    edit(
        tmp_path / "config.json",
        lambda c: c.update(id2label=labels, problem_type="multi_label_classification"),
    )
    checkpoint = load_checkpoint(str(tmp_path))
    assert checkpoint.labels == tuple(labels.values())
    assert checkpoint.multi_label


LABELS = ("cat", "Café DOG's tail!", "a red car, parked", "x" * 200)
CSV = 'cat, "Café DOG\'s tail!", "a red car, parked", ' + "x" * 200
MODELS: dict[str, Callable[[Path], Any]] = {
    "clip": whole_models.clip,
    "clip, the end of a text by its number": partial(whole_models.clip, legacy_eos=True),
    "siglip": whole_models.siglip,
    "siglip, sentencepiece": whole_models.first_siglip,
    "siglip, padding masked": partial(whole_models.siglip, attention_mask=True),
}


def pipeline_scores(model: Any, folder: Path, pixels: Tensor, labels: tuple[str, ...]) -> Tensor:
    """Return the answer of transformers' pipeline for normalised pixels, ordered by label."""
    library = transformers()
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    pipeline = library.ZeroShotImageClassificationPipeline(
        model=model,
        tokenizer=tokenizer,
        image_processor=lambda images, return_tensors: library.BatchFeature(
            {"pixel_values": pixels}
        ),
        device="cpu",
    )
    from PIL import Image

    answer = pipeline(Image.new("RGB", (8, 8)), candidate_labels=list(labels))
    scores = {each["label"]: each["score"] for each in answer}
    return torch.tensor([scores[label] for label in labels])


def own_scores(checkpoint: Checkpoint, pixels: Tensor) -> Tensor:
    with torch.inference_mode():
        logits = checkpoint.build()(pixels).logits[0]
    return torch.as_tensor(logits.sigmoid() if checkpoint.multi_label else logits.softmax(dim=0))


@pytest.mark.parametrize("name", MODELS)
def test_zero_shot_equals_the_pipeline(name: str, tmp_path: Path) -> None:
    model = MODELS[name](tmp_path)
    # The pipeline truncates long texts for SigLIP, and fails on long texts for CLIP.
    labels = LABELS if name.startswith("siglip") else LABELS[:3]
    checkpoint = load_checkpoint(
        str(tmp_path), labels=CSV.rsplit(",", len(LABELS) - len(labels))[0]
    )
    assert checkpoint.labels == labels
    pixels = pictures(checkpoint, 1)
    expected = pipeline_scores(model, tmp_path, pixels, labels)
    assert expected.std() > 1e-3, "the reference says nothing"
    torch.testing.assert_close(own_scores(checkpoint, pixels), expected, atol=1e-5, rtol=0)
    length, padding = (64, "max_length") if checkpoint.multi_label else (77, True)
    tokenizer = transformers().AutoTokenizer.from_pretrained(tmp_path)
    inputs = tokenizer(
        list(LABELS), padding=padding, truncation=True, max_length=length, return_tensors="pt"
    )
    with torch.inference_mode():
        of_texts = model.get_text_features(**inputs).pooler_output
        of_images = model.get_image_features(pixels).pooler_output
        own = checkpoint.build()(pixels).embeddings["head"]
    assert checkpoint.embed_texts is not None
    torch.testing.assert_close(
        torch.from_numpy(checkpoint.embed_texts(LABELS)), of_texts, atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(own, of_images, atol=1e-5, rtol=1e-5)
    # Each text alone, because texts are cached separately.
    alone = np.concatenate([checkpoint.embed_texts([text]) for text in LABELS])
    np.testing.assert_allclose(alone, of_texts.numpy(), atol=1e-5)


@pytest.mark.parametrize(("name", "backend"), [("clip", "openvino"), ("siglip", "torch")])
def test_labels_of_requests_score_the_same(name: str, backend: Any, tmp_path: Path) -> None:
    MODELS[name](tmp_path)
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "compile_mode": MODES[backend],
        "threads": 1,
    }
    checkpoint = load_checkpoint(str(tmp_path), labels=CSV)
    bare, full = (
        Predictor(each, **options) for each in (load_checkpoint(str(tmp_path)), checkpoint)
    )
    assert (bare.checkpoint.labels, bare.checkpoint.config.num_classes) == ((), 0)
    zero_shot = checkpoint.zero_shot
    assert zero_shot is not None
    images = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
    head = zero_shot.head(LABELS, bare.embed_texts(zero_shot.prompts(LABELS)))
    embedded = bare.predict(images, RequestedOutputs(1, embedding=EmbeddingRequest()))
    for image, outputs, expected in zip(
        images, embedded, full.predict(images, RequestedOutputs(4)), strict=True
    ):
        found = head.answer(RequestedOutputs(4, labels=LABELS), outputs)
        np.testing.assert_allclose(found.scores, expected.scores, atol=1e-5)
        assert found.indices.tolist() == expected.indices.tolist()
        pixels = Normalise(checkpoint.preprocess)(torch.from_numpy(image[None]))
        np.testing.assert_allclose(
            expected.scores, own_scores(checkpoint, pixels).numpy()[expected.indices], atol=1e-5
        )
        wanted = head.backbone_request(RequestedOutputs(1, MapRequest("relevance"), labels=LABELS))
        [of_label] = bare.predict(image[None], wanted)
        with torch.no_grad():
            classes = torch.tensor([int(expected.indices[0])])
            maps, _ = explain(checkpoint.build(), pixels, classes, MapRequest("relevance"))
        assert of_label.map is not None
        np.testing.assert_allclose(of_label.map.values, maps[0], atol=1e-5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    whole_models.clip(folder)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def change_json(file: Path, **fields: object) -> None:
    edit(file, lambda value: value.update(fields))


def text_config(**fields: object) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / "config.json", text_config_dict=fields)


REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tokenizer": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        "no tokenizer .*processor.save_pretrained",
    ),
    "a broken tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        "no tokenizer that transformers",
    ),
    "a tokenizer of more tokens": (
        lambda folder: change_json(
            folder / "tokenizer_config.json", extra_special_tokens=["<one>", "<more>"]
        ),
        "the tokenizer has .* tokens, the text tower",
    ),
    "a token of a high number": (
        lambda folder: change_json(
            folder / "tokenizer.json",
            added_tokens=[
                {"id": 999, "content": "cat", "special": False, "normalized": False}
                | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            ],
        ),
        "the tokenizer has .* tokens, the text tower|fails on a text",
    ),
    "no token for padding": (
        lambda folder: change_json(folder / "tokenizer_config.json", pad_token=None),
        "its tokenizer fails on a text: .*padding token",
    ),
    "a tower described by a text": (
        lambda folder: change_json(folder / "config.json", text_config="large"),
        "config.json: text_config: expected an object",
    ),
    "an image's tower described by a list": (
        lambda folder: change_json(folder / "config.json", vision_config_dict=[1]),
        "config.json: vision_config: expected an object",
    ),
    "an end of a very high number": (text_config(eos_token_id=10**30), "fails on a text"),
    "padding on the left": (
        lambda folder: change_json(folder / "tokenizer_config.json", padding_side="left"),
        "padding_side 'left': expected 'right'",
    ),
    "a layer less": (text_config(num_hidden_layers=1), "text tower: unexpected key 'blocks.1"),
    "heads that do not divide": (
        text_config(num_attention_heads=5),
        "text_config: .*multiple of heads",
    ),
    "very many layers": (text_config(num_hidden_layers=10**9), "text_config: num_hidden_layers"),
    "another activation": (
        text_config(hidden_act="mish"),
        "text_config: hidden_act 'mish' is not computed",
    ),
    "other positions": (
        text_config(max_position_embeddings=78),
        "text tower: pos_embed.weight has shape",
    ),
    "no scale": (
        lambda folder: edit_tensors(folder, lambda tensors: tensors.pop("logit_scale")),
        "missing key 'logit_scale'",
    ),
    "an endless scale": (
        lambda folder: edit_tensors(
            folder, lambda tensors: tensors["logit_scale"].fill_(torch.inf)
        ),
        "logit_scale: expected one number",
    ),
    "no text tower": (
        lambda folder: edit_tensors(
            folder,
            lambda t: [t.pop(name) for name in list(t) if name.startswith("text_model.encoder")],
        ),
        "text tower: missing key 'blocks.0",
    ),
    "a text tower that is not finite": (
        lambda folder: edit_tensors(folder, lambda t: t["text_projection.weight"].fill_(torch.nan)),
        "text tower: .* holds values that are not finite",
    ),
    "no width where it is not the usual one": (
        lambda folder: put(folder / "config.json", "projection_dim"),
        r"expected \[512, 32\]",
    ),
    "another width": (
        lambda folder: change_json(folder / "config.json", projection_dim=23),
        "has shape",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_an_incomplete_checkpoint_is_refused(case: str, copy: Path) -> None:
    spoil, message = REFUSALS[case]
    spoil(copy)
    with pytest.raises(CheckpointError, match=message) as refusal:
        load_checkpoint(str(copy), labels="cat,dog")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": "nowhere.txt"}, "VIT_LABELS 'nowhere.txt': neither a file, nor"),
        ({"labels": "cat,,dog"}, "VIT_LABELS: '', number 2"),
    ],
)
def test_labels_are_checked(options: dict[str, str], message: str, whole: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_checkpoint(str(whole), **options)


def test_siglip_without_pooling_is_refused(tmp_path: Path) -> None:
    whole_models.siglip(tmp_path)
    put(tmp_path / "config.json", "vision_config.vision_use_head", False)
    assert "vision_use_head is not true: without its head the tower gives no features" in refusal(
        tmp_path
    )


def test_tokenizers_code_is_not_run(copy: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (copy / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    change_json(
        copy / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
        tokenizer_class="Evil",
    )
    with contextlib.suppress(CheckpointError):
        load_checkpoint(str(copy), labels="cat,dog")
    assert not ran.exists()


def test_an_absent_library_names_its_extra(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        CheckpointError, match=re.escape("needs transformers: pip install 'vitserve[text]'")
    ):
        load_checkpoint(str(whole), labels="cat,dog")


def call_the_head(folder: Path, name: str) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        for kind in ("weight", "bias"):
            state[f"{name}.{kind}"] = state.pop(f"classifier.{kind}")

    edit_tensors(folder, change)


@pytest.mark.parametrize("name", ["classifier.1", "head", "fc"])
def test_a_head_of_any_name_is_read(name: str, tmp_path: Path) -> None:
    model = make("vit", tmp_path)
    call_the_head(tmp_path, name)
    assert_same_logits(
        load_checkpoint(str(tmp_path)), lambda pixels: model(pixels).logits, f"head {name}"
    )


def test_a_likely_head_of_a_folder_is_named(tmp_path: Path) -> None:
    make("vit", tmp_path)
    call_the_head(tmp_path, "species")
    with pytest.raises(
        CheckpointError,
        match=r"'species.weight' .* is likely the head: .* save the layer as 'classif",
    ):
        load_checkpoint(str(tmp_path))
