"""What may come of a fault, as a user sees it."""

from __future__ import annotations

from dataclasses import dataclass

GOOD = {
    "error": "an error on every healthy rank, in time, before anything wrong was done, that says who and where",
    "harmless": "no error, and every value is right",
}
MISSED = {
    "hang": "a healthy rank waits for longer than the group's timeout and 10 s",
    "abort": "a process was ended by the library",
    "raw": "an exception that is none of zcompile's",
    "mixed": "an error, but an optimizer had taken what does not belong together",
    "silent": "no error, and a value is wrong",
    "unnamed": "an error that names no culprit, or no place",
    "some": "an error on some of the healthy ranks only",
    "refused": "an error where nothing is wrong",
    "unsaid": "a rank waited for long and did not warn who is awaited",
    "deleted": "a file that is not zcompile's is gone or changed",
    "left": "what a failed save has left is still there after the next one",
    "broken": "the campaign itself failed",
}
SKIPPED = "skipped"
"""It cannot be tried here."""


@dataclass(frozen=True)
class Found:
    """What came of a case."""

    name: str
    kind: str
    verdict: str
    why: str
