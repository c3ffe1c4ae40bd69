"""Gradients: delivered at the end of a backward, or used by the optimizer as they arrive."""
