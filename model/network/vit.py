"""The Vision Transformer: pixels in, logits and the CLS row of attention out.

Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929. Parameter names and shapes are timm's
(`timm/models/vision_transformer.py`), so that its checkpoints load key for key. `ViTConfig` selects
the additions of other families, which `model.network.layers` implements.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ViTConfig
from model.network.layers.attention import norm_or_none
from model.network.layers.block import Block, Kept, Mlp
from model.network.layers.patch_embed import LinearPatchEmbed, PatchEmbed
from model.network.layers.position import sincos2d_position_embedding
from model.network.transfer import transfer_features
from model.outputs import TRANSFER_BLOCKS, embedding_width


class KeptPass(NamedTuple):
    """The intermediate results of a forward pass that explanations need.

    Attributes:
        blocks: of the last blocks, in the network's order.
        tokens: the last block's output, [B, N, D], or only the tokens that the head reads.
    """

    blocks: list[Kept]
    tokens: Tensor


class ViTOutput(NamedTuple):
    """The result of a forward pass.

    Attributes:
        logits: [B, num_classes], in the model's dtype.
        attention: [B, len(layers), heads, N] float32, or None without layers. Each row is a softmax
            over all N tokens, prefix tokens first.
        kept: intermediate results for an explanation, or None if the caller did not ask for them.
        embeddings: [B, `embedding_width`], in the model's dtype. `cls` is missing without a CLS
            token, `mean` if the last block skipped the patches, and `transfer` unless the caller
            asks for it.
    """

    logits: Tensor
    attention: Tensor | None
    kept: KeptPass | None = None
    embeddings: Mapping[str, Tensor] = MappingProxyType({})


def pool_tokens(x: Tensor, config: ViTConfig) -> Tensor:
    """Pool by a fixed rule: [B, N, D] -> [B, D], or [B, 2 D] for `cls_mean`."""
    if config.pool == "cls":
        return x[:, 0]
    patches = x if config.pool_prefix else x[:, config.prefix_tokens :]
    if config.pool == "max":
        return patches.amax(dim=1)
    mean = patches.mean(dim=1)
    if config.pool == "mean":
        return mean
    if config.pool == "mean_max":
        return 0.5 * (patches.amax(dim=1) + mean)
    return torch.cat((x[:, 0], mean), dim=1)


class AttentionPool(nn.Module):
    """A learned query attends to the tokens, then an MLP (Zhai et al. 2022).

    This is the MAP head of big_vision.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.pool_heads or config.heads
        self.head_dim = width // self.heads
        self.skipped = 0 if config.pool_prefix else config.prefix_tokens
        self.latent = nn.Parameter(torch.zeros(1, 1, width))
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp = Mlp(
            config.model_copy(update={"mlp_width": config.pool_mlp_width or config.mlp_width})
        )

    def forward(self, x: Tensor, return_attention: bool = False) -> tuple[Tensor, Tensor | None]:
        """Map [B, N, D] to ([B, D], [B, heads, N] float32 or None).

        Tokens that the pooling skips have attention 0.
        """
        q, k, v = self.project(x)
        row = F.pad(self.weights(q, k).squeeze(2), (self.skipped, 0)) if return_attention else None
        pooled = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(1))
        return pooled + self.mlp(self.norm(pooled)), row

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the query, and the keys and values of the tokens [B, N, D] that it looks at.

        Returns:
            q [B, heads, 1, head_dim]; k and v [B, heads, seen, head_dim].
        """
        by_head = (self.heads, self.head_dim)
        q = self.q(self.latent).unflatten(2, by_head).transpose(1, 2).expand(x.shape[0], -1, -1, -1)
        k, v = (
            self.kv(x[:, self.skipped :])
            .unflatten(2, (2, *by_head))
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        return q, k, v

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the attention weights of the query, float32 [B, heads, 1, seen]."""
        scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
        weights: Tensor = scores.float().softmax(dim=-1)
        return weights


HEADS: Final = ("head.", "head_dist.")


