"""Where meshinfer keeps its things; the environment and the config file are read here and nowhere else."""

from __future__ import annotations

import os
import platform
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from meshinfer.errors import InputError
from meshinfer.settings import Settings, settle


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders of one installation; all are made on first use."""

    home: Path

    @property
    def models(self) -> Path:
        """One JSON manifest per model, named by the model."""
        return self.home / "models"

    @property
    def mesh(self) -> Path:
        """Manifests of models that the mesh serves, of which this node may hold a part; named by their fingerprints."""
        return self.home / "mesh"

    @property
    def blobs(self) -> Path:
        """Content-addressed files, named by their SHA-256."""
        return self.home / "blobs"

    @property
    def downloads(self) -> Path:
        """What was fetched to make models from; may be deleted at any time."""
        return self.home / "downloads"

    @property
    def identity(self) -> Path:
        """The node's own key and the key of its mesh."""
        return self.home / "identity"

    @property
    def compiled(self) -> Path:
        """OpenVINO's cache of compiled models; may be deleted at any time."""
        return self.home / "compiled"

    @property
    def calibrations(self) -> Path:
        """What tokens were measured to cost here; may be deleted at any time."""
        return self.home / "calibration.json"

    @property
    def probes(self) -> Path:
        """How this machine's devices compare with others; may be deleted at any time."""
        return self.home / "probe.json"

    @property
    def tokenizers(self) -> Path:
        """OpenVINO tokenizers under the names their library wants; may be deleted at any time."""
        return self.home / "tokenizers"

    @property
    def work(self) -> Path:
        """Half-made things; never read by anything but their maker."""
        return self.home / "work"

    @property
    def locks(self) -> Path:
        """Lock files, so that several processes may use the same home."""
        return self.home / "locks"


def folders(home: str | os.PathLike[str] | None = None) -> Folders:
    """The folders under `home`, else $MESHINFER_HOME, else the user's data folder. Raises InputError."""
    chosen = home or os.environ.get("MESHINFER_HOME") or platformdirs.user_data_dir("meshinfer", appauthor=False)
    try:
        path = Path(chosen).expanduser().resolve()
        str(path).encode()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{str(chosen)!r} cannot be the folder for models: {error}") from error
    return Folders(path)


def load_settings(
    folders: Folders, given: Mapping[str, object], file: Path | None = None
) -> tuple[Settings, dict[str, str]]:
    """What an agent is told, and for each field of `Settings` where that is from.

    `given` is what the command line says, by the keys of the config file. `file` has to exist; without it
    the home's `config.toml` is read if there is one. Raises InputError.
    """
    path = file or folders.home / "config.toml"
    return settle(given, read_toml(path, needed=file is not None), str(path), platform.node())


def read_toml(path: Path, needed: bool = True) -> dict[str, object]:
    """What a TOML file says; nothing where it is not there and not `needed`. Raises InputError."""
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError as error:
        if not needed:
            return {}
        raise InputError(f"{path}: there is no such file") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text; save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        hint = "; text with backslashes goes in single quotes" if "\\" in str(error) else ""
        raise InputError(f"{path}: is not TOML: {error}{hint}") from error
