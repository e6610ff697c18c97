"""The fast encoder gives the same ids as the original, or none at all."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from store.prompt.fast import FastEncoder
from tests.store.prompt.pieces import FRAGMENTS
from workers.launch.tiny_model import WORDS

texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=20), max_size=8).map("".join)


@pytest.fixture(scope="module", params=["chatml", "llama3"])
def both(request: pytest.FixtureRequest, family: Callable[[str], Path]) -> tuple[Tokenizer, FastEncoder]:
    tokenizer = Tokenizer.from_file(str(family(request.param) / "tokenizer.json"))
    fast = FastEncoder.prove(tokenizer)
    assert fast is not None
    return tokenizer, fast


def same(tokenizer: Tokenizer, fast: FastEncoder, text: str) -> bool:
    ids = fast.encode(text)
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    return ids is None or ids == np.array(expected, dtype=np.uint32).tobytes()


@settings(max_examples=400, deadline=None)
@given(text=texts)
def test_ids_are_the_same(both: tuple[Tokenizer, FastEncoder], text: str) -> None:
    assert same(*both, text)


def test_ordinary_text_of_many_scripts_is_taken(both: tuple[Tokenizer, FastEncoder]) -> None:
    tokenizer, fast = both
    for text in (
        "plain",
        "naïve Zürich",
        "你好，世界。",
        "こんにちは",
        "👩‍👩‍👧‍👦 👍🏽",
        "مرحبا",
        "<|im_end|>\n<think>",
    ):
        assert fast.encode(text) is not None
        assert same(tokenizer, fast, text)


def test_text_a_normaliser_would_change_goes_to_the_original(family: Callable[[str], Path]) -> None:
    fast = FastEncoder.prove(Tokenizer.from_file(str(family("chatml") / "tokenizer.json")))
    assert fast is not None
    assert fast.encode("cafe\u0301") is None
    assert fast.encode("\u1100\u1161") is None


@pytest.mark.parametrize("run", [" ", "\n", "\t", "a", "1", "=", "\n \n ", "漢"])
def test_very_long_runs(both: tuple[Tokenizer, FastEncoder], run: str) -> None:
    for length in (999, 1000, 5000, 50_000):
        assert same(*both, "x" + run * length + "y")


@pytest.mark.parametrize("name", ["llama2", "parts", "phi"])
def test_other_kinds_of_tokenizers_have_none(name: str, family: Callable[[str], Path]) -> None:
    assert FastEncoder.prove(Tokenizer.from_file(str(family(name) / "tokenizer.json"))) is None


def _tiny(merges: list[tuple[str, str]]) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *dict.fromkeys(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def test_a_merge_list_that_cannot_make_one_of_its_tokens_is_not_trusted() -> None:
    """`bc` is merged first, so `ab` + `c` never meet: only the fast encoder would join `a` + `bc`."""
    assert FastEncoder.prove(_tiny([("b", "c"), ("a", "b")])) is not None
    assert FastEncoder.prove(_tiny([("b", "c"), ("a", "b"), ("ab", "c")])) is None


def test_ids_in_another_order_than_the_merges() -> None:
    tokenizer = _tiny([("t", "h"), ("th", "e"), ("a", "b")])
    shuffled = {token: 999 - number for token, number in tokenizer.get_vocab().items()}
    merges = [("t", "h"), ("th", "e"), ("a", "b")]
    other = Tokenizer(models.BPE(vocab=shuffled, merges=merges))
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = FastEncoder.prove(other)
    assert fast is not None
    assert same(other, fast, "the cab and the abbot thaw")


def test_characters_are_compared_as_texts_come_to_have_them_some_at_a_time(
    family: Callable[[str], Path],
) -> None:
    """All that there are took a second, which turns waited for: none has more than a few thousand."""
    tokenizer = Tokenizer.from_file(str(family("chatml") / "tokenizer.json"))
    fast = FastEncoder.prove(tokenizer)
    assert fast is not None
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 300)))
    taken = [fast.encode(text) is not None for _ in range(4)]
    assert taken == [False, False, True, True]
    assert same(tokenizer, fast, text)


def test_text_of_characters_nobody_knows_goes_to_the_original(both: tuple[Tokenizer, FastEncoder]) -> None:
    """Another engine may know a later Unicode version; surrogates are no text at all."""
    for text in ("private \ue000", "unassigned \U000e0fff", "lone \ud800"):
        assert both[1].encode(text) is None


def test_a_trained_vocabulary_of_its_own_words() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=800, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(FRAGMENTS * 2, trainer)
    # The pattern is meant literally here, as a string to find, not as a regular expression.
    assert FastEncoder.prove(tokenizer) is None
