"""What a folder with a model says of it beside the weights: context, generation defaults, template, tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshinfer.errors import SourceError
from meshinfer.sources.ir import read_graph
from meshinfer.sources.source import CONFIG

OPENVINO_TOKENIZER = (
    "openvino_tokenizer.xml",
    "openvino_tokenizer.bin",
    "openvino_detokenizer.xml",
    "openvino_detokenizer.bin",
)
FAST_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
TOKENIZER_SOURCES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files of a checkpoint that a tokenizer can be made from: one of them has to be there."""

# Where nothing says how long a context the model was trained for.
DEFAULT_CONTEXT_TOKENS = 2048

_MOST_CONTEXT_TOKENS = 1 << 31
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "max_sequence_length")
_GENERATION_KEYS = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MAX_JSON_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A language model as an OpenVINO IR on this disk, and what its source says of it."""

    folder: Path
    """Has openvino_model.xml and openvino_model.bin."""
    source: str
    revision: str
    """A commit of the hub, or the SHA-256 of the file or files the model was made from."""
    precision: str
    """What most weights are kept in: "int4", "int8", "f16", "q4_1", ..."""
    context_tokens: int
    generation: dict[str, Any]
    """Has `eos_token_id` (a list, maybe empty) and the sampling defaults that the source gives."""
    chat_template: str | None
    tokenizer_files: tuple[Path, ...]
    bits: int | None = None
    """What the weights were exported to, None where the source had them already."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no such file. Raises SourceError where it is no object."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise SourceError(f"{path} is too large to be what its name says")
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise SourceError(f"{path} is damaged: it should hold a JSON object")
    return data


def check_config(config: dict[str, Any], name: str) -> None:
    """Refuse a checkpoint that does not generate text. Raises SourceError saying what it is."""
    classes = [str(item) for item in config.get("architectures") or []]
    kind = config.get("model_type")
    if not kind:
        raise SourceError(f"{name} is not a transformers checkpoint: its config.json has no model_type")
    if config.get("is_encoder_decoder"):
        raise SourceError(f"{name} is a {kind} model with encoder and decoder; decoder-only language models are served")
    if classes and not any(item.endswith(("ForCausalLM", "LMHeadModel")) for item in classes):
        raise SourceError(f"{name} is not a language model that generates text: it is a {kind} ({', '.join(classes)})")


def context_tokens(folder: Path) -> int:
    """How many tokens the model was made for."""
    config = read_json(folder / CONFIG)
    for part in (config, config.get("text_config"), config.get("llm_config")):
        for key in _CONTEXT_KEYS:
            value = part.get(key) if isinstance(part, dict) else None
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST_CONTEXT_TOKENS:
                return value
    return DEFAULT_CONTEXT_TOKENS


def generation_defaults(folder: Path) -> dict[str, Any]:
    """Sampling defaults and every token that the folder's files call an end."""
    config, given = read_json(folder / CONFIG), read_json(folder / "generation_config.json")
    found: dict[str, Any] = {key: given[key] for key in _GENERATION_KEYS if given.get(key) is not None}
    ids = _as_ids(given.get("eos_token_id")) or _as_ids(config.get("eos_token_id"))
    found["eos_token_id"] = list(dict.fromkeys(ids + _tokenizer_eos(folder)))
    return found


def chat_template(folder: Path) -> str | None:
    """The Jinja template of the folder's tokenizer, None where it has none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise SourceError(f"cannot read {file}: {error}") from error
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = read_json(folder / name).get("chat_template")
        if isinstance(template, list):
            named = {item["name"]: item["template"] for item in template if isinstance(item, dict) and "name" in item}
            template = named.get("default")
        if isinstance(template, str) and template:
            return template
    graph = folder / OPENVINO_TOKENIZER[0]
    return read_graph(graph).runtime_info.get("chat_template") if graph.is_file() else None


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """The files that `meshinfer.text.tokenizer` needs. Raises SourceError where there is no tokenizer."""
    for names in (FAST_TOKENIZER, OPENVINO_TOKENIZER):
        if (folder / names[0]).is_file():
            return tuple(folder / name for name in names if (folder / name).is_file())
    raise SourceError(
        f"{folder} has no tokenizer: it needs tokenizer.json, or openvino_tokenizer.xml and its companions"
    )


def check_tokenizer_source(folder: Path) -> None:
    """Refuse a checkpoint from which no tokenizer can be made. Raises SourceError."""
    if not any((folder / name).is_file() for name in TOKENIZER_SOURCES):
        raise SourceError(f"{folder} has no tokenizer: it needs one of {', '.join(TOKENIZER_SOURCES)}")


def _as_ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _tokenizer_eos(folder: Path) -> list[int]:
    eos = read_json(folder / "tokenizer_config.json").get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if text is None:
        graph = folder / OPENVINO_TOKENIZER[0]
        if (folder / FAST_TOKENIZER[0]).is_file() or not graph.is_file():
            return []
        value = read_graph(graph).runtime_info.get("eos_token_id", "")
        return [int(value)] if value.isdigit() else []
    added = read_json(folder / "tokenizer.json").get("added_tokens")
    if not isinstance(added, list):
        return []
    return [item["id"] for item in added if isinstance(item, dict) and item.get("content") == text and "id" in item]
