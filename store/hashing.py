"""vLLM's block-hash chain, recomputed from token ids.

vLLM cuts a prompt in blocks of `block_size` tokens and names each full block by the digest of
`(parent digest, token ids, extra keys)`. The parent of the first block is a digest of a seed text, so two
parties that agree on algorithm, seed and block size give the same names to the same prefixes:

    tokens   | 0 ... 31 | 32 ... 63 | 64 ... 70        (block_size 32)
    digests  |    d0    |    d1     |  (not full)      d0 = H(H(seed), tokens 0-31, extra), d1 = H(d0, ...)

A block's full digest is in the Mooncake key; KV events carry its low 64 bits.
"""

from __future__ import annotations

import hashlib
import pickle
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, repeat
from typing import Final, Literal, TypeAlias, overload

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

HashAlgo: TypeAlias = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.uint32]

_KEY_BYTES: Final = 8
_KEY_MASK: Final = (1 << 64) - 1
# Python pickles an int below 2**31 in the 5-byte form, larger ones in another; no vocabulary comes near.
_MAX_TOKEN: Final = (1 << 31) - 1
# Seed of the sha256 forms when PYTHONHASHSEED is unset in the worker (vLLM 0.32).
_DEFAULT_SEED: Final = "vllm-none-hash"


class HashScheme(msgspec.Struct, frozen=True, gc=False):
    """How one worker names its blocks. `seed` is its PYTHONHASHSEED text, None when that is unset."""

    algo: HashAlgo
    block_size: int
    seed: str | None = None


class Digests(Sequence[bytes]):
    """Digests of equal `width` back to back: 2 bytes a token at block size 16 instead of the 5 of a list."""

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("packed", "width")

    def __init__(self, packed: bytes, width: int) -> None:
        self.packed: Final = packed
        self.width: Final = width

    def __len__(self) -> int:
        return len(self.packed) // self.width

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Digests: ...
    def __getitem__(self, index: int | slice) -> bytes | Digests:
        if isinstance(index, slice):
            return Digests(_cut(self.packed, self.width, index), self.width)
        start = range(len(self))[index] * self.width
        return self.packed[start : start + self.width]

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self.packed), self.width):
            yield self.packed[start : start + self.width]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Digests):
            return self.packed == other.packed and self.width == other.width
        return isinstance(other, Sequence) and list(self) == list(other)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]

    def __repr__(self) -> str:
        return f"Digests({len(self)} of {self.width} bytes)"


@dataclass(frozen=True, slots=True)
class Media:
    """An image (or audio, video) in a prompt: what it is, and the tokens that stand for it."""

    identifier: str
    offset: int
    length: int


class Chain(msgspec.Struct, frozen=True):
    """Digest and 64-bit key of every full block of a prompt, in order; the last, partial block has none."""

    digests: Sequence[bytes]
    keys: Sequence[int]

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def of(cls, digests: Digests) -> Chain:
        per_digest = digests.width // _KEY_BYTES
        lows = np.frombuffer(digests.packed, dtype=">u8")[per_digest - 1 :: per_digest]
        return cls(digests, array("Q", lows.astype(np.uint64).tobytes()))


def chain(
    tokens: Tokens,
    scheme: HashScheme,
    *,
    cache_salt: str | None = None,
    lora: tuple[str, str] | None = None,
    media: Sequence[Media] = (),
    resume: Sequence[bytes] | None = None,
) -> Chain:
    """The chain of all full blocks of `tokens` (the whole prompt, ids from 0 to 2**31 - 1).

    `cache_salt` enters the first block, `lora` (name, path as the worker was given it, byte for byte) every
    block, each of `media` (in order of offset) the blocks it lies in. `resume`: digests of the leading blocks
    under the same scheme, salt, adapter and media; they are taken over unchecked, and only the blocks after
    them are hashed.
    Raises ValueError for a seed that cannot be known (see `none_hash`) or a token id out of range.
    """
    size = scheme.block_size
    blocks = len(tokens) // size
    done = min(len(resume), blocks) if resume is not None else 0
    width = digest_width(scheme.algo)
    known = _packed(resume, width)[: done * width] if resume is not None else b""
    if done == blocks:
        return Chain.of(Digests(known, width))
    parent = known[-width:] if done else none_hash(scheme.algo, scheme.seed)
    new = _as_array(tokens[done * size : blocks * size])
    extras = _extras(range(done * size, blocks * size, size), size, cache_salt, lora, media)
    fresh = _hash_blocks(new, scheme, parent, extras)
    return Chain.of(Digests(known + fresh, width))


