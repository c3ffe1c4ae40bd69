"""Errors of the person at the keyboard: each says how to put it right."""


class FixableError(Exception):
    """Something asked for cannot be done; the message ends with the fix."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}. Fix: {fix}.")
