"""The chain equals what cbor2/pickle + hashlib/xxhash give for vLLM's block tuple, and is resumable."""

import hashlib
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import cbor2
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from store.hashing import (
    Digests,
    HashAlgo,
    HashScheme,
    Media,
    chain,
    key_of,
    none_hash,
    usable_tokens,
)

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "media_hashes.json").read_text())
ALGOS: tuple[HashAlgo, ...] = get_args(HashAlgo)
tokens_of = st.lists(
    st.one_of(st.integers(0, 300), st.integers(0, 70_000), st.integers(0, 2**31 - 1)), max_size=150
)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=300)


def reference(algo: HashAlgo) -> Callable[[Any], bytes]:
    """vLLM's own words: serialise the object with the library, digest it."""

    def digest(value: Any) -> bytes:
        packed = cbor2.dumps(value, canonical=True) if "cbor" in algo else pickle.dumps(value, protocol=5)
        return xxhash.xxh3_128_digest(packed) if "xxhash" in algo else hashlib.sha256(packed).digest()

    return digest


def apart(text: str) -> str:
    """An equal string that is another object (pickle writes the same object only once)."""
    return text.encode().decode()


def expected(
    tokens: list[int],
    scheme: HashScheme,
    salt: str | None = None,
    lora: tuple[str, str] | None = None,
    media: Sequence[Media] = (),
) -> list[bytes]:
    """`media` must not overlap."""
    digest = reference(scheme.algo)
    parent = digest("vllm-none-hash" if scheme.seed is None else scheme.seed)
    found: list[bytes] = []
    for start in range(0, len(tokens) - scheme.block_size + 1, scheme.block_size):
        extra: list[tuple[str | int, ...]] = []
        if lora is not None:
            extra.append(("lora", apart(lora[0]), apart(lora[1])))
        end = start + scheme.block_size
        reaching = [item for item in media if item.offset < end and start < item.offset + item.length]
        extra += [("mm", apart(item.identifier), item.offset - start) for item in reaching]
        if salt and start == 0:
            extra.append(("cache_salt", apart(salt)))
        block = tuple(tokens[start : start + scheme.block_size])
        parent = digest((parent, block, tuple(extra) or None))
        found.append(parent)
    return found


@pytest.mark.parametrize(
    ("algo", "seed", "digest"),
    [
        ("sha256_cbor", "0", "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"),
        ("sha256_cbor", None, "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"),
        ("sha256", "0", "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c"),
        ("sha256", None, "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198"),
    ],
)
def test_first_parents_are_those_seen_on_real_workers(algo: HashAlgo, seed: str | None, digest: str) -> None:
    assert none_hash(algo, seed).hex() == digest


@pytest.mark.parametrize("algo", ["xxhash", "xxhash_cbor"])
def test_a_random_seed_is_refused_not_guessed(algo: HashAlgo) -> None:
    with pytest.raises(ValueError, match="random seed"):
        chain(range(64), HashScheme(algo, 32))


@settings(max_examples=300, deadline=None)
@given(
    tokens=tokens_of,
    algo=st.sampled_from(ALGOS),
    size=st.sampled_from([1, 2, 3, 4, 16, 17, 32, 64]),
    seed=st.sampled_from(["0", "42", "random text ü"]),
    salt=st.none() | texts,
    lora=st.none() | st.tuples(texts, texts),
)
def test_chain_equals_the_library_serialisation(
    tokens: list[int], algo: HashAlgo, size: int, seed: str, salt: str | None, lora: tuple[str, str] | None
) -> None:
    scheme = HashScheme(algo, size, seed)
    found = chain(tokens, scheme, cache_salt=salt, lora=lora)
    assert list(found.digests) == expected(tokens, scheme, salt, lora)
    assert list(found.keys) == [int.from_bytes(digest[-8:], "big") for digest in found.digests]


@st.composite
def media_of(draw: st.DrawFn) -> list[Media]:
    """Items in order, some of one token, some one after the other, some with equal content."""
    found: list[Media] = []
    offset = 0
    for _ in range(draw(st.integers(0, 8))):
        offset += draw(st.integers(0, 40))
        length = draw(st.sampled_from((1, 3, 16, 90, 700)))
        found.append(Media(draw(st.sampled_from(("a", "mm", "f" * 64)) | texts), offset, length))
        offset += length
    return found


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 70_000), max_size=400),
    algo=st.sampled_from(ALGOS),
    size=st.sampled_from([1, 16, 32, 300]),
    salt=st.none() | texts,
    lora=st.none() | st.tuples(texts, texts),
    media=media_of(),
    cut=st.integers(0, 400),
)
def test_media_enter_the_blocks_they_lie_in(
    tokens: list[int],
    algo: HashAlgo,
    size: int,
    salt: str | None,
    lora: tuple[str, str] | None,
    media: list[Media],
    cut: int,
) -> None:
    scheme = HashScheme(algo, size, "0")
    found = chain(tokens, scheme, cache_salt=salt, lora=lora, media=media)
    assert list(found.digests) == expected(tokens, scheme, salt, lora, media)
    head = chain(tokens[:cut], scheme, cache_salt=salt, lora=lora, media=media)
    assert chain(tokens, scheme, cache_salt=salt, lora=lora, media=media, resume=head.digests) == found


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: case["name"])
def test_media_are_hashed_as_vllm_hashed_them(case: dict[str, Any]) -> None:
    scheme = HashScheme(case["algo"], case["size"], case["seed"])
    media = [Media(*item) for item in case["media"]]
    lora = tuple(case["lora"]) if case["lora"] else None
    found = chain(RECORDED["tokens"], scheme, cache_salt=case["salt"], lora=lora, media=media)
    assert [f"{key:016x}" for key in found.keys] == case["keys"]


