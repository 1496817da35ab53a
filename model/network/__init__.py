"""The Vision Transformer as an `nn.Module`, and its layers."""
