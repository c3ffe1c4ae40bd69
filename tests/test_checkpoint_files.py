"""What a checkpoint's folder must hold to be one, and what else may lie there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.cases import quickly
from tests.models import make
from tests.ranks import RankError, Ranks
from tests.test_state import SAVED, adamw, compiled, error_of, mark, same, slow_writes, train, values
from zcompile import StateError

# -- complete or absent ----------------------------------------------------------------------------------------------


def killed_save(rank: int, folder: str) -> None:
    model = compiled(make("mlp"), 3)
    mark(model, 1.0)
    model.save_checkpoint(folder)
    mark(model, 2.0)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            slow_writes(patch, lambda: os.kill(os.getpid(), signal.SIGKILL))
        try:
            model.save_checkpoint(folder)
        except StateError:
            os._exit(3)


def scale_of(rank: int, folder: str) -> float:
    model = compiled(make("mlp"), 1)
    model.load_checkpoint(folder)
    loaded = values(model)["scale"].item()
    mark(model, 5.0)
    model.save_checkpoint(folder)
    mark(model, 6.0)
    model.load_checkpoint(folder)
    assert values(model)["scale"].item() == 5.0, "the next save works"
    return loaded


@pytest.mark.slow
def test_the_previous_checkpoint_survives_a_kill(ranks: Ranks, tmp_path: Path) -> None:
    doomed = Ranks(2)
    with pytest.raises(RankError):
        doomed.run(2, killed_save, str(tmp_path / "c"), timeout=60)
    doomed.close()
    assert os.listdir(tmp_path) == ["c"]
    assert ranks.run(2, scale_of, str(tmp_path / "c")) == [1.0, 1.0]
    assert os.listdir(tmp_path) == ["c"]
    assert kinds(tmp_path / "c") == WHOLE


WHOLE = [".metadata", "__0_*_0.distcp", "__1_*_0.distcp", "zcompile.json"]


def kinds(folder: Path) -> list[str]:
    """The names in a folder, without what tells one save's from another's."""
    return sorted(re.sub(r"_[0-9a-f]{16}_", "_*_", name) for name in os.listdir(folder))


class Killed(BaseException):
    """The process is gone at this point."""


def by_torch(folder: str) -> float:
    """What torch's own reader finds."""
    scale = torch.zeros(())
    dcp.load({"model.scale": scale}, checkpoint_id=folder)
    return scale.item()


def kill_points(rank: int, folder: str) -> list[float]:
    """What is loadable after a save over an older one was killed before its n-th touch of the disk, for every n."""
    model = compiled(make("mlp"), 3)
    loadable = []
    for point in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        mark(model, 1.0)
        model.save_checkpoint(f"{folder}/c")
        (Path(folder) / "c" / "notes.txt").write_text("kept")
        mark(model, 2.0)
        count = 0

        def counted(act: Callable[..., Any], point: int = point) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count > point:
                    raise Killed
                return act(*args, **kwargs)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for module, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (shutil, "rmtree")):
                patch.setattr(module, name, counted(getattr(module, name)))
            for name in ("mkdir", "open", "rename", "unlink", "rmdir"):
                patch.setattr(Path, name, counted(getattr(Path, name)))
            try:
                model.save_checkpoint(f"{folder}/c")
            except (Killed, StateError):
                finished = False
            else:
                finished = True
        found = by_torch(f"{folder}/c")
        loadable.append(scale_of(rank, f"{folder}/c"))
        assert found == loadable[-1], "one and the same for torch's own reader"
        assert kinds(Path(folder) / "c") == [".metadata", "__0_*_0.distcp", "notes.txt", "zcompile.json"]
        assert os.listdir(folder) == ["c"]
        if finished:
            return loadable
    raise AssertionError("the save has no end")


@pytest.mark.slow
def test_whenever_a_save_is_killed_a_complete_checkpoint_is_there(ranks: Ranks, tmp_path: Path) -> None:
    (loadable,) = ranks.run(1, kill_points, str(tmp_path / "f"))
    assert len(loadable) > 10
    assert set(loadable) == {1.0, 2.0}
    assert loadable == sorted(loadable), "the old one, and from some point on the new one"


