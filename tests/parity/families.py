"""A tiny random model of every family that the exporter knows, exported once and kept.

Their weights are large enough that every layer changes the tokens, and no two layers are alike.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

GRAPH = "openvino_model.xml"
LAYERS = 4
SPREADS = {"matrix": 0.15, "vector": 0.1, "embedding": 0.03}
"""Standard deviations: of matrices, of what is added to biases and norms, and of what the layers are added to."""

_IDS = {"bos_token_id": 1, "eos_token_id": 2}
_BASE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    **_IDS,
}
_GQA = {**_BASE, "num_key_value_heads": 2}
_HEAD16 = {**_GQA, "head_dim": 16}
_GPT = {"vocab_size": 256, "n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 256, **_IDS}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_FALCON = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, **_IDS}
_OPT = {**_BASE, "word_embed_proj_dim": 64, "ffn_dim": 128}
_WINDOW = {"sliding_window": 8}


@dataclass(frozen=True, slots=True)
class Family:
    """A configuration of transformers. `paged`: whether OpenVINO's paged attention reproduces the model."""

    kind: str
    config: Mapping[str, Any]
    paged: bool = True


FAMILIES = {
    "arcee": Family("arcee", _GQA),
    "biogpt": Family("biogpt", _BASE),
    "bloom": Family("bloom", {"vocab_size": 256, "hidden_size": 64, "n_layer": LAYERS, "n_head": 4, **_IDS}),
    "codegen": Family("codegen", {**_GPT, "rotary_dim": 8}),
    "cohere": Family("cohere", _GQA),
    "cohere2": Family("cohere2", {**_HEAD16, **_WINDOW}),
    "falcon": Family("falcon", _FALCON),
    "falcon-alibi": Family("falcon", {**_FALCON, "alibi": True}, paged=False),
    "falcon-new-decoder": Family("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "gemma": Family("gemma", _HEAD16),
    "gemma2": Family("gemma2", {**_HEAD16, **_WINDOW}),
    "gemma3_text": Family("gemma3_text", {**_HEAD16, **_WINDOW}),
    "glm": Family("glm", _HEAD16),
    "glm4": Family("glm4", _HEAD16),
    "gpt2": Family("gpt2", {**_GPT, "pad_token_id": 0}),
    "gpt_bigcode": Family("gpt_bigcode", _GPT),
    "gpt_neo": Family(
        "gpt_neo",
        {
            "vocab_size": 256,
            "hidden_size": 64,
            "num_layers": LAYERS,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 8,
            "max_position_embeddings": 256,
            **_IDS,
        },
        paged=False,
    ),
    "gpt_neox": Family("gpt_neox", _BASE),
    "gpt_oss": Family("gpt_oss", {**_HEAD16, **_LOCAL_EXPERTS, **_WINDOW}),
    "gptj": Family("gptj", {**_GPT, "rotary_dim": 8}),
    "granite": Family("granite", _GQA),
    "granitemoe": Family("granitemoe", {**_GQA, **_LOCAL_EXPERTS}),
    "lfm2": Family("lfm2", {**_GQA, "layer_types": ["conv", "conv", "full_attention", "conv"]}, paged=False),
    "llama": Family("llama", _GQA),
    "llama-tied": Family("llama", {**_GQA, "tie_word_embeddings": True}),
    "llama-untied": Family("llama", {**_GQA, "tie_word_embeddings": False}),
    "mistral": Family("mistral", _GQA),
    "mistral-window": Family("mistral", {**_GQA, **_WINDOW}),
    "mixtral": Family("mixtral", {**_GQA, **_LOCAL_EXPERTS}),
    "mpt": Family("mpt", {"vocab_size": 256, "d_model": 64, "n_layers": LAYERS, "n_heads": 4}, paged=False),
    "olmo": Family("olmo", _GQA),
    "olmo2": Family("olmo2", _GQA),
    "opt": Family("opt", _OPT),
    "opt-post-norm": Family("opt", {**_OPT, "do_layer_norm_before": False}),
    "persimmon": Family("persimmon", _BASE),
    "phi": Family("phi", _BASE),
    "phi3": Family("phi3", _GQA),
    "phi3-partial-rotary": Family("phi3", {**_GQA, "partial_rotary_factor": 0.5}),
    "qwen2": Family("qwen2", _GQA),
    "qwen2_moe": Family("qwen2_moe", {**_GQA, **_EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3": Family("qwen3", _HEAD16),
    "qwen3_moe": Family("qwen3_moe", {**_HEAD16, **_EXPERTS}),
    "smollm3": Family("smollm3", _GQA),
    "stablelm": Family("stablelm", _GQA),
    "starcoder2": Family("starcoder2", _GQA),
    "xglm": Family(
        "xglm",
        {
            "vocab_size": 256,
            "d_model": 64,
            "num_layers": LAYERS,
            "attention_heads": 4,
            "ffn_dim": 128,
            "max_position_embeddings": 256,
            "pad_token_id": 0,
            **_IDS,
        },
        paged=False,
    ),
}


def exported(name: str, cache: Path) -> Path:
    """The IR of a family's model: from the cache, else exported into it."""
    family = FAMILIES[name]
    versions = {package: version(package) for package in ("optimum-intel", "transformers", "openvino", "torch")}
    made_of = [family.kind, family.config, SPREADS, versions]
    key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache / f"{name}-{key}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as work:
            checkpoint = _make_checkpoint(family, Path(work) / "checkpoint")
            keep_export(export(checkpoint, Path(work) / "ir"), folder)
    return folder / GRAPH


def export(checkpoint: Path, folder: Path, bits: int | None = None) -> Path:
    """Export a checkpoint with optimum-intel; its weights get 4 or 8 bits, or stay in f32."""
    with quiet():
        from optimum.exporters.openvino import main_export
        from optimum.intel import OVConfig, OVWeightQuantizationConfig

        config = OVConfig(dtype="fp32")
        if bits:
            extra = {"group_size": 64, "ratio": 1.0} if bits == 4 else {}
            config = OVConfig(quantization_config=OVWeightQuantizationConfig(bits=bits, sym=True, **extra))
        main_export(
            str(checkpoint),
            folder,
            task="text-generation-with-past",
            convert_tokenizer=False,
            library_name="transformers",
            ov_config=config,
        )
    return folder


def keep_export(folder: Path, target: Path) -> None:
    """Move a whole folder to its place in the cache; another run may have been faster."""
    try:
        folder.rename(target)
    except OSError:
        if not target.exists():
            raise


def _make_checkpoint(family: Family, folder: Path) -> Path:
    with quiet():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family.kind, **family.config)).eval()
        with torch.no_grad():
            for weights in model.parameters():
                if weights.dim() > 1:
                    weights.normal_(0, SPREADS["matrix"])
                else:
                    weights.add_(torch.randn_like(weights) * SPREADS["vector"])
            for module in model.modules():
                if isinstance(module, torch.nn.Embedding):
                    module.weight.normal_(0, SPREADS["embedding"])
        model.save_pretrained(folder)
    return folder


@contextmanager
def quiet() -> Iterator[None]:
    """PyTorch's and transformers' advice on how to trace models, and their progress bars, are not for these tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        yield
