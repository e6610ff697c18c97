"""Training of a byte-level BPE tokenizer, for models that are made on the spot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers


def train_byte_level(
    text: Iterable[str],
    words: str,
    vocabulary: int,
    specials: Sequence[AddedToken],
    *,
    nfc: bool = True,
) -> Tokenizer:
    """A tokenizer of at most `vocabulary` tokens that splits at the regular expression `words` first.

    With `nfc` text is normalized before, as Qwen's tokenizers do; without it, words that are tokens are
    taken whole before any merge, as Llama 3's do.
    """
    tokenizer = Tokenizer(models.BPE(ignore_merges=not nfc))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def special(*tokens: str, rstrip: bool = False) -> list[AddedToken]:
    """Tokens that text is split at as it stands; with `rstrip` they take white space behind them along."""
    return [AddedToken(token, special=True, normalized=False, rstrip=rstrip) for token in tokens]
