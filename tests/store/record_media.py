"""Block hashes of prompts with media, from vLLM's own functions. Run where vLLM is installed:

PYTHONHASHSEED=0 python tests/store/record_media.py tests/store/media_hashes.json
"""

# pyright: basic

import itertools
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest  # pyright: ignore
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange  # pyright: ignore
from vllm.sampling_params import SamplingParams  # pyright: ignore
from vllm.utils.hashing import get_hash_fn_by_name  # pyright: ignore
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # pyright: ignore
from vllm.v1.request import Request  # pyright: ignore

ALGOS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
# (identifier, offset, length): within a block, across blocks, several in a block, at the edges, overlapping,
# beyond the end of the prompt.
MEDIA: dict[str, list[tuple[str, int, int]]] = {
    "within a block": [("a" * 64, 18, 5)],
    "across blocks": [("b" * 64, 20, 70)],
    "from the start": [("c" * 64, 0, 16)],
    "two in a block": [("d" * 64, 33, 3), ("e" * 64, 40, 2)],
    "the same twice": [("f" * 64, 33, 3), ("f" * 64, 40, 30)],
    "five in a block": [(f"uuid-{i}", 48 + 3 * i, 2) for i in range(5)],
    "one after the other": [("mm", 10, 38), ("x", 48, 16), ("x", 64, 40)],
    "overlapping": [("video", 5, 60), ("audio", 9, 20), ("late", 90, 10)],
    "beyond the end": [("g" * 64, 100, 500)],
}


def main() -> None:
    draw = random.Random(5)
    limits = (24, 300, 150_000)
    tokens = [draw.randrange(draw.choice(limits)) for _ in range(130)]
    cases: list[dict[str, Any]] = []
    for algo, size, (name, media) in itertools.product(ALGOS, (16, 32), MEDIA.items()):
        for salt, lora in ((None, None), ("tenant", ("adapter", "/adapters/one"))):
            keys = hashes(algo, size, tokens, media, salt, lora)
            cases.append(
                {
                    "name": f"{algo} {size} {name}{' salted' if salt else ''}",
                    "algo": algo,
                    "size": size,
                    "seed": os.environ["PYTHONHASHSEED"],
                    "media": media,
                    "salt": salt,
                    "lora": lora,
                    "keys": keys,
                }
            )
    lines = ",\n".join(map(json.dumps, cases))
    Path(sys.argv[1]).write_text(f'{{"tokens": {tokens}, "cases": [\n{lines}\n]}}\n')


def hashes(
    algo: str,
    size: int,
    tokens: list[int],
    media: list[tuple[str, int, int]],
    salt: str | None,
    lora: tuple[str, str] | None,
) -> list[str]:
    """Low 64 bits of each full block's hash."""
    digest = get_hash_fn_by_name(algo)
    init_none_hash(digest)
    request = Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=[
            # As they come over the wire to the engine: every text an object of its own.
            MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=identifier.encode().decode(),
                mm_position=PlaceholderRange(offset=offset, length=length),
            )
            for identifier, offset, length in media
        ],
        lora_request=LoRARequest(lora[0], 1, lora[1]) if lora else None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(size, digest),
    )
    return [block[-8:].hex() for block in request.block_hashes]


if __name__ == "__main__":
    main()
