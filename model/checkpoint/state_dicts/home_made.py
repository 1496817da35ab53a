"""Names that people gave a Vision Transformer's tensors themselves, recognised by their words, shapes and places.

Nothing depends on the order in which a file lists its tensors. A mapping to the model's names is taken only where it
is complete, every tensor having a part, and unique: where two tensors could change places, neither shape nor words
telling them apart, it is refused. What a mapping cannot say (heads, activation, ...) is asked of the operator.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from model.errors import CheckpointError

_PARAMETER: Final = re.compile(r"(.*?)[._]?(weight|bias)")
_NUMBERED: Final = re.compile(r"(?:^|(?<=[._A-Za-z]))(\d+)\.")
_FUSED: Final = re.compile(r"(to_|w_?)?qkv(_?proj)?|in_proj|proj_qkv")
_APART: Final = re.compile(
    r"(?:to_|w_?|lin_?|linear_|proj_|fc_)?(?:(q)(?:uery|ueries|s)?|(k)(?:eys?|s)?|(v)(?:alues?|s)?)"
    r"(?:_?(?:proj|lin|linear|layer|net|projection|map))?"
)
_TIMMS_BLOCK: Final = frozenset(
    f"{module}.weight" for module in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
)
"""Names within a block of timm, which those who copied its code kept with the order of queries, keys and values."""
_CERTAIN: Final = frozenset({"num_heads", "qkv_order"})
_BATCH_NORM_EPS: Final = 1e-5
_MAX_STACKS: Final = 16
"""The largest, which are looked at: what belongs to others has no place in them."""
_LIBRARIES: Final[tuple[tuple[str, tuple[str, str], dict[str, Any]], ...]] = (
    (
        "vit-pytorch",
        (r"to_patch_embedding\.", r"transformer\.layers\.\d+\.0\.(fn\.)*to_qkv\.weight"),
        {"act_layer": "gelu", "norm_eps": 1e-5, "patch_order": "channels_last"}
        | {"pool_include_prefix": True, "fc_norm": False, "qkv_bias": False, "qkv_order": "3hd"},
    ),
    (
        "transformers",
        (r"embeddings\.patch_embeddings\.projection\.", r"layernorm_before\."),
        {"norm_order": "pre", "act_layer": "gelu", "norm_eps": 1e-12, "global_pool": "token"},
    ),
    (
        "torchvision",
        (r"conv_proj\.", r"encoder_layer_0\.ln_1\."),
        {"norm_order": "pre", "act_layer": "gelu", "norm_eps": 1e-6, "global_pool": "token"},
    ),
    ("torch.nn.TransformerEncoder", (r"self_attn\.in_proj_weight", r"linear1\."), {"norm_eps": 1e-5}),
)
"""Whose names they are, by patterns of two of the names, and what that code does unless it is told otherwise."""


class Recognised(NamedTuple):
    """A state dict under the model's names.

    Attributes:
        tensors: as stored, named as `model.network.vit.VisionTransformer` names its parameters.
        told: arguments of `VIT_ARCHITECTURE` that the tensors tell for certain.
        habits: those that the names suggest, mostly as the library has them.
        library: whose code has these names; empty where that is not known.
    """

    tensors: dict[str, Tensor]
    told: dict[str, Any]
    habits: dict[str, Any]
    library: str


class _Unclear(Exception):
    """The tensors have no complete and unique mapping; the message says why."""


class _Module(NamedTuple):
    path: str
    weight: tuple[int, ...]
    bias: bool

    @property
    def parts(self) -> list[str]:
        return self.path.split(".")

    @property
    def word(self) -> str:
        return self.parts[-1].lower()


_Names = dict[str, tuple[str, ...]]
"""The file's names of each of the model's tensors: several are parts along the first dimension."""


def recognise(tensors: Mapping[str, Tensor], where: str) -> Recognised:
    """Return a state dict under the model's names.

    Raises:
        CheckpointError: no mapping is complete and unique; it says which tensor has no place.
    """
    tensors = _without_batch_norms(tensors, where)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    reasons, results = [], []
    for prefix, blocks in _stacks(shapes):
        start = min(blocks)
        try:
            roles, told = _block(blocks[start])
            width = blocks[start][roles["norm1.weight"][0]][0]
            inside = {prefix.format(i) + rest for i in blocks for rest in blocks[i]}
            outside, more = _outside({n: s for n, s in shapes.items() if n not in inside}, width)
        except _Unclear as reason:
            reasons.append(str(reason))
            continue
        names = outside | {
            f"blocks.{i - start}.{role}": tuple(prefix.format(i) + rest for rest in rests)
            for i in blocks
            for role, rests in roles.items()
        }
        results.append((names, told | more, blocks[start]))
    if len(results) != 1:
        raise CheckpointError(f"{where}: {_refusal(shapes, reasons, len(results))}")
    names, told, block = results[0]
    library, habits = _library(shapes)
    if block.keys() >= _TIMMS_BLOCK:
        habits["qkv_order"] = "3hd"
    native = {
        name: torch.cat([tensors[part] for part in parts]) if len(parts) > 1 else tensors[parts[0]]
        for name, parts in names.items()
    }
    token = native.get("cls_token")
    if token is not None and not token.numel():
        del native["cls_token"]
    if library == "vit-pytorch":
        habits |= _of_vit_pytorch(native, shapes)
    for name in ("cls_token", "dist_token", "reg_token", "pos_embed"):
        if name in native:
            native[name] = native[name].reshape(1, -1, width)
    if "blocks.0.attn.proj.weight" not in native:
        if told.get("num_heads", 1) != 1 or library != "vit-pytorch":
            raise CheckpointError(f"{where}: its attention has no projection of its output")
        told["num_heads"] = 1  # vit-pytorch leaves the projection out of one head that is as wide as the tokens
        for i in range(len({name.split(".")[1] for name in native if name.startswith("blocks.")})):
            native[f"blocks.{i}.attn.proj.weight"] = torch.eye(width)
            native[f"blocks.{i}.attn.proj.bias"] = torch.zeros(width)
    certain: dict[str, Any] = {key: told.pop(key) for key in _CERTAIN & told.keys()}
    return Recognised(native, certain, habits | told, library)


def _of_vit_pytorch(native: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Any]:
    """Return what its models do that have these tensors, by the model's names and by its own."""
    habits: dict[str, Any] = {}
    token = native.get("cls_token")
    if token is None or token.ndim == 2:
        # Its models of before 2025 have a token [1, 1, D] whichever way they pool.
        habits["global_pool"] = "avg" if token is None else "token"
    if any(name.endswith(".to_out.weight") for name in names):
        habits["proj_bias"] = False  # in SimpleViT the projection is a layer of its own, without a bias
    if token is None:
        habits |= {"class_token": False} | ({} if "pos_embed" in native else {"pos_embed": "sincos2d"})
    return habits


