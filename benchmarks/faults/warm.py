"""Imported once by the server that forks ranks: what takes seconds in a fresh process."""

import torch

import zcompile  # noqa: F401

torch.set_num_threads(1)
with torch.no_grad():
    torch.compile(torch.nn.Linear(7, 7), backend="aot_eager")(torch.randn(3, 7))
torch.compiler.reset()
