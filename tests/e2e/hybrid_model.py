"""A tiny model with sliding-window and full attention: Gemma 3's architecture, weights made up by vLLM."""

import json
from pathlib import Path
from typing import Any

from workers.launch.tiny_model import VOCABULARY, make_tiny_model

WINDOW = 64


def make_hybrid_model(directory: Path) -> Path:
    """Four layers that take turns, so two KV groups; tokenizer and chat template of the tiny model."""
    make_tiny_model(directory)
    config = directory / "config.json"
    config.write_text(json.dumps(_config(), indent=2), encoding="utf-8")
    return directory


def _config() -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
        "intermediate_size": 128,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "max_position_embeddings": 640,
        "vocab_size": VOCABULARY,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
