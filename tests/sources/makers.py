"""Small real inputs: GGUF files, IRs, tokenizers and checkpoints."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

TEMPLATE = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"


def byte_letters() -> list[str]:
    """The 256 letters that byte-level BPE writes bytes as."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def make_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    weights: str = "Q4_0",
    vectors: str = "F32",
    tokenizer: tuple[str, str] = ("gpt2", "llama-bpe"),
    extra: Mapping[str, int | str] | None = None,
    without: str = "",
    layers: int = 2,
) -> Path:
    """A random model of width 256 with a byte-level vocabulary of 264 tokens, written by the gguf package.

    `extra` are more metadata; `without` is a key that is left out.
    """
    import gguf

    width, heads, kv_heads = 256, 4, 2
    tokens = ["<|end|>", "<|start|>", *byte_letters(), "he", "ll", "hell", "hello", "12", "<tool>"]
    types = [3, 3, *[1] * 261, 4]
    writer = gguf.GGUFWriter(path, architecture)
    values: dict[str, Any] = {
        f"{architecture}.block_count": layers,
        f"{architecture}.context_length": 512,
        f"{architecture}.embedding_length": width,
        f"{architecture}.feed_forward_length": width,
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": kv_heads,
        "general.file_type": 2,
        "tokenizer.ggml.model": tokenizer[0],
        "tokenizer.ggml.pre": tokenizer[1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
        **(extra or {}),
    }
    for key, value in values.items():
        if key != without:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 10000.0)
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", types)
    writer.add_array("tokenizer.ggml.merges", ["h e", "l l", "he ll", "hell o", "1 2"])
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        data = (random.standard_normal(shape) * 0.05).astype(np.float32)
        kind = gguf.GGMLQuantizationType[weights if len(shape) > 1 else vectors]
        writer.add_tensor(name, quantized(data, kind), raw_dtype=kind)

    head = width // heads
    add("token_embd.weight", len(tokens), width)
    add("output_norm.weight", width)
    for layer in range(layers):
        for name, *shape in (
            ("attn_norm", width),
            ("attn_q", heads * head, width),
            ("attn_k", kv_heads * head, width),
            ("attn_v", kv_heads * head, width),
            ("attn_output", width, heads * head),
            ("ffn_norm", width),
            ("ffn_gate", width, width),
            ("ffn_up", width, width),
            ("ffn_down", width, width),
        ):
            add(f"blk.{layer}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantized(data: np.ndarray[Any, Any], kind: Any) -> np.ndarray[Any, Any]:
    """`data` in a ggml type; where the gguf package can only read the type, zeros, or random numbers for Q4_K."""
    import gguf

    try:
        return gguf.quants.quantize(data, kind)
    except NotImplementedError:
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        shape = (*data.shape[:-1], data.shape[-1] // block * block_bytes)
        return random_q4_k(shape) if kind.name == "Q4_K" else np.zeros(shape, np.uint8)


def random_q4_k(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Random blocks of Q4_K, their two halves small enough for weights, no group's scale 0."""
    random = np.random.default_rng(shape[0])
    raw = random.integers(0, 256, shape, np.uint8).reshape(-1, 144)
    raw[:, :4] = random.uniform(1e-4, 3e-4, (len(raw), 2)).astype(np.float16).view(np.uint8)
    raw[:, 4:8] |= 1
    raw[:, 12:16] |= 1
    return raw.reshape(shape)


def make_ir(folder: Path, output: str = "logits", inputs: tuple[str, ...] = ("input_ids", "attention_mask")) -> Path:
    """A folder with a tiny IR that has a language model's inputs and output, f16 weights, and its JSON files."""
    import openvino as ov
    from openvino import opset13 as ops

    folder.mkdir(parents=True, exist_ok=True)
    parameters = [ops.parameter([-1, -1], np.int64, name=name) for name in inputs]
    for parameter, name in zip(parameters, inputs, strict=True):
        parameter.output(0).set_names({name})
    table = ops.constant(np.linspace(0, 1, 64 * 16, dtype=np.float32).reshape(64, 16))
    embedded = ops.gather(table, parameters[0], ops.constant(0))
    result = ops.matmul(embedded, table, False, True)
    result.output(0).set_names({output})
    ov.save_model(ov.Model([result], parameters), folder / "openvino_model.xml", compress_to_fp16=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 77}))
    make_tokenizer(folder)
    return folder


def make_tokenizer(folder: Path, *, bos: bool = False) -> Path:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE with a few merges and two special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    letters = byte_letters()
    words = ["<|end|>", "<|start|>", *letters, "he", "ll", "hell", "hello"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
    tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words[:2]])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=["<|start|>", "$A"], special_tokens=[("<|start|>", 1)]
        )
    tokenizer.enable_truncation(5)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<|start|>", "__type": "AddedToken"},
        "eos_token": "<|end|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_checkpoint(folder: Path, *, width: int = 64) -> Path:
    """A random Llama of two layers as a Hugging Face checkpoint in bf16, with a tokenizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=264,
            max_position_embeddings=96,
            bos_token_id=1,
            eos_token_id=0,
            pad_token_id=0,
        )
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return make_tokenizer(folder)
