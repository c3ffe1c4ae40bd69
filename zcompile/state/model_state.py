"""The state of a compiled model: whole or in shards, in memory or on disk, for any other stage and world."""

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
    check_alike,
    copy_on_host,
    empty_slots,
    is_kept,
    kept_of,
    of_one_rank,
    ordered_names,
    parts_of_whole,
    put_together,
    split_state,
    whole_state,
)
from zcompile.torch_internals.distributed import close_connections, gloo_of, group_timeout, set_group_timeout
from zcompile.torch_internals.dtensor import copyable, local_tensor
from zcompile.torch_internals.modules import LoadedKeys

Result = TypeVar("Result")
Values = dict[str, Any]
"""Tensors by name; under `..._extra_state`, what a module's `get_extra_state` gave."""


class Save:
    """A checkpoint on its way to the disk."""

    def __init__(self, folder: Path, future: Future[None]) -> None:
        self.folder = folder
        self._future = future
        self._asked = False

    def done(self) -> bool:
        """True once it is complete or has failed."""
        return self._future.done()

    def result(self) -> Path:
        """Wait until the checkpoint is complete on all ranks, and give its folder.

        Raises:
            StateError: it could not be written; the previous one is as it was.
        """
        self._asked = True
        with typed(str(self.folder)):
            self._future.result()
        return self.folder

    wait = result

    def settle(self) -> None:
        """Wait for its end; raise its error if nobody has asked for it."""
        if self._asked:
            self._future.exception()
        else:
            self.result()