def _library(names: Collection[str]) -> tuple[str, dict[str, Any]]:
    for library, patterns, told in _LIBRARIES:
        if all(any(re.search(pattern, name) for name in names) for pattern in patterns):
            return library, dict(told)
    return "", {}


def _stacks(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, dict[int, dict[str, tuple[int, ...]]]]]:
    """Return each prefix, as a format of a number, under which equal blocks lie, and the blocks; the largest first."""
    found: dict[str, dict[int, dict[str, tuple[int, ...]]]] = {}
    for name, shape in shapes.items():
        for match in _NUMBERED.finditer(name):
            if "{" not in name and "}" not in name and len(match[1]) < 4:
                prefix = f"{name[: match.start(1)]}{{}}."
                found.setdefault(prefix, {}).setdefault(int(match[1]), {})[name[match.end() :]] = shape
    stacks = []
    for prefix, blocks in found.items():
        numbers, first = sorted(blocks), blocks[min(blocks)]
        if (
            numbers in (list(range(len(blocks))), list(range(1, len(blocks) + 1)))
            and len(first) >= 6
            and all(block == first for block in blocks.values())
        ):
            stacks.append((prefix, dict(sorted(blocks.items()))))
    return sorted(stacks, key=lambda stack: -sum(map(len, stack[1].values())))[:_MAX_STACKS]


