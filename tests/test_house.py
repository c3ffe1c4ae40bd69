"""The house rules of CONTRIBUTING.md, read off the sources."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

import zcompile
from zcompile.schedule.default_pipeline import ACCUMULATE, of_stages, of_steps

ROOT = Path(__file__).parent.parent
SOURCES = [path for room in ("zcompile", "passes", "runtime") for path in sorted((ROOT / room).glob("**/*.py"))]
PASSES = [
    path
    for room in ("passes", "passes/pipelining")
    for path in sorted((ROOT / room).glob("*.py"))
    if path.stem != "__init__"
]
LONGEST = 60
ROOMS = {
    "torch_internals": "",
    "errors": "",
    "torch_range": "",
    "ir": "",
    "runtime": "ir",
    "runtime.gradients": "ir runtime",
    "runtime.offload": "ir runtime",
    "cost": "ir runtime",
    "facts": "ir cost",
    "proof.checker": "proof.checker_evaluation proof.checker_texts proof.checker_values",
    "proof.checker_evaluation": "proof.checker_divided proof.checker_rows proof.checker_texts proof.checker_values",
    "proof.checker_divided": "proof.checker_rows proof.checker_texts proof.checker_values",
    "proof.checker_rows": "proof.checker_texts proof.checker_values",
    "proof.checker_values": "proof.checker_texts",
    "proof.checker_texts": "",
    "proof": "ir facts proof.checker proof.checker_texts",
    "passes.common": "ir cost",
    "passes": "ir cost passes.common",
    "passes.pipelining": "ir cost passes passes.common",
    "frontend": "ir",
    "model": "ir frontend runtime runtime.gradients",
    "schedule": "ir cost facts proof passes passes.pipelining model",
    "recording": "ir runtime",
    "report": "ir cost schedule proof proof.checker_texts",
    "engine": "ir cost frontend model proof report runtime runtime.gradients runtime.offload schedule recording",
    "state": "runtime",
    "pipelining": "ir cost facts model proof passes.common passes.pipelining runtime runtime.gradients schedule report "
    "engine state",
    "torch_backend": "ir frontend model schedule runtime runtime.gradients engine",
    "named_backend": "torch_backend",
    "compiled": "ir model schedule runtime runtime.gradients engine state",
    "compile_model": "model schedule runtime engine compiled",
    "training_step": "frontend ir schedule report runtime runtime.gradients engine compiled compile_model pipelining",
    "tools.migration": "",
    "tools": "torch_range ir cost frontend model proof passes.common passes.pipelining schedule report runtime engine "
    "compile_model recording pipelining tools.migration",
    "": "torch_range ir cost facts model proof runtime schedule tools compile_model compiled torch_backend "
    "training_step pipelining",
    "__main__": "tools",
    "integrations": "compile_model compiled model schedule",
}
"""What each room may import beside itself; all may import `torch_internals` and `errors`."""


LINES = {
    "zcompile": 1_810,
    "zcompile/cost": 2_785,
    "zcompile/engine": 5_590,
    "zcompile/facts": 790,
    "zcompile/frontend": 1_525,
    "zcompile/integrations": 660,
    "zcompile/ir": 5_390,
    "zcompile/model": 1_585,
    "zcompile/pipelining": 2_130,
    "zcompile/proof": 5_605,
    "zcompile/recording": 820,
    "zcompile/report": 1_550,
    "zcompile/schedule": 1_600,
    "zcompile/state": 1_660,
    "zcompile/tools": 4_760,
    "zcompile/torch_internals": 1_930,
    "passes": 5_560,
    "runtime": 8_905,
}
"""The most lines that each folder may have, those below it included; of `zcompile`, its own files alone."""
MOST_LINES = 54_575
"""Of all that is installed. Whoever raises a number says why in the commit."""
BENCHMARKS = {
    "common": 1_340,
    "families": 1_770,
    "faults": 1_560,
    "fuzz": 1_470,
    "gpu": 1_560,
    "memory": 1_180,
    "mutants": 3_340,
    "speed": 2_725,
}
"""The same of each folder of benchmarks, which are not installed."""


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def trees(*rooms: str) -> Iterator[tuple[str, ast.Module]]:
    for path in SOURCES:
        name = str(path.relative_to(ROOT))
        if any(name == room or name.startswith(f"{room}/") for room in rooms):
            yield name, parsed(path)


def imports(tree: ast.Module) -> Iterator[str]:
    """Dotted names that `tree` imports, anywhere in it; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.AST) -> str:
    """`torch.a.b` for an attribute chain that begins with a name, else nothing."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def offenders(room: str, *forbidden: str) -> list[str]:
    return [
        f"{file} imports {name}"
        for file, tree in trees(room)
        for name in imports(tree)
        if any(name == module or name.startswith(f"{module}.") for module in forbidden)
    ]


def test_the_sources_are_found() -> None:
    assert len(SOURCES) > 20
    assert len(PASSES) >= 8


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("passes", ("torch.distributed",)),
        ("runtime", ("torch.fx", "torch.export")),
        ("zcompile/frontend/capture.py", ("torch.distributed",)),
    ],
)
def test_passes_know_no_groups_and_the_runtime_no_graphs(room: str, forbidden: tuple[str, ...]) -> None:
    assert offenders(room, *forbidden) == []


def import_graph() -> nx.DiGraph[str]:
    """Which module imports which: at the top, in functions and for type checkers."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES}
    modules = {f"zcompile.{name}" if not name.startswith("zcompile") else name for name in modules}
    modules = {name.removesuffix(".__init__") for name in modules}
    graph: nx.DiGraph[str] = nx.DiGraph()
    for file, tree in trees("zcompile", "passes", "runtime"):
        name = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        name = name if name.startswith("zcompile") else f"zcompile.{name}"
        for imported in imports(tree):
            target = imported if imported in modules else imported.rpartition(".")[0]
            if target in modules:
                graph.add_edge(name, target)
    return graph