class ModelState:
    """Reads and writes the state of a model whose parameters are shards. Every method is collective.

    What of the model is on meta on a rank is on other ranks, as the units of other pipeline stages are.

    Args:
        model: The module tree that holds the shards.
        communicator: The mesh that they are shards on.
        agreement: Where the ranks tell each other what is wrong, so that an error is on all of them.
        stage: The stage, for people who look into a checkpoint.
        ignored: Parameters that are no shards, and each rank's own.
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
        """The state of a module of the model."""
        return ModelState(module, self.communicator, self.agreement, self.stage)

    # -- whole ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def full(self, rank0_only: bool) -> Values:
        """`compiled.full_state_dict`."""
        state = self.model.state_dict()
        # A rank that asks alone would wait within a collective, which knows no names.
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
            # Buffers may differ between ranks.
            if is_sent or (isinstance(value, torch.Tensor) and not divided and not rank0_only):
                value = self._sent(value, home)
            if keeps:
                whole[name] = copy_on_host(value) if isinstance(value, torch.Tensor) else value
        return whole

    def _sent(self, value: torch.Tensor, home: int) -> torch.Tensor:
        """All of a tensor, which rank `home` has, on every rank; `value` is this rank's, or on meta."""
        device = self.communicator.device if is_elsewhere(value) else None
        copied = torch.empty_like(value, device=device) if is_elsewhere(value) else value.clone()
        self.communicator.broadcast(copied, home)
        return copied

    def save_full(self, path: str | os.PathLike[str]) -> None:
        """`compiled.save_full_state_dict`."""
        what, file = f"save_full_state_dict({os.fspath(path)!r})", Path(path)
        write = self._together(what, lambda: _writer_for(file))
        whole = self.full(rank0_only=True)

        def put() -> None:
            if self.communicator.rank == 0:
                with whole_file(file) as beside:
                    write(whole, beside)

        self._together(what, put)

    def load_full(self, state: Mapping[str, Any] | None) -> None:
        """`compiled.load_full_state_dict`."""
        found, what = Loading(self.model), "load_full_state_dict"

        def look() -> bool:
            if state is None and self.communicator.rank == 0:
                problem = "is None on the first rank of the mesh"
                raise StateError("the full state dict", problem, "give it on the first rank, or on every rank")
            if state or (state is not None and self.communicator.rank == 0):
                self._look(found, state)
            return bool(state)  # an empty one is what full_state_dict gives to all ranks but the first

        if not all(self._share(what, look)):
            self._send(found)
        self._write(found, what)

    @torch.no_grad()
    def _send(self, found: Loading) -> None:
        """Let every rank have its part of what the first one has found."""
        shapes = [None if place.value is None else place.held.shape for place in found.places]
        box: list[Any] = [(shapes, found.extra, found.keys.missing_keys, found.keys.unexpected_keys)]
        with self.communicator.waits.explained("what is in the state dict"):
            dist.broadcast_object_list(box, group=self.communicator.group, group_src=0)
        shapes, found.extra, *keys = box[0]
        found.keys = LoadedKeys(*keys)
        for place, shape in zip(found.places, shapes, strict=True):
            if shape is None:
                continue
            if shape != place.held.shape:  # a buffer that loading has made anew on the first rank
                place.held = place.table[place.key] = place.held.new_empty(shape)
            held = place.held
            whole = torch.empty(held.shape, dtype=held.dtype, device=self.communicator.device)
            if self.communicator.rank == 0:
                whole.copy_(place.value)
            self.communicator.broadcast(whole)
            if not is_elsewhere(held):
                part = self._part(held, whole)
                # A copy, or the view would keep the whole of each parameter until the last has come.
                place.value = part.clone() if isinstance(held, DTensor) else part

    def full_optimizer(self, optimizer: Optimizer, rank0_only: bool) -> dict[str, Any]:
        """`compiled.full_optimizer_state_dict`."""

        def kept() -> Any:
            self._refuse_ignored(optimizer)
            return kept_of(optimizer, self.model)

        everyones = self._share("full_optimizer_state_dict", kept)
        check_alike(everyones, self.model)
        return whole_state(optimizer, self.model, everyones, self.communicator, rank0_only)

    def load_full_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """`compiled.load_full_optimizer_state_dict`."""

        def parts() -> dict[str, Any]:
            self._refuse_ignored(optimizer)
            return parts_of_whole(state, optimizer, self.model)

        optimizer.load_state_dict(self._together("load_full_optimizer_state_dict", parts))

    # -- shards ---------------------------------------------------------------------------------------------------

    def load(self, state: Mapping[str, Any], strict: bool) -> Any:
        """`compiled.load_state_dict`."""
        found, what = Loading(self.model), "load_state_dict"
        self._together(what, lambda: self._look(found, state, strict))
        self._write(found, what, strict)
        return found.keys

    def _look(
        self, found: Loading, state: Mapping[str, Any], strict: bool = True, source: str = "the state dict"
    ) -> None:
        """Find what `state` would write; raise StateError if it does not fit."""
        try:
            found.look(state)
        except RuntimeError as error:
            _check(found.targets(), state, strict, source)
            fix = "see what hooks of loading make of it"
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
        """Write what fits, on all ranks; raise StateError for names that hooks after loading do not accept."""
        with torch.no_grad():
            for place in found.places:
                if place.value is not None and not is_elsewhere(place.held):
                    place.held.copy_(self._part(place.held, place.value))
        found.end()
        if strict and found.has_post_hooks:
            self._together(what, lambda: _check_names(found))

    def _part(self, target: Any, value: Any) -> Any:
        """What of `value`, whole or in shards, goes into `target` on this rank; a view of it where it can be one.

        Collective for a DTensor that lies otherwise, as hooks may leave what they transpose or pad.
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
            values.update(self.model.state_dict())  # once: hooks may be part of it
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
        content = self._together(what, lambda: self._content(values, others, differing, optimizer, extra, first))
        place = self._place(what, real(folder))
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

    def _place(self, what: str, folder: Path) -> CheckpointFolder:
        """Where this save writes: the first rank makes room for it."""

        def begin() -> list[Any]:
            if self.communicator.rank:
                return []
            place = CheckpointFolder.begin(folder)
            return [place.token, place.fresh]

        return CheckpointFolder(folder, *self._share(what, begin)[0])

    def _end(self, done: Future[None], place: CheckpointFolder, failure: BaseException | None) -> None:
        """Let a save be done, once what a failed one has written is gone."""
        if failure is None:
            done.set_result(None)
            return
        self._hang_up(failure)
        try:
            if self.communicator.rank == 0:
                clear(place.folder)
        except OSError:
            pass  # it goes with the next save
        finally:
            done.set_exception(failure)

    def _content(
        self, values: Values, others: set[str], differing: set[str], optimizer: Optimizer | None, extra: Any, like: int
    ) -> dict[str, Any]:
        """What this rank gives to torch.distributed.checkpoint: tensors, and of everything else one blob a rank.

        Buffers come from the first rank that has them, so `others` do; where this rank's are `differing` from those,
        they go into its blob. `like`: the first rank with the same parameters.
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
        """Raise StateError for an optimizer with state of parameters that are each rank's own."""
        if held := [name for name in ordered_names(optimizer, self.model) if name in self.ignored]:
            problem = "is left to you by ignore=, and the optimizer's state of it is this rank's own"
            raise StateError(
                held[0], problem, "step it by an optimizer of its own, and give its state_dict() as extra="
            )

    def _own_digests(self, state: Mapping[str, Any]) -> dict[str, str]:
        """What is saved and may differ between ranks, buffers and what is ignored, each with a digest of its value."""
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
        manifest = self._together(what, lambda: read_manifest(found))
        self._together(what, lambda: check_files(found, manifest, rank, size))
        reader = Reader(found, manifest["files"])
        targets: Values = {}

        def skeleton() -> dict[str, Any]:
            targets.update(self.model.state_dict())
            return self._skeleton(reader, optimizer, targets)

        content = self._together(what, skeleton)
        with typed(str(found)):
            try:
                dcp.load(content, storage_reader=reader, process_group=self._own_group())
            except (Exception, CheckpointException) as error:
                self._hang_up(error)
                raise

        state = Loading(self.model)

        def read() -> tuple[Any, dict[str, Any] | None]:
            (blob,) = content["ranks"].values()
            mine = _unblob(found, blob)
            here = _here(targets)
            values = {**content["model"], **{name: value for name, value in mine["own"].items() if name in here}}
            _check(here, values, True, str(found))
            self._look(state, values, source=str(found))
            if optimizer is None:
                return mine["extra"], None
            blobs = [content["optimizer"]["about"], *content["optimizer"]["parts"].values()]
            elsewhere = set(_elsewhere(targets))
            about = of_one_rank([_unblob(found, blob) for blob in blobs], elsewhere)
            owned = {name: _unblob(found, blob) for name, blob in content["optimizer"]["owned"].items()}
            about["values"] = {**about["values"], **owned}
            return mine["extra"], put_together(content["optimizer"]["state"], about, optimizer, self.model)

        extra, of_optimizer = self._together(what, read)
        if optimizer is not None and of_optimizer is not None:
            optimizer.load_state_dict(of_optimizer)
        self._write(state, what)
        return extra

    def _skeleton(self, reader: Reader, optimizer: Optimizer | None, values: Values) -> dict[str, Any]:
        """Empty tensors for what the checkpoint holds, laid out as this stage and world have them.

        They are new ones: if loading fails halfway, the model and the optimizer are as they were.
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
                fix = f"load the model alone: load_checkpoint({folder!r})"
                raise StateError(folder, "holds no optimizer state", fix)
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
        """Wait for the save before this one: two at once would mix their messages."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.settle()

    def _own_group(self) -> dist.ProcessGroup:
        """A gloo group for checkpoints alone: they are written while the training's group is in use."""
        if self._group is None:
            group = self.communicator.group
            timeout = group_timeout(group, self.communicator.device)
            self._group = dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=timeout,
                backend="gloo",
                use_local_synchronization=True,  # a mesh need not hold all ranks
            )
            # A rank that writes slowly is no rank that is gone; a rank that is gone closes its connections.
            set_group_timeout(self._group, max(timeout, timedelta(minutes=30)))
        return self._group

    def _hang_up(self, failure: BaseException) -> None:
        """End the waits of others for this rank where a message has failed here; they would last for half an hour.

        What torch.distributed.checkpoint raises is on all ranks already. The group stays as it is: a later save fails.
        """
        if self._group is not None and self.communicator.size > 1 and not isinstance(failure, CheckpointException):
            close_connections(gloo_of(self._group), self.communicator.rank, self.communicator.size)

    # -- errors of all ranks --------------------------------------------------------------------------------------

    def _together(self, what: str, act: Callable[[], Result]) -> Result:
        """Act on every rank; an error on one of them is the same error on all."""
        return self.agreement.attempt(what, act)[0]

    def _share(self, what: str, act: Callable[[], Any]) -> list[Any]:
        """The results of all ranks, as JSON gives them back; an error on one of them is the same error on all."""
        return self.agreement.attempt(what, act, shown=True)[1]


