from __future__ import annotations

import torch
import torch.nn.functional as F

from model.config import ConvolutionalStem, ViTConfig
from model.network.layers.patch_embed import ConvStem
from model.network.vit import VisionTransformer
from model.training.start import (
    start_patches,
    start_positions,
    start_stem,
    whitening_filters,
    whitening_sample,
)


def test_positions_all_differ_and_neighbours_are_closest() -> None:
    config = ViTConfig(
        image_size=(16, 24), patch_size=4, width=32, depth=1, heads=2, mlp_width=64, num_classes=4, pool="cls"
    )
    model = VisionTransformer(config)
    start_positions(model)
    assert model.pos_embed is not None
    code = model.pos_embed.detach()[0, 1:] / 0.3
    distance = torch.cdist(code, code)
    assert (distance + torch.eye(24)).min() > 0.1
    assert distance[0, 1] < distance[0, 2] < distance[0, 5]
    assert distance[0, 6] < distance[0, 12]
    frequency = 100 ** -(torch.arange(8) / 8)  # Chen et al. 2021, but for the temperature
    row, column = 2 * frequency, 3 * frequency
    expected = torch.cat([row.sin(), row.cos(), column.sin(), column.cos()])
    assert torch.allclose(code[2 * 6 + 3], expected, atol=1e-6)


def test_whitening_filters_give_uncorrelated_outputs_of_equal_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(500, 3, 16, 16, generator=generator)
    images = F.avg_pool2d(noise, 3, stride=1, padding=1) * 3  # neighbours now agree
    filters = whitening_filters(images, 4)
    answers = F.conv2d(images, filters, stride=4).transpose(0, 1).flatten(1)
    covariance = answers @ answers.T / answers.shape[1]
    strong = covariance.diagonal() > 0.9  # directions with hardly any content are damped on purpose
    assert strong.sum() > 20
    rest = covariance[strong][:, strong] - torch.eye(int(strong.sum()))
    assert rest.abs().max() < 0.12


def test_starts_touch_only_patch_filters_and_patch_positions() -> None:
    config = ViTConfig(
        image_size=(16, 16), patch_size=4, width=32, depth=1, heads=2, mlp_width=64, num_classes=4, pool="cls"
    )
    model = VisionTransformer(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    start_positions(model)
    start_patches(model, torch.randn(50, 3, 16, 16, generator=torch.Generator().manual_seed(1)))
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"pos_embed", "patch_embed.proj.weight"}
    assert torch.equal(after["pos_embed"][:, 0], before["pos_embed"][:, 0])  # the CLS token's stays


def test_whitening_looks_at_fewer_pictures_the_larger_they_are_and_copies_none() -> None:
    number = torch.arange(9000).reshape(-1, 1, 1, 1)
    small = number.expand(-1, 3, 32, 32)
    assert torch.equal(whitening_sample(small)[:, 0, 0, 0], torch.arange(5000))
    large = number.expand(-1, 3, 320, 320)
    sample = whitening_sample(large)
    assert len(sample) == 50
    assert sample[0, 0, 0, 0] < 200
    assert sample[-1, 0, 0, 0] > 8700  # from all over data that may be sorted
    assert sample.untyped_storage().data_ptr() == number.untyped_storage().data_ptr()
    assert len(whitening_sample(large[:3])) == 3


def test_a_stem_keeps_the_variance_and_begins_with_whitening_filters() -> None:
    stem = ConvolutionalStem(widths=(64, 96, 128), kernels=(3, 3, 3), strides=(1, 2, 2))
    config = ViTConfig(
        image_size=(32, 32), patch_size=4, width=16, depth=1, heads=2, mlp_width=16, num_classes=4, conv_stem=stem
    )
    model = VisionTransformer(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    assert isinstance(model.patch_embed.backbone, ConvStem)
    start_stem(model.patch_embed.backbone, torch.Generator().manual_seed(1))
    pixels = F.avg_pool2d(torch.randn(60, 3, 32, 32, generator=torch.Generator().manual_seed(2)), 3, 1, 1) * 3
    start_patches(model, pixels)
    first = model.state_dict()["patch_embed.backbone.0.weight"]
    assert torch.equal(first[27:54], -first[:27])  # 27 directions of 3 x 3 pixels of three colours
    with torch.no_grad():
        features = model.patch_embed.backbone(pixels)
    assert 0.1 < features.square().mean() < 2
