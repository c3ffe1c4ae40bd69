"""The state of a compiled model: whole or sharded, in memory or on disk, loadable in any other stage and world."""

from __future__ import annotations

import functools
import hashlib
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from zcompile.errors import StateError, nearest
from zcompile.runtime.agreement import Agreement
from zcompile.runtime.checkpoint_reader import Reader
from zcompile.runtime.groups import Communicator
from zcompile.runtime.tensors.explained import laid_out_like
from zcompile.runtime.tensors.owned import owner_of, part_of
from zcompile.runtime.tensors.placement import whole_of
from zcompile.state.checkpoint import (
    CheckpointFolder,
    Writer,
    check_files,
    clear,
    read_manifest,
    real,
    typed,
    whole_file,
)
from zcompile.state.loading import Loading
from zcompile.state.optimizer_state import (
    Slots,
    assemble_state,
    check_same_slots,
    copy_on_host,
    empty_slots,
    is_kept,
    merge_ranks,
    ordered_names,
    parts_of_whole,
    slot_names,
    split_state,
    whole_state,
)
from zcompile.torch_internals.distributed import close_connections, gloo_of, group_timeout, set_group_timeout
from zcompile.torch_internals.dtensor import copyable, local_tensor
from zcompile.torch_internals.modules import LoadedKeys

Result = TypeVar("Result")
Values = dict[str, Any]
"""Tensors by name; under `..._extra_state`, the results of `get_extra_state`."""


class Save:
    """A checkpoint that is being saved."""

    def __init__(self, folder: Path, future: Future[None]) -> None:
        self.folder = folder
        self._future = future
        self._asked = False

    def done(self) -> bool:
        """True once the save is complete or has failed."""
        return self._future.done()

    def result(self) -> Path:
        """Wait until the checkpoint is complete on all ranks, and return its folder.

        Raises:
            StateError: it could not be written; the previous checkpoint is unchanged.
        """
        self._asked = True
        with typed(str(self.folder)):
            self._future.result()
        return self.folder

    wait = result

    def settle(self) -> None:
        """Wait for its end; raise its error unless `result` was called before."""
        if self._asked:
            self._future.exception()
        else:
            self.result()


