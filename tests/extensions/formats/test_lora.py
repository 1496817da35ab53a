"""LoRA folders of PEFT are merged into their base, with PEFT's result."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import load_checkpoint
from model.errors import CheckpointError
from service.engine.checkpoint_files import checkpoint_from
from service.settings import Settings
from tests.model.checkpoint.folders import (
    adapter_folder,
    edit,
    huggingface_folder,
    native_folder,
    timm_folder,
)
from tests.model.checkpoint.parity import assert_same_logits, randomise
from tests.timm_reference import timm, transformers


def peft() -> Any:
    transformers()  # its torchvision may lack operators
    return pytest.importorskip("peft", reason="peft is not installed")


def base_folder(folder: Path, class_name: str = "ViTForImageClassification") -> Any:
    hub = transformers()
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config = hub.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=3)
    model = getattr(hub, class_name)(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    hub.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return model


KINDS: dict[str, dict[str, Any]] = {
    "query and value": {"target_modules": ["q_proj", "v_proj"]},
    "all layers, head saved whole": {
        "target_modules": "all-linear",
        "modules_to_save": ["classifier"],
    },
    "rank and alpha patterns": {
        "target_modules": ["q_proj", "fc1", "fc2"],
        "rank_pattern": {"layers.1.mlp.fc1": 2},
        "alpha_pattern": {"layers.0.*q_proj": 3},
    },
    "rank-stabilised": {"target_modules": ["o_proj"], "use_rslora": True},
    "DoRA": {"target_modules": ["q_proj", "fc1", "projection"], "use_dora": True},
    "biases of LoRA": {"target_modules": ["q_proj", "fc2"], "lora_bias": True},
    "convolution": {"target_modules": ["projection", "q_proj"]},
    "biases": {"target_modules": ["q_proj", "k_proj"], "bias": "lora_only"},
    "said to be transposed": {
        "target_modules": ["q_proj"],
        "fan_in_fan_out": True,
    },  # not a linear layer
}


# A warning of peft's own class would end pytest-xdist, which imports peft without torchvision.
@pytest.mark.filterwarnings("ignore:Adapter 'default'")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True")
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_merged_as_by_peft(kind: str, tmp_path: Path) -> None:
    library = peft()
    base = base_folder(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    adapted = library.get_peft_model(
        base, library.LoraConfig(r=4, lora_alpha=7, **KINDS[kind])
    ).eval()
    randomise(adapted, seed=5)  # the saved base does not change
    adapted = library.PeftModel.from_pretrained(
        transformers().ViTForImageClassification.from_pretrained(tmp_path / "base").eval(),
        saved(
            adapted,
            tmp_path / "adapter",
            str(tmp_path / "base"),
            KINDS[kind].get("fan_in_fan_out", False),
        ),
    )
    merged = adapted.merge_and_unload().eval()
    checkpoint = load_checkpoint(str(tmp_path / "adapter"))
    assert_same_logits(checkpoint, lambda pixels: merged(pixels).logits, f"LoRA {kind}")
    expected = merged.state_dict()
    name = next(n for n in expected if n.endswith("layers.0.attention.q_proj.weight"))
    assert torch.equal(checkpoint.tensors["blocks.0.attn.qkv.weight"][:32], expected[name])
    assert (
        checkpoint.notes[-1]
        == f"the LoRA adapter {tmp_path / 'adapter'} is merged into {tmp_path / 'base'}"
    )


def saved(adapted: Any, folder: Path, base: str, fan_in_fan_out: bool = False) -> Path:
    adapted.save_pretrained(folder)
    fields = {"base_model_name_or_path": base, "fan_in_fan_out": fan_in_fan_out}
    edit(folder / "adapter_config.json", lambda config: config.update(fields))
    return folder


def test_a_headless_base_takes_adapters_head(tmp_path: Path) -> None:
    """An adapter like those of google/vit-base-patch16-224-in21k, with its own classes."""
    library = peft()
    hub = transformers()
    base_folder(tmp_path / "base", "ViTModel")
    model = hub.ViTForImageClassification.from_pretrained(tmp_path / "base", num_labels=7)
    adapted = library.get_peft_model(
        model, library.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["classifier"])
    ).eval()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    folder = saved(adapted, tmp_path / "adapter", str(tmp_path / "base"))
    with pytest.raises(CheckpointError, match="no labels for its 7 classes: set VIT_LABELS"):
        load_checkpoint(str(folder))
    merged = adapted.merge_and_unload().eval()
    checkpoint = load_checkpoint(str(folder), labels="numbers")
    assert_same_logits(
        checkpoint, lambda pixels: merged(pixels).logits, "LoRA on a base without a head"
    )


@pytest.mark.filterwarnings("ignore:Could not find a config file")
@pytest.mark.parametrize("classes", [3, 7])
def test_adapters_head_replaces_timms(classes: int, tmp_path: Path) -> None:
    sizes = {
        "patch_size": 8,
        "embed_dim": 16,
        "depth": 2,
        "num_heads": 2,
        "mlp_ratio": 2,
        "img_size": 16,
    }
    timm_folder(tmp_path / "base")
    model = timm().create_model("vit_tiny_patch16_224", num_classes=3, **sizes)
    model.load_state_dict(load_file(tmp_path / "base" / "model.safetensors"))
    model.reset_classifier(classes)
    options = {"r": 4, "target_modules": ["qkv", "fc1"], "modules_to_save": ["head"]}
    library = peft()
    adapted = library.get_peft_model(model, library.LoraConfig(**options)).eval()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    folder = saved(adapted, tmp_path / "adapter", str(tmp_path / "base"))
    with pytest.raises(
        CheckpointError, match=f"no labels for its {classes} classes: set VIT_LABELS"
    ):
        load_checkpoint(str(folder))
    checkpoint = load_checkpoint(str(folder), labels="numbers")
    assert_same_logits(
        checkpoint, adapted.merge_and_unload().eval(), "LoRA with a new head on timm's model"
    )


@pytest.mark.parametrize("saved_modules", [None, ["head"]])
def test_adapter_of_a_timm_wrapper_is_merged(
    saved_modules: list[str] | None, tmp_path: Path
) -> None:
    hub = transformers()
    pretrained = timm().create_model("vit_tiny_patch16_224", depth=1).pretrained_cfg
    config = hub.TimmWrapperConfig(
        architecture="vit_tiny_patch16_224",
        model_args={"img_size": 48, "depth": 1},
        pretrained_cfg=pretrained | {"input_size": (3, 48, 48)},
        id2label={0: "a", 1: "b", 2: "c"},
    )
    model = hub.TimmWrapperForImageClassification(config).eval()
    randomise(model)
    model.save_pretrained(tmp_path / "base")
    library = peft()
    options = library.LoraConfig(r=4, target_modules=["qkv"], modules_to_save=saved_modules)
    adapted = library.get_peft_model(model, options).eval()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    folder = saved(adapted, tmp_path / "adapter", str(tmp_path / "base"))
    merged = adapted.merge_and_unload().eval()
    checkpoint = load_checkpoint(str(folder), labels="x,y,z")
    assert_same_logits(checkpoint, lambda pixels: merged(pixels).logits, "LoRA on a wrapper")


def test_a_missing_base_is_asked_for(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "adapter", "/elsewhere/vit")
    with pytest.raises(
        CheckpointError,
        match=r"adapter: an adapter, whose base '/elsewhere/vit' is not on .* VIT_BASE",
    ):
        load_checkpoint(str(folder))


# The folder of the base, and the name of its head.
HEADS = {
    "huggingface": (huggingface_folder, "classifier"),
    "timm": (timm_folder, "head"),
    "native": (native_folder, "head"),
}


@pytest.mark.parametrize("format_", HEADS)
def test_a_new_head_needs_its_own_labels(format_: str, tmp_path: Path) -> None:
    make, head = HEADS[format_]
    base = make(tmp_path / "base")
    folder = tmp_path / "adapter"
    assert load_checkpoint(str(base)).labels == ("a", "b", "c")
    if format_ == "huggingface":
        adapter_folder(folder, str(base))
    else:
        plain_adapter(folder, base)
    pair = load_file(folder / "adapter_model.safetensors")
    module = f"base_model.model.{head}"
    new = {f"{module}.weight": torch.ones(3, 16), f"{module}.bias": torch.tensor([1.0, 2.0, 3.0])}
    assert load_checkpoint(str(folder)).labels == ("a", "b", "c")
    save_file(pair | new, folder / "adapter_model.safetensors")
    with pytest.raises(
        CheckpointError, match="no labels for its 3 classes: set VIT_LABELS"
    ) as refused:
        load_checkpoint(str(folder))
    advised = f"if they are the base's, to {base / 'config.json'}"
    assert (advised in str(refused.value)) == (format_ == "huggingface")
    checkpoint = load_checkpoint(str(folder), labels="x,y,z")
    assert checkpoint.labels == ("x", "y", "z")
    assert torch.equal(checkpoint.tensors["head.bias"], new[f"{module}.bias"])
    assert checkpoint.assumed[-1].startswith("activation: that of the base")
    if format_ == "huggingface":
        assert load_checkpoint(str(folder), labels=str(base / "config.json")).labels == (
            "a",
            "b",
            "c",
        )
    if format_ != "native":
        names = {
            "id2label": {"0": "p", "1": "q", "2": "r"},
            "problem_type": "multi_label_classification",
        }
        (folder / "config.json").write_text(json.dumps(names))
        checkpoint = load_checkpoint(str(folder), base=str(base))
        assert checkpoint.labels == ("p", "q", "r")
        assert checkpoint.multi_label


@pytest.mark.parametrize("format_", HEADS)
def test_an_adapter_without_its_head_is_refused(format_: str, tmp_path: Path) -> None:
    make, _ = HEADS[format_]
    base = make(tmp_path / "base")
    folder = tmp_path / "adapter"
    if format_ == "huggingface":
        adapter_folder(folder, str(base))
    else:
        plain_adapter(folder, base)

    def state(**config: Any) -> None:
        (folder / "config.json").write_text(json.dumps(config))

    for config in (
        {"id2label": {"0": "p", "1": "q"}},
        {"label2id": {"p": 0, "q": 1}},
        {"num_labels": 2},
        {"num_classes": 2},
        {"label_names": ["p", "q"], "num_classes": 2},
    ):
        state(**config)
        for labels in (None, "numbers"):
            with pytest.raises(
                CheckpointError, match=r"states 2 classes, .* has 3 classes: "
            ) as no:
                load_checkpoint(str(folder), base=str(base), labels=labels)
            assert 'modules_to_save=["classifier"]' in str(no.value)
        assert load_checkpoint(str(folder), base=str(base), labels="x,y,z").labels == tuple("xyz")
    state(id2label={"0": "p", "1": "q", "2": "c"})
    with pytest.raises(CheckpointError, match=r"states the labels p, q, c, .* the labels a, b, c:"):
        load_checkpoint(str(folder), base=str(base))
    state(id2label={"0": "a", "1": "b", "2": "c"}, num_labels=3)
    assert load_checkpoint(str(folder), base=str(base)).labels == ("a", "b", "c")


def test_an_adapters_config_counts_without_a_head(tmp_path: Path) -> None:
    base = huggingface_folder(tmp_path / "base")
    folder = adapter_folder(tmp_path / "adapter", str(base))
    numbers = {str(index): f"LABEL_{index}" for index in range(3)}
    edit(base / "config.json", lambda config: config.update(id2label=numbers))
    stated = {
        "id2label": {"0": "p", "1": "q", "2": "r"},
        "problem_type": "multi_label_classification",
    }
    (folder / "config.json").write_text(json.dumps(stated))
    checkpoint = load_checkpoint(str(folder), base=str(base))
    assert (checkpoint.labels, checkpoint.multi_label) == (("p", "q", "r"), True)


def test_a_headless_base_needs_the_adapters_head(tmp_path: Path) -> None:
    base = huggingface_folder(tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    headless = {name: tensor for name, tensor in weights.items() if "classifier" not in name}
    save_file(headless, base / "model.safetensors")
    edit(base / "config.json", lambda config: config.update(architectures=["ViTModel"]))
    folder = adapter_folder(tmp_path / "adapter", str(base))
    (folder / "config.json").write_text('{"id2label": {"0": "p", "1": "q", "2": "r"}}')
    with pytest.raises(CheckpointError, match="states 3 classes, but the head has 0 classes"):
        load_checkpoint(str(folder), base=str(base))


def plain_adapter(folder: Path, base: Path, **fields: Any) -> dict[str, torch.Tensor]:
    """Write an adapter of a native folder by the formula, in PEFT's layout."""
    folder.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 6,
        "base_model_name_or_path": str(base),
    } | fields
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weight = load_file(base / "model.safetensors")["blocks.0.mlp.fc1.weight"]
    generator = torch.Generator().manual_seed(2)
    pair = {
        "base_model.model.blocks.0.mlp.fc1.lora_A.weight": torch.randn(
            2, weight.shape[1], generator=generator
        ),
        "base_model.model.blocks.0.mlp.fc1.lora_B.weight": torch.randn(
            weight.shape[0], 2, generator=generator
        ),
    }
    save_file(pair, folder / "adapter_model.safetensors")
    return pair


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, r"in part: lora_magnitude_vector is missing: save it again"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not read; LORA is: merge the adapter"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not read"),
        ({"r": 8}, "r is 8, but the adapter of 'blocks.0.mlp.fc1' has 2: give the adapter_config"),
        ({"modules_to_save": ["head"]}, r"none of modules_to_save, \['head'\], which were trained"),
        ({"r": "8"}, "r is '8', but the adapter"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is not read"),
        ({"base_model_name_or_path": None}, "set VIT_BASE"),
        ({"lora_alpha": None}, "lora_alpha is missing"),
        ({"lora_alpha": "x"}, "lora_alpha 'x': expected a number"),
        ({"lora_alpha": 10**400}, "lora_alpha 1000.*: expected a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan: expected a number"),
        ({"alpha_pattern": {"((.?)+)+!": 1}}, "alpha_pattern is not of names of modules"),
        ({"alpha_pattern": ["fc1"]}, "alpha_pattern is not of names of modules"),
    ],
)
def test_unmergeable_adapter_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    native_folder(tmp_path / "base")
    plain_adapter(tmp_path / "adapter", tmp_path / "base", **fields)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(str(tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("blocks.9.mlp.fc1.lora_A.weight", (2, 16), "changes 'blocks.9.mlp.fc1' in part"),
        ("blocks.0.mlp.fc1.lora_A.weight", (2, 9), r"is not for .*: .*set VIT_BASE \(--base\)"),
        ("blocks.0.mlp.fc1.lora_A.weight", (5, 16), "r is 2, but the adapter of .* has 5"),
        ("blocks.0.mlp.fc1.lora_B.weight", (32, 2, 3, 3), "change is not for a tensor"),
        ("blocks.0.mlp.fc1.lora_embedding_A", (2, 16), "is not of plain LoRA"),
        ("blocks.0.mlp.fc1.lora_magnitude_vector", (2,), "is not stated by use_dora"),
        ("", (), "has no tensors of LoRA"),
    ],
)
def test_an_unfit_adapter_is_refused(
    name: str, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    native_folder(tmp_path / "base")
    pair = plain_adapter(tmp_path / "adapter", tmp_path / "base")
    tensors = pair | {f"base_model.model.{name}": torch.ones(shape)} if name else {}
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(str(tmp_path / "adapter"))


def test_an_adapter_of_an_adapter_is_refused(tmp_path: Path) -> None:
    native_folder(tmp_path / "base")
    plain_adapter(tmp_path / "inner", tmp_path / "base")
    plain_adapter(
        tmp_path / "outer", tmp_path / "base", base_model_name_or_path=str(tmp_path / "inner")
    )
    with pytest.raises(CheckpointError, match="inner is an adapter, too: merge that one first"):
        load_checkpoint(str(tmp_path / "outer"))


def test_an_empty_adapter_is_refused(tmp_path: Path) -> None:
    native_folder(tmp_path / "base")
    plain_adapter(tmp_path / "adapter", tmp_path / "base")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"download adapter_model\.safetensors, too"):
        load_checkpoint(str(tmp_path / "adapter"))


