"""Names of tensors in transformers' classes, and the model's names for them.

The rules know the names of the hub's files and the names that transformers 5 has in memory. The
model's own part (`vit.`) may precede them, or be absent, as classes without a head save them.
"""

from typing import Final

from model.checkpoint.tensors import Rules

# ViT, ViT-MSN, I-JEPA, DeiT, DINOv2, BEiT and data2vec-vision.
ENCODER: Final[Rules] = (
    (r"^(vit|ijepa|deit|dinov2|dinov2_with_registers|beit|data2vec_vision)\.", ""),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.distillation_token$", "dist_token"),
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^(?:encoder\.layer|layers)\.(\d+)\.", r"blocks.\1."),
    (r"^(?:encoder\.relative_position_bias|shared_position_bias)\.", "shared."),
    (
        r"\.(?:attention\.attention\.)?relative_position_bias\.relative_position_",
        ".attn.relative_position_",
    ),
    (r"\.attention\.(?:attention\.)?(q|k|v)(?:uery|ey|alue|_proj)\.", r".attn.\1."),
    (r"\.attention\.(?:output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"^(blocks\.\d+)\.(?:intermediate\.dense|mlp\.weights_in)\.", r"\1.mlp.fc1."),
    (r"^(blocks\.\d+)\.(?:output\.dense|mlp\.weights_out|mlp\.down_proj)\.", r"\1.mlp.fc2."),
    (r"\.mlp\.gate_proj\.", ".mlp.fc1_g."),
    (r"\.mlp\.up_proj\.", ".mlp.fc1_x."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"\.lambda_([12])$", r".ls\1.gamma"),
    (r"^layernorm\.", "norm."),
    (r"^pooler\.layernorm\.", "fc_norm."),
    (r"^(?:cls_)?classifier\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
)

# CLIP and SigLIP: the image tower and the text tower.
TOWERS: Final[Rules] = (
    (r"^vision_model\.embeddings\.patch_embedding\.", "patch_embed.proj."),
    (r"^vision_model\.embeddings\.class_embedding$", "cls_token"),
    (r"^vision_model\.embeddings\.position_embedding\.weight$", "pos_embed"),
    (r"^text_model\.embeddings\.(token|position)_embedding\.", r"\1_embed."),
    (r"^position_embed\.", "pos_embed."),
    (r"^(?:vision|text)_model\.encoder\.layers\.(\d+)\.", r"blocks.\1."),
    (r"\.self_attn\.(q|k|v)_proj\.", r".attn.\1."),
    (r"\.self_attn\.out_proj\.", ".attn.proj."),
    (r"\.layer_norm([12])\.", r".norm\1."),
    (r"^vision_model\.pre_layrnorm\.", "norm_pre."),  # upstream's spelling
    (r"^(?:vision_model\.post|text_model\.final)_layer_?norm\.", "norm."),
    (r"^vision_model\.head\.probe$", "attn_pool.latent"),
    (r"^vision_model\.head\.attention\.out_proj\.", "attn_pool.proj."),
    (r"^vision_model\.head\.layernorm\.", "attn_pool.norm."),
    (r"^vision_model\.head\.mlp\.", "attn_pool.mlp."),
    (r"^visual_projection\.", "projection."),
    (r"^(?:classifier|text_projection|text_model\.head)\.", "head."),
)
