"""The result of converting a config: code, what zcompile handles differently, and what has no counterpart."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from zcompile.errors import OptionError, nearest

MESH = 'mesh = init_device_mesh("cuda", ({outer}, {inner}), mesh_dim_names=("replicate", "shard"))'
WORLD = "dist.get_world_size()"

AVERAGED = "gradients are averaged in float32, not in 16 bits: reduce_dtype= changes that"
FUSED = "an optimizer on the host is fastest with fused=True"
WHOLE = "torch.save(compiled.full_state_dict(), path): collective, whole tensors on rank 0"
"""Notes shared by the configs of several libraries."""


@dataclass
class Script:
    """A training script as text, with notes. Values are Python source."""

    source: str
    """The file that was converted, for the first comment."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of `zcompile.compile`."""
    mesh: tuple[str, str] | None = None
    """Sizes of the outer and the inner dimension."""
    optimizer: str | None = None
    """The constructor call, with {} for the parameters: `torch.optim.AdamW({}, lr=0.1)`."""
    clip: str | None = None
    """The maximum norm."""
    accumulate: str | None = None
    """Number of micro-batches; None for one."""
    scaler: dict[str, str] | None = None
    """Arguments of the GradScaler for float16; None for no GradScaler."""
    offload_optimizer: bool = False
    """Keep optimizer state on the host, which needs `zcompile.train_step`."""
    launch: str | None = None
    saving: list[str] = field(default_factory=list)
    """How to save; printed as comments."""
    otherwise: list[str] = field(default_factory=list)
    """Settings that zcompile handles without an option, or by another option."""
    missing: list[str] = field(default_factory=list)
    """Settings without a counterpart, and why."""
    unknown: list[str] = field(default_factory=list)

    @property
    def stage(self) -> int:
        return int(self.options.get("stage", "3"))

    @property
    def text(self) -> str:
        """The script as Python, with notes as comments."""
        code = [*self._imports(), "", *self._setup(), "", *self._loop()]
        lines = [f"# From {self.source}. `model`, `batches` and `loss_of(model, batch)` are yours."]
        if "args." in str(code):
            lines.append('# `args` are the TrainingArguments that the Trainer uses for "auto" values.')
        lines += ["", *code]
        notes = {"Saving": self.saving, "Handled differently": self.otherwise, "No counterpart": self.missing}
        for heading, entries in {**notes, "Unknown keys, which are ignored": self.unknown}.items():
            if entries:
                lines += ["", f"# {heading}:", *(line for entry in _grouped(entries) for line in _comment(entry))]
        return "\n".join(lines) + "\n"

    def _imports(self) -> Iterator[str]:
        if self.accumulate is not None:
            yield "from contextlib import nullcontext"
            yield ""
        yield "import torch"
        if self.mesh is not None:
            yield "import torch.distributed as dist"
            yield "from torch.distributed.device_mesh import init_device_mesh"
        yield ""
        yield "import zcompile"

    def _setup(self) -> Iterator[str]:
        if self.launch is not None:
            yield f"# {self.launch}"
        if self.options.get("offload_parameters") == '"cpu"':
            yield 'torch.distributed.init_process_group("cpu:gloo,cuda:nccl")  # gradients are on the host'
        if self.mesh is not None:
            yield MESH.format(outer=self.mesh[0], inner=self.mesh[1])
        options = _keywords({**({"mesh": "mesh"} if self.mesh is not None else {}), **self.options})
        made = self.optimizer or "make_optimizer({})"
        if self.offload_optimizer:
            yield f"optimizer = {made.format('model.parameters()')}"
            yield f'step = zcompile.train_step(model, loss_of, optimizer, offload_optimizer="cpu"{options})'
            return
        yield f"compiled = zcompile.compile(model{options})"
        yield f"optimizer = {made.format('compiled.parameters()')}"
        if self.scaler is not None:
            yield f'scaler = torch.amp.GradScaler("cuda"{_keywords(self.scaler)})'

    def _loop(self) -> Iterator[str]:
        if self.offload_optimizer:
            yield from ("for batch in batches:", "    loss = step(batch)")
            return
        loss = "loss_of(compiled, batch)" + (f" / {self.accumulate}" if self.accumulate is not None else "")
        backward = "loss.backward()" if self.scaler is None else "scaler.scale(loss).backward()"
        if self.accumulate is None:
            yield "for batch in batches:"
            yield from (f"    {line}" for line in (f"loss = {loss}", backward, *self._step()))
            return
        yield "for number, batch in enumerate(batches, 1):"
        yield f"    is_last = number % {self.accumulate} == 0"
        yield "    with nullcontext() if is_last else compiled.no_sync():"
        yield f"        loss = {loss}"
        yield f"        {backward}"
        yield "    if is_last:"
        yield from (f"        {line}" for line in self._step())

    def _step(self) -> Iterator[str]:
        if self.clip is not None:
            if self.scaler is not None:
                yield "scaler.unscale_(optimizer)"
            yield f"norm = torch.nn.utils.clip_grad_norm_(compiled.parameters(), {self.clip})"
        yield from ("optimizer.step()",) if self.scaler is None else ("scaler.step(optimizer)", "scaler.update()")
        yield "optimizer.zero_grad()"

    def note_rest(self, config: Config, otherwise: Mapping[str, str], missing: Mapping[str, str]) -> None:
        """Add a note for every key that was not converted, from these texts by path."""
        known = {*otherwise, *missing}
        for path, value in config.rest(known):
            if path in known and is_off(value):
                continue
            if path in otherwise:
                self.otherwise.append(f"{path}: {otherwise[path]}")
            elif path in missing:
                self.missing.append(f"{path}: {missing[path]}")
            else:
                self.unknown.append(f"{path}: {_near(path, {*known, *config.taken})}")