def _modules(shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, _Module], dict[str, tuple[int, ...]]]:
    """Return the modules that have a weight, by path, and the parameters that are no module's."""
    modules, single = {}, {}
    for name, shape in shapes.items():
        match = _PARAMETER.fullmatch(name)
        if match is None or f"{name[: match.start(2)]}weight" not in shapes:
            single[name] = shape
        elif match[2] == "weight":
            bias = shapes.get(f"{name[: match.start(2)]}bias")
            if bias not in (None, shape[:1]):
                raise _Unclear(f"{name!r} has shape {list(shape)} and its bias {list(bias or ())}")
            modules[match[1]] = _Module(match[1], shape, bias is not None)
    return modules, single


def _block(shapes: Mapping[str, tuple[int, ...]]) -> tuple[_Names, dict[str, Any]]:
    """Return the parts of a block by their names within the model's, and what they tell."""
    modules, single = _modules(shapes)
    linear = {path: module for path, module in modules.items() if len(module.weight) == 2}
    norms = [module for module in modules.values() if len(module.weight) == 1 and module.bias]
    qkv, told = _qkv(linear, shapes)
    width, inner = qkv[0].weight[1], sum(module.weight[0] for module in qkv) // 3
    others = [module for module in linear.values() if module not in qkv]
    out, first, second = _products(others, qkv[0], width, inner)
    result: _Names = {}
    for role, parts in (("attn.qkv", qkv), ("attn.proj", [out]), ("mlp.fc1", [first]), ("mlp.fc2", [second])):
        _add(result, role, [part for part in parts if part is not None], shapes)
    heads = [norm for norm in norms if norm.weight != (width,)]
    around = [norm for norm in norms if norm.weight == (width,)]
    if len(around) != 2:
        raise _Unclear(f"a block has {len(around)} norms over {width} features, expected two")
    pair = _by_branch([norm.path for norm in around], qkv[0].path, first.path)
    one, two = (modules[path] for path in pair)
    _add(result, "norm1", [one], shapes)
    _add(result, "norm2", [two], shapes)
    orders = {_precedes(one.path, qkv[0].path), _precedes(two.path, first.path)} - {None}
    if len(orders) == 1:
        told["norm_order"] = "pre" if orders.pop() else "post"
    if heads:
        _head_norms(result, heads, inner, shapes, told)
    scales = [name for name, shape in single.items() if shape == (width,)]
    if len(scales) == 2:
        scales = list(_by_branch(scales, qkv[0].path, first.path))
        result |= {"ls1.gamma": (scales[0],), "ls2.gamma": (scales[1],)}
    _complete(result, shapes)
    return result, told


def _qkv(linear: Mapping[str, _Module], shapes: Mapping[str, tuple[int, ...]]) -> tuple[list[_Module], dict[str, Any]]:
    """Return the projections to queries, keys and values, in this order, and what they tell.

    The order of the rows of a fused projection is told where it is a parameter of torch's `nn.MultiheadAttention`.
    """
    fused = [module for module in linear.values() if _FUSED.fullmatch(module.word)]
    if len(fused) == 1 and fused[0].weight[0] % 3 == 0:
        return fused, {"qkv_order": "3hd"} if f"{fused[0].path}_weight" in shapes else {}
    kinds: dict[str, list[_Module]] = {"q": [], "k": [], "v": []}
    for module in linear.values():
        words = [match for part in reversed(module.parts) if (match := _APART.fullmatch(part.lower()))]
        if words:
            kinds[next(kind for kind in words[0].groups() if kind)].append(module)
    counts = {len(modules) for modules in kinds.values()}
    forms = {(module.weight, module.bias) for modules in kinds.values() for module in modules}
    if fused or len(counts) != 1 or 0 in counts or len(forms) != 1:
        raise _Unclear("its blocks have no projections to queries, keys and values that names tell apart")
    count = counts.pop()
    ordered = [sorted(kinds[kind], key=lambda module: _numbers(module.path)) for kind in "qkv"]
    if count > 1 and any(len({_unnumbered(module.path) for module in modules}) > 1 for modules in ordered):
        raise _Unclear(f"its blocks have {count} projections to queries, which names do not number")
    told: dict[str, Any] = {"qkv_order": "3hd"} | ({"num_heads": count} if count > 1 else {})
    return [module for modules in ordered for module in modules], told


