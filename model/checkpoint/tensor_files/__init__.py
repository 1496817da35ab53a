"""Files of tensors, read as data within bounds: what `torch.save` wrote, safetensors, NumPy's `.npz`, `.mar`."""