def _keywords(given: Mapping[str, str]) -> str:
    return "".join(f", {name}={value}" for name, value in given.items())


def _near(path: str, known: Set[str]) -> str:
    advice = nearest(path, known)
    return advice.partition(" choose")[0] if advice.startswith("did") else "no key of this name is known"


def _grouped(entries: list[str]) -> Iterator[str]:
    """Merge entries with the same text into one entry for several keys."""
    keys: dict[str, list[str]] = {}
    for entry in dict.fromkeys(entries):
        key, colon, text = entry.partition(": ")
        keys.setdefault(text if colon else key, []).extend([key] if colon else [])
    yield from (f"{', '.join(of)}: {text}" if of else text for text, of in keys.items())


def _comment(entry: str) -> list[str]:
    return textwrap.wrap(entry, 116, initial_indent="# - ", subsequent_indent="#   ", break_long_words=False)


AUTO = "auto"
"""A value that Hugging Face's Trainer fills in from its TrainingArguments."""


class Config:
    """Nested keys and values that remembers which were read. A path is the keys joined by dots."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._taken: set[str] = set()

    def take(self, path: str, default: Any = None) -> Any:
        """Read the value at a path; the default if it is absent, null or "auto"."""
        self._taken.add(path)
        value = self._at(path)
        return default if value is None or value == AUTO else value

    def is_auto(self, path: str) -> bool:
        """True if the value at a path is left to the Trainer."""
        return bool(self._at(path) == AUTO)

    def _at(self, path: str) -> Any:
        value: Any = self._values
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def flag(self, path: str, *, default: bool = False) -> bool:
        """Read a boolean, or a text such as "true". Raises OptionError for any other value."""
        value = self.take(path, default)
        if isinstance(value, str):
            value = {"true": True, "false": False}.get(value.lower(), value)
        if not isinstance(value, bool):
            raise OptionError(path, f"is {value!r}", "make it true or false")
        return value

    def number(self, path: str, default: float = 0) -> float:
        """Read a number, or a text such as "5e8", which PyYAML does not parse. Raises OptionError for other values."""
        value = self.take(path, default)
        try:
            found = float(value)
        except (TypeError, ValueError) as error:
            raise OptionError(path, f"is {value!r}", "make it a number") from error
        return int(found) if found.is_integer() else found

    @property
    def taken(self) -> Set[str]:
        """The paths that were read, present or not."""
        return self._taken

    def rest(self, known: Set[str]) -> Iterator[tuple[str, Any]]:
        """Unread paths with their values. A section is expanded if a path in it was read or is `known`."""
        sections = {path[:at] for path in {*self._taken, *known} for at, sign in enumerate(path) if sign == "."}
        yield from self._rest(self._values, "", sections)

    def _rest(self, values: Mapping[str, Any], prefix: str, sections: Set[str]) -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            path = f"{prefix}{key}"
            if path in self._taken:
                continue
            if isinstance(value, Mapping) and path in sections:
                yield from self._rest(value, f"{path}.", sections)
            else:
                yield path, value


def is_off(value: Any) -> bool:
    """True for values that request nothing: false, null, "none", "auto", or a section that is not enabled."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return value in (None, False, "none", "None", "no", "NO", AUTO, [], "")
