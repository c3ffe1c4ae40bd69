"""Mutants of programs: what computes something else is refused by the checker of values."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcompile
from tests.cases import quickly
from tests.ranks import Ranks
from tests.test_checker import MIXED, Texts, errors, rewritten
from tests.test_tensor_parallel import build, meshes, tokens
from zcompile import ProofError
from zcompile.passes.offload_activations import offload_activations
from zcompile.passes.partition_activations import partition_activations
from zcompile.proof.checker import prove
from zcompile.proof.checker_texts import BACKWARD, CAPTURE, FORWARD
from zcompile.proof.dumps import MANIFEST, prove_dump, rank_folders
from zcompile.proof.ranks import check_folders
from zcompile.schedule.pipeline import Pass

# -- mutants ----------------------------------------------------------------------------------------------------------


def changed(texts: Texts, file: str, pattern: str, new: str) -> tuple[Texts, set[int]]:
    """`texts` with the first match of `pattern` in a file replaced; and the lines that have changed."""
    match = re.search(pattern, texts[file], re.DOTALL)
    assert match is not None, f"{pattern} is not in {file}:\n{texts[file]}"
    after = texts[file][: match.start()] + match.expand(new) + texts[file][match.end() :]
    assert after != texts[file]
    try:
        statements = [one for function in ast.parse(after).body for one in getattr(function, "body", ())]
    except SyntaxError:
        return {**texts, file: after}, set()
    before, now = texts[file].split("\n"), after.split("\n")
    lines = {number for number, line in enumerate(now, 1) if before[number - 1 : number] != [line]}
    spans = [range(one.lineno, (one.end_lineno or one.lineno) + 1) for one in statements]
    return {**texts, file: after}, {line for span in spans for line in span if lines & set(span)}


def refused(texts: Texts, file: str, pattern: str, new: str) -> str:
    """What is said of such a change, which must name a line of what has changed."""
    mutant, lines = changed(texts, file, pattern, new)
    with pytest.raises(ProofError) as error:
        prove(mutant)
    named = {int(line) for line in re.findall(rf"{file} line (\d+)", str(error.value))}
    assert named & lines, f"{file} lines {sorted(lines)[:3]}: {error.value}"
    return str(error.value)


CHAIN = {"stage": 3, "updates": True, "arenas": True}
_ALL = Pass("offload_activations", partial(offload_activations, least=1))
MOVED = {"offload_activations": "cpu", "passes": {"offload_activations": _ALL}}
_GATHER = r"blocks_1_gather = all_gather\(blocks_1\)"
MUTANTS: dict[str, tuple[dict[str, Any], str, str, str, str]] = {
    "arguments of equal type": (
        {},
        BACKWARD,
        r"(loss_grad|head_grad_input), blocks_(\d)_out",
        r"\1, blocks_0_out",
        "not what was traced|defined",
    ),
    "another saved value": (
        {},
        FORWARD,
        r"blocks_1_out, blocks_1_saved",
        "blocks_0_out, blocks_1_saved",
        "not what was traced",
    ),
    "another list of saved values": (
        {},
        FORWARD,
        r"blocks_0_saved, blocks_1_out, blocks_1_saved",
        "blocks_1_saved, blocks_1_out, blocks_0_saved",
        "not what was traced",
    ),
    "no wait for a gather": (
        {},
        FORWARD,
        r"    blocks_0_full = wait\(blocks_0_gather\)[^\n]*\n",
        "",
        "blocks_0_full is defined nowhere",
    ),
    "a gather used before it is there": (
        {},
        FORWARD,
        r"region_0\(tokens_full,",
        "region_0(tokens_gather,",
        "not a full unit",
    ),
    "no wait for a reduction": (
        {},
        BACKWARD,
        r"blocks_1_grads = wait\(blocks_1_reduce\)",
        "blocks_1_grads = copy(blocks_1_reduce)",
        "",
    ),
    "a reduction that is returned": ({}, BACKWARD, r"\[head_grads,", "[head_reduce,", "not been waited for"),
    "a gradient that is dropped": (
        {},
        BACKWARD,
        r"blocks_1_grads, blocks_0_grads",
        "blocks_0_grads",
        "the gradient of blocks.1.* is missing",
    ),
    "a gradient that is given twice": ({}, BACKWARD, r"\[head_grads,", "[head_grads, head_grads,", "second time"),
    "swapped gradients": (
        {},
        "regions/region_6.py",
        r"return \[(\w+), (\w+)\]",
        r"return [\2, \1]",
        "not what was traced",
    ),
    "swapped parameters": (
        {},
        "regions/region_1.py",
        r"argument 0 item 0(.*?)argument 0 item 1\b",
        r"argument 0 item 1\1argument 0 item 0",
        "",
    ),
    "another dtype of a gather": (
        MIXED,
        FORWARD,
        r"blocks_1_gather = all_gather\(blocks_1, dtype=torch.bfloat16\)",
        "blocks_1_gather = all_gather(blocks_1)",
        "",
    ),
    "another dtype of a reduction": (
        MIXED,
        BACKWARD,
        r"(head_full_grads, dtype=torch.)float32",
        r"\1bfloat16",
        "averages head in bf16; its units say f32",
    ),
    "a dtype that is not declared": (
        {},
        FORWARD,
        _GATHER,
        "blocks_1_gather = all_gather(blocks_1, dtype=torch.bfloat16)",
        "gathers blocks.1 in bf16; its units say nothing",
    ),
    "a wire that is not declared": (
        {},
        FORWARD,
        _GATHER,
        "blocks_1_gather = all_gather(blocks_1, wire=torch.int8)",
        "gathers inside blocks.1 in i8; its units say nothing",
    ),
    "a reduction's dtype that is not declared": (
        {},
        BACKWARD,
        r"reduce_scatter\(head, head_full_grads\)",
        "reduce_scatter(head, head_full_grads, dtype=torch.bfloat16)",
        "averages head in bf16; its units say nothing",
    ),
    "another unit": ({}, FORWARD, _GATHER, "blocks_1_gather = all_gather(blocks_0)", "blocks.0"),
    "used after release": (
        {},
        FORWARD,
        r"(    blocks_0_out, [^\n]*\n[^\n]*\n)(    release\(blocks_0_full\)[^\n]*\n)",
        r"\2\1",
        "which was released at",
    ),
    "released twice": ({}, FORWARD, r"(    release\(tokens_full\)[^\n]*\n)", r"\1\1", "which was released at"),
    "an edit in a region": (
        {},
        "regions/region_1.py",
        r"aten\.gelu\.default",
        "aten.relu.default",
        "relu.*where the traced step has.*gelu",
    ),
    "another constant in a region": (
        {},
        "regions/region_1.py",
        r"1e-05",
        "1e-06",
        "1e-06.*where the traced step has.*1e-05",
    ),
    "a truth for a number": ({}, "regions/region_2.py", r", 1, (?=unsqueeze)", ", True, ", ""),
    "another result": ({}, FORWARD, r"return \[loss\]", "return [blocks_2_out]", "result 0 is not what was traced"),
    "a result that is missing": ({}, FORWARD, r"return \[loss\]", "return []", "result 0 is missing"),
    "deleted too early": (
        {},
        BACKWARD,
        r"(    blocks_2_grad_input)",
        r"    del blocks_1_out\n\1",
        "blocks_1_out was deleted",
    ),
    "a gradient that is read behind its reduction": (
        {},
        BACKWARD,
        r"region_4\(([^)]*)\)\n",
        r"region_4(\1)\n    x = copy(head_full_grads)\n",
        "",
    ),
    "two readers of a gradient": (
        {"stage": 0},
        BACKWARD,
        r"(    blocks_2_reduce = all_reduce\(blocks_2, )blocks_2_full_grads",
        r"\1head_full_grads",
        "",
    ),
    "gathered before its update": (
        CHAIN,
        BACKWARD,
        r"(    update\(blocks_0[^\n]*\n)(    gather_ahead\(blocks_0[^\n]*\n)",
        r"\2\1",
        "before its update",
    ),
    "gathered otherwise for the next step": (
        CHAIN,
        BACKWARD,
        r"gather_ahead\(blocks_0",
        "gather_ahead(blocks_0, keep=True",
        "next forward",
    ),
    "an update that is missing": (CHAIN, BACKWARD, r"    update\(blocks_1, [^\n]*\n", "", "blocks_1|blocks.1"),
    "another unit's gradients": (
        CHAIN,
        BACKWARD,
        r"update\(blocks_1, blocks_1_grads",
        "update(blocks_1, blocks_2_grads",
        "not its averaged",
    ),
    "the arena lent twice": (
        CHAIN,
        FORWARD,
        r"(at=arena\[\d+:\d+\])(.*?)at=arena\[\d+:\d+\]",
        r"\1\2\1",
        "another line has",
    ),
    "beyond the arena": (
        CHAIN,
        FORWARD,
        r"(head_gather = all_gather\(head, at=arena\[\d+:)\d+",
        r"\g<1>999999999",
        "does not have",
    ),
    "not fetched": (MOVED, BACKWARD, r"    \w+ = wait\((\w+_fetch)\)[^\n]*\n", "", "is defined nowhere"),
    "offloaded another value": (MOVED, FORWARD, r"offload\(blocks_1_out,", "offload(blocks_0_out,", ""),
    "stored elsewhere": (
        {"checkpoint": "unit", "arenas": True},
        FORWARD,
        r"store\(blocks_1_out, stack\)",
        "store(blocks_1_out, tokens_1)",
        "",
    ),
    "a full unit for secondary shards": (
        {"world": 4, "replicas": 2, "shard": "hpz"},
        FORWARD,
        r"(    tokens_full = wait\(tokens_gather\)[^\n]*\n)",
        r"\1    again = all_gather(tokens, tokens_full)\n",
        "gathers tokens from what are not its secondary shards",
    ),
    "an unknown function": ({}, FORWARD, r"release\(tokens_full\)", "free(tokens_full)", "not a function that"),
    "an unknown statement": (
        {},
        FORWARD,
        r"    (release\(tokens_full\))",
        r"    if tokens: \1",
        "not a statement of a program",
    ),
    "a function's name for a value": ({}, FORWARD, r"loss, ", "wait, ", "name of a function"),
}


@functools.cache
def right(options: str) -> Texts:
    """The program that mutants with these options begin with."""
    chosen = next(mutant[0] for mutant in MUTANTS.values() if repr(mutant[0]) == options)
    return rewritten("gpt", **{"stage": 3, "prefetch": 1, **chosen})


@pytest.mark.parametrize("name", MUTANTS)
def test_what_computes_something_else_is_refused_with_its_line(name: str) -> None:
    options, file, pattern, new, words = MUTANTS[name]
    said = refused(right(repr(options)), file, pattern, new)
    assert re.search(words, said, re.DOTALL), said
    assert "cannot be followed" not in said or words == "", said


_BEHIND = r"(\n    blocks_1_out, \*)"
UNKNOWN: dict[str, tuple[str, str, str]] = {
    "a seed": (FORWARD, _BEHIND, r"\n    torch.manual_seed(0)\1"),
    "a write by an operator": (FORWARD, _BEHIND, r"\n    operator.imul(blocks_0_out, 2.0)\1"),
    "a write to an item": (FORWARD, _BEHIND, r"\n    operator.setitem(blocks_0_out, 0, 3.0)\1"),
    "a write by a library": (FORWARD, _BEHIND, r"\n    torch.nn.init.zeros_(blocks_0_out)\1"),
    "an attribute": (FORWARD, _BEHIND, r"\n    blocks_0_out.data = aten.relu.default(blocks_0_out)\1"),
    "what is deleted of a list": (FORWARD, _BEHIND, r"\n    del blocks_0_saved[0]\1"),
    "what is not there deleted": (FORWARD, _BEHIND, r"\n    del nothing\1"),
    "an operation that was not traced": (FORWARD, _BEHIND, r"\n    y = aten.nonsense.default(blocks_0_out)\1"),
    "statistics that are written": (
        FORWARD,
        _BEHIND,
        r"\n    y = aten.native_batch_norm.default(x, None, None, x, x, True, 1.0, 1.0)\1".replace(
            "x,", "blocks_0_out,"
        ),
    ),
    "an operation of a library": (FORWARD, _BEHIND, r"\n    y = ops.mylib.zero.default(blocks_0_out)\1"),
    "a collective": (FORWARD, _BEHIND, r"\n    torch.distributed.all_reduce(blocks_0_out)\1"),
    "a value that nobody takes": (FORWARD, _BEHIND, r"\n    copy(blocks_0_out)\1"),
    "a second function": (
        FORWARD,
        r"$",
        "\ndef region_1(box):\n    (\n        a,\n    ) = unbox(box)\n    return [a]\n",
    ),
    "a function of the runtime": (FORWARD, r"$", "\ndef wait(x):\n    return x\n"),
    "a constant": (FORWARD, r"^", "units = {}\n"),
    "a default": (FORWARD, r"def forward\(box\)", "def forward(box, _=print())"),
    "another box": (FORWARD, r"unbox\(box\)", "unbox(reversed(box))"),
    "no names": (FORWARD, r"\n    tokens_full = wait", "\n    () = wait"),
    "a decorator": ("regions/region_1.py", r"def region_1", "@cuda_graph(fixed=print())\ndef region_1"),
    "a name that takes what is in the middle": (
        "regions/region_1.py",
        r"getitem, getitem_1, getitem_2, \*_,",
        "getitem, *getitem_1, getitem_2,",
    ),
    "a name for the rest of a tuple": (
        "regions/region_1.py",
        r"getitem_2, \*_,",
        "getitem_2, *rest,",
    ),
}


@quickly("name", list(UNKNOWN), list(UNKNOWN)[::5])
def test_what_is_not_known_to_do_nothing_else_is_refused(name: str) -> None:
    file, pattern, new = UNKNOWN[name]
    texts = rewritten("gpt", prefetch=1)
    match = re.search(pattern, texts[file])
    assert match is not None, texts[file]
    with pytest.raises(ProofError, match=rf"{file} line \d+"):
        prove({**texts, file: texts[file][: match.start()] + match.expand(new) + texts[file][match.end() :]})


def test_a_copy_that_is_laid_out_otherwise_is_another_value_but_to_reductions() -> None:
    texts = rewritten("gpt", prefetch=1)
    call = re.search(r"\n    blocks_1_out, \*blocks_1_saved = region_1\([^)]*(blocks_0_out)\)", texts[FORWARD])
    assert call is not None
    for copied, refuses in (("copy(blocks_0_out)", True), ("copy(blocks_0_out, strided=True)", False)):
        line = f"\n    y = {copied}{call[0].replace('blocks_0_out)', 'y)')}"
        changed_ = {**texts, FORWARD: texts[FORWARD].replace(call[0], line)}
        with pytest.raises(ProofError, match="contiguous") if refuses else contextlib.nullcontext():
            prove(changed_)


def test_graphs_of_operations_of_higher_order_are_told_apart(tmp_path: Path) -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.cond(self.first(x).sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))
            return self.last(x).sum()

    compiled = zcompile.compile(Choosing(), backend="eager", dump=tmp_path)
    compiled(torch.ones(2, 4)).backward()
    (verdict,) = prove_dump(tmp_path)
    assert verdict.error is None
    texts = {one.relative_to(tmp_path / "program_0").as_posix(): one for one in tmp_path.glob("program_0/**/*.py")}
    assert (tmp_path / MANIFEST).exists()
    found = {name: path.read_text() for name, path in texts.items() if name == CAPTURE or not re.match(r"\d", name)}
    name = next(name for name, text in found.items() if name.startswith("regions/") and "= graph('" in text)
    with pytest.raises(ProofError, match="not what was traced"):
        prove({**found, name: re.sub(r"graph\('....", "graph('0000", found[name], count=1)})


def test_what_a_cuda_graph_has_made_is_copied_before_it_is_returned() -> None:
    texts = rewritten("gpt", prefetch=1)
    graphs = {
        name: text.replace("\ndef region_", "\n@cuda_graph(fixed=[])\ndef region_") for name, text in texts.items()
    }
    with pytest.raises(ProofError, match="memory of a CUDA graph"):
        prove({**graphs, CAPTURE: texts[CAPTURE]})
    copied = graphs[FORWARD].replace("return [loss]", "loss_copy = copy(loss, strided=True)\n    return [loss_copy]")
    assert prove({**graphs, FORWARD: copied}).parameters == 41
    cached = {name: text.replace("@cuda_graph(", "@cached(") for name, text in graphs.items()}
    with pytest.raises(ProofError, match=r"region_0.py line 2: is decorated by something unknown"):
        prove({**cached, FORWARD: copied})
    with pytest.raises(ProofError, match=r"forward.py line \d+: is not a part of a program"):
        prove({**graphs, FORWARD: f"{copied}\nregion_0 = region_1\n"})


def test_a_parameter_with_a_gradient_is_not_unused() -> None:
    texts = rewritten("gpt", prefetch=1)
    claimed = texts[CAPTURE].replace('"norm.bias f32[32]"', '"norm.bias f32[32] unused"')
    with pytest.raises(ProofError, match=r"norm\.bias is unused, and has a gradient of it"):
        prove({**texts, CAPTURE: claimed})
    names = re.findall(r"\w+", texts["regions/region_3.py"].rpartition("return [")[2])
    dropped = texts[BACKWARD].replace("*head_full_grads = ", "a, _, c = ").replace("head_full_grads", "[a, None, c]")
    assert len(names) == 4
    with pytest.raises(ProofError, match=r"the gradient of norm\.bias is missing"):
        prove({**texts, BACKWARD: dropped})


WRITES = """
axes = {"dp": "shard 2"}
stage = 3
units = {"a": ["a.weight f32[4, 4] frozen"]}


