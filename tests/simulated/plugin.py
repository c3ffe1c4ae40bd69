"""A plugin of pytest that gives its process a simulated GPU: `pytest -p tests.simulated.plugin -m gpu`.

Regions run eager: what Inductor would write for a GPU cannot run here.
"""

from __future__ import annotations

import importlib
from typing import Any

importlib.import_module("tests.simulated.device")  # it has to be there before torch
importlib.import_module("tests.simulated.nccl")
regions: Any = importlib.import_module("zcompile.engine.region_cache")
compile_region = regions._compile
regions._compile = lambda region, _: compile_region(region, "eager")
