"""Nothing is accepted and wrong: whatever is done to a state dict, it is read exactly or refused in one line.

Each case is a network of its own, a state dict of it that was renamed, reordered, cut or turned, and a part of the
truth about it, as its maker would state it, or a mistake that the tensors show. Some have a twin in the file, averaged
or raw, which is to be chosen. Names may say nothing, but they do not lie: no reader can know that what is called a
query is a key. PERTURBATIONS=1000 tries more than the usual number of cases, SEED=1 others.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from model.checkpoint import load_checkpoint
from model.errors import CheckpointError
from tests.model.checkpoint.home_made import HomeMade
from tests.model.checkpoint.parity import preprocess_file, randomise, relative_error
from tests.model.checkpoint.test_home_made_names import STYLES, apart, renamed

State = dict[str, Tensor]
CASES: Final = int(os.environ.get("PERTURBATIONS", "240"))
FIRST: Final = 1_000_000 * int(os.environ.get("SEED", "0"))
TWINS: Final = (("model", "model_ema"), ("state_dict", "state_dict_ema"), ("model.", "ema_model."), ("a.", "averaged."))
LIBRARY: Final = "vit-pytorch of 2021"
WORDS: Final = {
    r"norm1": ["ln_1", "attn_norm", "layer_norm1", "a", "pre_norm"],
    r"norm2": ["ln_2", "mlp_norm", "layer_norm2", "b", "post_norm"],
    r"attn\.qkv": ["attn.in_proj", "self_attention.to_qkv", "x", "attn.kqv", "attn.query_key_value"],
    r"attn\.proj": ["attn.out", "attn.to_out.0", "y", "o"],
    r"mlp\.fc1": ["ffn.0", "linear1", "mlp.up", "c", "x"],
    r"mlp\.fc2": ["ffn.3", "linear2", "mlp.down", "d", "x"],
    r"blocks\.(\d)": [r"layers.\1", r"encoder.layer_\1", r"h.\1", r"block\1", r"transformer.layers.\1.0"],
    r"^norm\.": ["ln.", "encoder.norm.", "final.", "fc_norm.", "norm_pre.", "head_norm."],
    r"^head\.": ["fc.", "classifier.", "mlp_head.1.", "head.1.", "head_dist."],
    r"^cls_token": ["class_token", "cls", "token", "dist_token"],
    r"^pos_embed": ["positions", "pos_embedding", "p"],
    r"patch_embed\.proj": ["conv_proj", "embed", "to_patch_embedding.1", "patch_embed.norm"],
}


def network(at: random.Random) -> tuple[HomeMade, dict[str, Any], bool]:
    """Return a network, the truth about it, and whether it does what timm's models do."""
    is_timms = at.random() < 0.3
    usual: dict[str, Any] = {"activation": "gelu", "eps": 1e-6, "pool": "token"}
    options: dict[str, Any] = {
        "activation": at.choice(["gelu", "relu"]),
        "eps": at.choice([1e-6, 1e-3]),
        "pool": at.choice(["token", "avg"]),
    }
    options = (usual if is_timms else options) | {
        "heads": at.choice([1, 2, 4, 8]),
        "norm_first": at.random() < 0.6,
        "hidden": 64 if is_timms else at.choice([16, 32, 48, 64]),
        "depth": at.choice([1, 2, 3]),
        "final_norm": at.random() < 0.8,
        "position_prefix": is_timms or at.random() < 0.8,
        "qkv_order": "3hd" if is_timms else at.choice(["3hd", "3hd", "h3d", "hd3", "d3h"]),
    }
    head = None
    if not is_timms and at.random() < 0.2:
        head = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))
    model = HomeMade(size=8, patch=4, width=16, classes=4, head=head, **options).eval()
    randomise(model, seed=at.randrange(1000))
    truth = {
        "num_heads": options["heads"],
        "norm_order": "pre" if options["norm_first"] else "post",
        "act_layer": options["activation"],
        "norm_eps": options["eps"],
        "global_pool": options["pool"],
        "qkv_order": options["qkv_order"],
    }
    truth |= {} if options["final_norm"] else {"final_norm": "false"}
    truth |= {"fc_norm": "false", "pool_include_prefix": "false"} if options["pool"] == "avg" else {}
    truth |= {"head_act": "relu"} if head is not None else {}
    return model, truth, is_timms


