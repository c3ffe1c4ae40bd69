"""Cases of `benchmarks.fuzz` as data: a model, options, and a way to train; drawn by chance, and made smaller."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.fuzz.models import IN_PYTHON, Layer, Spec, draw_spec

DISK = "disk:FOLDER"
"""Stands for a folder of the case's own."""


@dataclass(frozen=True)
class Case:
    """What is trained, how, and by how many ranks."""

    spec: Spec = field(default_factory=Spec)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `zcompile.compile`; a dtype by its name."""
    world: int = 2
    way: str = "loop"
    """The loop, `train_step`, or the backend of torch.compile."""
    optimizer: str = "sgd"
    early: bool = False
    """The optimizer is built over the plain model, before `zcompile.compile`."""
    steps: int = 2
    micro: int = 1
    """Micro-batches of a step."""
    no_sync: bool = False
    """All but the last of them under `no_sync`."""
    forwards: int = 1
    """Forwards before the backward, which is that of the sum of their losses."""
    retain: bool = False
    """Each backward twice."""
    clip: bool = False
    keep: bool = False
    """Gradients are set to zeros, not to None."""
    picks: tuple[tuple[int, ...], ...] = ((0,),)
    """Heads that a step's loss reads, in turn."""
    lopsided: bool = False
    """Ranks are at other places of `picks`."""
    asks: bool = False
    """The model is told which heads to compute."""
    rows: tuple[int, ...] = (2,)
    """Rows of a batch, in turn over ranks and steps."""
    lengths: tuple[int, ...] = (3,)
    """Lengths of its sequences, in turn over ranks, steps and micro-batches."""
    settings: bool = False
    """Rates and decays of the optimizer change with each step."""
    redraw: str = ""
    """Before the second step parameters get random numbers: noise, other values by `nn.init`, by `.data`, or a mask."""
    evaluate: str = ""
    """Before each step: under no_grad, inference_mode, in eval mode, or a forward whose result is dropped."""
    save: str = ""
    """Before the last step the state goes through a checkpoint, a state dict, or a whole state dict."""

    @property
    def exact(self) -> bool:
        """True where zcompile promises the bits of eager PyTorch.

        Batch normalization follows the layout of its input, and its fake does not: a traced view of it becomes a copy,
        of which a product may be rounded otherwise.
        """
        plain = self.options.get("backend") == "eager" and "dtype" not in self.options
        plain = plain and "kind='batch_norm'" not in repr(self.spec)
        return plain and self.world <= 2 and self.micro == self.forwards == 1 and not self.clip and not self.retain


@dataclass(frozen=True)
class Task:
    """A case for this rank. `folder` is empty, and the same on all ranks."""

    case: Case
    rank: int
    folder: Path


@dataclass(frozen=True)
class Verdict:
    """What became of a case on a rank: right, wrong, refused (an error of zcompile's), crash, or void.

    Void is a model that plain PyTorch does not train either. `text` is a traceback, or what differs.
    """

    kind: str
    what: str = ""
    text: str = ""
    bits: bool = True
    """Not a bit differed."""

    @property
    def said(self) -> str:
        """In one line: what the error is, not how to fix it."""
        return self.text.strip().splitlines()[-1] if self.kind == "wrong" else self.what


def draw_case(seed: int, number: int) -> Case:
    """The case of this number."""
    chance = random.Random(f"{seed} {number}")
    spec = draw_spec(chance)
    options = _draw_options(chance, spec)
    way = chance.choices(["loop", "train_step", "backend"], [6, 2, 2])[0]
    if way == "backend":
        options = {name: value for name, value in options.items() if name not in ("units", "offload_parameters")}
    loop, ticks = way != "train_step", any(kind in str(spec) for kind in IN_PYTHON)
    micro = chance.choice([1, 1, 1, 2, 3]) if loop else 1
    picks, asks = _draw_picks(chance, len(spec.heads)), chance.random() < 0.15
    return Case(
        spec=replace(spec, double=spec.double and "dtype" not in options),
        options=options,
        world=chance.choices([1, 2, 3, 4], [20, 55, 20, 5])[0],
        way=way,
        optimizer=chance.choice(["sgd", "adamw", "adagrad"]),
        early=chance.random() < 0.3,
        steps=chance.randint(2, 4),
        micro=micro,
        no_sync=way == "loop" and micro > 1 and chance.random() < 0.6,
        forwards=2 if loop and chance.random() < 0.12 else 1,
        retain=loop and chance.random() < 0.08,
        clip=chance.random() < 0.2,
        keep=loop and chance.random() < 0.15,
        picks=picks,
        lopsided=loop and not asks and chance.random() < 0.2,
        asks=asks,
        rows=chance.choice([(2,), (2,), (3, 2), (2, 3, 4)]),
        lengths=chance.choice([(3,), (3,), (3, 5), (4, 6, 3)]),
        settings=chance.random() < 0.25,
        redraw=chance.choice(["", "", "", "noise", "init", "data", "mask"]) if way != "backend" else "",
        evaluate=chance.choice(["", "", "", "no_grad", "inference_mode", "eval", "dropped"]),
        save=chance.choice(["", "", "", "checkpoint", "state_dict", "full"]) if way == "loop" and not ticks else "",
    )