def test_b018_two_images_in_one_text_share_only_what_is_before_them() -> None:
    scheme = HashScheme("sha256_cbor", 16)
    tokens = list(range(160))
    one, other = (chain(tokens, scheme, media=[Media(name, 70, 50)]) for name in ("cat", "dog"))
    assert [a == b for a, b in zip(one.keys, other.keys, strict=True)] == [True] * 4 + [False] * 6


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("size", [128, 300, 1024, 8192])
def test_large_blocks(algo: HashAlgo, size: int) -> None:
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, 200_000, size * 2 + 5).tolist()
    scheme = HashScheme(algo, size, "0")
    assert list(chain(tokens, scheme).digests) == expected(tokens, scheme)


@settings(max_examples=100, deadline=None)
@given(
    tokens=tokens_of,
    cut=st.integers(0, 150),
    algo=st.sampled_from(ALGOS),
    salt=st.none() | texts,
    lora=st.none() | st.tuples(texts, texts),
    plain=st.booleans(),
)
def test_resuming_gives_the_same_chain(
    tokens: list[int], cut: int, algo: HashAlgo, salt: str | None, lora: tuple[str, str] | None, plain: bool
) -> None:
    scheme = HashScheme(algo, 16, "0")
    whole = chain(np.array(tokens, dtype=np.uint32), scheme, cache_salt=salt, lora=lora)
    head = chain(tokens[:cut], scheme, cache_salt=salt, lora=lora).digests
    resume = list(head) if plain else head
    assert chain(tokens, scheme, cache_salt=salt, lora=lora, resume=resume) == whole


def test_a_resumed_chain_is_cut_to_the_prompt() -> None:
    scheme = HashScheme("sha256_cbor", 16)
    longer = chain(range(100), scheme)
    assert chain(range(40), scheme, resume=longer.digests) == chain(range(40), scheme)


def test_salt_changes_every_block_through_the_first_and_lora_each() -> None:
    scheme = HashScheme("sha256_cbor", 16)
    plain, salted = chain(range(48), scheme), chain(range(48), scheme, cache_salt="tenant")
    assert not set(plain.keys) & set(salted.keys)
    assert list(chain(range(48), scheme, cache_salt="").keys) == list(plain.keys)


def test_sequences_behave_like_lists() -> None:
    found = chain(range(100), HashScheme("xxhash_cbor", 16, "0"))
    digests, keys = list(found.digests), list(found.keys)
    assert len(found) == len(found.keys) == 6
    assert found.digests[-1] == digests[-1]
    assert found.keys[-1] == keys[-1]
    assert found.digests[1:4] == digests[1:4]
    assert list(found.keys[::2]) == keys[::2]
    assert list(found.digests[::-1]) == digests[::-1]
    with pytest.raises(IndexError):
        found.keys[6]
    with pytest.raises(IndexError):
        found.digests[-7]


def test_key_of_takes_every_form_a_hash_arrives_in() -> None:
    digest = bytes(range(24)) + b"\xff\x00\x00\x00\x00\x00\x00\x01"
    assert key_of(digest) == 0xFF00000000000001
    assert key_of(0xFF00000000000001) == 0xFF00000000000001
    assert key_of(0xFF00000000000001 - (1 << 64)) == 0xFF00000000000001


@pytest.mark.parametrize("bad", [[-1] * 16, [2**31] * 16, [2**40] * 16])
def test_token_ids_out_of_range_are_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        chain(bad, HashScheme("sha256", 16))


def test_resume_of_another_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="another algorithm"):
        chain(range(64), HashScheme("sha256", 16), resume=Digests(bytes(16), 16))


@pytest.mark.parametrize(
    ("length", "usable"),
    [(128, 96), (129, 128), (127, 96), (64, 32), (33, 32), (32, 0), (31, 0), (1, 0), (0, 0)],
)
def test_a_full_hit_leaves_one_token_to_compute(length: int, usable: int) -> None:
    """Lengths and cached tokens as measured on a real worker with block size 32."""
    assert usable_tokens(length // 32, 32, length) == usable


def test_blocks_held_bound_the_usable_tokens() -> None:
    assert usable_tokens(2, 32, 1000) == 64
