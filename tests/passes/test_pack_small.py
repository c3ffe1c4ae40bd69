from __future__ import annotations

from tests.passes.programs import check, parsed
from zcompile.passes.pack_small import pack_small

UNPACKED = """
axes = {"dp": "shard 2"}
stage = 3
units = {
    "large": [
        "large.weight f32[256, 128]",
        "large.other f32[256, 128]",
    ],
    "mixed": [
        "mixed.weight f32[256, 128]",
        "mixed.bias f32[256]",
        "mixed.norm f32[128]",
    ],
    "kinds": [
        "kinds.a bf16[4]",
        "kinds.b f32[8]",
        "kinds.c f32[8]",
        "kinds.scale f32[] whole",
    ],
}
packed = {
}
"""

PACKED = UNPACKED.replace("packed = {", 'packed = {\n    "mixed": [[1, 2]],\n    "kinds": [[1, 2]],')

PHASES = """
def forward(box):
    (
        x,  # f32[8, 4]
    ) = unbox(box)
    return [x], []


def backward(box):
    (
        dy,  # f32[8, 4]    tangent
    ) = unbox(box)
    return [dy], []
"""


def test_neighbours_that_are_small_travel_as_one_message_and_kinds_are_not_mixed() -> None:
    program = check(pack_small, UNPACKED, PHASES, PHASES, PACKED)
    assert {unit.name: unit.messages for unit in program.layout.units} == {
        "large": ((0,), (1,)),
        "mixed": ((0,), (1, 2)),
        "kinds": ((0,), (1, 2), (3,)),
    }


def test_packing_twice_changes_nothing() -> None:
    program = pack_small(parsed(UNPACKED, PHASES))
    assert pack_small(program).layout == program.layout