def test_no_module_imports_itself_over_others() -> None:
    assert list(nx.simple_cycles(import_graph())) == []


def room_of(module: str) -> str:
    """The room of a module by its dotted name: the longest of `ROOMS` that it begins with."""
    inside = module.removeprefix("zcompile").removeprefix(".")
    return max((room for room in ROOMS if f"{inside}.".startswith(f"{room}.") or not room), key=len)


def test_rooms_import_what_the_table_says() -> None:
    pairs = {(room_of(one), room_of(other)) for one, other in import_graph().edges}
    found = {
        room: {other for one, other in pairs if one == room} - {room, "torch_internals", "errors"} for room in ROOMS
    }
    assert found == {room: set(allowed.split()) - {"torch_internals", "errors"} for room, allowed in ROOMS.items()}


def test_no_folder_is_full_and_every_one_is_installed() -> None:
    folders = {path.parent for path in SOURCES}
    assert max(len(list(folder.glob("*.py"))) for folder in folders) <= 25
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    names = {str(folder.relative_to(ROOT)).replace("/", ".") for folder in folders}
    assert set(installed) == {name if name.startswith("zcompile") else f"zcompile.{name}" for name in names}


def test_runtime_knows_no_programs() -> None:
    known = {other for one, other in import_graph().edges if one.startswith("zcompile.runtime.")}
    assert {name for name in known if room_of(name) == "ir"} == {
        "zcompile.ir.axis",
        "zcompile.ir.layout",
        "zcompile.ir.packing",
        "zcompile.ir.tensor_type",
    }
    found = [file for file, tree in trees("runtime") if any(dotted(node) == "torch.fx" for node in ast.walk(tree))]
    assert found == [], "nor through an attribute of torch"


def test_rooms_are_imported_under_the_installed_name() -> None:
    assert [one for room in ("zcompile", "passes", "runtime") for one in offenders(room, "passes", "runtime")] == []


def test_private_names_of_torch_stand_in_one_folder() -> None:
    found = []
    for file, tree in trees("zcompile", "passes", "runtime"):
        if file.startswith("zcompile/torch_internals/"):
            continue
        names = [*imports(tree), *(dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))]
        found += [f"{file}: {name}" for name in names if _is_private_torch(name)]
    assert found == []


def test_private_attributes_are_our_own() -> None:
    """Of torch's objects they are reached in one folder."""
    sources = list(trees("zcompile", "passes", "runtime"))
    classes = [node for _, tree in sources for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    ours = {name for found in classes for name in members(found)}
    found = [
        f"{file}:{node.lineno}: {ast.unparse(node)}"
        for file, tree in sources
        if not file.startswith("zcompile/torch_internals/")
        if "/integrations/" not in file  # what is there derives from others' classes
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr)
        if node.attr not in ours and not is_operation(node) and not dotted(node).startswith("sys.")
    ]
    assert found == []


