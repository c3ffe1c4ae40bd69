"""Pipelines: a model divided by its layers, and steps of several micro-batches, each rank with a program of its own."""