def test_adapter_beside_a_model_is_refused(tmp_path: Path) -> None:
    native_folder(tmp_path / "base")
    plain_adapter(tmp_path / "base", tmp_path / "base")
    with pytest.raises(
        CheckpointError,
        match=r"no file says whether they are merged: --base \S+/base \(VIT_BASE\) reads",
    ):
        load_checkpoint(str(tmp_path / "base"))
    native_folder(tmp_path / "other")
    checkpoint = load_checkpoint(str(tmp_path / "base"), base=str(tmp_path / "other"))
    assert checkpoint.notes == (
        f"the LoRA adapter {tmp_path / 'base'} is merged into {tmp_path / 'other'}",
    )


def test_base_without_an_adapter_is_refused(tmp_path: Path) -> None:
    native_folder(tmp_path / "model")
    native_folder(tmp_path / "base")
    with pytest.raises(
        CheckpointError, match=r"/model: not an adapter \(no adapter_config.json\), so VIT_BASE"
    ):
        load_checkpoint(str(tmp_path / "model"), base=str(tmp_path / "base"))


def test_base_outside_the_folder_is_refused(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "models"
    outside = huggingface_folder(tmp_path / "outside")
    folder.mkdir()
    huggingface_folder(folder / "inside")
    for name, base in (
        ("in", folder / "inside"),
        ("out", outside),
        ("up", folder / ".." / "outside"),
        ("hub", "a/b"),
    ):
        adapter_folder(folder / name, str(base))

    def loaded(name: str, base: str | None = None) -> str:
        given = Settings(checkpoint=str(folder / name), checkpoint_folder=str(folder), base=base)
        return checkpoint_from(given).notes[-1]

    assert loaded("in").endswith(f"is merged into {folder / 'inside'}")
    assert loaded("out", base=str(outside)).endswith(f"is merged into {outside}")
    for name in ("out", "up", "hub"):
        with pytest.raises(CheckpointError, match="does not lie below VIT_CHECKPOINT_FOLDER"):
            loaded(name)


def test_adapter_of_models_may_name_a_hub_id(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    adapter_folder(tmp_path / "models" / "hub", "vitserve-tests/none")
    adapter_folder(tmp_path / "models" / "out", str(huggingface_folder(tmp_path / "outside")))
    models = str(tmp_path / "models")
    for name, message in (
        ("hub", "vitserve-tests/none"),
        ("out", "does not lie below .* VIT_MODELS"),
    ):
        with pytest.raises(CheckpointError, match=message) as refused:
            checkpoint_from(Settings(models=models, checkpoint=f"{models}/{name}"))
        assert ("does not lie below" in str(refused.value)) == (name == "out")


def test_an_adapter_is_named_as_itself(tmp_path: Path) -> None:
    base = huggingface_folder(tmp_path / "base")
    assert load_checkpoint(str(adapter_folder(tmp_path / "mine", str(base)))).name == "mine"


def test_config_beside_an_adapter_is_no_model(tmp_path: Path) -> None:
    native_folder(tmp_path / "base")
    plain_adapter(tmp_path / "adapter", tmp_path / "base")
    (tmp_path / "adapter" / "config.json").write_text('{"model_type": "vit"}')
    assert load_checkpoint(str(tmp_path / "adapter")).labels == ("a", "b", "c")
