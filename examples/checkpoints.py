"""What a rank needs beside model and optimizer to go on as if it had never stopped."""

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler


def remember(step: int, rank: int, schedule: LRScheduler, data: torch.Generator) -> dict[str, Any]:
    """The state of a rank after `step` steps: its schedule, its place in the data, its random numbers."""
    gpu = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    random = {"cpu": torch.get_rng_state(), **gpu}
    return {"step": step, "rank": rank, "schedule": schedule.state_dict(), "data": data.get_state(), "random": random}


def recall(state: dict[str, Any], rank: int, schedule: LRScheduler, data: torch.Generator) -> int:
    """Put back what `remember` gave; return the steps that were done.

    A rank that the earlier run did not have gets the first one's state: it keeps random numbers of its own.
    """
    schedule.load_state_dict(state["schedule"])
    if state["rank"] == rank:
        data.set_state(state["data"])
        torch.set_rng_state(state["random"]["cpu"])
        if "cuda" in state["random"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["random"]["cuda"])
    return int(state["step"])
