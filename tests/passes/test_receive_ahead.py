from __future__ import annotations

from tests.passes.test_unroll_microbatches import stages
from zcompile.ir.actions import ActionTable
from zcompile.ir.operation import op_of
from zcompile.ir.ops import Receive, WaitReceive
from zcompile.passes.pipelining.receive_ahead import receive_ahead
from zcompile.passes.pipelining.unroll_microbatches import unroll_microbatches

AFTER = """
def step(box):
    (
        c,                                                            #                       1 parameter  unit c
        pp,                                                           #                                    group pp
        grad_output,                                                  # f32[8, 4]                          tangent
    ) = unbox(box)
    m0_b_out_recv = recv(pp, 'f32[8, 4]', source=0, message='m0_yb')  # f32[8, 4]             +128 B       b
    # 1F0
    m0_b_out = wait(m0_b_out_recv)                                    # &f32[8, 4]                         b
    del m0_b_out_recv
    m1_b_out_recv = recv(pp, 'f32[8, 4]', source=0, message='m1_yb')  # f32[8, 4]             +128 B       b
    m0_c_out = region_0(c, m0_b_out)                                  # f32[8, 4]             +128 B       c
    # 1B0
    m0_c_grad_input, m0_c_full_grad = region_1(c, grad_output,        # f32[8, 4], f32[4, 4]  +192 B       c
            m0_b_out)
    del m0_b_out                                                      #                       -128 B
    m0_c_grad_input_sent = send(m0_c_grad_input, pp, to=0, message='m0_db')  # &f32[8, 4]                  c
    del m0_c_grad_input
    # 1F1
    m1_b_out = wait(m1_b_out_recv)                                    # &f32[8, 4]                         b
    del m1_b_out_recv
    m1_c_out = region_0(c, m1_b_out)                                  # f32[8, 4]             +128 B       c
    # 1B1
    m1_c_grad_input, m1_c_full_grad = region_1(c, grad_output,        # f32[8, 4], f32[4, 4]  +192 B       c
            m1_b_out)
    del grad_output, m1_b_out                                         #                       -128 B
    m1_c_grad_input_sent = send(m1_c_grad_input, pp, to=0, message='m1_db')  # &f32[8, 4]                  c
    del m1_c_grad_input
    # end
    wait(m0_c_grad_input_sent)
    del m0_c_grad_input_sent                                          #                       -128 B
    wait(m1_c_grad_input_sent)
    del m1_c_grad_input_sent                                          #                       -128 B
    return [m0_c_out, m1_c_out], {'c.weight': [m0_c_full_grad, m1_c_full_grad]}
"""
TABLE = ActionTable.parse("0F0, 0F1, 0B0, 0B1\n1F0, 1B0, 1F1, 1B1")


def test_a_message_is_on_its_way_while_the_one_before_is_used() -> None:
    program = unroll_microbatches(stages("c"), table=TABLE, rank=1, axis="pp")
    before = str(program)
    assert str(receive_ahead(program)).strip("\n") == AFTER.strip("\n")
    assert str(program) == before, "a pass works on a copy"


def test_messages_are_received_in_the_order_in_which_they_are_sent() -> None:
    table = ActionTable.parse("0F0, 0F1, 0F2, 0B0, 0B1, 0B2\n1F0, 1F1, 1F2, 1B0, 1B1, 1B2")
    for rank in range(2):
        program = unroll_microbatches(stages("c"), table=table, rank=rank, axis="pp")
        wanted = [op_of(node, Receive).message for node in program.nodes(Receive)]
        for depth in range(1, 5):
            found = [op_of(node, Receive).message for node in receive_ahead(program, depth=depth).nodes(Receive)]
            assert found == wanted


def test_a_message_that_is_needed_later_holds_none_up_nor_lets_one_pass() -> None:
    table = ActionTable.parse("0F0, 0F1, 0F2, 0F3, 0B0, 0B1, 0B2, 0B3\n1F0, 1F1, 1F2, 1F3, 1B0, 1B1, 1B2, 1B3")
    program = unroll_microbatches(stages("c"), table=table, rank=1, axis="pp")
    first, second, *_ = program.nodes(WaitReceive)
    (started,) = second.all_input_nodes
    first.prepend(started)
    first.prepend(second)
    wanted = [op_of(node, Receive).message for node in program.nodes(Receive)]
    for depth in range(1, 4):
        found = [op_of(node, Receive).message for node in receive_ahead(program, depth=depth).nodes(Receive)]
        assert found == wanted
