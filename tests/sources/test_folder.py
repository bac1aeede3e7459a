"""What a folder's JSON files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshinfer.errors import SourceError
from meshinfer.sources import folder as facts
from tests.sources.makers import TEMPLATE, make_tokenizer


def write(folder: Path, **files: Any) -> Path:
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 32768}}, 32768),
        ({"max_position_embeddings": -1, "n_ctx": 512}, 512),
        ({}, facts.DEFAULT_CONTEXT_TOKENS),
    ],
)
def test_the_context_is_found_under_its_many_names(tmp_path: Path, config: dict[str, Any], tokens: int) -> None:
    assert facts.context_tokens(write(tmp_path, config=config)) == tokens


def test_generation_defaults_come_from_the_generation_config_and_ends_from_everywhere(tmp_path: Path) -> None:
    given = {
        "eos_token_id": [5, 6],
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "do_sample": True,
        "bos_token_id": 1,
    }
    write(make_tokenizer(tmp_path), config={"eos_token_id": 9}, generation_config=given)
    assert facts.generation_defaults(tmp_path) == {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "eos_token_id": [5, 6, 0],
    }


def test_without_a_generation_config_the_config_has_the_end(tmp_path: Path) -> None:
    assert facts.generation_defaults(write(tmp_path, config={"eos_token_id": 9})) == {"eos_token_id": [9]}
    assert facts.generation_defaults(write(tmp_path, config={})) == {"eos_token_id": []}


def test_the_template_file_wins_over_the_tokenizer_config(tmp_path: Path) -> None:
    assert facts.chat_template(tmp_path) is None
    assert facts.chat_template(make_tokenizer(tmp_path)) == TEMPLATE
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert facts.chat_template(write(tmp_path, tokenizer_config={"chat_template": named})) == "D"
    (tmp_path / "chat_template.jinja").write_text("J", encoding="utf-8")
    assert facts.chat_template(tmp_path) == "J"


def test_tokenizer_json_is_enough_and_half_an_openvino_tokenizer_is_not_preferred(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="has no tokenizer"):
        facts.tokenizer_files(tmp_path)
    make_tokenizer(tmp_path)
    (tmp_path / "openvino_tokenizer.xml").write_text("<net/>")
    assert [path.name for path in facts.tokenizer_files(tmp_path)] == ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no model_type"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, r"it is a bert \(BertForMaskedLM\)"),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "it is a vit"),
        (
            {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            "t5 model with encoder and decoder",
        ),
    ],
)
def test_models_that_do_not_generate_text_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        facts.check_config(config, "org/x")


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_language_models_pass(kind: str) -> None:
    facts.check_config({"model_type": "x", "architectures": [kind]}, "org/x")


@pytest.mark.parametrize("text", ["{", "[]", "\x80"])
def test_damaged_json_names_its_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(SourceError, match=r"config\.json"):
        facts.context_tokens(tmp_path)
