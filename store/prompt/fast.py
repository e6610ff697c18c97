"""A second encoder for byte-level BPE vocabularies, several times as fast, proven equal when it is made.

tiktoken joins any two neighbours that make a token, the Hugging Face tokenizer only the pairs its merge list
names. Both give the same ids if the list makes every token out of its own bytes: then, once all earlier
merges are done, only the named pair can stand where a token is about to be made (by induction over the ranks;
bounds of a token are never crossed by a merge, so what happens within them does not depend on the rest). That
is checked for the whole vocabulary. Word splits are compared character by character, as texts
come to have them; what was not compared (and what a normaliser would touch) is left to the original.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
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
# Other engines may know a later Unicode version, with forms for what has none here; surrogates are no text.
_NOT_COMPARED: Final = frozenset(("Cn", "Cs", "Co"))
# 17 us each: whoever waits, the event loop too, waits 2 ms for them.
_COMPARED_AT_ONCE: Final = 128
# None of the letters byte-level BPE writes.
_SEPARATOR: Final = "\uffff"
# The regular expression engine backtracks over runs of blanks, and gives up on very long ones.
_LONGEST_RUN: Final = 1000


class FastEncoder:
    """Ids of texts it can vouch for. Thread-safe; encoding does not hold the GIL."""

    def __init__(
        self,
        encoding: tiktoken.Encoding,
        ids: npt.NDArray[np.uint32],
        original: Tokenizer,
        normalizers: Sequence[str],
    ) -> None:
        self._encoding: Final = encoding
        self._ids: Final = ids
        self._original: Final = original
        self._normal_form: Final = normalizers[0] if normalizers else None
        self._compares: Final = len(normalizers) <= 1
        # Characters that both encoders were seen to treat alike, and those left to the original.
        self._alike: Final = set(map(chr, range(128)))
        self._unlike: Final[set[str]] = set()

    @classmethod
    def prove(cls, tokenizer: Tokenizer) -> FastEncoder | None:
        """The fast twin of `tokenizer`, None if there is none. Takes about 0.6 s for 150K tokens."""
        try:
            import tiktoken
        except ImportError:  # all that is lost without it is time
            return None
        description: Json = msgspec.json.decode(tokenizer.to_str())
        words = _words(description["pre_tokenizer"])
        normalizers = _normalizers(description["normalizer"])
        added = {token["content"]: token for token in description["added_tokens"]}
        if words is None or normalizers is None or not _plain_bpe(description) or not _plain_added(added):
            return None
        table = _in_order(description["model"], added)
        if table is None or not _makes_every_token(tokenizer, table, description["model"]):
            return None
        specials = {content: len(table) + i for i, content in enumerate(added)}
        ids = [*table.values(), *(token["id"] for token in added.values())]
        ranks = dict(zip(table, range(len(table)), strict=True))
        try:
            encoding = tiktoken.Encoding(
                "twin", pat_str=_grouped(words), mergeable_ranks=ranks, special_tokens=specials
            )
        except Exception:  # a pattern the other engine does not know
            return None
        twin = cls(encoding, np.array(ids, dtype=np.uint32), tokenizer, normalizers)
        return twin if all(twin._agrees(["".join(map(_in_context, map(chr, range(128))))])) else None

    def encode(self, text: str) -> bytes | None:
        """Ids of `text` as uint32 bytes, added tokens recognised; None if it must go to the original.

        Takes up to 2 ms more where characters are new.
        """
        return self._encode(text) if text.isascii() or self._vouches_for(text) else None

    def _encode(self, text: str) -> bytes | None:
        if " " * _LONGEST_RUN in text or "\n" * _LONGEST_RUN in text:
            return None
        try:
            found = self._encoding.encode_to_numpy(text, allowed_special="all")
        except ValueError:
            return None
        return self._ids[found].tobytes()

    def _vouches_for(self, text: str) -> bool:
        if not self._alike.issuperset(text):
            new = set(text) - self._alike
            if not self._compares or not self._unlike.isdisjoint(new):
                return False
            if not _NOT_COMPARED.isdisjoint(map(unicodedata.category, new)):
                return False
            self._compare(list(itertools.islice(new, _COMPARED_AT_ONCE)))
            if not self._alike.issuperset(new):
                return False
        return self._normal_form is None or unicodedata.is_normalized(self._normal_form, text)  # pyright: ignore[reportArgumentType]

    def _compare(self, characters: Sequence[str]) -> None:
        """Find out which of these both encoders treat alike."""
        agreed = self._agrees(list(map(_in_context, characters)))
        for character, alike in zip(characters, agreed, strict=True):
            (self._alike if alike else self._unlike).add(character)

    def _agrees(self, texts: Sequence[str]) -> list[bool]:
        """Whether both give the same ids, for each of the texts."""
        theirs = self._original.encode_batch_fast(list(texts), add_special_tokens=False)
        return [
            self._encode(text) == np.array(encoding.ids, dtype=np.uint32).tobytes()
            for text, encoding in zip(texts, theirs, strict=True)
        ]


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


def _in_order(model: Json, added: Mapping[str, Json]) -> dict[bytes, int] | None:
    """The id of every token by its bytes, in the order of ranks: single bytes first, then by merge."""
    letters = _byte_letters()
    vocabulary: dict[str, int] = model["vocab"]
    merges: list[list[str] | str] = model["merges"]
    made = ("".join(merge) if isinstance(merge, list) else merge.replace(" ", "", 1) for merge in merges)
    # A token may be made in several ways, if those follow each other.
    order = [*letters, *(token for token, _ in itertools.groupby(made))]
    tokens = set(order)
    if len(tokens) != len(order) or not vocabulary.keys() - added.keys() <= tokens <= vocabulary.keys():
        return None
    if not letters.keys() >= set("".join(order)):
        return None
    bytes_of = {ord(letter): number for letter, number in letters.items()}
    contents = _SEPARATOR.join(order).translate(bytes_of).split(_SEPARATOR)
    return {
        content.encode("latin-1"): vocabulary[token] for content, token in zip(contents, order, strict=True)
    }


def _makes_every_token(tokenizer: Tokenizer, contents: Iterable[bytes], model: Json) -> bool:
    """Whether the merge list, applied to a token's bytes, gives that token, for all of them."""
    letter_of = {number: letter for letter, number in _byte_letters().items()}
    bpe: Any = tokenizer.model
    if model.get("ignore_merges"):  # which looks whole words up first; others may be encoding, so on a copy
        bpe = Tokenizer.from_str(tokenizer.to_str()).model
        bpe.ignore_merges = False
    whole = _SEPARATOR.join(content.decode("latin-1") for content in contents)
    return all(len(bpe.tokenize(token)) == 1 for token in whole.translate(letter_of).split(_SEPARATOR))


def _byte_letters() -> dict[str, int]:
    """The letter byte-level BPE writes for each byte: itself if visible, else one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [number for number in range(256) if number not in visible]
    return {chr(number): number for number in visible} | {chr(256 + i): n for i, n in enumerate(hidden)}


def _in_context(c: str) -> str:
    """The character beside a letter, a digit, a sign, blanks, an apostrophe and itself."""
    return f"a{c}b1{c}2 {c}{c} .{c};\n{c}\n  {c}  '{c}' {c}"