def _products(linear: list[_Module], qkv: _Module, width: int, inner: int) -> tuple[_Module | None, _Module, _Module]:
    """Return the attention's output projection, or None, and the two layers of the MLP."""
    if len(linear) > 3:
        raise _Unclear(f"its blocks have {len(linear)} layers beside queries, keys and values, expected three")
    nothing: list[_Module | None] = [None]
    found = [
        (out, first, second)
        for first, second in itertools.permutations(linear, 2)
        for out in [module for module in linear if module not in (first, second)] or nothing
        if first.weight[1] == width
        and second.weight == (width, first.weight[0])
        and (inner == width if out is None else out.weight == (width, inner))
    ]
    if len(found) > 1:  # the MLP may be as wide as the tokens: then places and numbers tell
        found = [
            (out, first, second)
            for out, first, second in found
            if (out is None or _common(out.path, qkv.path) > max(_common(m.path, qkv.path) for m in (first, second)))
            and _unnumbered(first.path) == _unnumbered(second.path)
            and _numbers(first.path) < _numbers(second.path)
        ]
    if len(found) != 1:
        named = ", ".join(f"{module.path} {list(module.weight)}" for module in linear)
        raise _Unclear(f"which of a block's layers are its attention's projection and its MLP is not clear: {named}")
    return found[0]


def _by_branch(paths: list[str], attention: str, mlp: str) -> tuple[str, str]:
    """Return two paths, that of the attention's branch first, by their places, their words or their numbers."""
    first, second = paths
    sides = [_side(path, attention, mlp) for path in paths]
    if sides[0] is not None and sides[1] is not None and sides[0] != sides[1]:
        return (first, second) if sides[0] else (second, first)
    if sides == [None, None] and _unnumbered(first) == _unnumbered(second):
        return (first, second) if _numbers(first) < _numbers(second) else (second, first)
    raise _Unclear(f"which of {first!r} and {second!r} belongs to the attention is not clear")


def _side(path: str, attention: str, mlp: str) -> bool | None:
    """Return whether a path is of the attention's branch; None where it does not say."""
    near = _common(path, attention) - _common(path, mlp)
    if near:
        return near > 0
    words = re.sub(r"[^a-z]+", " ", path.lower())
    of_attention = re.search(r"before|\binput\b|\b(self )?(attn|attention|mha|msa|sa)\b", words) is not None
    of_mlp = re.search(r"after|\bpost attention\b|\b(mlp|ffn?|feed ?forward)\b", words) is not None
    return None if of_attention == of_mlp and not re.search(r"\bpost attention\b", words) else not of_mlp


def _head_norms(
    result: _Names, norms: list[_Module], inner: int, shapes: Mapping[str, tuple[int, ...]], told: dict[str, Any]
) -> None:
    by_kind = {
        match[1] or match[2]: norm for norm in norms if (match := re.match(r"(?:norm_|ln_)?(?:(q)|(k))", norm.word))
    }
    sizes = {norm.weight for norm in norms}
    if by_kind.keys() != {"q", "k"} or len(norms) != 2 or len(sizes) != 1 or inner % norms[0].weight[0]:
        raise _Unclear(f"a block has norms of other sizes: {', '.join(norm.path for norm in norms)}")
    told["num_heads"] = inner // norms[0].weight[0]
    _add(result, "attn.q_norm", [by_kind["q"]], shapes)
    _add(result, "attn.k_norm", [by_kind["k"]], shapes)