def forward(box):
    (
        a_weight,  # f32[4, 4]  parameter a.weight
        x,         # f32[8, 4]  mutated
    ) = unbox(box)
    y = aten.mm.default(x, a_weight)
    z = aten.sin.default(y)
    x_new = aten.copy_.default(x, z)
    s = ops._c10d_functional.all_reduce.default(z, 'sum', '3')
    w = ops._c10d_functional.wait_tensor.default(s)
    r = aten.add.Tensor(w, x)
    return [r], []
"""
WRITING = """
def region_0(box):
    (
        a_weight,  # f32[4, 4]  argument 0 item 0
        x,         # f32[8, 4]  argument 1
    ) = unbox(box)
    y = aten.mm.default(x, a_weight)
    z = aten.sin.default(y)
    x_new = aten.copy_.default(x, z)
    s = ops._c10d_functional.all_reduce.default(z, 'sum', '3')
    w = ops._c10d_functional.wait_tensor.default(s)
    r = aten.add.Tensor(w, x)
    return [r]
"""
CALLING = """
def forward(box):
    (
        a,  #            1 parameter   unit a
        x,  # f32[8, 4]                mutated
    ) = unbox(box)
    a_gather = all_gather(a)
    a_full = wait(a_gather)
    r = region_0(a_full, x)
    return [r], []
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (r"    x_new[^\n]*\n", "", "add.Tensor.*write 0 is missing|add.Tensor"),
        (r"(    x_new[^\n]*\n)(.*)(    r = [^\n]*\n)", r"\2\3\1", "add"),
        (r"copy_\.default\(x, z\)", "copy_.default(x, y)", "copy_"),
        (
            r"(    y = )aten.mm.default\(x, a_weight\)(.*)(    x_new[^\n]*\n)",
            r"\1aten.mm.default(a_weight, x)\2\3",
            "mm",
        ),
        (r"    w = [^\n]*\n(.*)\(w, x\)", r"\1(s, x)", "add"),
        (
            r"(    s = [^\n]*\n)",
            r"\1    s_1 = ops._c10d_functional.all_reduce.default(y, 'sum', '3')\n",
            "collective 1",
        ),
        (r"'sum', '3'", "'max', '3'", "all_reduce"),
    ],
)
def test_writes_and_collectives_of_the_models_own_are_as_they_were(old: str, new: str, said: str) -> None:
    texts = {CAPTURE: WRITES, FORWARD: CALLING, "regions/region_0.py": WRITING}
    prove(texts)
    prove({**texts, FORWARD: CALLING.replace("1 parameter ", "1 parameters")})
    mutant, _ = changed(texts, "regions/region_0.py", old, new)
    with pytest.raises(ProofError, match=said):
        prove(mutant)