class VisionTransformer(nn.Module):
    """A Vision Transformer for classification.

    Args:
        config: the architecture.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        eps = config.norm_eps
        embed = LinearPatchEmbed if config.patch_embedding == "linear" else PatchEmbed
        self.patch_embed = embed(config)
        self.cls_token = _token(1, width) if config.class_token else None
        self.dist_token = _token(1, width) if config.distillation_token else None
        self.reg_token = _token(config.registers, width) if config.registers else None
        self.pos_embed: nn.Parameter | None = None
        if config.position_embedding != "none":
            learned = config.position_embedding == "learned"
            self.pos_embed = nn.Parameter(
                torch.zeros(1, config.position_tokens, width), requires_grad=learned
            )
        self.norm_pre = norm_or_none(width, eps, present=config.norm_before_blocks)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = norm_or_none(
            width, eps, present=config.final_norm and not config.norm_after_pool
        )
        self.attn_pool = AttentionPool(config) if config.pool == "attention" else None
        self.fc_norm = norm_or_none(
            width, eps, present=config.final_norm and config.norm_after_pool
        )
        self.projection: nn.Module = nn.Identity()
        if config.projection_width is not None:
            pooled = 2 * width if config.pool == "cls_mean" else width
            self.projection = nn.Linear(pooled, config.projection_width, bias=False)
        self.head = nn.Linear(embedding_width(config), config.logits)
        self.head_dist = nn.Linear(width, config.logits) if config.distillation_head else None

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise for training from scratch: truncated normal, std 0.02, as timm and JAX do."""
        for name, parameter in self.named_parameters():
            if name == "pos_embed" and self.config.position_embedding == "sincos2d":
                with torch.no_grad():
                    parameter.copy_(self.fixed_position_embedding())
            elif name.endswith("gamma"):
                nn.init.constant_(parameter, 1e-5)  # a layer scale
            elif parameter.ndim == 1:
                is_norm_weight = "norm" in name and name.endswith("weight")
                nn.init.constant_(parameter, 1.0 if is_norm_weight else 0.0)
            elif name in ("head.weight", "head_dist.weight"):
                nn.init.zeros_(parameter)
            else:
                nn.init.trunc_normal_(parameter, std=0.02, generator=generator)

    def fixed_position_embedding(self) -> Tensor:
        """Return the sincos2d embedding: [1, position_tokens, D] float32 on the CPU."""
        config = self.config
        prefix = config.prefix_tokens if config.position_prefix else 0
        return sincos2d_position_embedding(config.grid, config.width, prefix_tokens=prefix)

    def embed(self, pixels: Tensor) -> Tensor:
        """Map normalised pixels [B, C, H, W] to tokens [B, N, D], prefix tokens first."""
        x: Tensor = self.patch_embed(pixels)
        if self.pos_embed is not None and not self.config.position_prefix:
            x = x + self.pos_embed
        prefix = [
            token
            for token in (self.cls_token, self.dist_token, self.reg_token)
            if token is not None
        ]
        if prefix:
            x = torch.cat((*(token.expand(x.shape[0], -1, -1) for token in prefix), x), dim=1)
        if self.pos_embed is not None and self.config.position_prefix:
            x = x + self.pos_embed
        normed: Tensor = self.norm_pre(x)  # [B, N, D]
        return normed

    def forward(
        self,
        pixels: Tensor,
        attention_layers: Sequence[int] = (),
        keep: int = 0,
        all_tokens: bool = False,
        transfer: bool = False,
    ) -> ViTOutput:
        """Return logits, embeddings and the attention rows of `attention_layers`.

        Args:
            pixels: [B, C, H, W], normalised, in the model's dtype; H, W = `config.image_size`.
            attention_layers: layers (0 is the first) whose attention row to return, in this order.
            keep: number of last blocks whose intermediate results to keep; see `KeptPass`.
            all_tokens: whether the last block also computes the tokens that the head does not read.
                Without them, a head that reads only the CLS token saves 10/12 of the block's
                arithmetic.
            transfer: whether to return the embedding `transfer`, which needs all tokens.

        Returns:
            See `ViTOutput`. With attention pooling, the last layer's row is the pooling query's.
        """
        last = self.config.depth - 1
        of_query = self.config.attention_source == "pool_query"
        reads_blocks = transfer or self.config.pool == "transfer"
        x = self.embed(pixels)
        rows: dict[int, Tensor] = {}
        kept: list[Kept] = []
        outputs: list[Tensor] = []
        # The head reads the CLS token; a distilled model's second head reads the next token.
        skips_patches = self.config.pool == "cls" and not (all_tokens or transfer)
        read = 1 + self.config.distillation_token if skips_patches else None
        for index, block in enumerate(self.blocks):
            with_row = index in attention_layers and not (index == last and of_query)
            queries = read if index == last else None
            x, row, kept_block = block(x, with_row, queries, index > last - keep)
            if row is not None:
                rows[index] = row
            if kept_block is not None:
                kept.append(kept_block)
            if reads_blocks and index > last - TRANSFER_BLOCKS:
                outputs.append(x)
        normed = self.norm(x)
        if reads_blocks:
            from_blocks = transfer_features(outputs, self.config, self.norm, self.fc_norm)
        if self.config.pool == "transfer":
            pooled = from_blocks
        else:
            pooled, row = self._pool(normed, of_query and last in attention_layers)
            if row is not None:
                rows[last] = row
        attention = (
            torch.stack([rows[i] for i in attention_layers], 1) if attention_layers else None
        )
        embeddings = self._embeddings(normed, pooled, with_patches=not skips_patches)
        if transfer:
            embeddings["transfer"] = from_blocks
        logits = self._classify(normed, pooled)
        return ViTOutput(logits, attention, KeptPass(kept, x) if keep else None, embeddings)

    def read(self, x: Tensor) -> Tensor:
        """Map the last block's output to logits [B, num_classes].

        Args:
            x: [B, N, D], or only the tokens that the head reads.
        """
        x = self.norm(x)
        return self._classify(x, self._pool(x, False)[0])

    def _pool(self, x: Tensor, return_attention: bool) -> tuple[Tensor, Tensor | None]:
        """Map [B, N, D] to the head's input and the pooling query's row.

        Returns:
            [B, `embedding_width`]; [B, heads, N] or None.
        """
        if self.attn_pool is None:
            return self.projected(pool_tokens(x, self.config)), None
        pooled, row = self.attn_pool(x, return_attention)
        return self.projected(pooled), row

    def projected(self, pooled: Tensor) -> Tensor:
        """Map the pooled vector, [B, D] or [B, 2 D], to the head's input [B, `embedding_width`]."""
        projected: Tensor = self.projection(self.fc_norm(pooled))
        return projected

    def classify(self, embedding: Tensor) -> Tensor:
        """Map the head's input, [B, `embedding_width`], to its logits [B, num_classes]."""
        if self.config.normalized_head:
            # Logits are up to 100 times a cosine, and bfloat16 would round them to eighths.
            bias = self.head.bias.float()
            return F.linear(F.normalize(embedding.float(), dim=-1), self.head.weight.float(), bias)
        logits: Tensor = self.head(embedding)
        return logits

    def _classify(self, x: Tensor, pooled: Tensor) -> Tensor:
        """Map normed tokens and their pooled vector to logits [B, num_classes]."""
        logits = self.classify(pooled)
        if self.head_dist is not None:
            logits = (logits + self.head_dist(x[:, 1])) / 2
        return logits

    def _embeddings(self, x: Tensor, pooled: Tensor, *, with_patches: bool) -> dict[str, Tensor]:
        """Return `ViTOutput.embeddings` from normed tokens, which may lack the patches."""
        config = self.config
        if config.distillation_head:  # two heads read two tokens; their mean, as in timm
            pooled = (pooled + x[:, 1]) / 2
        embeddings: dict[str, Tensor] = {"head": pooled}
        if config.class_token:
            embeddings["cls"] = self.fc_norm(x[:, 0])
        if with_patches:
            embeddings["mean"] = self.fc_norm(x[:, config.prefix_tokens :].mean(dim=1))
        return embeddings


def blocks_of(model: VisionTransformer) -> list[Block]:
    """Return the blocks in the network's order."""
    return cast(list[Block], list(model.blocks))


def _token(count: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(1, count, width))


def meta_model(config: ViTConfig) -> VisionTransformer:
    """Return the model without storage: only the names and shapes of its tensors."""
    with torch.device("meta"):
        return VisionTransformer(config)


def placeholder_heads(config: ViTConfig) -> dict[str, Tensor]:
    """Return tensors for the heads of a model without classes, by name.

    Every runtime needs at least one logit.
    """
    shapes = {} if config.num_classes else meta_model(config).state_dict()
    return {
        name: torch.linspace(-1, 1, tensor.numel()).reshape(tensor.shape)
        for name, tensor in shapes.items()
        if name.startswith(HEADS)
    }


def count_parameters(model: nn.Module) -> int:
    """Return the number of scalars in all parameters."""
    return sum(p.numel() for p in model.parameters())
