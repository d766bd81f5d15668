"""From a binary and tensors to the GPU."""