def _outside(shapes: Mapping[str, tuple[int, ...]], width: int) -> tuple[_Names, dict[str, Any]]:
    """Return what is not in the blocks by the model's names, and what it tells."""
    result: _Names = {}
    for role, words in (
        ("pos_embed", r"pos"),
        ("cls_token", r"cls|class"),
        ("dist_token", "dist"),
        ("reg_token", "reg"),
    ):
        tokens = [
            name
            for name, shape in shapes.items()
            if re.search(words, name.lower())
            and shape[-1:] == (width,)
            and (name,) not in result.values()
            and all(
                edge == 1
                for edge in (shape[:-2] if role in ("pos_embed", "reg_token") else shape[:-2] + shape[-2:-1])
                if edge
            )
            and not re.search("norm|head|classifier", name.lower())
            and f"{name.removesuffix('weight')}bias" not in shapes
        ]
        if len(tokens) == 1:
            result[role] = (tokens[0],)
    modules, _ = _modules({name: shape for name, shape in shapes.items() if (name,) not in result.values()})
    told: dict[str, Any] = {}
    *stem, patch = _patches(modules)
    _add(result, "patch_embed.proj", [patch], shapes)
    for number, convolution in enumerate(stem):
        _add(result, f"patch_embed.backbone.{number}", [convolution], shapes)
    heads = [module for module in modules.values() if len(module.weight) == 2 and module != patch]
    head = _head(result, heads, width, shapes)
    for norm in (module for module in modules.values() if len(module.weight) == 1):
        role = "norm"
        before_patch, before_head = _precedes(norm.path, patch.path), head and _precedes(norm.path, head.path)
        if _common(norm.path, patch.path) and before_patch is not None:
            role = "patch_embed.norm_in" if before_patch else "patch_embed.norm_out"
        elif head and _common(norm.path, head.path) and before_head:
            role, told["fc_norm"] = "fc_norm", True
        elif re.search(r"pre_?(layr|layer)?_?norm|(norm|ln)_pre", norm.path.lower()):
            role = "norm_pre"
        elif re.search("patch|emb", norm.path.lower()) or before_head is False:
            raise _Unclear(f"the part of {norm.path!r} is not clear")
        if f"{role}.weight" in result:
            raise _Unclear(f"it has two norms where one is read: {result[f'{role}.weight'][0]!r} and {norm.path!r}")
        _add(result, role, [norm], shapes)
    _complete(result, shapes)
    return result, told


def _patches(modules: Mapping[str, _Module]) -> list[_Module]:
    """Return the embedding of patches, and before it the convolutions of a stem."""
    convolutions = sorted(
        (module for module in modules.values() if len(module.weight) == 4), key=lambda module: _numbers(module.path)
    )
    if len(convolutions) > 1:
        chained = all(after.weight[1] == before.weight[0] for before, after in itertools.pairwise(convolutions))
        if not chained or len({_unnumbered(module.path) for module in convolutions}) > 1:
            named = ", ".join(module.path for module in convolutions[:4])
            raise _Unclear(f"the order of the {len(convolutions)} convolutions of its stem is not clear: {named}")
        return convolutions
    linear = [
        module
        for module in modules.values()
        if len(module.weight) == 2 and re.search(r"patch|embed|linear_map", module.path.lower())
    ]
    if len(convolutions or linear) != 1:
        raise _Unclear(f"it has {len(linear)} embeddings of patches that names tell, expected one")
    return convolutions or linear


def _without_batch_norms(tensors: Mapping[str, Tensor], where: str) -> Mapping[str, Tensor]:
    """Return the tensors with each batch norm (epsilon 1e-5, torch's) folded into the convolution before it."""
    norms = [name.removesuffix(".running_mean") for name in tensors if name.endswith(".running_mean")]
    result = dict(tensors)
    for norm in norms:
        before = [
            name.removesuffix(".weight")
            for name, tensor in tensors.items()
            if tensor.ndim == 4
            and name.endswith(".weight")
            and _numbers(name) <= _numbers(norm)
            and name.split(".")[:1] == norm.split(".")[:1]
        ]
        convolution = max(before, key=_numbers, default="")
        if not _follows(norm, convolution):
            raise CheckpointError(f"{where}: the part of {norm!r} is not clear: a batch norm without its convolution")
        parts = [result.pop(f"{norm}.{kind}", None) for kind in ("weight", "bias", "running_mean", "running_var")]
        weight = result.get(f"{convolution}.weight")
        if weight is None or any(part is None or part.shape != weight.shape[:1] for part in parts):
            raise CheckpointError(f"{where}: the part of {norm!r} is not clear: a batch norm without its convolution")
        scale, shift, mean, variance = (part.float() for part in parts if part is not None)
        scale = scale * (variance + _BATCH_NORM_EPS).rsqrt()
        bias = result.get(f"{convolution}.bias", torch.zeros_like(mean))
        result[f"{convolution}.weight"] = weight.float() * scale.reshape(-1, 1, 1, 1)
        result[f"{convolution}.bias"] = (bias.float() - mean) * scale + shift
        result.pop(f"{norm}.num_batches_tracked", None)
    return result