class ModelState:
    """Reads and writes the state of a model whose parameters are shards. Every method is collective.

    Tensors that are on meta on this rank are kept by other ranks, such as the units of other pipeline stages.

    Args:
        model: The module tree with the shards.
        communicator: The mesh of all ranks that have a part of the model.
        agreement: Shares errors among these ranks, so that all of them raise.
        stage: The ZeRO stage, written to checkpoints for information.
        ignored: Names of parameters that are not sharded and may differ between ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        communicator: Communicator,
        agreement: Agreement,
        stage: int,
        ignored: Sequence[str] = (),
    ) -> None:
        self.model, self.communicator, self.agreement = model, communicator, agreement
        self.stage, self.ignored = stage, ignored
        self._group: dist.ProcessGroup | None = None
        self._pending: Save | None = None

    def of(self, module: nn.Module) -> ModelState:
        """The state of a submodule of the model."""
        return ModelState(module, self.communicator, self.agreement, self.stage)

    # -- whole ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def full(self, rank0_only: bool) -> Values:
        """`compiled.full_state_dict`."""
        state = self.model.state_dict()
        # Agree first: a rank that calls this alone gets an error that names the method, instead of a hang.
        absent = [set(names) for names in self._share("full_state_dict", lambda: _elsewhere(state))]
        whole: Values = {}
        keeps = self.communicator.rank == 0 or not rank0_only
        for name, value in state.items():
            home = next(rank for rank, names in enumerate(absent) if name not in names)
            divided = isinstance(value, DTensor) and not is_elsewhere(value)
            if divided:
                with self.communicator.waits.explained(f"the gather of {name}"):
                    value = whole_of(value, self.communicator.device)
            is_sent = any(name in names for names in absent)
            # Plain tensors, such as buffers, may differ between ranks: send the first rank's.
            if is_sent or (isinstance(value, torch.Tensor) and not divided and not rank0_only):
                value = self._broadcast(value, home)
            if keeps:
                whole[name] = copy_on_host(value) if isinstance(value, torch.Tensor) else value
        return whole

    def _broadcast(self, value: torch.Tensor, home: int) -> torch.Tensor:
        """Broadcast a tensor from rank `home`; `value` is this rank's, which may be on meta."""
        device = self.communicator.device if is_elsewhere(value) else None
        copied = torch.empty_like(value, device=device) if is_elsewhere(value) else value.clone()
        self.communicator.broadcast(copied, home)
        return copied

    def save_full(self, path: str | os.PathLike[str]) -> None:
        """`compiled.save_full_state_dict`."""
        what, file = f"save_full_state_dict({os.fspath(path)!r})", Path(path)
        write = self._on_every_rank(what, lambda: _writer_for(file))
        whole = self.full(rank0_only=True)

        def put() -> None:
            if self.communicator.rank == 0:
                with whole_file(file) as beside:
                    write(whole, beside)

        self._on_every_rank(what, put)

    def load_full(self, state: Mapping[str, Any] | None) -> None:
        """`compiled.load_full_state_dict`."""
        found, what = Loading(self.model), "load_full_state_dict"

        def look() -> bool:
            if state is None and self.communicator.rank == 0:
                problem = "is None on the first rank of the mesh"
                raise StateError("the full state dict", problem, "give it on the first rank, or on every rank")
            if state or (state is not None and self.communicator.rank == 0):
                self._find(found, state)
            return bool(state)  # full_state_dict returns an empty dict on all ranks but the first

        if not all(self._share(what, look)):
            self._send(found)
        self._write(found, what)

    @torch.no_grad()
    def _send(self, found: Loading) -> None:
        """Send the values that the first rank has found; each rank keeps its part."""
        shapes = [None if place.value is None else place.held.shape for place in found.places]
        box: list[Any] = [(shapes, found.extra, found.keys.missing_keys, found.keys.unexpected_keys)]
        with self.communicator.waits.explained("what is in the state dict"):
            dist.broadcast_object_list(box, group=self.communicator.group, group_src=0)
        shapes, found.extra, *keys = box[0]
        found.keys = LoadedKeys(*keys)
        for place, shape in zip(found.places, shapes, strict=True):
            if shape is None:
                continue
            if shape != place.held.shape:  # a buffer that loading has replaced on the first rank
                place.held = place.table[place.key] = place.held.new_empty(shape)
            held = place.held
            whole = torch.empty(held.shape, dtype=held.dtype, device=self.communicator.device)
            if self.communicator.rank == 0:
                whole.copy_(place.value)
            self.communicator.broadcast(whole)
            if not is_elsewhere(held):
                part = self._part(held, whole)
                # Hazard: a view would keep every whole parameter alive until the last one has been received.
                place.value = part.clone() if isinstance(held, DTensor) else part

    def full_optimizer(self, optimizer: Optimizer, rank0_only: bool) -> dict[str, Any]:
        """`compiled.full_optimizer_state_dict`."""

        def kept() -> Any:
            self._refuse_ignored(optimizer)
            return slot_names(optimizer, self.model)

        slots_of_ranks = self._share("full_optimizer_state_dict", kept)
        check_same_slots(slots_of_ranks, self.model)
        return whole_state(optimizer, self.model, slots_of_ranks, self.communicator, rank0_only)

    def load_full_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """`compiled.load_full_optimizer_state_dict`."""

        def parts() -> dict[str, Any]:
            self._refuse_ignored(optimizer)
            return parts_of_whole(state, optimizer, self.model)

        optimizer.load_state_dict(self._on_every_rank("load_full_optimizer_state_dict", parts))

    # -- shards ---------------------------------------------------------------------------------------------------

    def load(self, state: Mapping[str, Any], strict: bool) -> Any:
        """`compiled.load_state_dict`."""
        found, what = Loading(self.model), "load_state_dict"
        self._on_every_rank(what, lambda: self._find(found, state, strict))
        self._write(found, what, strict)
        return found.keys

    def _find(
        self, found: Loading, state: Mapping[str, Any], strict: bool = True, source: str = "the state dict"
    ) -> None:
        """Find what `state` would write. Raises StateError if it does not fit."""
        try:
            found.find(state)
        except RuntimeError as error:
            _check(found.targets(), state, strict, source)
            fix = "check the model's load hooks"
            raise StateError(source, f"does not load: {error}", fix) from error
        elsewhere = {place.name for place in found.places if is_elsewhere(place.held)}
        missing = found.keys.missing_keys
        missing[:] = [name for name in missing if name not in elsewhere]
        if strict and not found.has_post_hooks:
            _check_names(found, source)
        for place in found.places:
            if place.value is not None:
                _check_value(place.name, place.held, place.value, source)

    def _write(self, found: Loading, what: str, strict: bool = True) -> None:
        """Write the values that were found. Raises StateError if post-hooks leave missing or unexpected keys."""
        with torch.no_grad():
            for place in found.places:
                if place.value is not None and not is_elsewhere(place.held):
                    place.held.copy_(self._part(place.held, place.value))
        found.end()
        if strict and found.has_post_hooks:
            self._on_every_rank(what, lambda: _check_names(found))

    def _part(self, target: Any, value: Any) -> Any:
        """The part of `value`, whole or sharded, that this rank writes into `target`; a view of `value` if possible.

        Collective for a DTensor with other placements, which a load hook that transposes or pads may make.
        """
        if not isinstance(target, DTensor) or (isinstance(value, DTensor) and _same_placement(target, value)):
            return value
        if isinstance(value, DTensor):
            value = whole_of(value, self.communicator.device)
        return laid_out_like(target, part_of(value, target).to(target.device))

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str], optimizer: Optimizer | None, extra: Any, asynchronous: bool) -> Save:
        """`compiled.save_checkpoint`."""
        self._settle()
        what = f"save_checkpoint({os.fspath(folder)!r})"
        values: Values = {}

        def keep() -> list[Any]:
            values.update(self.model.state_dict())  # called only once, since it may run hooks
            held = [name for name, parameter in self.model.named_parameters() if not is_elsewhere(parameter)]
            return [self._own_digests(values), held]

        kept = self._share(f"{what}: what ranks keep", keep)
        own, names = kept[self.communicator.rank]
        first = next(rank for rank, (_, others) in enumerate(kept) if others == names)
        saved: dict[str, tuple[int, str]] = {}
        for rank, (digests, _) in enumerate(kept):
            saved = {name: (rank, digest) for name, digest in digests.items()} | saved
        differing = {name for name, digest in own.items() if digest != saved[name][1]}
        others = {name for name in own if name not in differing and saved[name][0] != self.communicator.rank}
        content = self._on_every_rank(what, lambda: self._content(values, others, differing, optimizer, extra, first))
        place = self._begin_save(what, real(folder))
        writer = Writer(place, {"world": self.communicator.size, "stage": self.stage, "torch": torch.__version__})
        done: Future[None] = Future()
        save = Save(Path(os.path.abspath(folder)), done)
        try:
            group = self._own_group()
            if asynchronous:
                written: Any = dcp.async_save(content, storage_writer=writer, process_group=group)
                written.add_done_callback(lambda ended: self._end(done, place, ended.exception()))
                self._pending = save
                return save
            dcp.save(content, storage_writer=writer, process_group=group)
        except (Exception, CheckpointException) as error:
            self._end(done, place, error)
            save.result()  # raises it
        self._end(done, place, None)
        return save

    def _begin_save(self, what: str, folder: Path) -> CheckpointFolder:
        """The target of this save, made by the first rank."""

        def begin() -> list[Any]:
            if self.communicator.rank:
                return []
            place = CheckpointFolder.begin(folder)
            return [place.token, place.fresh]

        return CheckpointFolder(folder, *self._share(what, begin)[0])

    def _end(self, done: Future[None], place: CheckpointFolder, failure: BaseException | None) -> None:
        """Finish a save; remove its files first if it has failed."""
        if failure is None:
            done.set_result(None)
            return
        self._close_connections(failure)
        try:
            if self.communicator.rank == 0:
                clear(place.folder)
        except OSError:
            pass  # the next save removes them
        finally:
            done.set_exception(failure)

    def _content(
        self, values: Values, others: set[str], differing: set[str], optimizer: Optimizer | None, extra: Any, like: int
    ) -> dict[str, Any]:
        """The state that this rank passes to torch.distributed.checkpoint: tensors, and one blob of everything else.

        Another rank saves the buffers in `others`. This rank's values of the buffers in `differing` differ from the
        saved ones, and go into its blob. `like`: the first rank with the same parameters.
        """
        rank = self.communicator.rank
        model: Values = {}
        own: Values = {}
        for name, value in _here(values).items():
            if not isinstance(value, torch.Tensor) or name in differing:
                own[name] = value
            elif name not in others:
                model[name] = for_others(value)
        content: dict[str, Any] = {"model": model}
        if optimizer is not None:
            self._refuse_ignored(optimizer)
            state = split_state(optimizer, self.model)
            content["optimizer"] = {"state": state.tensors}
            content["optimizer"]["owned"] = {n: _blob(f"state of {n}", values) for n, values in state.owned.items()}
            if rank == 0:
                content["optimizer"]["about"] = _blob("the optimizer's options", state.about)
            elif rank == like:
                content["optimizer"]["parts"] = {str(rank): _blob("the optimizer's options", state.about)}
        content["ranks"] = {str(rank): _blob("extra", {"extra": extra, "own": own})}
        return content

    def _refuse_ignored(self, optimizer: Optimizer) -> None:
        """Raise StateError for an optimizer of parameters that `ignore=` leaves to the user."""
        if held := [name for name in ordered_names(optimizer, self.model) if name in self.ignored]:
            problem = "is left to you by ignore=, so its optimizer state may differ between ranks"
            fix = "use a separate optimizer for it, and give that one's state_dict() as extra="
            raise StateError(held[0], problem, fix)

    def _own_digests(self, state: Mapping[str, Any]) -> dict[str, str]:
        """Digests of the values that may differ between ranks: buffers, and parameters that `ignore=` names."""
        shards = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}.difference(self.ignored)
        return {
            name: hashlib.sha256(_bytes(value)).hexdigest()
            for name, value in state.items()
            if isinstance(value, torch.Tensor)
            and name not in shards
            and not isinstance(value, DTensor)
            and not is_elsewhere(value)
        }

    def load_checkpoint(self, folder: str | os.PathLike[str], optimizer: Optimizer | None) -> Any:
        """`compiled.load_checkpoint`."""
        self._settle()
        what, rank, size = f"load_checkpoint({os.fspath(folder)!r})", self.communicator.rank, self.communicator.size
        found = Path(os.path.abspath(folder))
        manifest = self._on_every_rank(what, lambda: read_manifest(found))
        self._on_every_rank(what, lambda: check_files(found, manifest, rank, size))
        reader = Reader(found, manifest["files"])
        targets: Values = {}

        def skeleton() -> dict[str, Any]:
            targets.update(self.model.state_dict())
            return self._skeleton(reader, optimizer, targets)

        content = self._on_every_rank(what, skeleton)
        with typed(str(found)):
            try:
                dcp.load(content, storage_reader=reader, process_group=self._own_group())
            except (Exception, CheckpointException) as error:
                self._close_connections(error)
                raise

        state = Loading(self.model)

        def read() -> tuple[Any, dict[str, Any] | None]:
            (blob,) = content["ranks"].values()
            mine = _unblob(found, blob)
            here = _here(targets)
            values = {**content["model"], **{name: value for name, value in mine["own"].items() if name in here}}
            _check(here, values, True, str(found))
            self._find(state, values, source=str(found))
            if optimizer is None:
                return mine["extra"], None
            blobs = [content["optimizer"]["about"], *content["optimizer"]["parts"].values()]
            elsewhere = set(_elsewhere(targets))
            about = merge_ranks([_unblob(found, blob) for blob in blobs], elsewhere)
            owned = {name: _unblob(found, blob) for name, blob in content["optimizer"]["owned"].items()}
            about["values"] = {**about["values"], **owned}
            return mine["extra"], assemble_state(content["optimizer"]["state"], about, optimizer, self.model)

        extra, of_optimizer = self._on_every_rank(what, read)
        if optimizer is not None and of_optimizer is not None:
            optimizer.load_state_dict(of_optimizer)
        self._write(state, what)
        return extra

    def _skeleton(self, reader: Reader, optimizer: Optimizer | None, values: Values) -> dict[str, Any]:
        """Empty tensors to load the checkpoint into, laid out for this stage and world.

        They are new tensors, so that the model and the optimizer are unchanged if loading fails.
        """
        folder, metadata = str(reader.path), reader.read_metadata()
        saved: dict[tuple[str, ...], torch.Tensor] = {
            tuple(metadata.planner_data[key]): torch.empty(value.size, dtype=value.properties.dtype, device="meta")
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }

        def below(*path: str) -> dict[str, torch.Tensor]:
            return {one[len(path)]: value for one, value in saved.items() if one[:-1] == path}

        targets = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        _check(targets, below("model"), True, folder)
        here = {name: value for name, value in targets.items() if not is_elsewhere(value)}
        blob = functools.partial(torch.empty_like, device="cpu")
        content: dict[str, Any] = {"model": {name: _empty_like(value) for name, value in here.items()}}
        if optimizer is not None:
            if ("optimizer", "about") not in saved:
                fix = f"load only the model: load_checkpoint({folder!r})"
                raise StateError(folder, "has no optimizer state", fix)
            slots: Slots = {}
            for path, shape in saved.items():
                if path[:2] == ("optimizer", "state") and not is_elsewhere(targets.get(path[2])):
                    slots.setdefault(path[2], {})[path[3]] = shape
            state = empty_slots(slots, optimizer, self.model)
            owned = {n: blob(s) for n, s in below("optimizer", "owned").items() if n in here and is_kept(here[n])}
            parts = {rank: blob(shape) for rank, shape in below("optimizer", "parts").items()}
            about = blob(saved["optimizer", "about"])
            content["optimizer"] = {"state": state, "owned": owned, "about": about, "parts": parts}
        rank = str(self.communicator.rank)
        source = rank if ("ranks", rank) in saved else "0"
        return {**content, "ranks": {source: blob(saved["ranks", source])}}

    def _settle(self) -> None:
        """Wait for the previous save: the messages of two concurrent saves would mix."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.settle()

    def _own_group(self) -> dist.ProcessGroup:
        """A gloo group for checkpoints only, which are written while training uses its own group."""
        if self._group is None:
            group = self.communicator.group
            timeout = group_timeout(group, self.communicator.device)
            self._group = dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=timeout,
                backend="gloo",
                use_local_synchronization=True,  # the mesh may have fewer ranks than the world
            )
            # A long timeout: a rank may write slowly, and a dead rank is noticed by its closed connections.
            set_group_timeout(self._group, max(timeout, timedelta(minutes=30)))
        return self._group

    def _close_connections(self, failure: BaseException) -> None:
        """Close this rank's connections after a failed message, or other ranks would wait until the long timeout.

        torch.distributed.checkpoint raises its own errors on all ranks already. The group is not replaced: later saves
        fail.
        """
        if self._group is not None and self.communicator.size > 1 and not isinstance(failure, CheckpointException):
            close_connections(gloo_of(self._group), self.communicator.rank, self.communicator.size)

    # -- errors of all ranks --------------------------------------------------------------------------------------

    def _on_every_rank(self, what: str, act: Callable[[], Result]) -> Result:
        """Call `act` on every rank; an error on one rank is raised on all."""
        return self.agreement.attempt(what, act)[0]

    def _share(self, what: str, act: Callable[[], Any]) -> list[Any]:
        """The results of `act` on all ranks, passed as JSON; an error on one rank is raised on all."""
        return self.agreement.attempt(what, act, shown=True)[1]


# -- what is where ---------------------------------------------------------------------------------------------------


def is_elsewhere(value: Any) -> bool:
    """True for a meta tensor, which stands for a tensor of other ranks."""
    return isinstance(value, torch.Tensor) and value.is_meta


def _elsewhere(state: Mapping[str, Any]) -> list[str]:
    return [name for name, value in state.items() if is_elsewhere(value)]


def _here(state: Values) -> Values:
    """The entries of a state dict that this rank has."""
    return {name: value for name, value in state.items() if not is_elsewhere(value)}


# -- values ----------------------------------------------------------------------------------------------------------


def _check(targets: Mapping[str, Any], given: Mapping[str, Any], strict: bool, source: str = "the state dict") -> None:
    """Raise StateError for the first name that is missing, unexpected or does not fit, and list some others."""
    missing = [name for name in targets if name not in given]
    unexpected = [name for name in given if name not in targets]
    if strict:
        _check_listed(missing, unexpected, targets, source)
    for name, target in targets.items():
        if name in given and isinstance(target, torch.Tensor):
            _check_value(name, target, given[name], source)


def _check_names(found: Loading, source: str = "the state dict") -> None:
    """Raise StateError for missing or unexpected keys."""
    _check_listed(found.keys.missing_keys, found.keys.unexpected_keys, found.targets(), source)


def _check_listed(missing: Sequence[str], unexpected: Sequence[str], targets: Iterable[str], source: str) -> None:
    if missing:
        problem = f"is missing from {source}{_more(missing)}"
        fix = "give every name of compiled.state_dict(), or strict=False if names may be missing"
        if unexpected:
            fix = f"rename an entry of {source}, or build the model that it was saved from: "
            fix += nearest(missing[0], unexpected)
        raise StateError(missing[0], problem, fix)
    if unexpected:
        problem = f"is in {source}, but is not a parameter or buffer of the model{_more(unexpected)}"
        raise StateError(unexpected[0], problem, f"remove or rename it: {nearest(unexpected[0], targets)}")


def _check_value(name: str, target: torch.Tensor, value: Any, source: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise StateError(name, f"is a {type(value).__name__} in {source}, not a tensor", "give a tensor")
    if tuple(value.shape) != tuple(target.shape):
        problem = f"has shape {list(value.shape)} in {source}, and {list(target.shape)} in the model"
        raise StateError(name, problem, "give the whole parameter of a model of the same sizes")
    if value.dtype != target.dtype:
        problem = f"is {value.dtype} in {source}, and {target.dtype} in the model"
        raise StateError(name, problem, f"convert one of them on purpose, such as value.to({target.dtype})")
    if isinstance(value, DTensor) and not (isinstance(target, DTensor) and value.device_mesh == target.device_mesh):
        problem = f"is on {value.device_mesh} in {source}, and on another mesh or unsharded in the model"
        raise StateError(name, problem, "give its full_tensor(), or use save_checkpoint and load_checkpoint")


def _same_placement(target: DTensor, value: DTensor) -> bool:
    return value.placements == target.placements and owner_of(value) == owner_of(target)


def _more(names: Sequence[str]) -> str:
    listed = ", ".join(names[1:4])
    return f", and so {'is' if len(names) == 2 else 'are'} {listed}{' ...' if len(names) > 4 else ''}" if listed else ""


def _empty_like(target: torch.Tensor) -> torch.Tensor:
    if isinstance(target, DTensor):
        return laid_out_like(target, torch.empty_like(local_tensor(target)))
    return torch.empty_like(target)


def for_others(value: Any) -> Any:
    """A value for a state dict: a shard becomes a plain DTensor of torch over the same memory.

    Views of its rows are then not watched as possible writes to the parameter. Owned parameters stay as they are.
    """
    shard = isinstance(value, DTensor) and not isinstance(value, nn.Parameter) and owner_of(value) is None
    return copyable(value) if shard else value


def _bytes(value: torch.Tensor) -> bytes:
    flat: bytes = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return flat


def _blob(subject: str, value: Any) -> torch.Tensor:
    """Pickle any value into a 1-D uint8 tensor. Raises StateError if it cannot be pickled."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:
        problem = f"cannot be pickled: {type(error).__name__}: {error}"
        raise StateError(subject, problem, "give tensors, numbers, strings and containers of them") from error
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def _unblob(folder: Path, blob: torch.Tensor) -> Any:
    try:
        return torch.load(io.BytesIO(_bytes(blob)), map_location="cpu", weights_only=False)
    except Exception as error:
        problem = f"holds extra state that cannot be unpickled: {type(error).__name__}: {error}"
        raise StateError(str(folder), problem, "make the classes of its objects importable") from error


def _writer_for(path: Path) -> Callable[[Values, Path], None]:
    """The function that writes a file with the suffix of `path`."""
    if path.suffix != ".safetensors":
        return _save_by_torch
    try:
        from safetensors.torch import save_file  # an optional dependency
    except ImportError as error:
        problem = "needs the package safetensors, which is not installed"
        raise StateError(str(path), problem, "pip install 'zcompile[safetensors]', or save to a .pt file") from error
    # transformers refuses safetensors files without this metadata.
    return lambda state, beside: save_file(state, beside, metadata={"format": "pt"})


def _save_by_torch(state: Values, beside: Path) -> None:
    with beside.open("wb") as file:  # torch.save(path) would hide the reason of a failure
        torch.save(state, file)
