"""Gradients: delivered when a backward has ended, or used by the optimizer as they arrive."""
