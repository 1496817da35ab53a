"""State dicts as people make them are served exactly or refused in one line that says what to do."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from model.checkpoint import load_checkpoint
from model.errors import CheckpointError
from tests.model.checkpoint.home_made import PLAIN, load, made
from tests.model.checkpoint.parity import (
    TOLERANCE,
    assert_same_logits,
    pictures,
    preprocess_file,
    randomise,
    relative_error,
)


def test_a_post_norm_network_under_timms_names_is_never_taken_for_a_pre_norm_one(tmp_path: Path) -> None:
    """The names and shapes are the same."""
    model = made(norm_first=False)
    given = "vit_tiny_patch16_224,embed_dim=48,depth=2,num_heads=3,patch_size=4"
    with pytest.raises(CheckpointError, match="norm_order=pre"):
        load(model.state_dict(), tmp_path, given)
    assert_same_logits(load(model.state_dict(), tmp_path, f"{given},norm_order=post"), model, "post-norm")


def test_the_number_of_heads_is_not_guessed(tmp_path: Path) -> None:
    model = made(heads=4)
    given = "vit_small_patch16_224,embed_dim=48,depth=2,patch_size=4"  # whose own heads are 6
    with pytest.raises(CheckpointError, match="num_heads=N"):
        load(model.state_dict(), tmp_path, given)
    assert_same_logits(load(model.state_dict(), tmp_path, f"{given},num_heads=4,norm_order=pre"), model, "heads")


GREY = {"size": 28, "patch": 4, "channels": 1, "hidden": 64, "activation": "relu", "eps": 1e-5, "final_norm": False}


def test_one_refusal_prints_the_command_that_serves_a_grey_model(tmp_path: Path) -> None:
    model = made(**GREY, pool="avg")
    torch.save(model.state_dict(), tmp_path / "grey.pth")
    with pytest.raises(CheckpointError) as refusal:
        load_checkpoint(str(tmp_path / "grey.pth"))
    printed = str(refusal.value)
    assert printed.count("\n") == 0
    # The operator fills in what is in capitals and mends what the code has otherwise; nothing more is asked.
    command = printed[printed.index("vitserve serve ") :].rpartition(" (N is")[0]
    for said, meant in {
        "num_heads=N": "num_heads=3", "MEAN": "0.1307", "STD": "0.3081", "act_layer=gelu": "act_layer=relu",
        "norm_eps=1e-06": "norm_eps=1e-5", "global_pool=token": "global_pool=avg",
    }.items():  # fmt: skip
        assert said in command
        command = command.replace(said, meant)
    _, _, *words = shlex.split(command)
    options: dict[str, Any] = dict(zip((word.removeprefix("--") for word in words[::2]), words[1::2], strict=True))
    assert "final_norm=false" in options["architecture"]
    options["architecture"] += ",pool_include_prefix=false"
    checkpoint = load_checkpoint(options.pop("checkpoint"), **options)
    assert_same_logits(checkpoint, model, "grey 28 px in patches of 4")
    assert checkpoint.preprocess.mean == (0.1307,)
    assert checkpoint.assumed == ()


def test_what_a_name_says_and_no_file_is_listed_with_the_option_that_says_it(tmp_path: Path) -> None:
    model = made(size=48, patch=16, width=192, hidden=768, depth=12)
    options = {"preprocess": preprocess_file(tmp_path, 48, 48)}
    assumed = load(model.state_dict(), tmp_path, "vit_tiny_patch16_224,act_layer=gelu", **options).assumed
    assert assumed == tuple(
        f"{value}, as vit_tiny_patch16_224 has it (VIT_ARCHITECTURE)"
        for value in ("num_heads=3", "norm_order=pre", "norm_eps=1e-06", "global_pool=token")
    )


@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh"])
def test_a_head_of_two_layers(activation: str, tmp_path: Path) -> None:
    layer = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}[activation]()
    model = made(head=nn.Sequential(nn.Linear(48, 20), layer, nn.Dropout(), nn.Linear(20, 5)))
    with pytest.raises(CheckpointError, match="head_act="):
        load(model.state_dict(), tmp_path, PLAIN)
    assert_same_logits(load(model.state_dict(), tmp_path, f"{PLAIN},head_act={activation}"), model, "two-layer head")


def test_a_head_behind_dropout_and_positions_without_the_prefix(tmp_path: Path) -> None:
    model = made(head=nn.Sequential(nn.Dropout(), nn.Linear(48, 5)), position_prefix=False)
    assert_same_logits(load(model.state_dict(), tmp_path, PLAIN), model, "dropout and linear")


@pytest.mark.parametrize(
    "given", [PLAIN, "vit_tiny_patch16_224,embed_dim=48,depth=2,patch_size=4,num_heads=3,norm_order=pre"]
)
def test_a_backbone_without_a_head_is_one_where_that_is_stated(given: str, tmp_path: Path) -> None:
    model = made(hidden=192)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head.")}
    with pytest.raises(
        CheckpointError, match=r"no file says its num_classes: .*,num_classes=0 --preprocess \S+ \(it has no"
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


@pytest.mark.parametrize("batch_norm", [True, False])
def test_a_stem_of_convolutions(batch_norm: bool, tmp_path: Path) -> None:
    layers: list[nn.Module] = []
    for channels, width in ((3, 8), (8, 12)):
        norm = [nn.BatchNorm2d(width)] if batch_norm else []
        layers += [nn.Conv2d(channels, width, 3, 2, 1, bias=not batch_norm), *norm, nn.ReLU()]
    model = made()
    model.patch_embed["proj"] = nn.Sequential(*layers, nn.Conv2d(12, 48, 1)).eval()
    randomise(model)
    for name, statistic in model.named_buffers():
        if statistic.ndim:
            statistic.copy_(torch.linspace(0.5, 2, len(statistic)) - int("mean" in name))
    with pytest.raises(CheckpointError, match="conv_stem=2-relu-2-relu-1"):
        load(model.state_dict(), tmp_path, PLAIN)
    checkpoint = load(model.state_dict(), tmp_path, f"{PLAIN},conv_stem=2-relu-2-relu-1")
    assert_same_logits(checkpoint, model, f"stem of convolutions, batch norm {batch_norm}")
    assert checkpoint.vit.patch_size == 4
    for wrong in ("2-relu-2", "2-relu-2-gelu-1", "2-relu-2-relu-2", "a-relu-2-relu-1", "2-relu-1-relu-1"):
        with pytest.raises(CheckpointError, match=r"conv_stem|last convolution|multiple|no square grid|preprocessing"):
            load(model.state_dict(), tmp_path, f"{PLAIN},conv_stem={wrong}")


def test_a_stem_whose_padding_no_file_says_is_refused(tmp_path: Path) -> None:
    model = made()
    model.patch_embed["proj"] = nn.Sequential(nn.Conv2d(3, 8, 2, 2), nn.ReLU(), nn.Conv2d(8, 48, 2, 2))
    with pytest.raises(CheckpointError, match="the padding of the stem is not known"):
        load(model.state_dict(), tmp_path, f"{PLAIN},conv_stem=2-relu-2")


def test_a_batch_norm_behind_an_activation_is_not_folded_into_the_convolution_before_it(tmp_path: Path) -> None:
    model = made()
    layers = nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.BatchNorm2d(8), nn.Conv2d(8, 48, 2, 2)
    model.patch_embed["proj"] = nn.Sequential(*layers)
    with pytest.raises(CheckpointError, match="a batch norm without its convolution"):
        load(model.state_dict(), tmp_path, f"{PLAIN},conv_stem=2-relu-2")


def test_a_stem_whose_order_is_not_clear_is_not_called_another_network(tmp_path: Path) -> None:
    state = dict(made().state_dict()) | {"patch_embed.stem.weight": torch.zeros(3, 3, 3, 3)}
    with pytest.raises(CheckpointError, match=r"the order of the 2 convolutions of its stem is not clear: my_patch"):
        load({f"my_{name}": tensor for name, tensor in state.items()}, tmp_path, PLAIN)
