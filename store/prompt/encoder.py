"""Text to token ids with a model's own fast tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from store.prompt.fast import FastEncoder
from store.prompt.request import Ids, Side, Unrenderable


class Encoder:
    """A tokenizer without padding or truncation. Thread-safe; encoding does not hold the GIL.

    Ids are bytes here, uint32 in the machine's order: pieces are joined, kept and looked up as such.
    """

    def __init__(self, backend: Tokenizer) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend: Final = backend
        self._around: Final = _specials_around(backend)
        self._fast: Final = None if backend.encode_special_tokens else FastEncoder.prove(backend)

    def encode_pieces(self, pieces: Sequence[str]) -> list[bytes]:
        """The ids of each piece, without special tokens around it. Raises Unrenderable on lone surrogates."""
        fast = self._fast
        found = [fast.encode(piece) if fast is not None else None for piece in pieces]
        left = [place for place, ids in enumerate(found) if ids is None]
        if left:
            try:
                # `encode` holds the GIL all along (129 ms for 88K tokens), `encode_batch_fast` does not.
                batch = self._backend.encode_batch_fast(
                    [pieces[place] for place in left], add_special_tokens=False
                )
            except (TypeError, UnicodeEncodeError) as wrong:
                raise Unrenderable("invalid", "text with lone surrogates") from wrong
            for place, encoding in zip(left, batch, strict=True):
                found[place] = np.array(encoding.ids, dtype=np.uint32).tobytes()
        return [ids for ids in found if ids is not None]

    def decode(self, ids: Ids) -> str:
        return self._backend.decode(ids.tolist(), skip_special_tokens=False)

    def starts(self, piece: str) -> list[int]:
        """The character each token of `piece` begins at."""
        (encoding,) = self._backend.encode_batch([piece], add_special_tokens=False)
        return [start for start, _ in encoding.offsets]

    def around(self, *, add_special_tokens: bool) -> tuple[bytes, bytes]:
        """The ids put before and after a text: the tokenizer's own BOS and the like, if asked for."""
        if not add_special_tokens:
            return b"", b""
        if self._around is None:
            raise Unrenderable("tokenizer_unsupported", "special tokens are not simply around the text")
        return self._around


def truncated(encoder: Encoder, text: str, keep: int, side: Side | None, *, add_special_tokens: bool) -> Ids:
    """The ids of `text` cut to `keep` as vLLM cuts.

    A named side takes special tokens for a part of the text, the default (left) keeps them whole around what
    is left of it.
    """
    before, after = encoder.around(add_special_tokens=add_special_tokens)
    (body,) = encoder.encode_pieces([text])
    if side is not None:
        return truncate(np.frombuffer(before + body + after, dtype=np.uint32), keep, side)
    room = keep - (len(before) + len(after)) // 4
    kept = truncate(np.frombuffer(body, dtype=np.uint32), room, None).tobytes()
    return np.frombuffer(before + kept + after, dtype=np.uint32)


def truncate(ids: Ids, keep: int, side: Side | None) -> Ids:
    """The last `keep` ids (the first, if side is "right"); all, if there are no more than that."""
    if keep >= len(ids):
        return ids
    if keep <= 0:
        raise Unrenderable("invalid", "truncate_prompt_tokens leaves nothing")
    return ids[:keep] if side == "right" else ids[-keep:]


def _specials_around(backend: Tokenizer) -> tuple[bytes, bytes] | None:
    """What the tokenizer puts before and after any text on request; None when it is not as simple as that."""
    found: set[tuple[bytes, bytes]] = set()
    for sample in ("a", "two words", "x\n" * 5):
        plain = backend.encode(sample, add_special_tokens=False).ids
        whole = backend.encode(sample, add_special_tokens=True).ids
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), None)
        if at is None:
            return None
        ends = (whole[:at], whole[at + len(plain) :])
        found.add((np.array(ends[0], np.uint32).tobytes(), np.array(ends[1], np.uint32).tobytes()))
    return found.pop() if len(found) == 1 else None
