"""Tokenizers rebuilt from GGUF files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshinfer.config import Folders
from meshinfer.errors import SourceError
from meshinfer.sources import gguf
from meshinfer.sources.gguf_tokenizer import build_tokenizer, write_tokenizer
from meshinfer.text.tokenizer import Tokenizer, load_tokenizer
from tests.sources.makers import make_gguf

TEXTS = ["hello 123456 don't", "日本語 🙂", " a\n\n  b", "<|start|>hello<|end|><tool>", "", "I'LL"]


def rebuilt(folder: Path, **options: Any) -> Tokenizer:
    header = gguf.read_file(make_gguf(folder / "m.gguf", **options))
    write_tokenizer(build_tokenizer(header, "m.gguf"), header, folder)
    return load_tokenizer(folder, Folders(folder / "home"))


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_every_kind_gives_every_text_back(tmp_path: Path, kind: str) -> None:
    tokenizer = rebuilt(tmp_path, tokenizer=("gpt2", kind))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special=False), skip_special=False) == text
    assert tokenizer.vocab_size == 264
    assert tokenizer.eos_ids == (0,)
    assert tokenizer.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}


def test_special_tokens_are_skipped_and_others_are_not(tmp_path: Path) -> None:
    tokenizer = rebuilt(tmp_path)
    ids = tokenizer.encode("<|start|>hello<|end|><tool>", add_special=False)
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "hello<tool>"


def test_digits_are_grouped_as_the_family_does(tmp_path: Path) -> None:
    def count(kind: str) -> int:
        return len(rebuilt(tmp_path, tokenizer=("gpt2", kind)).encode("1212", add_special=False))

    assert (count("gpt-2"), count("qwen2"), count("smollm"), count("llama-bpe")) == (2, 4, 4, 3)


@pytest.mark.parametrize(("kind", "wants", "starts"), [("llama-bpe", None, 1), ("qwen2", None, 0), ("qwen2", 1, 1)])
def test_bos_is_added_to_bare_prompts_where_the_model_wants_it(
    tmp_path: Path, kind: str, wants: int | None, starts: int
) -> None:
    extra = {} if wants is None else {"tokenizer.ggml.add_bos_token": wants}
    tokenizer = rebuilt(tmp_path, tokenizer=("gpt2", kind), extra=extra)
    assert tokenizer.encode("hello", add_special=True).count(1) == starts
    assert tokenizer.encode("hello", add_special=False).count(1) == 0


@pytest.mark.parametrize("kind", [("llama", "default"), ("gpt2", "tekken"), ("bert", "bert")])
def test_an_unknown_tokenizer_is_named(tmp_path: Path, kind: tuple[str, str]) -> None:
    header = gguf.read_file(make_gguf(tmp_path / "m.gguf", tokenizer=kind))
    with pytest.raises(SourceError, match=f"its tokenizer is '{kind[0]}/{kind[1]}', known are gpt2 with gpt-2, smollm"):
        build_tokenizer(header, "m.gguf")


def test_damage_is_said_before_anything_is_converted(tmp_path: Path) -> None:
    header = gguf.read_file(make_gguf(tmp_path / "m.gguf", tokenizer=("gpt2", "llama-bpe")))
    damaged = [
        replace(header, metadata={**header.metadata, "tokenizer.ggml.bos_token_id": 10**6}),
        replace(header, arrays={**header.arrays, gguf.MERGES: ["no such"]}),
        replace(header, arrays={**header.arrays, gguf.MERGES: [1, 2]}),
        replace(header, arrays={**header.arrays, gguf.TOKENS: list(range(264))}),
    ]
    for broken in damaged:
        with pytest.raises(SourceError, match=r"^m\.gguf is damaged: its (tokenizer|vocabulary) "):
            build_tokenizer(broken, "m.gguf")
