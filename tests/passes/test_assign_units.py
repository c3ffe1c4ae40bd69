from __future__ import annotations

from tests.passes.programs import PAIR, parsed
from zcompile.ir.operation import data
from zcompile.ir.ops import Item
from zcompile.passes.assign_units import assign_units

PHASES = """
def forward(box):
    (
        a_weight,                                               # f32[4, 4]                     parameter a.weight
        b_weight,                                               # f32[4, 4]                     parameter b.weight
        x,                                                      # f32[8, 4]
    ) = unbox(box)
    before = aten.sin.default(x)                                # f32[8, 4]             +128 B
    del x
    ta = aten.t.default(a_weight)                               # &f32[4, 4]                    b
    ya = aten.mm.default(before, ta)                            # f32[8, 4]             +128 B  a
    del before, ta                                              #                       -128 B
    inner = aten.sin.default(ya)                                # f32[8, 4]             +128 B  a.inner.deep
    del ya                                                      #                       -128 B
    beside = aten.sin.default(inner)                            # f32[8, 4]             +128 B  ab
    del inner                                                   #                       -128 B
    tied = aten.mm.default(beside, a_weight)                    # f32[8, 4]             +128 B  b.head
    del beside                                                  #                       -128 B
    yb = aten.mm.default(tied, b_weight)                        # f32[8, 4]             +128 B  b
    del tied                                                    #                       -128 B
    both = aten.addmm.default(yb, yb, a_weight, beta=b_weight)  # f32[8, 4]             +128 B  b
    del yb                                                      #                       -128 B
    low, high, *_ = aten.split.Tensor(both, 4)                  # f32[4, 4], f32[4, 4]  +128 B  b
    del both                                                    #                       -128 B
    return [high], [low]


def backward(box):
    (
        low,                      # f32[4, 4]         b
        dy,                       # f32[4, 4]         tangent
    ) = unbox(box)
    g = aten.mul.Tensor(dy, low)  # f32[4, 4]  +64 B  a.inner
    del low, dy                   #            -64 B
    return [g], []
"""


def units() -> dict[str, str]:
    program = parsed(PAIR, PHASES)
    result = assign_units(program)
    assert not any(data(node).unit for node in program.nodes()), "a pass works on a copy"
    assert result.text(regions=True) == program.text(regions=True), "units are not printed"
    return {node.name: data(node).unit for node in result.nodes()}


def test_an_operation_belongs_to_the_unit_whose_parameters_it_reads() -> None:
    found = units()
    assert found["ya"] == "a", "through a view"
    assert found["tied"] == "a", "wherever it stands"
    assert found["yb"] == "b"


def test_of_several_units_read_the_one_of_its_module_wins() -> None:
    assert units()["both"] == "b"


def test_an_operation_that_reads_no_parameters_belongs_to_the_unit_around_its_module() -> None:
    found = units()
    assert found["inner"] == "a"
    assert found["g"] == "a", "in the backward too"


def test_what_stands_between_units_belongs_to_none() -> None:
    found = units()
    assert found["before"] == ""
    assert found["beside"] == "", "a name that merely begins like a unit's is another module"


def test_results_stay_with_the_operation_that_gave_them() -> None:
    program = assign_units(parsed(PAIR, PHASES))
    assert {data(node).unit for node in program.nodes(Item)} == {"b"}


SHARED = """
def forward(box):
    (
        a_weight,                            # f32[4, 4]          parameter a.weight
        b_weight,                            # f32[4, 4]          parameter b.weight
        x,                                   # f32[4, 4]
    ) = unbox(box)
    first = aten.mm.default(x, b_weight)     # f32[4, 4]  +64 B   b
    table = aten.cos.default(x)              # f32[4, 4]  +64 B   a
    between = aten.mul.Tensor(first, table)  # f32[4, 4]  +64 B   b
    del first, table                         #            -128 B
    more = aten.sin.default(x)               # f32[4, 4]  +64 B   a
    del x
    last = aten.mm.default(between, more)    # f32[4, 4]  +64 B   b
    del between, more                        #            -128 B
    other = aten.mm.default(last, a_weight)  # f32[4, 4]  +64 B   a
    del last                                 #            -64 B
    end = aten.mm.default(other, b_weight)   # f32[4, 4]  +64 B   b
    del other                                #            -64 B
    return [end], []
"""


def test_what_reads_no_parameter_within_the_run_of_another_unit_joins_it() -> None:
    program = assign_units(parsed(PAIR, SHARED))
    found = {node.name: data(node).unit for node in program.nodes()}
    assert found["table"] == found["more"] == "b", "else b would be gathered three times"
    assert found["other"] == "a", "it reads a parameter"