# -- what is where ---------------------------------------------------------------------------------------------------


def is_elsewhere(value: Any) -> bool:
    """True for what stands in the place of a tensor that other ranks have."""
    return isinstance(value, torch.Tensor) and value.is_meta


def _elsewhere(state: Mapping[str, Any]) -> list[str]:
    return [name for name, value in state.items() if is_elsewhere(value)]


def _here(state: Values) -> Values:
    """Of a state dict what this rank has."""
    return {name: value for name, value in state.items() if not is_elsewhere(value)}


# -- values ----------------------------------------------------------------------------------------------------------


def _check(targets: Mapping[str, Any], given: Mapping[str, Any], strict: bool, source: str = "the state dict") -> None:
    """Raise StateError for the first name that is missing, unexpected or does not fit, with a count of the others."""
    missing = [name for name in targets if name not in given]
    unexpected = [name for name in given if name not in targets]
    if strict:
        _check_listed(missing, unexpected, targets, source)
    for name, target in targets.items():
        if name in given and isinstance(target, torch.Tensor):
            _check_value(name, target, given[name], source)


def _check_names(found: Loading, source: str = "the state dict") -> None:
    """Raise StateError for names that loading has missed, or found too many."""
    _check_listed(found.keys.missing_keys, found.keys.unexpected_keys, found.targets(), source)


