"""Text to tokens and back, from the tokenizer files of a model.

`tokenizer.json` is read by the tokenizers library itself, so nothing here imports transformers or torch; a model
that has only an OpenVINO tokenizer uses openvino-genai's.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from xml.etree import ElementTree

from meshinfer.config import Folders
from meshinfer.errors import InputError, SourceError, telling_line
from meshinfer.files.work import work_folder

TOKENIZER_JSON, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_GRAPHS = ("openvino_tokenizer", "openvino_detokenizer")
_MENDING = "1"
"""Changes when the mending of OpenVINO tokenizers does."""
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer(Protocol):
    """What both kinds of tokenizer can do; safe to use from several threads."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """What the tokenizer itself calls an end; the manifest's `eos_token_id` may have more."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """`bos_token`, `eos_token`, ... as a chat template names them."""
        ...

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Tokens of a text.

        `add_special` is True for a bare prompt, which gets the tokens the model wants around it (such as BOS), and
        False for a rendered chat template, which has them all in its text already.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...


def load_tokenizer(files: Path | Mapping[str, Path], folders: Folders) -> Tokenizer:
    """The tokenizer of a folder, or of files given by name (as a content-addressed store has them).

    Raises SourceError where the files are missing or damaged.
    """
    by_name = {path.name: path for path in files.iterdir()} if isinstance(files, Path) else dict(files)
    if TOKENIZER_JSON in by_name:
        return FastTokenizer(by_name[TOKENIZER_JSON], by_name.get(TOKENIZER_CONFIG))
    graphs = {f"{graph}.{ending}" for graph in _GRAPHS for ending in ("xml", "bin")}
    if not graphs <= by_name.keys():
        raise SourceError(f"no tokenizer: neither {TOKENIZER_JSON} nor all of {', '.join(sorted(graphs))}")
    return OpenVinoTokenizer(_named_folder({name: by_name[name] for name in graphs}, folders))


class FastTokenizer:
    """A `tokenizer.json`, with the roles of its special tokens from `tokenizer_config.json`."""

    def __init__(self, tokenizer_json: Path, tokenizer_config: Path | None) -> None:
        import tokenizers  # type: ignore[import-untyped,unused-ignore]

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.read_text(encoding="utf-8"))
            config = json.loads(tokenizer_config.read_text(encoding="utf-8")) if tokenizer_config else {}
        except Exception as error:  # the library raises bare Exception
            raise SourceError(f"cannot read the tokenizer in {tokenizer_json}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special = {role: text for role in _ROLES if (text := _content(config.get(role)))}
        self._missing_bos = self._bos_that_is_missing(bool(config.get("add_bos_token")))

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def eos_ids(self) -> tuple[int, ...]:
        number = self._tokenizer.token_to_id(self._special.get("eos_token", ""))
        return () if number is None else (number,)

    @property
    def special_tokens(self) -> Mapping[str, str]:
        return self._special

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        ids = self._tokenizer.encode(_utf8(text), add_special_tokens=add_special).ids
        return [*self._missing_bos, *ids] if add_special else list(ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def _bos_that_is_missing(self, wanted: bool) -> tuple[int, ...]:
        """BOS, where the configuration wants it and the post-processor of `tokenizer.json` does not add it."""
        bos = self._tokenizer.token_to_id(self._special.get("bos_token", ""))
        if not wanted or bos is None or bos in self._tokenizer.encode("", add_special_tokens=True).ids:
            return ()
        return (bos,)


class OpenVinoTokenizer:
    """The OpenVINO tokenizer and detokenizer in a folder."""

    def __init__(self, folder: Path) -> None:
        import openvino_genai

        try:
            self._tokenizer = openvino_genai.Tokenizer(str(folder))
            self._vocab_size = len(self._tokenizer.get_vocab())
        except RuntimeError as error:
            raise SourceError(f"cannot load the OpenVINO tokenizer in {folder}: {telling_line(error)}") from error

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_ids(self) -> tuple[int, ...]:
        number = int(self._tokenizer.get_eos_token_id())
        return (number,) if number >= 0 else ()

    @property
    def special_tokens(self) -> Mapping[str, str]:
        found = {"bos_token": self._tokenizer.get_bos_token(), "eos_token": self._tokenizer.get_eos_token()}
        return {role: text for role, text in found.items() if text}

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        if not text and not add_special:
            return []
        ids = self._tokenizer.encode(_utf8(text), add_special_tokens=add_special).input_ids.data
        return [int(number) for number in ids[0]]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        known = [number for number in ids if 0 <= number < self._vocab_size]
        return str(self._tokenizer.decode(known, skip_special_tokens=skip_special)) if known else ""


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the text is not valid Unicode: {error.reason} at character {error.start}") from error
    return text


def _named_folder(files: Mapping[str, Path], folders: Folders) -> Path:
    """A folder where the files have their names, kept by content and mended."""
    try:
        digest = hashlib.sha256(_MENDING.encode())
        for name in sorted(files):
            digest.update(f"{name} {hashlib.sha256(files[name].read_bytes()).hexdigest()}\n".encode())
        target = folders.tokenizers / digest.hexdigest()
        if target.is_dir():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with work_folder(folders, "tokenizer") as work:
            half = work / target.name
            half.mkdir()
            for name, path in files.items():
                shutil.copyfile(path, half / name)
            _lift_prompt_limit(half)
            _show_half_characters(half)
            _rename(half, target)
    except OSError as error:
        raise SourceError(f"cannot unpack the tokenizer: {error}") from error
    return target


def _rename(half: Path, target: Path) -> None:
    try:
        half.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was faster, with the same content
            raise


def _lift_prompt_limit(folder: Path) -> None:
    """Undo the cut at 8192 tokens that openvino-genai builds into the tokenizer of a GGUF model.

    The limit is the constant operand of a Minimum; it is pointed at a new value at the end of the weights.
    """
    path = folder / f"{_GRAPHS[0]}.xml"
    weights, tree = path.with_suffix(".bin"), _parse(path)
    layers = {layer.get("id"): layer for layer in tree.iter("layer")}
    for edge in tree.iter("edge"):
        target, constant = layers.get(edge.get("to-layer")), layers.get(edge.get("from-layer"))
        data = constant.find("data") if constant is not None else None
        if target is None or target.get("type") != "Minimum" or data is None:
            continue
        if data.get("element_type") == "i32" and data.get("size") == "4":
            data.set("offset", str(weights.stat().st_size))
            with weights.open("ab") as file:
                file.write((2**31 - 1).to_bytes(4, "little"))
    tree.write(path, encoding="utf-8", xml_declaration=True)


def _show_half_characters(folder: Path) -> None:
    """Make the detokenizer write U+FFFD for half a character instead of nothing, so that it is seen and waited for."""
    path = folder / f"{_GRAPHS[1]}.xml"
    tree = _parse(path)
    for layer in tree.iter("layer"):
        data = layer.find("data")
        if layer.get("type") == "UTF8Validate" and data is not None:
            data.set("replace_mode", "true")
    tree.write(path, encoding="utf-8", xml_declaration=True)


def _parse(path: Path) -> ElementTree.ElementTree[ElementTree.Element]:
    try:
        return ElementTree.parse(path)
    except ElementTree.ParseError as error:
        raise SourceError(f"{path.name} is damaged: {error}") from error
