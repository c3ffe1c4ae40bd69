"""Regions as machine code for an H100, made where there is neither a GPU nor a driver: `make triton`.

zcompile compiles models for the simulated device of `tests.simulated`, and Inductor each of their regions as for a GPU:
it writes Triton, and Triton compiles that for sm_90a. The one thing that a driver is asked for is to load machine code
and to tell what it needs; the `driver` here reads that off the code. Nothing is launched.

Triton is installed in a folder of its own, because Inductor behaves otherwise wherever it can be imported.
"""