def in_parts(state: State, at: random.Random, truth: dict[str, Any], is_timms: bool) -> State:
    """Return a state dict whose patches, queries, keys and values may be laid out in another way; see `perturbed`."""
    as_libraries = is_timms and truth["norm_order"] == "pre"
    if at.random() < 0.1:
        order = "channels_first" if is_timms else at.choice(["channels_first", "channels_last"])
        patch = state["patch_embed.proj.weight"]
        patch = patch if order == "channels_first" else patch.permute(0, 2, 3, 1)
        state = {**state, "patch_embed.proj.weight": patch.flatten(1)}
        truth["patch_order"] = order
    if truth["qkv_order"] != "3hd":  # timm's names would lie
        name = at.choice(["attn.qkv_proj", "attn.w_qkv", "self_attention.to_qkv", "attn.in_proj"])
        state = renamed(state, (r"attn\.qkv", name))
    elif at.random() < 0.15:
        style = at.choice([style for style in STYLES if as_libraries or style not in ("transformers", LIBRARY)])
        if "head.bias" in state and "norm.weight" in state and "patch_order" not in truth:
            state = STYLES[style][1](state)
    elif at.random() < 0.1:
        heads = truth["num_heads"]
        state = apart(state, "heads.{}.q", "heads.{}.k", "heads.{}.v", heads=heads)
        if heads > 1 and at.random() < 0.5:  # a mistake that the tensors show
            mistakes = {"num_heads": at.choice([n for n in (1, 2, 4, 8) if n != heads]), "qkv_order": "h3d"}
            key = at.choice(list(mistakes))
            truth[key] = mistakes[key]
    elif at.random() < 0.2:
        state = apart(state, *at.choice([("to_q", "to_k", "to_v"), ("query", "key", "value"), ("a", "b", "c")]))
    return state


def perturbed(state: State, at: random.Random, truth: dict[str, Any], is_timms: bool) -> State:
    """Return a state dict to which some of what happens to them has happened.

    Args:
        truth: of the network; how its patches are counted is added, where it comes to matter.
        is_timms: whether the network does what timm's models do, and those of other libraries but for the norms.
    """
    state = in_parts(state, at, truth, is_timms)
    for _ in range(at.choice([0, 0, 0, 1, 2, 4])):
        pattern = at.choice(list(WORDS))
        state = renamed(state, (pattern, at.choice(WORDS[pattern])))
    if at.random() < 0.25:
        for name in at.sample(list(state), at.choice([1, 1, 2, 3])):
            del state[name]
    if at.random() < 0.1:  # all of a kind
        kind = re.sub(r"\d+", r"\\d+", re.escape(at.choice(list(state))))
        state = {name: tensor for name, tensor in state.items() if not re.fullmatch(kind, name)}
    if at.random() < 0.15:
        turned = [name for name, tensor in state.items() if tensor.ndim == 2 and len(set(tensor.shape)) == 2]
        if turned and at.random() < 0.5:
            turned = [at.choice(turned)]
        state |= {name: state[name].T.contiguous() for name in turned}
    if at.random() < 0.1:
        state["extra.weight"] = torch.ones(at.choice([(16,), (16, 16), (4, 16), (1, 1, 16)]))
    if at.random() < 0.3:
        prefix = at.choice(["module.", "model.", "_orig_mod.", "net.", "my_vit."])
        state = {f"{prefix}{name}": tensor for name, tensor in state.items()}
    names = list(state)
    if at.random() < 0.5:
        at.shuffle(names)
    return {name: state[name] for name in names}


def statement(truth: dict[str, Any], is_timms: bool, depth: int, at: random.Random) -> str | None:
    """Return what the maker says: the truth, or a part of it."""
    share = at.choice([1, 1, 1, 0.7])
    kept = {key: value for key, value in truth.items() if at.random() < share}
    arguments = "".join(f",{key}={value}" for key, value in kept.items())
    if is_timms and at.random() < 0.7:
        return f"vit_small_patch16_224,embed_dim=16,depth={depth},patch_size=4{arguments}"
    return None if at.random() < 0.03 else f"vit{arguments}"