def _draw_options(chance: random.Random, spec: Spec) -> dict[str, Any]:
    """Of `zcompile.compile`: each with its default more often than not."""
    options: dict[str, Any] = {
        "stage": chance.choice([0, 1, 2, 3, 3]),
        "prefetch": chance.randint(0, 3),
        "backend": "inductor" if chance.random() < 0.03 else "eager",
    }
    others: dict[str, tuple[float, list[Any]]] = {
        "checkpoint": (0.25, ["unit", "unit", "unit", "1 MiB", 0.9]),
        "arenas": (0.2, [True]),
        "bucket": (0.2, [16, 64, 1024]),
        "dtype": (0.15, ["bfloat16"]),
        "units": (0.2, [["layers.*"], ["layers.0", "heads.*"], ["*"]]),
        "offload_activations": (0.08, [DISK]),
        "offload_parameters": (0.05 if options["stage"] else 0, [DISK]),
        "memory_limit": (0.04, ["1 MiB"]),
    }
    for name, (share, choices) in others.items():
        if chance.random() < share:
            options[name] = chance.choice(choices)
    if "memory_limit" in options:
        options.pop("arenas", None)
    return options


def _draw_picks(chance: random.Random, heads: int) -> tuple[tuple[int, ...], ...]:
    """All heads in each step more often than some."""
    if heads == 1 or chance.random() < 0.5:
        return (tuple(range(heads)),)
    return tuple(
        tuple(sorted(chance.sample(range(heads), chance.randint(1, heads)))) for _ in range(chance.randint(1, 3))
    )


def told(value: Any) -> str:
    """A case, or what it is made of, as Python, without what is as usual."""
    if isinstance(value, tuple):
        return f"({', '.join(told(item) for item in value)}{',' if len(value) == 1 else ''})"
    if not isinstance(value, Case | Spec | Layer):
        return repr(value)
    usual = Layer("") if isinstance(value, Layer) else type(value)()
    given = [(item.name, getattr(value, item.name)) for item in fields(value)]
    said = [f"{name}={told(one)}" for name, one in given if one != getattr(usual, name)]
    return f"{type(value).__name__}({', '.join(said)})"


def smaller(case: Case) -> Iterator[Case]:
    """Cases like this one with one thing less."""
    plain = Case()
    for layers in _fewer(case.spec.layers):
        yield replace(case, spec=replace(case.spec, layers=layers))
    for name in case.options:
        if name not in ("stage", "backend"):
            yield replace(case, options={n: value for n, value in case.options.items() if n != name})
    for name in (
        *("way", "micro", "no_sync", "forwards", "retain", "clip", "keep", "lopsided", "asks"),
        *("rows", "lengths", "settings", "redraw", "evaluate", "save", "early", "optimizer"),
    ):
        if getattr(case, name) != getattr(plain, name):
            yield replace(case, **{name: getattr(plain, name)})
    for name in ("inputs", "outputs", "tied", "double"):
        if getattr(case.spec, name) != getattr(plain.spec, name):
            yield replace(case, spec=replace(case.spec, **{name: getattr(plain.spec, name)}))
    if len(case.spec.heads) > 1:
        yield replace(case, spec=replace(case.spec, heads=case.spec.heads[:1]), picks=((0,),))
    if len(case.picks) > 1:
        yield from (replace(case, picks=(pick,)) for pick in case.picks)
    if case.world > 1:
        yield replace(case, world=case.world - 1)
    if case.steps > 1:
        yield replace(case, steps=case.steps - 1)
    if case.options.get("backend") == "inductor":
        yield replace(case, options={**case.options, "backend": "eager"})


def _fewer(layers: tuple[Layer, ...]) -> Iterator[tuple[Layer, ...]]:
    """The layers without one of them, with one in place of what it contains, or with a plainer one."""
    for index, layer in enumerate(layers):
        before, after = layers[:index], layers[index + 1 :]
        yield (*before, *after)
        if layer.inner:
            yield (*before, *layer.inner, *after)
            yield from ((*before, replace(layer, inner=inner), *after) for inner in _fewer(layer.inner) if inner)
        if layer.frozen:
            yield (*before, replace(layer, frozen=False), *after)
        if layer.number:
            yield (*before, replace(layer, number=0), *after)
