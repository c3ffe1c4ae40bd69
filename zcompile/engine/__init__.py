"""Compiles and runs the programs of a sharded model."""