def _follows(norm: str, convolution: str) -> bool:
    """Return whether a batch norm comes right after a convolution by its name: 4 after 3, `bn1` after `conv1`."""
    (path, last), (norm_path, norm_last) = (name.rpartition(".")[::2] for name in (convolution, norm))
    if last.isdecimal() and norm_last.isdecimal():
        return path == norm_path and int(norm_last) == int(last) + 1
    return path == norm_path and not last.isdecimal() and not norm_last.isdecimal() and last[-1:] == norm_last[-1:]


def _head(result: _Names, heads: list[_Module], width: int, shapes: Mapping[str, tuple[int, ...]]) -> _Module | None:
    """Add the head, of one layer or two, and return its first layer; None where there is none."""
    if not heads:
        return None
    found = [
        chain
        for chain in (itertools.permutations(heads) if len(heads) <= 2 else ())
        if chain[0].weight[1] == width
        and all(after.weight[1] == before.weight[0] for before, after in itertools.pairwise(chain))
    ]
    if len(found) > 1:
        found = [
            chain
            for chain in found
            if _unnumbered(chain[0].path) == _unnumbered(chain[1].path)
            and _numbers(chain[0].path) < _numbers(chain[1].path)
        ]
    if len(found) != 1:
        named = ", ".join(f"{module.path} {list(module.weight)}" for module in heads)
        raise _Unclear(f"its head is not clear: {named}")
    *hidden, last = found[0]
    _add(result, "head", [last], shapes)
    if hidden:
        _add(result, "pre_logits.fc", hidden, shapes)
    return found[0][0]


def _add(result: _Names, role: str, modules: list[_Module], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for kind in ("weight", "bias"):
        names = tuple(
            name
            for module in modules
            for name in (f"{module.path}.{kind}", f"{module.path}_{kind}")
            if name in shapes and (kind == "weight" or module.bias)
        )
        if names:
            result[f"{role}.{kind}"] = names


def _complete(result: _Names, shapes: Mapping[str, tuple[int, ...]]) -> None:
    used = [name for names in result.values() for name in names]
    left = [name for name in shapes if name not in used]
    if left or len(used) != len(set(used)):
        shown = ", ".join(f"{name!r} {list(shapes[name])}" for name in left[:3])
        raise _Unclear(f"the part of {shown} is not clear")


def _common(a: str, b: str) -> int:
    """Return how many of their first names two modules share."""
    left, right = a.split(".")[:-1], b.split(".")[:-1]
    return next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right)))


def _precedes(a: str, b: str) -> bool | None:
    """Return whether a module stands before another in one sequence; None where they are not in one."""
    for x, y in zip(a.split("."), b.split("."), strict=False):
        if x != y:
            return int(x) < int(y) if x.isdigit() and y.isdigit() else None
    return None


def _numbers(path: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path)]


def _unnumbered(path: str) -> str:
    return re.sub(r"\d+", "0", path)


def _refusal(shapes: Mapping[str, tuple[int, ...]], reasons: list[str], count: int) -> str:
    if count:
        return f"it holds {count} Vision Transformers: save the one to be served alone"
    if reasons:
        return f"{reasons[0]}; its names can be mapped: vitserve inspect FILE --keys draft.toml writes a first draft"
    first = {name.partition(".")[0]: name for name in reversed(list(shapes))}
    shown = ", ".join(repr(name)[:80] for name in list(reversed(first.values()))[:4])
    convolutions = sum(len(shape) == 4 for shape in shapes.values())
    if convolutions > 1:
        return (
            f"not a Vision Transformer but a convolutional network: {convolutions} convolutions, names such as {shown}"
        )
    return f"no blocks of a Vision Transformer, all alike and numbered, are among its names, such as {shown}"