def outcome(number: int, folder: Path, preprocess: str) -> tuple[str, str]:
    """Return `exact`, `refused` or `wrong`, and of what."""
    at = random.Random(number)
    model, truth, is_timms = network(at)
    state = perturbed(dict(model.state_dict()), at, truth, is_timms)
    said = statement(truth, is_timms, len(model.blocks), at)
    file = folder / "weights.pth"
    names, weights, held = at.choice(TWINS), None, state
    if at.random() < 0.15:
        twin = {name: tensor + 0.1 for name, tensor in state.items()}
        pair = [state, twin] if at.random() < 0.5 else [twin, state]
        held = _packed(dict(zip(names, pair, strict=True)))
        weights = at.choice([None, "raw" if pair[0] is state else "ema"])
        # One that is not chosen is never the one that was meant.
        model = model if weights else HomeMade(size=8, patch=4, width=16, heads=2, classes=4).eval()
    elif at.random() < 0.1:
        is_ema, weights = at.random() < 0.5, at.choice(["ema", "raw", "teacher"])
        held = _packed({names[is_ema]: state})
        model = (
            model
            if weights == ("ema" if is_ema else "raw")
            else HomeMade(size=8, patch=4, width=16, heads=2, classes=4)
        )
    torch.save(held, file)
    options: dict[str, Any] = {"architecture": said, "preprocess": preprocess, "labels": "numbers", "weights": weights}
    try:
        ours = load_checkpoint(str(file), **options).build()
    except CheckpointError as error:
        assert "\n" not in str(error)
        return "refused", str(error)
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        difference = relative_error(ours(pixels).logits, model(pixels))
    return ("exact" if difference < 1e-4 else "wrong"), f"{number}: {said} {weights} {difference:.1e} {list(state)}"


def _packed(parts: dict[str, State]) -> dict[str, Any]:
    """Return copies of a network under their keys, or under their prefixes in one state dict."""
    if not next(iter(parts)).endswith("."):
        return dict(parts)
    return {prefix + name: tensor for prefix, state in parts.items() for name, tensor in state.items()}


@pytest.mark.timeout(600)
def test_a_perturbed_state_dict_is_exact_or_refused(tmp_path: Path) -> None:
    preprocess = preprocess_file(tmp_path, 8, 8)
    outcomes = [outcome(FIRST + number, tmp_path, preprocess) for number in range(CASES)]
    counts = {kind: sum(of == kind for of, _ in outcomes) for kind in ("exact", "refused", "wrong")}
    print(counts)  # noqa: T201 - read with pytest -s
    assert [what for kind, what in outcomes if kind == "wrong"] == []
    assert counts["exact"] > CASES / 10, counts
    assert counts["refused"] > CASES / 10, counts


SHAPES: Final = (
    *[(), (0,), (1,), (3,), (8,), (16,), (48,), (16, 16), (48, 16), (64, 16), (16, 64), (4, 16), (0, 16), (16, 48)],
    *[(1, 1, 16), (1, 5, 16), (5, 16), (16, 3, 4, 4), (16, 3, 4, 2), (1, 16, 16), (2, 2, 2), (8, 3, 3, 3)],
)


def test_any_shapes_under_any_names_are_refused_in_one_line_or_answer(tmp_path: Path) -> None:
    preprocess, file = preprocess_file(tmp_path, 8, 8), tmp_path / "weights.pth"
    for number in range(CASES // 2):
        at = random.Random(FIRST + number)
        model, truth, _ = network(at)
        state = perturbed(dict(model.state_dict()), at, truth, False)
        names = [
            *state,
            "pre_logits.fc.weight",
            "blocks.0.ls1.gamma",
            "reg_token",
            "a.running_mean",
            "pooler.dense.weight",
        ]
        for name in at.sample(names, at.choice([1, 2, 4, len(names)])):
            state[name] = torch.ones(at.choice(SHAPES))
        torch.save(state, file)
        said = at.choice([None, "vit", "vit,num_heads=4,norm_order=pre,act_layer=gelu,norm_eps=1e-6,global_pool=token"])
        try:
            ours = load_checkpoint(str(file), architecture=said, preprocess=preprocess, labels="numbers").build()
        except CheckpointError as error:
            assert "\n" not in str(error)
        else:
            assert ours(torch.zeros(1, ours.config.in_channels, 8, 8)).logits.shape == (1, ours.config.num_classes)
