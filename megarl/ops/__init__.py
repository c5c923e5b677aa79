"""The arithmetic of the training step: each file has a torch reference, the public op and its kernel's entry."""
