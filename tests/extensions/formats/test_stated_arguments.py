"""What a plain state dict does not tell is asked for, and may be stated."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from model.checkpoint import load_checkpoint
from model.checkpoint.timm_architectures import architectures
from model.errors import CheckpointError
from service.model_settings import as_keys
from tests.extensions.formats.home_made import PLAIN, load, made
from tests.model.checkpoint.parity import (
    preprocess_file,
)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (None, "--architecture vit,num_heads=N,.* a name of timm says all of them"),
        (
            "vit_nothing",
            f"'vit_nothing' is none of the {len(architectures())} architectures of timm",
        ),
        ("vit_small_patch16_224", "has shape .*192.*, expected .*384"),
        (
            "vit_tiny_patch16_224,depth=11,norm_order=pre",
            r"unexpected key 'blocks.11.*correct depth=12 \(VIT_ARCHITECTURE, or",
        ),
        ("vit_tiny_patch16_224,num_hidden_layers=12", "'num_hidden_layers': did you mean depth?"),
        ("vit,layers=12", "'layers': did you mean depth?"),
        ("vit_tiny_patch16_224,hidden_size=192", "'hidden_size': did you mean embed_dim?"),
        ("vit_tiny_patch16_224,mlp_ratio=2,norm_order=pre", "correct its sizes .*mlp_ratio"),
        ("vit_tiny_patch16_224,patch_size=8", "no square grid|has shape"),
        ("vit_tiny_patch16_224,num_heads=5,norm_order=pre", "not a multiple of heads 5"),
        ("vit_tiny_patch16_224,no_embed_class=true", "no square grid"),
        ("vit_tiny_patch16_224,global_pool=avg", "missing key 'fc_norm.bias'"),
        ("vit_tiny_patch16_224,qk_norm=true", "missing key"),
        ("vit_tiny_patch16_224,nonsense=1", "'nonsense': it has num_heads, norm_order, act_layer"),
        ("vit_tiny_patch16_224,pool=avg", "'pool': did you mean global_pool or pool_include"),
        ("vit_tiny_patch16_224,depth=12,depth=11", "depth is stated twice: 12 and 11: remove"),
        ("vit num_heads=3", "expected a name first, then a comma, as in vit,num_heads=3"),
        ("num_heads=3", "expected a name first, then a comma, as in vit,num_heads=3"),
        (
            "vit_tiny_patch16_224,pre_norm=true,norm_order=pre",
            r"missing key 'norm_pre.bias' .*: save all .*; else correct the architecture",
        ),
        (
            "vit_tiny_patch16_224,img_size=32",
            r"says img_size=32, but .* tell img_size=\[48, 48\]: correct the argument, or leave it",
        ),
        ("vit_tiny_patch16_224,num_classes=4", "says num_classes=4, but .* head of 3 classes"),
        ("vit_tiny_patch16_224,in_chans=1", "says in_chans=1, but .* tell in_chans=3"),
        ("vit_tiny_patch16_224,depth", "'depth': expected argument=value"),
    ],
)
def test_a_wrong_architecture_is_refused(
    architecture: str | None, message: str, tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(
            str(tiny),
            architecture=architecture,
            preprocess=preprocess_file(tmp_path, 48, 48),
            labels="numbers",
        )


@pytest.mark.parametrize("told", ["num_classes=3", "img_size=48", "img_size=[48,48]", "in_chans=3"])
def test_arguments_may_say_what_a_file_tells(told: str, tiny: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(
        str(tiny),
        architecture=f"vit_tiny_patch16_224,{told}",
        preprocess=preprocess_file(tmp_path, 48, 48),
        labels="numbers",
    )
    assert checkpoint.config.num_classes == 3


@pytest.mark.parametrize(
    ("content", "suffix"),
    [
        ("a\nb\nc\n\n", ".txt"),
        ('["a", "b", "c"]', ".json"),
        ('{"0": "a", "2": "c", "1": "b"}', ".json"),
    ],
)
def test_label_file_of_lines_or_json(content: str, suffix: str, tiny: Path, tmp_path: Path) -> None:
    labels = tmp_path / f"labels{suffix}"
    labels.write_text(content)
    preprocess = preprocess_file(tmp_path, 48, 48)
    checkpoint = load_checkpoint(
        str(tiny), architecture="vit_tiny_patch16_224", preprocess=preprocess, labels=str(labels)
    )
    assert checkpoint.labels == ("a", "b", "c")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no file says its preprocessing, labels: "),
        (
            {"preprocess": "google-224", "labels": "numbers"},
            "the preprocessing gives 224x224 pixels, the model takes 48x48: --image-size 224x224",
        ),
        ({"preprocess": "nothing", "labels": "numbers"}, "neither a file nor one of"),
        ({"preprocess": "FILE"}, "no file says its labels: .* --labels numbers "),
        ({"preprocess": "FILE", "labels": "nothing"}, "neither a file, nor names"),
        ({"preprocess": "FILE", "labels": "imagenet-1k"}, "1000 labels for 3 classes"),
    ],
)
def test_what_a_format_lacks_is_asked_for(
    options: dict[str, Any], message: str, tiny: Path, tmp_path: Path
) -> None:
    if options.get("preprocess") == "FILE":
        options = options | {"preprocess": preprocess_file(tmp_path, 48, 48)}
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(str(tiny), architecture="vit_tiny_patch16_224", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"architecture": "num_heads=3"},
            "^VIT_ARCHITECTURE 'num_heads=3': expected a name first, then a comma, as in vit",
        ),
        (
            {"architecture": "vit_tiny_patch16_224,global_pol=avg"},
            "^VIT_ARCHITECTURE: vit_tiny_patch16_224 has no argument 'global_pol': did you mean "
            "global_pool",
        ),
        ({"architecture": "vit,norm_epz=1"}, "did you mean norm_eps"),
        ({"architecture": "vit,use_shared_rel_pos_bias=true"}, r"did you mean rel_pos\?"),
        ({"architecture": "eva02_base_patch14_448,pre_norm=true"}, "has no argument 'pre_norm'"),
        ({"labels": "not/there.txt"}, "^VIT_LABELS 'not/there.txt': neither a file, nor names"),
        (
            {"preprocess": "not/there.json"},
            "^VIT_PREPROCESS 'not/there.json': neither a file nor one of",
        ),
    ],
)
def test_wrong_options_are_refused_first(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.pth").write_bytes(b"no weights")
    good: dict[str, Any] = {
        "architecture": "vit_tiny_patch16_224",
        "preprocess": "deit-224",
        "labels": "numbers",
    }
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(str(tmp_path / "mine.pth"), **(good | options))


def test_advised_command_is_complete(tiny: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"--preprocess deit-224 --labels numbers .*google-224 .* -1 to 1"
    ) as told:
        load_checkpoint(str(tiny), architecture="vit_tiny_patch16_224")
    assert "MEAN" not in str(told.value)


def test_assumptions_name_their_option(
    tmp_path: Path,
) -> None:
    model = made(width=192, hidden=768, depth=12)
    given = "vit_tiny_patch16_224,patch_size=4,act_layer=gelu"
    assert load(model.state_dict(), tmp_path, given).assumed == tuple(
        f"{value}, as vit_tiny_patch16_224 has it (VIT_ARCHITECTURE)"
        for value in ("num_heads=3", "norm_order=pre", "norm_eps=1e-06", "global_pool=token")
    )


def test_absent_parts_must_be_stated(tmp_path: Path) -> None:
    state = dict(made().state_dict())
    without = {name: tensor for name, tensor in state.items() if not name.startswith("norm.")}
    with pytest.raises(CheckpointError, match="final_norm=false"):
        load(without, tmp_path, PLAIN)
    with pytest.raises(CheckpointError, match=r"final_norm=false, but 'norm\.weight' is there"):
        load(state, tmp_path, f"{PLAIN},final_norm=false")
    with pytest.raises(CheckpointError, match="no file says its fc_norm"):
        load(state, tmp_path, PLAIN.replace("token", "avg"))


@pytest.mark.parametrize("inherited", [(), ("labels",)])
def test_an_entry_of_a_folder_is_served_by_a_toml(inherited: tuple[str, ...], tiny: Path) -> None:
    preprocess = '{"size": 48, "mean": [0.5, 0.5, 0.5]}'
    with pytest.raises(CheckpointError) as refusal:
        load_checkpoint(str(tiny), architecture="vit,num_heads=3")
    message = as_keys(str(refusal.value), "cats.toml", inherited)
    keys, _, rest = message.partition("this serves it: ")[2].partition(" in cats.toml (")
    assert tomllib.loads(keys.replace('", ', '"\n')) == {
        "architecture": "vit,num_heads=3,norm_order=pre,act_layer=gelu,norm_eps=1e-06,"
        "global_pool=token",
        "preprocess": "deit-224",
        **({} if inherited else {"labels": "numbers"}),
    }
    assert "vitserve serve" not in message
    assert rest.startswith("to train from it: vitserve convert")
    command = f"vitserve serve --checkpoint 'my cats.pth' --preprocess '{preprocess}' (VIT_LABELS)"
    expected = f"preprocess = {json.dumps(preprocess)} in a.toml (labels)"
    assert as_keys(command, "a.toml") == expected