def first_kill_points(rank: int, folder: str, there: bool) -> list[bool]:
    """Whether there is a checkpoint after a first save was killed before its n-th renaming, for every n."""
    model = compiled(make("mlp"), 3)
    loadable = []
    for point in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        Path(folder, "c").mkdir(parents=True) if there else None
        finished = False
        with pytest.MonkeyPatch.context() as patch:
            for name in ("rename", "replace"):
                patch.setattr(os, name, killing(getattr(os, name), point))
            patch.setattr(Path, "unlink", killing(Path.unlink, 0))
            with contextlib.suppress(Killed):
                model.save_checkpoint(f"{folder}/c")
                finished = True
        if there or finished:
            loadable.append(Path(folder, "c", "zcompile.json").exists() and Path(folder, "c", ".metadata").exists())
        else:
            loadable.append(Path(folder, "c").exists())
        if loadable[-1]:
            model.load_checkpoint(f"{folder}/c")
        else:
            error_of(lambda: model.load_checkpoint(f"{folder}/c"))
        model.save_checkpoint(f"{folder}/c")
        assert kinds(Path(folder) / "c") == [".metadata", "__0_*_0.distcp", "zcompile.json"]
        assert os.listdir(folder) == ["c"]
        if finished:
            return loadable
    raise AssertionError("the save has no end")


def killing(act: Callable[..., Any], point: int) -> Callable[..., Any]:
    count = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count > point:
            raise Killed
        return act(*args, **kwargs)

    return call


@pytest.mark.parametrize("there", [False, True])
def test_a_first_save_that_is_killed_leaves_no_checkpoint_and_nothing_behind(
    ranks: Ranks, tmp_path: Path, there: bool
) -> None:
    (loadable,) = ranks.run(1, first_kill_points, str(tmp_path / "f"), there)
    assert loadable == sorted(loadable)
    assert loadable.count(False) >= 2


# -- what else lies there --------------------------------------------------------------------------------------------


def save_twice(rank: int, folders: list[str]) -> list[float]:
    """What is loaded after two saves to each."""
    model = compiled(make("mlp"), 3)
    found = []
    for folder in folders:
        for value in (1.0, 2.0):
            mark(model, value)
            model.save_checkpoint(folder)
        mark(model, 3.0)
        model.load_checkpoint(folder)
        found.append(values(model)["scale"].item())
    return found


