"""Passes that turn a traced step into a pipeline, for `zcompile.train_step` on a mesh with a pipeline axis."""
