"""Text an engine without weights can answer with: words that the model's tokenizer keeps apart."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

_WORDS: Final = 2000
_TRIED: Final = 40_000


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens and the text each of them adds."""

    ids: Sequence[int]
    pieces: Sequence[str]
    finish: str

    def until(self, stops: Sequence[str]) -> Answer:
        """Ended in front of the first stop text; the token it begins in is the last one."""
        text = "".join(self.pieces)
        found = [at for at in map(text.find, stops) if at >= 0]
        if not found:
            return self
        left = min(found)
        pieces: list[str] = []
        for piece in self.pieces:
            pieces.append(piece[:left])
            left -= len(piece)
            if left < 0:
                break
        return Answer(self.ids[: len(pieces)], pieces, "stop")


class Vocabulary:
    """Answers are drawn from tokens that are a whole word with its space in front.

    Such words come out of the tokenizer as they went in, so that an answer which comes back as part of the
    next prompt has the same tokens, as that of a real model mostly has.
    """

    def __init__(self, directory: Path) -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.size: Final = self._model_size(directory)
        first, following = self._find_words()
        self._first: Final = first or following
        self._following: Final = following

    def answer(self, seed: bytes, tokens: int, finish: str) -> Answer:
        """`tokens` words, the same for the same seed."""
        draw = random.Random(hashlib.sha256(seed).digest())
        chosen = [draw.choice(self._first), *draw.choices(self._following, k=max(0, tokens - 1))]
        return Answer([token for token, _ in chosen], [text for _, text in chosen], finish)

    @staticmethod
    def length(seed: bytes, mean: int) -> int:
        """How many tokens the answer would have by itself: half to one and a half times `mean`."""
        low = max(1, mean // 2)
        return low + int.from_bytes(hashlib.sha256(b"length" + seed).digest()[:8], "big") % max(1, mean)

    def spell(self, text: str, tokens: int, finish: str) -> Answer:
        """That very text, cut after `tokens` tokens (then it ends with `length`)."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        ends: list[int] = [end for _, end in encoding.offsets]
        pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        if len(ids) > tokens:
            return Answer(ids[:tokens], pieces[:tokens], "length")
        return Answer(ids, pieces, finish)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def certain(self, ids: Sequence[int]) -> list[dict[str, Any] | None]:
        """Prompt logprobs in vLLM's shape, of a model that is sure of every token."""
        rows = zip(ids[1:], self.strings(ids[1:]), strict=True)
        return [
            None,
            *({str(token): {"logprob": 0.0, "rank": 1, "decoded_token": name}} for token, name in rows),
        ]

    def strings(self, ids: Sequence[int]) -> list[str]:
        """The tokenizer's own names of the tokens."""
        return [self._tokenizer.id_to_token(token) or "" for token in ids]

    def _model_size(self, directory: Path) -> int:
        """Ids from here on are out of vocabulary, for vLLM the larger of model's and tokenizer's."""
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        try:
            config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        except OSError:
            return size
        return max(size, int((config.get("text_config") or config).get("vocab_size") or 0))

    def _find_words(self) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
        """Tokens that start a word with nothing in front, and tokens with the space before a word."""
        first: list[tuple[int, str]] = []
        following: list[tuple[int, str]] = []
        encode = self._tokenizer.encode
        for token in range(min(_TRIED, self._tokenizer.get_vocab_size(with_added_tokens=False))):
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            word = text.strip()
            if len(word) < 2 or not (word.isascii() and word.isalpha() and word.islower()):
                continue
            if text == word and encode(word, add_special_tokens=False).ids == [token]:
                first.append((token, word))
            # Decoders of SentencePiece models drop a space at the beginning: look at it behind another word.
            pair = encode(f"a {word}", add_special_tokens=False).ids
            if len(pair) > 1 and pair[-1] == token and encode("a", add_special_tokens=False).ids == pair[:-1]:
                following.append((token, f" {word}"))
            if len(following) >= _WORDS:
                break
        if not following:
            plain = range(min(256, self._tokenizer.get_vocab_size(with_added_tokens=False)))
            following = [
                (token, self._tokenizer.decode([token], skip_special_tokens=False)) for token in plain
            ]
        return first, following
