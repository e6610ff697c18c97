"""A second encoder for byte-level BPE vocabularies, several times as fast, proven equal when it is made.

tiktoken joins any two neighbours that make a token, the Hugging Face tokenizer only the pairs its merge list
names. Both give the same ids if the list makes every token out of its own bytes: then, once all earlier
merges are done, only the named pair can stand where a token is about to be made (by induction over the ranks;
bounds of a token are never crossed by a merge, so what happens within them does not depend on the rest). That
is checked for the whole vocabulary. Word splits are compared character by character; what was not compared
(and what a normaliser would touch) is left to the original.
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

if TYPE_CHECKING:
    import tiktoken

Json: TypeAlias = dict[str, Any]

# tokenizers' own pattern of its ByteLevel step.
_GPT2_WORDS: Final = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LOOKS_AROUND: Final = re.compile(r"\(\?<?[=!]")
# Flags that hold to the end of their group, and classes that begin with a bracket.
_UNCLEAR: Final = re.compile(r"\(\?[a-zA-Z]*(-[a-zA-Z]+)?\)|\[\^?\]")
_HARMLESS_NORMALIZERS: Final = frozenset(("NFC", "NFD", "NFKC", "NFKD"))
# Large blocks of letters without any internal distinction: every 64th stands for the others.
_UNIFORM: Final = ((0x3400, 0x4DC0), (0x4E00, 0xA000), (0xAC00, 0xD7A4), (0x20000, 0x2A6E0))
_LAST_COMPARED: Final = 0x1FAFF
# The regular expression engine backtracks over runs of blanks, and gives up on very long ones.
_LONGEST_RUN: Final = 1000


class FastEncoder:
    """Ids of texts it can vouch for. Thread-safe; encoding does not hold the GIL."""

    def __init__(self, encoding: tiktoken.Encoding, ids: npt.NDArray[np.uint32]) -> None:
        self._encoding: Final = encoding
        self._ids: Final = ids
        self._alphabet: frozenset[str] = frozenset(map(chr, range(128)))
        self._normal_form: str | None = None

    @classmethod
    def prove(cls, tokenizer: Tokenizer) -> FastEncoder | None:
        """The fast twin of `tokenizer`, None if there is none. Takes about 2 s for 150K tokens."""
        try:
            import tiktoken
        except ImportError:  # all that is lost without it is time
            return None
        description: Json = json.loads(tokenizer.to_str())
        words = _words(description["pre_tokenizer"])
        normalizers = _normalizers(description["normalizer"])
        added = {token["content"]: token for token in description["added_tokens"]}
        if words is None or normalizers is None or not _plain_bpe(description) or not _plain_added(added):
            return None
        table = _ranks(description["model"], added)
        if table is None or not _makes_every_token(tokenizer, table, description["model"]):
            return None
        specials = {content: len(table) + i for i, content in enumerate(added)}
        ids = [number for _, number in table.values()] + [token["id"] for token in added.values()]
        ranks = {content: rank for content, (rank, _) in table.items()}
        try:
            encoding = tiktoken.Encoding(
                "twin", pat_str=_grouped(words), mergeable_ranks=ranks, special_tokens=specials
            )
        except Exception:  # a pattern the other engine does not know
            return None
        twin = cls(encoding, np.array(ids, dtype=np.uint32))
        if not twin._equals(tokenizer, [_in_context(map(chr, range(128)))]):
            return None
        twin._learn_alphabet(tokenizer, normalizers)
        return twin

    def encode(self, text: str) -> bytes | None:
        """Ids of `text` as uint32 bytes, added tokens recognised; None if it must go to the original."""
        if not text.isascii() and not self._vouches_for(text):
            return None
        if " " * _LONGEST_RUN in text or "\n" * _LONGEST_RUN in text:
            return None
        try:
            found = self._encoding.encode_to_numpy(text, allowed_special="all")
        except ValueError:
            return None
        return self._ids[found].tobytes()

    def _vouches_for(self, text: str) -> bool:
        if not self._alphabet.issuperset(text):
            return False
        return self._normal_form is None or unicodedata.is_normalized(self._normal_form, text)  # pyright: ignore[reportArgumentType]

    def _equals(self, tokenizer: Tokenizer, texts: Sequence[str]) -> bool:
        theirs = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return all(
            self.encode(text) == np.array(encoding.ids, dtype=np.uint32).tobytes()
            for text, encoding in zip(texts, theirs, strict=True)
        )

    def _learn_alphabet(self, tokenizer: Tokenizer, normalizers: Sequence[str]) -> None:
        """Add the characters beyond ASCII that both encoders treat alike, in groups of neighbours."""
        if len(normalizers) > 1:
            return
        self._normal_form = normalizers[0] if normalizers else None
        ascii_only = self._alphabet
        groups = list(_groups())
        texts = [_in_context(group) for group, _ in groups]
        self._alphabet = ascii_only.union(*(whole for _, whole in groups))
        theirs = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        known: set[str] = set()
        for (_, whole), text, encoding in zip(groups, texts, theirs, strict=True):
            if self.encode(text) == np.array(encoding.ids, dtype=np.uint32).tobytes():
                known.update(whole)
        self._alphabet = ascii_only.union(known)


def _words(step: Json | None) -> str | None:
    """The pattern of words, if splitting by it and byte-level letters are all the pre-tokenizer does."""
    steps: list[Json] = (
        [] if step is None else step["pretokenizers"] if step["type"] == "Sequence" else [step]
    )
    names = [each["type"] for each in steps]
    if names not in (["ByteLevel"], ["Split", "ByteLevel"]) or steps[-1]["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return _GPT2_WORDS if steps[0]["use_regex"] else None
    split = steps[0]
    plain = split["behavior"] == "Isolated" and not split["invert"] and not steps[1]["use_regex"]
    return split["pattern"].get("Regex") if plain else None


def _grouped(pattern: str) -> str:
    """The same pattern, with the alternatives before the first that looks around as one.

    tiktoken's engine tries each alternative by itself where one of them looks around, but a group that does
    not at once: words are found in three quarters of the time.
    """
    if _UNCLEAR.search(pattern):
        return pattern
    ends = [0]
    depth, in_class, escaped = 0, False, False
    for place, letter in enumerate(pattern):
        if escaped or letter == "\\":
            escaped = not escaped
        elif in_class or letter == "[":
            if in_class and letter == "[":  # one class within another
                return pattern
            in_class = letter != "]"
        elif letter == "|" and not depth:
            ends.append(place)
        else:
            depth += (letter == "(") - (letter == ")")
    plain = [end for end in ends if not _LOOKS_AROUND.search(pattern, 0, end)]
    return f"(?:{pattern[: plain[-1]]}){pattern[plain[-1] :]}" if plain[-1] else pattern


def _normalizers(step: Json | None) -> list[str] | None:
    steps: list[Json] = [] if step is None else step["normalizers"] if step["type"] == "Sequence" else [step]
    names: list[str] = [each["type"] for each in steps]
    return names if _HARMLESS_NORMALIZERS.issuperset(names) else None


def _plain_bpe(description: Json) -> bool:
    model: Json = description["model"]
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    return model["type"] == "BPE" and not any(model.get(key) for key in odd)


def _plain_added(added: Mapping[str, Json]) -> bool:
    """Whether added tokens are found in the text as they are, and no two can start at one place."""
    flags = ("normalized", "lstrip", "rstrip", "single_word")
    if any(token[flag] for token in added.values() for flag in flags):
        return False
    names = sorted(added)
    return not any(longer.startswith(shorter) for shorter, longer in itertools.pairwise(names))


def _ranks(model: Json, added: Mapping[str, Json]) -> dict[bytes, tuple[int, int]] | None:
    """(rank, id) of every token by its bytes, in the order of ranks: single bytes first, then by merge."""
    letters = _byte_letters()
    vocabulary: dict[str, int] = model["vocab"]
    order: list[str] = [letter for letter in letters if letter in vocabulary]
    if len(order) != 256:
        return None
    last = ""
    seen: set[str] = set(order)
    merges: list[list[str] | str] = model["merges"]
    for merge in merges:
        token = "".join(merge) if isinstance(merge, list) else merge.replace(" ", "", 1)
        if token not in seen:
            order.append(token)
        elif token != last:
            return None  # merges of one token at several ranks
        seen.add(token)
        last = token
    if not seen.issuperset(vocabulary.keys() - added.keys()) or not vocabulary.keys() >= seen:
        return None
    table: dict[bytes, tuple[int, int]] = {}
    for token in order:
        if not all(letter in letters for letter in token):
            return None
        table[bytes(letters[letter] for letter in token)] = (len(table), vocabulary[token])
    return table


def _makes_every_token(tokenizer: Tokenizer, table: Mapping[bytes, object], model: Json) -> bool:
    """Whether the merge list, applied to a token's bytes, gives that token, for all of them."""
    letter_of = {number: letter for letter, number in _byte_letters().items()}
    bpe: Any = tokenizer.model
    if model.get("ignore_merges"):  # which looks whole words up first; others may be encoding, so on a copy
        bpe = Tokenizer.from_str(tokenizer.to_str()).model
        bpe.ignore_merges = False
    return all(len(bpe.tokenize("".join(letter_of[number] for number in content))) == 1 for content in table)


def _byte_letters() -> dict[str, int]:
    """The letter byte-level BPE writes for each byte: itself if visible, else one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [number for number in range(256) if number not in visible]
    return {chr(number): number for number in visible} | {chr(256 + i): n for i, n in enumerate(hidden)}


def _groups() -> Iterable[tuple[list[str], list[str]]]:
    """(characters to compare, characters they stand for) of what this Unicode version knows beyond ASCII."""
    uniform = [range(first, end) for first, end in _UNIFORM]
    for block in uniform:
        yield [chr(number) for number in block[::64]], [chr(number) for number in block]
    group: list[str] = []
    for number in range(128, _LAST_COMPARED + 1):
        if any(number in block for block in uniform) or unicodedata.category(chr(number)) in {
            "Cn",
            "Cs",
            "Co",
        }:
            continue
        group.append(chr(number))
        if len(group) == 32:
            yield group, group
            group = []
    yield group, group


def _in_context(characters: Iterable[str]) -> str:
    """Each character beside a letter, a digit, a sign, blanks, an apostrophe and itself."""
    return "".join(f"a{c}b1{c}2 {c}{c} .{c};\n{c}\n  {c}  '{c}' {c}" for c in characters)