@lru_cache(maxsize=64)
def none_hash(algo: HashAlgo, seed: str | None) -> bytes:
    """The parent of a first block: digest of the serialised seed text.

    Raises ValueError for the xxhash forms without a seed: each worker process then draws its own at random.
    """
    if seed is None:
        if algo.startswith("xxhash"):
            raise ValueError(f"{algo} without PYTHONHASHSEED has a random seed in every worker process")
        seed = _DEFAULT_SEED
    packed = _cbor_text(seed) if algo.endswith("_cbor") else pickle.dumps(seed, protocol=5)
    return _digest_of(algo)(packed)


def key_of(digest: bytes | int) -> int:
    """The unsigned 64-bit key of a digest, or of an event's hash (which may arrive as a signed integer)."""
    if isinstance(digest, int):
        return digest & _KEY_MASK
    return int.from_bytes(digest[-_KEY_BYTES:], "big")


def usable_tokens(blocks: int, block_size: int, prompt_tokens: int) -> int:
    """Tokens an engine reuses of `blocks` leading blocks it holds: it always computes at least one token."""
    return max(0, min(blocks, (prompt_tokens - 1) // block_size)) * block_size


def digest_width(algo: HashAlgo) -> int:
    """Bytes in a digest: 32 for the sha256 forms, 16 for the xxhash forms."""
    return 16 if algo.startswith("xxhash") else 32


# A copy of it is made in half the time that OpenSSL 3 takes to begin anew.
_SHA256: Final = hashlib.sha256()


def _sha256(data: bytes) -> bytes:
    state = _SHA256.copy()
    state.update(data)
    return state.digest()


def _digest_of(algo: HashAlgo) -> Callable[[bytes], bytes]:
    return xxhash.xxh3_128_digest if algo.startswith("xxhash") else _sha256


def _packed(digests: Sequence[bytes], width: int) -> bytes:
    if isinstance(digests, Digests):
        if digests.width != width:
            raise ValueError("cannot resume a chain of another algorithm")
        return digests.packed
    return b"".join(digests)


def _cut(packed: bytes, width: int, index: slice) -> bytes:
    start, stop, step = index.indices(len(packed) // width)
    if step == 1:
        return packed[start * width : stop * width]
    return b"".join(packed[i * width : (i + 1) * width] for i in range(start, stop, step))


def _as_array(tokens: Tokens) -> npt.NDArray[np.uint32]:
    try:
        ids = np.asarray(tokens, dtype=np.uint32)
    except (OverflowError, TypeError) as wrong:
        raise ValueError("token ids must be integers from 0 to 2**31 - 1") from wrong
    if ids.size and int(ids.max()) > _MAX_TOKEN:
        raise ValueError("token ids must be integers from 0 to 2**31 - 1")
    return ids


def _hash_blocks(
    tokens: npt.NDArray[np.uint32],
    scheme: HashScheme,
    parent: bytes,
    extras: Iterable[Extra],
) -> bytes:
    """Digests of `tokens` (a multiple of the block size) after `parent`, back to back."""
    pack = _cbor_blocks if scheme.algo.endswith("_cbor") else _pickle_blocks
    blocks = pack(tokens, scheme.block_size, len(parent), extras)
    found: list[bytes] = []
    if scheme.algo.startswith("xxhash"):
        for before, after in blocks:
            parent = xxhash.xxh3_128_digest(before + parent + after)
            found.append(parent)
        return b"".join(found)
    begin = _SHA256.copy
    for before, after in blocks:
        state = begin()
        state.update(before + parent + after)
        parent = state.digest()
        found.append(parent)
    return b"".join(found)


Extra: TypeAlias = tuple[tuple[str | int, ...], ...]
"""Tagged extra keys of a block, numbers only last in their row; empty stands for vLLM's None."""


def _extras(
    starts: range, size: int, cache_salt: str | None, lora: tuple[str, str] | None, media: Sequence[Media]
) -> Iterator[Extra]:
    """The extra keys of the blocks that begin at `starts`: the same object where they are the same."""
    every: Extra = (("lora", *lora),) if lora is not None else ()
    if not media and not (starts.start == 0 and cache_salt):
        return repeat(every, len(starts))
    return _differing(every, starts, size, cache_salt, media)


def _differing(
    every: Extra, starts: range, size: int, cache_salt: str | None, media: Sequence[Media]
) -> Iterator[Extra]:
    end_of_media = media[-1].offset + media[-1].length if media else 0
    at = 0  # the first item that may reach into the block
    for start in starts:
        extra = every
        while start < end_of_media and at < len(media) and media[at].offset < start + size:
            item = media[at]
            if start < item.offset + item.length:
                extra = (*extra, ("mm", item.identifier, item.offset - start))
                if start + size < item.offset + item.length:
                    break  # as vLLM does it, which leaves out an item that begins within one that goes on
            at += 1
        yield (*extra, ("cache_salt", cache_salt)) if start == 0 and cache_salt else extra


# One row per form of a packed integer: which of its up to five bytes exist.
_CBOR_BYTES: Final = np.array(
    [[1, 0, 0, 0, 0], [1, 0, 0, 0, 1], [1, 0, 0, 1, 1], [1, 1, 1, 1, 1]], dtype=np.bool_
)
_PICKLE_BYTES: Final = np.array([[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=np.bool_)
_PICKLE_OPCODES: Final = np.frombuffer(b"KMJ", dtype=np.uint8)  # BININT1, BININT2, BININT


def _cbor_blocks(
    tokens: npt.NDArray[np.uint32], size: int, width: int, extras: Iterable[Extra]
) -> Iterable[tuple[bytes, bytes]]:
    """Canonical CBOR of `(parent, block, extra or None)` for each block, without the parent in the middle."""
    form = (tokens >= 24).view(np.uint8) + (tokens >= 1 << 8) + (tokens >= 1 << 16)
    cells = np.empty((len(tokens), 5), dtype=np.uint8)
    cells[:, 0] = np.where(form == 0, tokens, 23 + form)
    cells[:, 1:] = tokens.astype(">u4").view(np.uint8).reshape(-1, 4)
    before = b"\x83" + _cbor_head(2, width)
    head = _cbor_head(4, size)
    tails = map(lru_cache(_cbor_extra), extras)
    bodies = _bodies(cells, _CBOR_BYTES, form, size)
    return [(before, head + body + tail) for body, tail in zip(bodies, tails, strict=True)]


def _pickle_blocks(
    tokens: npt.NDArray[np.uint32], size: int, width: int, extras: Iterable[Extra]
) -> Iterator[tuple[bytes, bytes]]:
    """Pickle (protocol 5) of `(parent, block, extra or None)` for each block, without the parent.

    One frame: pickle starts a second one after 64 KiB, that is for blocks of more than 13,000 tokens.
    """
    form = (tokens >= 1 << 8).view(np.uint8) + (tokens >= 1 << 16)
    cells = np.empty((len(tokens), 5), dtype=np.uint8)
    cells[:, 0] = _PICKLE_OPCODES.take(form)
    cells[:, 1:] = tokens.astype("<u4").view(np.uint8).reshape(-1, 4)
    memo = 2  # the parent and the block's tuple are memoised before the extra keys
    # A tuple of one to three has its own opcode at the end, a longer one a mark in front.
    opening, closing = (b"", bytes((0x84 + size,))) if size <= 3 else (b"(", b"t")
    parent_head = b"C" + bytes((width,))
    last: Extra | None = None
    tail, fixed = b"", 0
    for body, extra in zip(_bodies(cells, _PICKLE_BYTES, form, size), extras, strict=True):
        if extra is not last:
            packed = _pickle_extra(extra, memo) if extra else b"N"
            last, tail = extra, closing + b"\x94" + packed + b"\x87\x94."
            fixed = len(parent_head) + width + 1 + len(opening) + len(tail)
        frame = (fixed + len(body)).to_bytes(8, "little")
        yield b"\x80\x05\x95" + frame + parent_head, b"\x94" + opening + body + tail


def _bodies(
    cells: npt.NDArray[np.uint8], forms: npt.NDArray[np.bool_], form: npt.NDArray[np.uint8], size: int
) -> list[bytes]:
    """The bytes of each run of `size` tokens; of a cell those exist that its `form`'s row of `forms` names.

    take and compress: indexing with arrays does the same in three times the time.
    """
    packed = cells.reshape(-1).compress(forms.take(form, axis=0).reshape(-1)).tobytes()
    widths = forms.sum(axis=1).take(form)
    ends: list[int] = np.cumsum(widths)[size - 1 :: size].tolist()
    return [packed[start:end] for start, end in pairwise((0, *ends))]


def _cbor_head(major: int, value: int) -> bytes:
    if value < 24:
        return bytes((major << 5 | value,))
    if value < 1 << 8:
        return bytes((major << 5 | 24, value))
    if value < 1 << 16:
        return bytes((major << 5 | 25,)) + value.to_bytes(2, "big")
    return bytes((major << 5 | 26,)) + value.to_bytes(4, "big")


def _cbor_text(text: str) -> bytes:
    data = text.encode()
    return _cbor_head(3, len(data)) + data


def _cbor_value(value: str | int) -> bytes:
    if isinstance(value, str):
        return _cbor_text(value)
    return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)


def _cbor_extra(extra: Extra) -> bytes:
    if not extra:
        return b"\xf6"
    rows = (_cbor_head(4, len(row)) + b"".join(map(_cbor_value, row)) for row in extra)
    return _cbor_head(4, len(extra)) + b"".join(rows)


def _pickle_extra(extra: Extra, memo: int) -> bytes:
    """Pickle of a tuple of tuples of texts and numbers, `memo` objects having been memoised before.

    An object is written once and referred to afterwards. In the engine equal texts come from different places
    of a request, so they are different objects, but for tags and the texts CPython has only one object of.
    """
    out: list[bytes] = []
    seen: dict[tuple[bool, str], int] = {}
    for row in extra:
        for place, value in enumerate(row):
            if isinstance(value, int):
                out.append(_pickle_int(value))
                continue
            single = len(value) <= 1 and value < "\u0100"
            key = (place == 0 and not single, value)
            if key in seen and (key[0] or single):
                number = seen[key]
                out.append(b"h" + bytes((number,)) if number < 256 else b"j" + number.to_bytes(4, "little"))
                continue
            data = value.encode("utf-8", "surrogatepass")
            short = len(data) < 1 << 8
            out.append((b"\x8c" if short else b"X") + len(data).to_bytes(1 if short else 4, "little") + data)
            out.append(b"\x94")
            seen[key] = memo
            memo += 1
        out.append(bytes((0x84 + len(row),)) + b"\x94")
        memo += 1
    if len(extra) > 3:
        return b"(" + b"".join(out) + b"t\x94"
    return b"".join(out) + bytes((0x84 + len(extra),)) + b"\x94"


def _pickle_int(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + bytes((value,))
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    return b"J" + value.to_bytes(4, "little", signed=True)
