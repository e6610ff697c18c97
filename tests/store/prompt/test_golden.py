"""Token ids equal those a real vLLM gave for the same bodies, for every tokenizer and template family."""

from collections.abc import Callable

import pytest

from store.hashing import HashScheme, chain
from store.prompt.local import LocalPrompts
from store.prompt.request import TextPrompt, Unrenderable
from tests.store.prompt.corpus import CHAT, MESSAGES, RESPONSES, TEXT, bodies, digest, request_of
from tests.store.prompt.families import FAMILIES
from tests.store.prompt.pieces import BOS
from tests.store.prompt.record import read

SCHEME = HashScheme("sha256_cbor", 16)
# Not reproduced here, with the reason given.
LEFT_OUT = {"developer_tools": 1}


@pytest.mark.parametrize("name", FAMILIES)
def test_b018_b019_b020_tokens_equal_real_vllm(name: str, load: Callable[[str], LocalPrompts]) -> None:
    golden = read()[name]
    prompts = load(name)
    left_out: dict[str, int] = {}
    for (path, body), expected in zip(bodies(), golden, strict=True):
        try:
            prompt = prompts.prompt(request_of(path, body), SCHEME)
        except Unrenderable as why:
            if expected is not None:
                left_out[why.reason] = left_out.get(why.reason, 0) + 1
            continue
        if expected is None:  # what the engine refuses, it may refuse alone
            continue
        assert expected == digest(prompt.tokens.tolist()), body
        assert prompt.chain == chain(prompt.tokens, SCHEME, cache_salt=body.get("cache_salt"))
    assert left_out.items() <= LEFT_OUT.items()


@pytest.mark.parametrize("name", BOS)
def test_b055_a_prompt_has_the_bos_that_vllm_gives_it(name: str, load: Callable[[str], LocalPrompts]) -> None:
    """One of the text's own, one of the template's, one of the tokenizer's where the API asks for it."""
    prompts, bos = load(name), BOS[name]
    bos_id = prompts.prompt(TextPrompt(text=bos, add_special_tokens=False), SCHEME).tokens[0]
    seen: list[tuple[str, object, int]] = []
    for (path, body), expected in zip(bodies(), read()[name], strict=True):
        text = body.get("prompt") or body.get("input") or body.get("messages", [{}])[0].get("content")
        if text == f"{bos}Hello":
            tokens = prompts.prompt(request_of(path, body), SCHEME).tokens
            assert digest(tokens.tolist()) == expected, body
            seen.append((path, body.get("add_special_tokens"), int((tokens == bos_id).sum())))
    in_template = 1
    assert sorted(seen, key=str) == sorted(
        [
            *((TEXT, special, 1 + (special is not False)) for special in (None, True, False)),
            *((CHAT, special, 1 + in_template + (special is True)) for special in (None, True, False)),
            (MESSAGES, None, 1 + in_template),
            (RESPONSES, None, 2 + in_template),
        ],
        key=str,
    )


def test_the_golden_answers_cover_all_families_and_refusals() -> None:
    golden = read()
    assert set(golden) == set(FAMILIES)
    assert len(golden) >= 5
    assert all(sum(answer is not None for answer in answers) >= 300 for answers in golden.values())
    assert any(None in answers for answers in golden.values())
