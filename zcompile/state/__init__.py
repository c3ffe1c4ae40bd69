"""State of models and optimizers, in memory and on disk."""