def members(found: ast.ClassDef) -> Iterator[str]:
    """What a class defines: methods, fields, attributes of `self`."""
    for node in ast.walk(found):
        match node:
            case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def is_operation(node: ast.Attribute) -> bool:
    """True for names of operations, which may be like that: aten._to_copy."""
    return dotted(node).startswith(("aten.", "_aten.", "torch.ops."))


def _is_private_torch(name: str) -> bool:
    root, *parts = name.split(".")
    if name.startswith("torch.ops."):
        return False  # operations may have such names: aten._to_copy
    return root == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts)


def test_one_file_names_kinds_of_gpus() -> None:
    found = [
        f"{file}:{node.lineno}"
        for file, tree in trees("zcompile", "passes", "runtime")
        if file != "runtime/device.py"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and "cuda" in node.attr and node.attr != "cuda_graphs")
        or (isinstance(node, ast.Constant) and node.value == "cuda")
    ]
    assert found == []


def length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_folders_keep_within_their_lines() -> None:
    found = dict.fromkeys(LINES, 0)
    for path in SOURCES:
        first, second, *below = (*path.relative_to(ROOT).parts, "")
        found[f"{first}/{second}" if first == "zcompile" and any(below) else first] += len(
            path.read_text().splitlines()
        )
    assert {folder: count for folder, count in found.items() if count > LINES[folder]} == {}
    assert sum(found.values()) <= MOST_LINES


def test_benchmarks_keep_to_their_folders_and_lines() -> None:
    found = dict.fromkeys(BENCHMARKS, 0)
    for path in (ROOT / "benchmarks").glob("**/*.py"):
        found[path.relative_to(ROOT / "benchmarks").parts[0]] += len(path.read_text().splitlines())
    assert {folder: count for folder, count in found.items() if count > BENCHMARKS[folder]} == {}
    assert max(len(list((ROOT / "benchmarks" / folder).glob("*.py"))) for folder in BENCHMARKS) <= 25


def test_functions_fit_on_a_screen() -> None:
    """But for their docstrings: that of `compile` has a line for each option."""
    found = [
        f"{file}: {node.name} has {lines} lines"
        for file, tree in trees("zcompile", "passes", "runtime")
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (lines := length(node) - (length(node.body[0]) if ast.get_docstring(node) else 0)) > LONGEST
    ]
    assert found == []


def test_one_name_is_one_class() -> None:
    found: dict[str, list[str]] = {}
    for file, tree in trees("zcompile", "passes", "runtime"):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(file))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


@pytest.mark.parametrize("path", PASSES, ids=lambda path: path.stem)
def test_a_pass_has_its_function_its_test_and_a_docstring_named_after_it(path: Path) -> None:
    tree = parsed(path)
    assert path.stem in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert (ast.get_docstring(tree) or "").startswith(f"{path.stem}: ")
    assert (ROOT / "tests" / "passes" / f"test_{path.stem}.py").exists()


def test_the_default_pipelines_run_every_pass() -> None:
    options: dict[str, Any] = {
        "memory_limit": 1,
        "checkpoint": "unit",
        "updates": True,
        "arenas": True,
        "offload_activations": "cpu",
        "partition_activations": 2,
        "cuda_graphs": True,
        "chunk": 1,
    }
    full = [zcompile.pipeline(stage=stage, **options) for stage in range(4)] + [zcompile.pipeline(sequence="ulysses")]
    names = {name for pipeline in full for name in pipeline.names}
    names |= {
        step.name
        for step in (
            *of_stages(partition="default", sent=1, bucket=1),
            *of_steps(3, prefetch=1, bucket=1, memory_limit=1, away=True),
        )
    }
    assert names | {ACCUMULATE.name, "cut_stages", "unroll_microbatches"} == {path.stem for path in PASSES}


@pytest.mark.parametrize("name", zcompile.__all__)
def test_a_public_name_exists_and_is_documented(name: str) -> None:
    public = getattr(zcompile, name)
    doc = inspect.getdoc(public)
    assert doc
    assert not doc.startswith(f"{name}("), "the signature that dataclass writes is no documentation"


def test_public_errors_are_errors_of_zcompile() -> None:
    errors = [getattr(zcompile, name) for name in zcompile.__all__ if name.endswith("Error")]
    assert errors
    assert all(issubclass(error, zcompile.ZcompileError) for error in errors)


def test_public_functions_name_the_errors_they_raise() -> None:
    for function in (zcompile.compile, zcompile.pipeline, zcompile.parse, zcompile.verify):
        assert "Raises:" in (inspect.getdoc(function) or ""), function.__name__
