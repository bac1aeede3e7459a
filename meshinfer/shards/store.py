"""The store: every file once, under its SHA-256; every model a manifest that names its files.

Blobs and manifests change only under one lock that is held for moments. An adder is a session with a work folder, whose
lock lives as long as its process; what it has put into `blobs/` is pinned in that folder until its manifest is saved.
Collection deletes what no manifest names and no living session pins.

A manifest in `models/` promises a whole model. One in `mesh/` is of a model that the mesh serves: this node may hold
any part of it, and fetches files of it as parts, which resume.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from meshinfer.config import Folders
from meshinfer.errors import CorruptFileError, InputError, ModelNotFoundError, SourceError
from meshinfer.files import disk
from meshinfer.files.hashing import sha256_file
from meshinfer.files.work import held_briefly, living, sweep, work_folder
from meshinfer.shards.manifest import FileRef, Manifest, from_json
from meshinfer.types import Sha256

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_RESERVED = {"con", "prn", "aux", "nul"} | {f"{port}{digit}" for port in ("com", "lpt") for digit in range(10)}
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PART = ".part"


def model_name(text: str) -> str:
    """The name a model has in the store: `text` in lower case. Raises InputError where no file could be called so."""
    name = text.lower()
    if not _NAME.fullmatch(name):
        raise InputError(
            f"'{text}' is no model name: 1 to 64 of a-z, 0-9, '.', '_' and '-', the first of them a letter or digit"
        )
    if name.split(".")[0] in _RESERVED:
        raise InputError(f"'{text}' is no model name: Windows keeps '{name.split('.')[0]}' for itself")
    return name


class Store:
    """The models of one machine. Several processes may use the same folders; one object does one adding at a time."""

    def __init__(self, folders: Folders) -> None:
        self.folders = folders
        self._session: Path | None = None
        self._busy = threading.Lock()

    @contextmanager
    def adding(self, name: str, on_wait: Callable[[], None] | None = None) -> Iterator[Path]:
        """Hold `name` while a model is added under it; yields a private folder that is gone afterwards.

        A second process with the same name waits (`on_wait` is called first), and then finds the model in `names()`.
        However this ends, files that belong to no saved model are deleted.
        """
        name = model_name(name)
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this Store is adding a model already: use one of your own")
        try:
            with self._name_held(name, on_wait):
                try:
                    with work_folder(self.folders, "adding") as self._session:
                        files = self._session / "files"
                        with disk.converted(files):
                            files.mkdir()
                        yield files
                finally:
                    self._tidy()
        finally:
            self._session = None
            self._busy.release()

    def add_file(self, path: Path, name: str, move: bool = True) -> FileRef:
        """Put a file's bytes into the store; `name` is what the model calls it. Only inside `adding`.

        With `move` the file itself is taken where the disk allows it, and is gone afterwards in any case. A blob that
        is there already is replaced by the bytes just hashed, which heals it. Raises NoSpaceError, InputError.
        """
        session = self._session
        if session is None:
            raise RuntimeError("add_file is called inside `with store.adding(name)`")
        try:
            size = path.stat().st_size
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        part = self.folders.blobs / f"{session.name}.{secrets.token_hex(8)}.part"
        with disk.converted(self.folders.blobs, size):
            try:
                taken = move and not path.is_symlink() and path.stat().st_dev == self.folders.blobs.stat().st_dev
                if taken:
                    sha256 = sha256_file(path)
                    disk.sync_file(path)
                else:
                    with path.open("rb") as reading:
                        sha256 = disk.copy_hashed(reading, part)
                with self._locked():
                    _pin(session, sha256)
                    self._place(path if taken else part, sha256, size)
                if move:
                    path.unlink(missing_ok=True)
            finally:
                part.unlink(missing_ok=True)
        return FileRef(name, sha256, size)

    def path(self, ref: FileRef) -> Path:
        """Where a file of a model lies, if it is here; `check` says whether it is and whether it is whole."""
        if not _SHA256.fullmatch(ref.sha256):
            raise SourceError(f"{ref.name} has no SHA-256 but '{ref.sha256}': not a model manifest")
        return self.folders.blobs / ref.sha256

    def check(self, ref: FileRef) -> None:
        """Read a file and compare its hash. Raises CorruptFileError, or InputError where it is missing."""
        path = self.path(ref)
        if not path.exists():
            raise InputError(f"{ref.name} is missing ({path}): add the model again")
        actual = sha256_file(path)
        if actual != ref.sha256:
            raise CorruptFileError(f"{ref.name} ({path})", ref.sha256, actual, remedy="add the model again")

    def has(self, ref: FileRef) -> bool:
        """Whether a file is here, by its size; `check` reads it."""
        try:
            return self.path(ref).stat().st_size == ref.size_bytes
        except OSError:
            return False

    def part_path(self, ref: FileRef) -> Path:
        """Where a file is gathered that is being fetched; it stays while a manifest in `mesh/` names the file."""
        return self.path(ref).with_name(f"{ref.sha256}{_PART}")

    def take_part(self, ref: FileRef) -> None:
        """Make a gathered part the file it was to be.

        Raises CorruptFileError, and the part is gone, where its bytes are others; InputError where there is none.
        """
        part = self.part_path(ref)
        with disk.converted(self.folders.blobs):
            facts = ("size", str(ref.size_bytes), str(part.stat().st_size)), ("sha256", ref.sha256, sha256_file(part))
            for kind, expected, actual in facts:
                if expected != actual:
                    part.unlink()
                    raise CorruptFileError(ref.name, expected, actual, kind, remedy="fetch it again")
            disk.sync_file(part)
            with self._locked():
                self._place(part, ref.sha256, ref.size_bytes)
            part.unlink(missing_ok=True)

    def save_mesh(self, manifest: Manifest) -> Sha256:
        """Keep the manifest of a model that the mesh serves; its fingerprint. From then on its files stay."""
        text, fingerprint = manifest.to_json(), manifest.fingerprint()
        from_json(text)
        with disk.converted(self.folders.mesh, len(text)):
            self._make_folders()
            with self._locked():
                disk.write_atomic(self._mesh_path(fingerprint), text)
        return fingerprint

    def load_mesh(self, fingerprint: str) -> Manifest:
        """Read a manifest of the mesh. Raises InputError where it is not here, SourceError where it is damaged."""
        path = self._mesh_path(fingerprint)
        try:
            manifest = from_json(path.read_bytes())
        except FileNotFoundError:
            raise InputError(f"the manifest of model {fingerprint[:12]} is not here") from None
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        if manifest.fingerprint() != fingerprint:
            raise SourceError(f"{path} is damaged: it is the manifest of {manifest.fingerprint()[:12]}")
        return manifest

    def mesh_fingerprints(self) -> list[Sha256]:
        """The fingerprints of all manifests of the mesh, sorted."""
        stems = (path.stem for path in self.folders.mesh.glob("*.json"))
        return sorted(Sha256(stem) for stem in stems if _SHA256.fullmatch(stem))

    def forget_mesh(self, fingerprint: str) -> int:
        """Forget a model of the mesh and delete the files that only it needed; the bytes freed."""
        with disk.converted(self.folders.home):
            self._make_folders()
            with self._locked():
                self._mesh_path(fingerprint).unlink(missing_ok=True)
                return self._collect()

    def save(self, manifest: Manifest) -> None:
        """Write a manifest; from then on its files stay. Raises InputError where the name means another model."""
        manifest = _named(manifest, model_name(manifest.name))
        text = manifest.to_json()
        from_json(text)  # what cannot be read again is not written
        with disk.converted(self.folders.models, len(text)):
            self._make_folders()
            with self._locked():
                if manifest.name in self.names() and not self._same(manifest):
                    raise InputError(f"'{manifest.name}' is another model already: remove it, or choose another name")
                disk.write_atomic(self._manifest_path(manifest.name), text)

    def load(self, name: str) -> Manifest:
        """Read a manifest. Raises ModelNotFoundError, or SourceError where it is unreadable."""
        name = model_name(name)
        try:
            data = self._manifest_path(name).read_bytes()
        except FileNotFoundError:
            raise ModelNotFoundError(name, self.names()) from None
        except OSError as error:
            raise InputError(f"cannot read {self._manifest_path(name)}: {error.strerror}") from error
        try:
            return _named(from_json(data), name)
        except SourceError as error:
            raise SourceError(f"{name}: {error}; remove it with: meshinfer model rm {name}") from error

    def names(self) -> list[str]:
        """The names of all models, sorted."""
        return sorted(path.stem for path in self.folders.models.glob("*.json") if _NAME.fullmatch(path.stem))

    def remove(self, name: str) -> int:
        """Forget a model and delete the files that only it needed; the bytes freed."""
        name = model_name(name)
        with disk.converted(self.folders.home):
            self._make_folders()
            with self._locked():
                try:
                    self._manifest_path(name).unlink()
                except FileNotFoundError:
                    raise ModelNotFoundError(name, self.names()) from None
                return self._collect()

    def _make_folders(self) -> None:
        home = self.folders
        for folder in (home.models, home.mesh, home.blobs, home.work, home.locks):
            folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _name_held(self, name: str, on_wait: Callable[[], None] | None) -> Iterator[None]:
        with disk.converted(self.folders.home):
            self._make_folders()
            lock = FileLock(self.folders.locks / f"{name}.model.lock", thread_local=False)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                if on_wait:
                    on_wait()
                lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _locked(self) -> AbstractContextManager[None]:
        return held_briefly(self.folders.locks / "store.lock")

    def _manifest_path(self, name: str) -> Path:
        return self.folders.models / f"{name}.json"

    def _mesh_path(self, fingerprint: str) -> Path:
        if not _SHA256.fullmatch(fingerprint):  # it may come from another node
            raise InputError(f"'{fingerprint}' is no fingerprint of a model")
        return self.folders.mesh / f"{fingerprint}.json"

    def _same(self, manifest: Manifest) -> bool:
        try:
            return self.load(manifest.name).fingerprint() == manifest.fingerprint()
        except SourceError:
            return False

    def _place(self, source: Path, sha256: Sha256, size_bytes: int) -> None:
        blob = self.folders.blobs / sha256
        try:
            disk.replace(source, blob)
        except PermissionError:  # Windows: the blob is open in a process that runs the model
            if not blob.is_file() or blob.stat().st_size != size_bytes:
                raise

    def _tidy(self) -> None:
        with disk.converted(self.folders.home), self._locked():
            self._collect()

    def _collect(self) -> int:
        """Delete blobs that no manifest names and no session pins; the bytes freed. Call it under the lock.

        Manifests are searched for hashes, not parsed: one that this version cannot read keeps its files.
        """
        sweep(self.folders)
        sessions = living(self.folders, "adding")
        mesh = {sha256 for path in self.folders.mesh.glob("*.json") for sha256 in _hashes_in(path)}
        lists = [*self.folders.models.glob("*.json"), *(session / "pins" for session in sessions)]
        wanted = {sha256 for path in lists for sha256 in _hashes_in(path)} | mesh | {sha256 + _PART for sha256 in mesh}
        alive = {session.name for session in sessions}
        for folder in (self.folders.models, self.folders.mesh):
            for part in folder.glob(f".*{_PART}"):
                part.unlink(missing_ok=True)
        freed = 0
        for blob in self.folders.blobs.iterdir():
            if blob.name in wanted or blob.name.split(".")[0] in alive:
                continue
            try:
                size = blob.stat().st_size
                blob.unlink()
            except OSError:  # Windows: open in a process that still runs the model; the next collection gets it
                continue
            freed += size
        return freed


def _named(manifest: Manifest, name: str) -> Manifest:
    return manifest if manifest.name == name else replace(manifest, name=name)


def _pin(session: Path, sha256: Sha256) -> None:
    with (session / "pins").open("a", encoding="ascii") as stream:
        stream.write(f"\n{sha256}\n")  # a line of its own even after one that a full disk cut short
        stream.flush()
        os.fsync(stream.fileno())


def _hashes_in(path: Path) -> list[str]:
    try:
        return _SHA256.findall(path.read_text("latin-1"))
    except FileNotFoundError:  # a session that pins nothing yet, or ended just now
        return []