def _check_listed(missing: Sequence[str], unexpected: Sequence[str], targets: Iterable[str], source: str) -> None:
    if missing:
        problem = f"is missing from {source}{_more(missing)}"
        fix = "give every name of compiled.state_dict(), or strict=False where names may be left out"
        if unexpected:
            fix = f"rename what {source} has in its place, or build the model that it was made from: "
            fix += nearest(missing[0], unexpected)
        raise StateError(missing[0], problem, fix)
    if unexpected:
        problem = f"is in {source}, but is no parameter or buffer of the model{_more(unexpected)}"
        raise StateError(unexpected[0], problem, f"leave it out or rename it: {nearest(unexpected[0], targets)}")


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
        problem = f"lies on {value.device_mesh} in {source}, otherwise than in the model"
        raise StateError(name, problem, "give its full_tensor(), or go through save_checkpoint")


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
    """A value of a state dict for torch to read: of a shard a DTensor of torch's, over the same memory.

    Who takes the rows of that is not taken to write to the parameter ever after. What one rank owns stays what it is.
    """
    shard = isinstance(value, DTensor) and not isinstance(value, nn.Parameter) and owner_of(value) is None
    return copyable(value) if shard else value


def _bytes(value: torch.Tensor) -> bytes:
    flat: bytes = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return flat


def _blob(subject: str, value: Any) -> torch.Tensor:
    """Any value as bytes, 1-D; a StateError if it cannot be pickled."""
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
        raise StateError(
            str(folder), problem, "load it where the classes that it was made of can be imported"
        ) from error


def _writer_for(path: Path) -> Callable[[Values, Path], None]:
    """What writes a file of this suffix."""
    if path.suffix != ".safetensors":
        return _save_by_torch
    try:
        from safetensors.torch import save_file  # an optional dependency
    except ImportError as error:
        problem = "needs the package safetensors, which is not installed"
        raise StateError(str(path), problem, "pip install 'zcompile[safetensors]', or save to a .pt file") from error
    # Hugging Face refuses a file that does not say what its tensors are.
    return lambda state, beside: save_file(state, beside, metadata={"format": "pt"})


def _save_by_torch(state: Values, beside: Path) -> None:
    with beside.open("wb") as file:  # torch's own file would not say why it cannot be written
        torch.save(state, file)