def test_a_value_is_told_from_what_it_was_before_it_is_written_to() -> None:
    region = WRITING.replace("return [r]", "return [r, x]")
    late = CALLING.replace("    r = region_0", "    x_was = copy(x)\n    r, x_is = region_0")
    wanted = WRITES.replace("return [r]", "return [r, x]")
    texts = {CAPTURE: wanted, FORWARD: late.replace("[r]", "[r, x_is]"), "regions/region_0.py": region}
    prove(texts)
    prove({**texts, FORWARD: late.replace("[r]", "[r, x]")})
    with pytest.raises(ProofError, match="result 1 is not"):
        prove({**texts, FORWARD: late.replace("[r]", "[r, x_was]")})


def dumped_by_ranks(rank: int, folder: str) -> None:
    data, model = meshes(1, 2)
    shards = Pass("partition_activations", partial(partition_activations, least=1))
    passes = {"partition_activations": shards}
    compiled = build(data, model, "mlps", passes=passes, partition_activations=True)
    compiled(*tokens(0, 0)).backward()
    compiled.dump(folder, all_ranks=True)


@pytest.mark.slow
def test_what_is_kept_in_shards_is_the_same_on_all_tensor_parallel_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, dumped_by_ranks, str(tmp_path))
    dumps = rank_folders(tmp_path)
    assert [errors(dump) for dump in dumps.values()] == [[], []]
    check_folders(dumps)
    home = dumps[0] / "program_0"
    texts = {str(path.relative_to(home)): path.read_text() for path in home.rglob("*.py") if not path.name[1].isdigit()}
    texts[CAPTURE] = (home / CAPTURE).read_text()
    moved = re.findall(r"offload\((\w+), tp\)", texts[FORWARD])
    saved = re.findall(r"blocks_0_saved_\d(?!\d*_)", texts[FORWARD].rpartition("return")[2])
    own = next(name for name in saved if name not in moved)
    assert moved
    kept = f"{own}_again = offload({own}, tp)"
    mutant = texts[FORWARD].replace("    release(blocks_0_full)", f"    {kept}\n    release(blocks_0_full)")
    with pytest.raises(ProofError, match="not known to be the same on all of them"):
        prove({**texts, FORWARD: mutant})
    unmarked = re.sub(r"(ops._c10d_functional.all_reduce.default.*?)# =", r"\1# ", texts[CAPTURE])
    with pytest.raises(ProofError, match="not known to be the same on all of them"):
        prove({**texts, CAPTURE: unmarked})