def test_a_symbolic_link_stays_and_the_checkpoint_lies_where_it_leads(ranks: Ranks, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    (disk / "there").mkdir(parents=True)
    links = {"folder": disk / "there", "dangling": disk / "new", "parent": disk}
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    folders = [str(tmp_path / name) for name in ("folder", "dangling", "parent/c")]
    assert ranks.run(2, save_twice, folders) == [[2.0] * 3] * 2
    assert sorted(os.listdir(tmp_path)) == ["dangling", "disk", "folder", "parent"]
    assert all((tmp_path / name).is_symlink() and (tmp_path / name).readlink() == links[name] for name in links)
    assert sorted(os.listdir(disk)) == ["c", "new", "there"]
    assert [kinds(disk / name) for name in ("c", "new", "there")] == [WHOLE] * 3


def among_others(rank: int, root: str) -> list[float]:
    """What is loaded after saves among files of the user's, one of which failed and one of which was killed."""
    model, folder = compiled(make("mlp"), 3), Path(root) / "c"
    model.save_checkpoint(folder)
    if rank == 0:
        for name in ("c/notes.txt", "c/logs/events", "c/__0_0.txt", ".c.new/thesis.tex", ".c.old/thesis.tex"):
            (Path(root) / name).parent.mkdir(exist_ok=True)
            (Path(root) / name).write_text(name)
    dist.barrier()
    mark(model, 2.0)
    with pytest.MonkeyPatch.context() as patch:
        slow_writes(patch, lambda: (Path(root) / "no" / "folder").touch())
        error_of(lambda: model.save_checkpoint(folder))
    dist.barrier()  # the first rank clears
    assert kinds(folder) == sorted([*WHOLE, "__0_0.txt", "logs", "notes.txt"]), "of the failed save nothing is left"
    dist.barrier()
    return [scale_of(rank, str(folder)), scale_of(rank, str(folder))]


def test_a_save_removes_nothing_that_no_save_has_written(ranks: Ranks, tmp_path: Path) -> None:
    loaded = ranks.run(2, among_others, str(tmp_path))
    assert loaded[0] == loaded[1]
    assert loaded[0][1] == 5.0
    assert kinds(tmp_path / "c") == sorted([*WHOLE, "__0_0.txt", "logs", "notes.txt"])
    assert sorted(os.listdir(tmp_path)) == [".c.new", ".c.old", "c"]
    for name in ("c/notes.txt", "c/logs/events", "c/__0_0.txt", ".c.new/thesis.tex", ".c.old/thesis.tex"):
        assert (tmp_path / name).read_text() == name


def save_where_i_stand(rank: int, folder: str) -> float:
    model, before = compiled(make("mlp"), 3), os.getcwd()
    try:
        Path(folder).mkdir(exist_ok=True)
        os.chdir(folder)
        for value in (1.0, 2.0):
            mark(model, value)
            model.save_checkpoint(".")
        return scale_of(rank, ".")
    finally:
        os.chdir(before)


def test_a_save_to_the_current_folder_leaves_the_process_in_it(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, save_where_i_stand, str(tmp_path / "c")) == [2.0, 2.0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk takes root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def save_on_small_disk(rank: int, root: str, links: str) -> list[str]:
    disk, large = Path(root), compiled(nn.Linear(300, 400), 3)
    small = compiled(make("mlp"), 3)
    attempts: list[Callable[[], object]] = [
        lambda: large.save_checkpoint(disk / "c"),
        lambda: large.save_checkpoint(disk / "c", asynchronous=True).result(),
        lambda: large.save_checkpoint(disk / "other"),
        lambda: large.save_full_state_dict(disk / "large.pt"),
        lambda: large.save_full_state_dict(disk / "large.safetensors"),
        lambda: large.save_full_state_dict(links),
    ]
    small.save_checkpoint(disk / "c")
    small.save_full_state_dict(disk / "large.pt")
    found = []
    for attempt in attempts:
        found.append(error_of(attempt))
        dist.barrier()
        assert sorted(os.listdir(disk)) == ["c", "large.pt"]
        assert kinds(disk / "c") == WHOLE
        small.load_checkpoint(disk / "c")
    small.save_checkpoint(disk / "c")
    assert torch.load(disk / "large.pt").keys() == make("mlp").state_dict().keys()
    return found


def test_a_full_disk_is_an_error_that_says_so_and_nothing_is_left_on_it(
    ranks: Ranks, small_disk: Path, tmp_path: Path
) -> None:
    (tmp_path / "link.pt").symlink_to(small_disk / "large.pt")
    one, two = ranks.run(2, save_on_small_disk, str(small_disk), str(tmp_path / "link.pt"))
    assert one == two
    assert (tmp_path / "link.pt").is_symlink()
    for text, folder in zip(one, ("disk/c", "disk/c", "disk/other", "disk", "disk", "disk"), strict=True):
        assert text.startswith(f"{tmp_path / folder}: the disk is full")
        assert "No space left on device" in text


def load_damaged(rank: int, folders: list[str]) -> list[str]:
    model = compiled(make("mlp", seed=9), 2)
    optimizer = adamw(model)
    train(model, optimizer, "mlp", range(1))
    before, kept = values(model), repr(optimizer.state_dict())
    texts = [error_of(lambda folder=folder: model.load_checkpoint(folder, optimizer)) for folder in folders]
    assert same(values(model), before)
    assert repr(optimizer.state_dict()) == kept
    return texts


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "missing": lambda path: path.unlink(),
}


def save_one(rank: int, folder: str) -> None:
    model = compiled(make("mlp"), 3)
    optimizer = adamw(model)
    train(model, optimizer, "mlp", range(SAVED))
    model.save_checkpoint(folder, optimizer)


@pytest.mark.slow
def test_a_damaged_file_is_an_error_and_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, save_one, str(tmp_path / "whole"))
    files = sorted(os.listdir(tmp_path / "whole"))
    assert kinds(tmp_path / "whole") == WHOLE
    damaged: dict[str, str] = {}
    for file in files:
        for name, damage in DAMAGES.items():
            folder = tmp_path / f"{file} {name}"
            shutil.copytree(tmp_path / "whole", folder)
            damage(folder / file)
            damaged[str(folder)] = file
    one, two = ranks.run(2, load_damaged, list(damaged))
    assert one == two
    for text, (folder, file) in zip(one, damaged.items(), strict=True):
        assert folder in text
        assert file in text
        assert "Fix: " in text


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a manifest that says something else, with a digest that fits."""
    content = json.loads((folder / "zcompile.json").read_text())
    del content["sha256"]
    change(content)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / "zcompile.json").write_text(json.dumps({**content, "sha256": digest}))


@pytest.mark.slow
@quickly("name", ["../secret", "/etc/passwd", "sub/../../secret", ".."], ["../secret"])
def test_a_manifest_that_names_files_elsewhere_is_refused(ranks: Ranks, tmp_path: Path, name: str) -> None:
    ranks.run(2, save_one, str(tmp_path / "c"))
    (tmp_path / "secret").write_text("kept")
    forge(tmp_path / "c", lambda content: content["files"].update({name: {"bytes": 4, "sha256": "?"}}))
    one, two = ranks.run(2, load_damaged, [str(tmp_path / "c")])
    assert one == two
    assert f"names {name!r}, which is not in the folder" in one[0]
    ranks.run(2, save_one, str(tmp_path / "c"))
    assert (tmp_path / "secret").read_text() == "kept", "nor does a save remove it"
    assert kinds(tmp_path / "c") == WHOLE


def lists_less(content: dict[str, Any]) -> None:
    del content["files"][min(name for name in content["files"] if name.endswith(".distcp"))]


def tells_no_size(content: dict[str, Any]) -> None:
    del content["files"][".metadata"]["bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "text"),
    [(lists_less, ".distcp: is not listed in the checkpoint's manifest"), (tells_no_size, "zcompile.json: is damaged")],
)
def test_a_manifest_that_does_not_tell_of_every_file_is_refused(
    ranks: Ranks, tmp_path: Path, change: Callable[[dict[str, Any]], None], text: str
) -> None:
    ranks.run(2, save_one, str(tmp_path / "c"))
    forge(tmp_path / "c", change)
    one, two = ranks.run(2, load_damaged, [str(tmp_path / "c")])
    assert one == two
    assert text in one[0]


CALLS = [
    ("os", "mkdir"),
    ("posix", "mkdir"),
    ("torch", "os.mkdir"),
    ("torch.distributed.checkpoint.metadata", "os.mkdir"),
]


@pytest.mark.slow
@quickly("module, name", CALLS, CALLS[:1])
def test_metadata_that_calls_what_no_checkpoint_consists_of_is_refused(
    ranks: Ranks, tmp_path: Path, module: str, name: str
) -> None:
    ranks.run(2, save_one, str(tmp_path / "c"))
    content = f"\x80\x04c{module}\n{name}\n(V{tmp_path / 'called'}\ntR.".encode("latin-1")
    (tmp_path / "c" / ".metadata").write_bytes(content)
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    forge(tmp_path / "c", lambda manifest: manifest["files"].update({".metadata": entry}))
    one, two = ranks.run(2, load_damaged, [str(tmp_path / "c")])
    assert one == two
    assert f".metadata: names {module}.{name}, which no checkpoint" in one[0]
    assert not (tmp_path / "called").exists()


def link_whole(rank: int, path: str) -> None:
    model = compiled(make("mlp"), 3)
    model.save_full_state_dict(path)


def test_a_link_to_a_file_stays_one_and_leftovers_of_killed_processes_go(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    for name in (".w.pt.new", ".w.pt.0123456789abcdef.new", ".v.pt.0123456789abcdef.new"):
        (tmp_path / "disk" / name).touch()
    (tmp_path / "link.pt").symlink_to("disk/w.pt")
    ranks.run(2, link_whole, str(tmp_path / "link.pt"))
    assert os.readlink(tmp_path / "link.pt") == "disk/w.pt"
    assert sorted(os.listdir(tmp_path / "disk")) == [".v.pt.0123456789abcdef.new", ".w.pt.new", "w.pt"]
    assert torch.load(tmp_path / "link.pt").keys() == make("mlp").state_dict().keys()
