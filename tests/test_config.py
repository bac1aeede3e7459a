"""Reading the config file: which one, and what is said of one that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshinfer.config import Folders, load_settings
from meshinfer.errors import InputError


@pytest.fixture
def home(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "home")


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_without_a_file_there_are_the_defaults(home: Folders) -> None:
    settings, origins = load_settings(home, {})
    assert settings.name and settings.users == 8 and set(origins.values()) == {"default"}
    assert not home.home.exists()


def test_the_file_of_the_home_is_read_where_none_is_named(home: Folders, tmp_path: Path) -> None:
    inside = write(home.home / "config.toml", b'users = 3\nname = "in the home"')
    other = write(tmp_path / "other.toml", b"users = 4")
    settings, origins = load_settings(home, {})
    assert (settings.users, origins["users"]) == (3, str(inside))
    settings, origins = load_settings(home, {}, other)
    assert (settings.users, origins["users"], origins["name"]) == (4, str(other), "default")


def test_a_file_of_notepad_is_read(home: Folders) -> None:
    write(home.home / "config.toml", "\ufeffname = \"Büro\"\r\nmodel = 'C:\\models\\x'\r\n".encode())
    settings, _ = load_settings(home, {})
    assert (settings.name, settings.model) == ("Büro", "C:\\models\\x")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"users = 3\nport 7420\n", "at line 2"),
        (b"users = 3\nusers = 4\n", "Cannot overwrite a value (at line 2"),
        (b'users = 3\nmodel = "C:\\models"\n', "text with backslashes goes in single quotes"),
        ("name = 'x'".encode("utf-16"), "save it as UTF-8"),
        (b"user = 3", "there is no key 'user'; did you mean 'users'?"),
    ],
)
def test_a_file_that_is_wrong_is_named_in_one_line(home: Folders, data: bytes, said: str) -> None:
    path = write(home.home / "config.toml", data)
    with pytest.raises(InputError) as caught:
        load_settings(home, {})
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and said in message and "\n" not in message


def test_a_file_that_cannot_be_read_is_said(home: Folders, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such file"):
        load_settings(home, {}, tmp_path / "nowhere.toml")
    with pytest.raises(InputError, match="cannot be read"):
        load_settings(home, {}, tmp_path)
