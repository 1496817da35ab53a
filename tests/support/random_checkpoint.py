"""A checkpoint of any configuration, with random weights."""

from model.checkpoint.checkpoint import Checkpoint
from model.config import PreprocessConfig, ViTConfig
from model.network.vit import VisionTransformer
from tests.model.checkpoint.parity import randomise


def random_checkpoint(config: ViTConfig) -> Checkpoint:
    model = VisionTransformer(config)
    randomise(model)
    channels = config.in_channels
    preprocess = PreprocessConfig(
        size=config.image_size,
        resize="squash",
        resize_size=config.image_size,
        interpolation="bilinear",
        mean=(0.5,) * channels,
        std=(0.5,) * channels,
    )
    labels = tuple(f"class {i}" for i in range(config.num_classes))
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return Checkpoint("tiny", "here", "vitserve", "tiny", config, preprocess, labels, tensors)
