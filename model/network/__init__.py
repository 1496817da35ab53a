"""The Vision Transformer as an `nn.Module`, with its layers."""
