"""A tiny model that takes images, made on the spot: the parts of Idefics 3 around the tiny model's own.

It is one of the few kinds that vLLM's CPU build imports without torchvision.
"""

from __future__ import annotations

import base64
import json
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from workers.launch.tiny_model import make_tiny_model

# An image is scaled to at most SIDE pixels and shown to the model in tiles, each of TILE_TOKENS tokens.
SIDE, TILE, PATCH, MERGED = 112, 56, 14, 2
TILE_TOKENS = (TILE // PATCH // MERGED) ** 2
_TOKENS = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)

# Content comes part by part, and an image stands where its part stands.
TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- for part in message.content -%}
        {%- if part.type == 'image' -%}{{- '<image>' -}}{%- else -%}{{- part.text -}}{%- endif -%}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def make_picture_model(directory: Path) -> Path:
    """Write the model's directory, and return it. It has no weights: serve it with `--load-format=dummy`."""
    # A directory of an earlier run holds this model already, not the tiny one that it is made of.
    shutil.rmtree(directory, ignore_errors=True)
    make_tiny_model(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    text: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    text |= {"model_type": "llama", "vocab_size": tokenizer.get_vocab_size()}
    whole: dict[str, Any] = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": tokenizer.token_to_id("<image>"),
        "scale_factor": MERGED,
        "text_config": text,
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "intermediate_size": 64,
            "image_size": TILE,
            "patch_size": PATCH,
        },
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": SIDE},
        "max_image_size": {"longest_edge": TILE},
    }
    files = {
        "config.json": whole,
        "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": TILE_TOKENS},
        "preprocessor_config.json": images | {"processor_class": "Idefics3Processor"},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return directory


def picture(color: tuple[int, int, int], width: int = 64, height: int = 64) -> str:
    """A PNG of one color, as the data URL that bodies carry."""
    rows = (b"\0" + bytes(color) * width) * height
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        png += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return "data:image/png;base64," + base64.b64encode(png).decode()
