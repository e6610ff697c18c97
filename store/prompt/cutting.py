"""Where a rendered prompt may be cut so that its pieces tokenize independently.

A tokenizer takes its added tokens (`<|im_start|>` and the like) out of the text before anything else and
treats what lies between them piece by piece. So tokens(a + cut + b) = tokens(a) + tokens(cut + b), if the cut
token is found in the text as it is and nothing around it can change that. Both are checked when the tokenizer
is loaded: the first by its properties, the rest by comparison on samples. Without proof there are no cuts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tokenizers import AddedToken, Tokenizer

# A piece this long is worth an entry of its own (about 300 bytes) in the cache; shorter ones are joined.
PIECE_BYTES: Final = 1024

_SAMPLES: Final = (
    "",
    " ",
    "\n",
    "user\n",
    "  two blanks, it's 12345 numbers\n\n",
    "\n\n\n   ",
    "naïve cafe\u0301 \u1100\u1161 ﬁ ﾊﾝ",
    "你好，世界。",
    "👩‍👩‍👧 👍🏽",
    "\u00a0\u2003\u200b\ufeff\u3000",
    "x",
    "<|",
    "|>",
    "<",
    '{"a": [1, 2.5]}',
    "\u0301combining first",
)


def cut(text: bytes, token: bytes | None, start: int = 0) -> list[int]:
    """Where the pieces of UTF-8 `text` end, from `start` (where one begins) on; the last ends with the text.

    Each but the first begins with `token`, each but the last is long. Where a piece ends depends only on the
    text before that point, so a text that goes on keeps its pieces.
    """
    ends: list[int] = []
    while token is not None and (end := text.find(token, start + PIECE_BYTES)) >= 0:
        ends.append(end)
        start = end
    ends.append(len(text))
    return ends


def find_cut_token(tokenizer: Tokenizer, rendered: Sequence[str]) -> str | None:
    """The token to cut at: the most frequent one in the `rendered` sample prompts; None without proof."""
    if tokenizer.encode_special_tokens:
        return None
    added: Mapping[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    contents = [token.content for token in added.values()]
    counts: dict[str, int] = {}
    for token in added.values():
        number = sum(text.count(token.content) for text in rendered)
        if number and _stands_alone(token, contents):
            counts[token.content] = number
    # Of equally frequent ones the first in the prompt: it opens what the others close.
    order = sorted(counts, key=lambda each: (-counts[each], min(text.find(each) for text in rendered)))
    return next((token for token in order if _holds(tokenizer, token, contents, rendered)), None)


def _stands_alone(token: AddedToken, contents: Sequence[str]) -> bool:
    """Whether every occurrence of the token's text becomes the token, whatever is around it."""
    if token.normalized or token.lstrip or token.rstrip or token.single_word or not token.content:
        return False
    # A token that contains this one, or runs into it from the left (itself included), would win the match.
    return not any(
        (token.content in other and other != token.content) or _runs_into(other, token.content)
        for other in contents
    )


def _runs_into(left: str, right: str) -> bool:
    """Whether an occurrence of `left` can end within one of `right`."""
    return any(left.endswith(right[:length]) for length in range(1, min(len(left), len(right))))


def _holds(tokenizer: Tokenizer, token: str, contents: Sequence[str], rendered: Sequence[str]) -> bool:
    """Whether pieces tokenize like the whole, on text around the token and on sample prompts."""

    def ids(texts: Sequence[str]) -> list[list[int]]:
        batch = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    return all(_equal(ids, parts) for parts in _trials(token, contents, rendered))


def _trials(token: str, contents: Sequence[str], rendered: Sequence[str]) -> list[list[str]]:
    trials = [[left, token + right] for left, right in itertools.product(_SAMPLES, _SAMPLES)]
    trials += [[other, token + other] for other in contents[:64]]
    for text in rendered:
        first, *rest = text.split(token)
        trials.append([first, *(token + piece for piece in rest)])
    return trials


def _equal(ids: Callable[[Sequence[str]], list[list[int]]], parts: list[str]) -> bool:
    whole, *pieces = ids(["".join(parts), *parts])
    return whole == list(itertools.chain.from_iterable(pieces))
