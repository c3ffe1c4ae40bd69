"""Passes that make a pipeline of a traced step: for `zcompile.train_step` on a mesh with a pipeline axis."""
