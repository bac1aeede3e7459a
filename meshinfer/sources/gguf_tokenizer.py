"""The tokenizer of a GGUF file as the `tokenizer.json` that every other source has.

openvino-genai makes one too, but it cuts prompts at 8192 tokens without a word and splits the text of Llama 3 at
the wrong places, so only the weights are taken from it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshinfer.errors import SourceError
from meshinfer.files.disk import converted
from meshinfer.sources.gguf import MERGES, TOKEN_TYPES, TOKENS, GgufHeader, unsupported

_CONTROL, _USER_DEFINED = 3, 4

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Split:
    """How a family cuts text into words before the merges."""

    pattern: str | None = None
    """None: the one of GPT-2."""
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_SPLITS = {
    "gpt-2": _Split(),
    "smollm": _Split(single_digits=True),
    "qwen2": _Split(_WORDS % "", nfc=True),
    "deepseek-r1-qwen": _Split(_WORDS % "", nfc=True),
    "llama-bpe": _Split(_WORDS % "{1,3}", ignore_merges=True, add_bos=True),
}


def build_tokenizer(header: GgufHeader, name: str) -> Any:
    """The file's `tokenizers.Tokenizer`. Raises SourceError naming what cannot be rebuilt exactly, or is damaged."""
    model, pre = header.metadata.get("tokenizer.ggml.model"), header.metadata.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in _SPLITS:
        raise unsupported(name, f"its tokenizer is '{model}/{pre}', known are gpt2 with {', '.join(_SPLITS)}")
    tokens, types = header.arrays.get(TOKENS, []), header.arrays.get(TOKEN_TYPES, [])
    if not tokens or len(types) != len(tokens) or MERGES not in header.arrays:
        raise unsupported(name, f"its vocabulary is incomplete: {len(tokens)} tokens, {len(types)} types")
    if not all(isinstance(text, str) for text in (*tokens, *header.arrays[MERGES])):
        raise SourceError(f"{name} is damaged: its vocabulary holds something else than text")
    try:
        return _tokenizer(header)
    except Exception as error:  # the library raises bare Exception
        raise SourceError(f"{name} is damaged: its tokenizer cannot be built: {error}") from error


def write_tokenizer(tokenizer: Any, header: GgufHeader, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`: what `build_tokenizer` made of this header.

    Raises NoSpaceError, InputError.
    """
    tokens = header.arrays[TOKENS]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            config[f"{role}_token"] = tokens[number]
    with converted(folder):
        (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
        text = json.dumps(config, ensure_ascii=False, indent=1)
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _tokenizer(header: GgufHeader) -> Any:
    from tokenizers import (  # type: ignore[import-untyped,unused-ignore]
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
    )

    split = _SPLITS[header.metadata["tokenizer.ggml.pre"]]
    tokens, types = header.arrays[TOKENS], header.arrays[TOKEN_TYPES]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in header.arrays[MERGES])]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.ignore_merges))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.single_digits else []
    if split.pattern:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    pairs = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in pairs if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in pairs if k == _USER_DEFINED])
    bos = header.metadata.get("tokenizer.ggml.bos_token_id")
    if header.metadata.get("tokenizer.ggml.add_bos_token", split.add_bos) and isinstance(bos, int):
        _prepend(tokenizer, tokens[bos], bos)
    return tokenizer


def _prepend(tokenizer: Any, bos: str, number: int) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, number)]
    )
