"""The store on real disks, with several processes at once."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import subprocess
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import IO

import pytest

from meshinfer.config import Folders
from meshinfer.errors import CorruptFileError, InputError, ModelNotFoundError, NoSpaceError, SourceError
from meshinfer.files import disk
from meshinfer.files.work import work_folder
from meshinfer.shards.manifest import FileRef
from meshinfer.shards.store import Store, model_name
from meshinfer.types import Sha256
from tests.shards.samples import manifest

PROCESS_TIMEOUT_S = 60.0
spawn = multiprocessing.get_context("spawn")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Folders(tmp_path / "home"))


def add(store: Store, name: str, *contents: bytes) -> list[FileRef]:
    """Add a whole model whose files have these contents."""
    with store.adding(name) as work:
        refs = []
        for number, content in enumerate(contents):
            made = work / f"file{number}"
            made.write_bytes(content)
            refs.append(store.add_file(made, made.name))
        store.save(manifest(name, refs))
    return refs


def blobs(store: Store) -> set[str]:
    return {path.name for path in store.folders.blobs.iterdir()}


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_model_comes_back_as_it_was_saved(store: Store) -> None:
    refs = add(store, "one", b"graph", b"weights" * 1000, b"tokenizer")
    loaded = store.load("one")
    assert loaded == manifest("one", refs)
    assert store.names() == ["one"]
    for ref, content in zip(refs, (b"graph", b"weights" * 1000, b"tokenizer"), strict=True):
        assert store.path(ref).read_bytes() == content
        assert store.path(ref).name == ref.sha256 == sha(content)
        assert ref.size_bytes == len(content)
        store.check(ref)


def test_nothing_is_left_in_work_and_moved_files_are_gone(store: Store, tmp_path: Path) -> None:
    outside = tmp_path / "mine.bin"
    outside.write_bytes(b"mine")
    with store.adding("one") as work:
        inside = work / "made"
        inside.write_bytes(b"made")
        store.add_file(inside, "made")
        assert not inside.exists()
        store.add_file(outside, "mine", move=False)
        assert outside.read_bytes() == b"mine"
    assert list(store.folders.work.iterdir()) == []


def test_moving_a_link_leaves_what_it_points_to(store: Store, tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"content")
    try:
        link.symlink_to(target)
    except OSError as error:
        pytest.skip(f"no symbolic links here: {error}")
    with store.adding("one"):
        ref = store.add_file(link, "f")
        assert store.path(ref).read_bytes() == b"content" and not store.path(ref).is_symlink()
    assert target.exists() and not link.is_symlink()


def test_add_file_outside_adding_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="inside"):
        store.add_file(tmp_path / "any", "any")


def test_one_store_does_one_adding_at_a_time(store: Store) -> None:
    with store.adding("one"):
        with pytest.raises(RuntimeError, match="adding a model already"), store.adding("one"):
            pass
        with Store(store.folders).adding("two"):
            pass
    with store.adding("one"):
        pass


def test_what_others_keep_in_work_is_left_alone(store: Store) -> None:
    cache = store.folders.work / "tokenizers"
    cache.mkdir(parents=True)
    with work_folder(store.folders) as other:
        (other / "file").touch()
        add(store, "one", b"a", b"b")
        store.remove("one")
        assert (other / "file").exists() and cache.exists()


def test_a_missing_source_is_named(store: Store, tmp_path: Path) -> None:
    with store.adding("one"), pytest.raises(InputError, match=r"cannot read .*nowhere"):
        store.add_file(tmp_path / "nowhere", "f")


def test_shared_blobs_stay_until_the_last_model_goes(store: Store) -> None:
    add(store, "one", b"shared", b"only one")
    add(store, "two", b"shared", b"only two!")
    assert len(blobs(store)) == 3
    assert store.remove("one") == len(b"only one")
    assert blobs(store) == {sha(b"shared"), sha(b"only two!")}
    assert store.names() == ["two"]
    assert store.remove("two") == len(b"shared") + len(b"only two!")
    assert blobs(store) == set()
    with pytest.raises(ModelNotFoundError, match="have: none yet"):
        store.remove("two")


def test_a_manifest_of_another_version_keeps_its_files(store: Store) -> None:
    add(store, "old", b"a", b"b")
    path = store.folders.models / "old.json"
    path.write_text(path.read_text("utf-8").replace('"format_version": 1', '"format_version": 99'), "utf-8")
    add(store, "new", b"c", b"d")
    store.remove("new")
    assert blobs(store) == {sha(b"a"), sha(b"b")}
    with pytest.raises(SourceError, match="format 99"):
        store.load("old")
    assert store.remove("old") == 2


def test_another_model_of_the_same_name_is_refused(store: Store) -> None:
    add(store, "one", b"a", b"b")
    add(store, "one", b"a", b"b")
    with pytest.raises(InputError, match="another model already"):
        add(store, "one", b"a", b"other")
    assert blobs(store) == {sha(b"a"), sha(b"b")}, "the refused model's file must be gone"
    store.remove("one")
    add(store, "one", b"a", b"other")
    assert blobs(store) == {sha(b"a"), sha(b"other")}


def test_a_failed_adding_leaves_nothing(store: Store) -> None:
    class Stopped(Exception):
        pass

    with pytest.raises(Stopped), store.adding("one") as work:
        (work / "f").write_bytes(b"f")
        store.add_file(work / "f", "f")
        assert blobs(store) == {sha(b"f")}
        raise Stopped
    assert blobs(store) == set() and list(store.folders.work.iterdir()) == []


def test_a_flipped_byte_is_found_and_healed_by_adding_again(store: Store) -> None:
    content = b"weights" * 1000
    refs = add(store, "one", b"graph", content)
    blob = store.path(refs[1])
    blob.write_bytes(content[:5] + b"X" + content[6:])
    with pytest.raises(CorruptFileError) as caught:
        store.check(refs[1])
    assert refs[1].sha256 in str(caught.value) and sha(blob.read_bytes()) in str(caught.value)
    assert "file1" in str(caught.value)
    store.check(refs[0])
    add(store, "one", b"graph", content)
    store.check(refs[1])


def test_a_blob_of_the_wrong_size_is_replaced(store: Store) -> None:
    refs = add(store, "one", b"graph", b"weights")
    store.path(refs[1]).write_bytes(b"wei")
    add(store, "one", b"graph", b"weights")
    store.check(refs[1])


def test_a_missing_file_is_named(store: Store) -> None:
    refs = add(store, "one", b"graph", b"weights")
    store.path(refs[1]).unlink()
    with pytest.raises(InputError, match="file1 is missing"):
        store.check(refs[1])


def test_a_hash_that_is_a_path_is_refused(store: Store) -> None:
    with pytest.raises(SourceError, match="no SHA-256"):
        store.path(FileRef("f", Sha256("../../etc/passwd"), 1))


@pytest.mark.parametrize("name", ["a", "smollm2-135m", "q.w_e-n3", "x" * 64, "console", "com10"])
def test_good_names(name: str) -> None:
    assert model_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".a", "-a", "a/b", "a\\b", "a b", "x" * 65, "é", "a\n", "con", "NUL", "nul.txt", "lpt1", "Com9.gguf"]
)
def test_bad_names(name: str) -> None:
    with pytest.raises(InputError, match="no model name"):
        model_name(name)


def test_names_ignore_case(store: Store) -> None:
    with store.adding("Model-A") as work:
        for name in ("f", "g"):
            (work / name).write_bytes(name.encode())
        refs = [store.add_file(work / name, name) for name in ("f", "g")]
        store.save(manifest("Model-A", refs))
    assert store.names() == ["model-a"]
    assert store.load("MODEL-a").name == "model-a"


def test_an_unknown_model_says_what_there_is(store: Store) -> None:
    add(store, "one", b"a", b"b")
    with pytest.raises(ModelNotFoundError, match="have: one"):
        store.load("two")


def test_an_unreadable_manifest_is_an_error_until_it_is_removed(store: Store) -> None:
    refs = add(store, "one", b"a", b"b")
    (store.folders.models / "one.json").write_text("{", "utf-8")
    with pytest.raises(SourceError):
        store.load("one")
    with pytest.raises(InputError):
        store.save(manifest("one", refs))
    store.remove("one")
    assert manifest("one", add(store, "one", b"a", b"b")) == store.load("one")


def test_a_home_that_is_a_file_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("not a folder")
    with pytest.raises(InputError, match="cannot read or write"), Store(Folders(tmp_path / "home")).adding("one"):
        pass


def test_a_copy_in_progress_is_left_alone(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(store, "other", b"a", b"b")
    (tmp_path / "mine").write_bytes(b"mine")

    def copy_while_another_process_removes(reading: IO[bytes], target: Path) -> Sha256:
        sha256 = copy_hashed(reading, target)
        Store(store.folders).remove("other")
        return sha256

    copy_hashed = disk.copy_hashed
    monkeypatch.setattr(disk, "copy_hashed", copy_while_another_process_removes)
    with store.adding("one"):
        store.check(store.add_file(tmp_path / "mine", "mine", move=False))


# --- models of the mesh, of which a part is here ---------------------------------------------------------------------


def ref_of(name: str, content: bytes) -> FileRef:
    return FileRef(name, Sha256(sha(content)), len(content))


def gathered(store: Store, ref: FileRef, content: bytes) -> Path:
    """A part of `ref` with this content."""
    part = store.part_path(ref)
    part.write_bytes(content)
    return part


GRAPH, WEIGHTS = ref_of("graph", b"graph"), ref_of("weights", b"weights")


def test_a_manifest_of_the_mesh_comes_back_and_is_no_model(store: Store) -> None:
    assert store.mesh_fingerprints() == []
    one, two = manifest("one", [GRAPH, WEIGHTS]), manifest("two", [WEIGHTS, GRAPH])
    fingerprints = [store.save_mesh(one), store.save_mesh(two), store.save_mesh(one)]
    assert fingerprints == [one.fingerprint(), two.fingerprint(), one.fingerprint()]
    assert store.mesh_fingerprints() == sorted(fingerprints[:2]) and store.names() == []
    assert store.load_mesh(one.fingerprint()) == one and store.load_mesh(two.fingerprint()) == two
    store.forget_mesh(one.fingerprint())
    store.forget_mesh(one.fingerprint())
    assert store.mesh_fingerprints() == [two.fingerprint()]
    with pytest.raises(InputError, match=f"the manifest of model {one.fingerprint()[:12]} is not here"):
        store.load_mesh(one.fingerprint())


@pytest.mark.parametrize("fingerprint", ["", "../../models/one", "0" * 63, "A" * 64, "0" * 64 + "\n"])
def test_what_is_no_fingerprint_is_refused(store: Store, fingerprint: str) -> None:
    for call in (store.load_mesh, store.forget_mesh):
        with pytest.raises(InputError, match="is no fingerprint"):
            call(fingerprint)


def test_a_damaged_manifest_of_the_mesh_is_a_source_error_until_it_is_saved_again(store: Store) -> None:
    one = manifest("one", [GRAPH, WEIGHTS])
    path = store.folders.mesh / f"{store.save_mesh(one)}.json"
    for text in ("{", manifest("one", [WEIGHTS, GRAPH]).to_json()):
        path.write_text(text, "utf-8")
        with pytest.raises(SourceError):
            store.load_mesh(one.fingerprint())
    store.save_mesh(one)
    assert store.load_mesh(one.fingerprint()) == one


def test_a_part_becomes_a_file(store: Store) -> None:
    store.save_mesh(manifest("one", [GRAPH, WEIGHTS]))
    assert not store.has(WEIGHTS)
    gathered(store, WEIGHTS, b"wei")
    assert not store.has(WEIGHTS)
    gathered(store, WEIGHTS, b"weights")
    store.take_part(WEIGHTS)
    assert store.has(WEIGHTS) and not store.has(GRAPH) and blobs(store) == {WEIGHTS.sha256}
    store.check(WEIGHTS)
    store.path(WEIGHTS).write_bytes(b"wei")
    assert not store.has(WEIGHTS)
    gathered(store, WEIGHTS, b"weights")
    store.take_part(WEIGHTS)
    store.check(WEIGHTS)


@pytest.mark.parametrize("content", [b"wrights", b"wei", b"weights and more", b""])
def test_a_part_with_other_bytes_is_deleted(store: Store, content: bytes) -> None:
    store.save_mesh(manifest("one", [GRAPH, WEIGHTS]))
    part = gathered(store, WEIGHTS, content)
    with pytest.raises(CorruptFileError, match="weights is damaged: .*; fetch it again"):
        store.take_part(WEIGHTS)
    assert not part.exists() and not store.has(WEIGHTS)
    with pytest.raises(InputError, match="cannot read"):
        store.take_part(WEIGHTS)


def test_collection_leaves_what_the_mesh_serves(store: Store) -> None:
    one = manifest("one", [GRAPH, WEIGHTS])
    store.save_mesh(one)
    gathered(store, GRAPH, b"graph")
    store.take_part(GRAPH)
    part, stray = gathered(store, WEIGHTS, b"wei"), gathered(store, ref_of("stray", b"stray"), b"st")
    add(store, "other", b"a", b"b")
    assert store.remove("other") == 2
    assert blobs(store) == {GRAPH.sha256, part.name} and not stray.exists()
    assert store.forget_mesh(one.fingerprint()) == len(b"graph") + len(b"wei")
    assert blobs(store) == set()


def test_a_model_here_keeps_its_files_but_no_parts_when_the_mesh_forgets_it(store: Store) -> None:
    refs = add(store, "one", b"graph", b"weights")
    store.save_mesh(store.load("one"))
    gathered(store, WEIGHTS, b"wei")
    store.remove("one")
    assert blobs(store) == {*(ref.sha256 for ref in refs), store.part_path(WEIGHTS).name}
    add(store, "one", b"graph", b"weights")
    assert store.forget_mesh(store.load("one").fingerprint()) == len(b"wei")
    assert blobs(store) == {ref.sha256 for ref in refs} and store.load("one").files == (*refs * 3,)


# --- several processes ---------------------------------------------------------------------------------------------


def add_once(home: Path, name: str, waiting: Event, start: Event) -> None:
    """Add a model if nobody has; a file in `home` tells who did the work."""
    store = Store(Folders(home))
    start.wait(PROCESS_TIMEOUT_S)
    with store.adding(name, on_wait=waiting.set) as work:
        if name in store.names():
            (home / f"found.{os.getpid()}").touch()
            return
        (home / f"worked.{os.getpid()}").touch()
        assert waiting.wait(PROCESS_TIMEOUT_S), "the other process never came"
        refs = []
        for number in range(3):
            (work / "f").write_bytes(bytes([number]) * 100_000)
            refs.append(store.add_file(work / "f", f"f{number}"))
        store.save(manifest(name, refs))


def add_and_remove(home: Path, name: str, rounds: int) -> None:
    """Add and remove a model again and again; its files must be whole each time."""
    store = Store(Folders(home))
    for _ in range(rounds):
        for ref in add(store, name, b"shared" * 1000, b"weights" * 1000, name.encode()):
            store.check(ref)
        store.remove(name)


def add_and_hang(home: Path, name: str, added: Event) -> None:
    """Add one file of a model and wait to be killed."""
    store = Store(Folders(home))
    with store.adding(name) as work:
        (work / "big").write_bytes(b"half-made" * 1000)
        (work / "f").write_bytes(b"added")
        store.add_file(work / "f", "f")
        added.set()
        spawn.Event().wait(PROCESS_TIMEOUT_S)


def finish(*processes: multiprocessing.process.BaseProcess) -> None:
    for process in processes:
        process.join(PROCESS_TIMEOUT_S)
        assert process.exitcode == 0


def test_two_processes_add_the_same_model_once(store: Store) -> None:
    home = store.folders.home
    home.mkdir()
    waiting, start = spawn.Event(), spawn.Event()
    processes = [spawn.Process(target=add_once, args=(home, "one", waiting, start)) for _ in range(2)]
    for process in processes:
        process.start()
    start.set()
    finish(*processes)
    assert len(list(home.glob("worked.*"))) == 1 and len(list(home.glob("found.*"))) == 1
    for ref in store.load("one").files:
        store.check(ref)
    assert list(store.folders.work.iterdir()) == []


def test_removing_never_takes_what_another_process_is_adding(store: Store) -> None:
    processes = [spawn.Process(target=add_and_remove, args=(store.folders.home, name, 25)) for name in ("one", "two")]
    for process in processes:
        process.start()
    finish(*processes)
    assert blobs(store) == set() and store.names() == []


def test_a_killed_adder_is_protected_while_alive_and_cleaned_up_when_dead(store: Store) -> None:
    add(store, "other", b"added", b"b")
    added = spawn.Event()
    process = spawn.Process(target=add_and_hang, args=(store.folders.home, "one", added))
    process.start()
    assert added.wait(PROCESS_TIMEOUT_S)
    store.remove("other")
    assert blobs(store) == {sha(b"added")}, "the file of the living adder was deleted"
    process.kill()
    process.join(PROCESS_TIMEOUT_S)
    assert len(list(store.folders.work.iterdir())) == 1
    with store.adding("one") as work:
        assert list(store.folders.work.iterdir()) == [work.parent], "the dead adder's folder is still there"
        assert store.names() == []
        (work / "f").write_bytes(b"again")
        ref = store.add_file(work / "f", "f")
        store.save(manifest("one", [ref, ref]))
    assert blobs(store) == {sha(b"again")}
    store.check(ref)


def test_removing_a_model_also_deletes_what_a_dead_adder_left(store: Store) -> None:
    add(store, "other", b"a", b"b")
    added = spawn.Event()
    process = spawn.Process(target=add_and_hang, args=(store.folders.home, "one", added))
    process.start()
    assert added.wait(PROCESS_TIMEOUT_S)
    process.kill()
    process.join(PROCESS_TIMEOUT_S)
    assert store.remove("other") == len(b"a") + len(b"b") + len(b"added")
    assert blobs(store) == set() and list(store.folders.work.iterdir()) == []


# --- disks that are full or may not be written -----------------------------------------------------------------------


def test_a_full_disk_is_said_and_leaves_nothing(small_disk: Callable[[int], Path], tmp_path: Path) -> None:
    store = Store(Folders(small_disk(1) / "home"))
    big, small = tmp_path / "big", tmp_path / "small"
    big.write_bytes(b"x" * 3_000_000)
    small.write_bytes(b"y" * 10_000)
    with store.adding("one"):
        with pytest.raises(NoSpaceError, match="3 MB needed"):
            store.add_file(big, "big")
        assert big.exists() and blobs(store) == set()
        ref = store.add_file(small, "small")
        store.save(manifest("one", [ref, ref]))
    store.check(ref)
    assert not small.exists()


def test_a_disk_that_fills_up_under_the_manifest_keeps_the_old_one(small_disk: Callable[[int], Path]) -> None:
    store = Store(Folders(small_disk(1) / "home"))
    refs = add(store, "one", b"a", b"b")
    with pytest.raises(NoSpaceError):
        store.save(manifest("one", refs, source="x" * 3_000_000))
    assert store.load("one") == manifest("one", refs)
    assert [path.name for path in store.folders.models.iterdir()] == ["one.json"]


def test_a_read_only_disk_is_an_input_error(small_disk: Callable[[int], Path]) -> None:
    store = Store(Folders(small_disk(1) / "home"))
    refs = add(store, "one", b"a", b"b")
    subprocess.run(["mount", "-o", "remount,ro", store.folders.home.parent], check=True)
    store.check(refs[0])
    assert store.load("one").name == "one"
    with pytest.raises(InputError, match=r"(?i)cannot read or write .*read-only"):
        store.remove("one")
    with pytest.raises(InputError, match=r"(?i)cannot read or write .*read-only"), store.adding("two"):
        pass
    assert store.names() == ["one"]
