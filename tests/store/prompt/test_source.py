"""Loading once, remembering failures, and leaving the event loop free."""

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from store.hashing import HashScheme
from store.prompt.fast import FastEncoder
from store.prompt.local import LocalPrompts
from store.prompt.request import ChatPrompt, TextPrompt, TokensPrompt, Unrenderable
from store.prompt.source import PromptSource, PromptStatus
from tests.clock import once_in_time, unhindered
from tests.store.prompt.pieces import user

SCHEME = HashScheme("sha256_cbor", 16)


async def test_all_who_ask_while_it_loads_share_one_load(
    family: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    real = LocalPrompts.load.__func__  # type: ignore[attr-defined]

    def counted(cls: type[LocalPrompts], tokenizer: str, *, cache_bytes: int) -> LocalPrompts:
        loads.append(tokenizer)
        return real(cls, tokenizer, cache_bytes=cache_bytes)

    monkeypatch.setattr(LocalPrompts, "load", classmethod(counted))
    source = PromptSource(str(family("chatml")))
    assert source.status().state == "loading"
    requests = [source.prompt(ChatPrompt(messages=[user(f"hi {n}")]), SCHEME) for n in range(8)]
    assert len({prompt.tokens.tobytes() for prompt in await asyncio.gather(*requests)}) == 8
    assert len(loads) == 1
    assert source.status().state == "ready"
    await source.close()


_THREADS = """
import asyncio, os, sys
from store.hashing import HashScheme
from store.prompt.request import ChatPrompt
from store.prompt.source import PromptSource

async def main():
    source = PromptSource(sys.argv[1])
    messages = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    await source.prompt(ChatPrompt(messages=messages), HashScheme("sha256_cbor", 16))
    print(len(os.listdir("/proc/self/task")))

asyncio.run(main())
"""


def test_short_texts_do_not_wait_for_long_ones_in_a_pool_of_the_tokenizer(
    family: Callable[[str], Path],
) -> None:
    """Whose threads take what comes last last: a short text waited 6 s there."""

    def threads(**more: str) -> int:
        env = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"} | more
        argv = [sys.executable, "-c", _THREADS, str(family("chatml"))]
        return int(subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout)

    assert threads() < threads(TOKENIZERS_PARALLELISM="true")


async def test_a_caller_that_gives_up_does_not_end_the_load(family: Callable[[str], Path]) -> None:
    source = PromptSource(str(family("chatml")))
    hurried = asyncio.create_task(source.prompt(TextPrompt(text="x"), SCHEME))
    patient = asyncio.create_task(source.prompt(TextPrompt(text="x"), SCHEME))
    await asyncio.sleep(0)
    hurried.cancel()
    assert len((await patient).tokens) == 1
    await source.close()


async def test_b056_a_failed_load_is_remembered_and_tried_again_later(
    tmp_path: Path, family: Callable[[str], Path]
) -> None:
    path = tmp_path / "model"
    source = PromptSource(str(path), retry_delay_s=2.0)
    for _ in range(2):
        with pytest.raises(Unrenderable, match="tokenizer_unavailable"):
            await source.prompt(TextPrompt(text="x"), SCHEME)
    assert source.status().state == "failed"
    path.symlink_to(family("chatml"))
    with pytest.raises(Unrenderable):
        await source.prompt(TextPrompt(text="x"), SCHEME)
    await asyncio.sleep(2.0)
    assert len((await source.prompt(TextPrompt(text="x"), SCHEME)).tokens) == 1
    assert source.status().state == "ready"
    await source.close()


async def test_a_model_without_template_says_so_for_chats_only(
    tmp_path: Path, family: Callable[[str], Path]
) -> None:
    for file in family("chatml").iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    source = PromptSource(str(tmp_path))
    with pytest.raises(Unrenderable, match="no_template"):
        await source.prompt(ChatPrompt(messages=[user("q")]), SCHEME)
    assert len((await source.prompt(TextPrompt(text="x"), SCHEME)).tokens) == 1
    await source.close()


async def test_the_loop_stays_free_while_long_prompts_are_tokenized(family: Callable[[str], Path]) -> None:
    source = PromptSource(str(family("chatml")))
    await source.prompt(TextPrompt(text="x"), SCHEME)
    texts = itertools.count()

    async def tokenized() -> list[tuple[float, float]]:
        long = [
            ChatPrompt(messages=[user(f"{next(texts)} " + "some words of code(x) = 12;\n" * 8_000)] * 2)
            for _ in range(4)
        ]
        gaps: list[float] = []

        async def watch() -> None:
            while True:
                before = unhindered()
                await asyncio.sleep(0)
                gaps.append(unhindered() - before)

        began = unhindered()
        watcher = asyncio.create_task(watch())
        prompts = await asyncio.gather(*(source.prompt(request, SCHEME) for request in long))
        watcher.cancel()
        assert all(len(prompt.tokens) > 50_000 for prompt in prompts)
        # One of them on the loop would hold it for a quarter of the time.
        return [(max(gaps), (unhindered() - began) / 6)]

    await once_in_time(tokenized)
    await source.close()


async def test_ids_are_taken_as_they_are(family: Callable[[str], Path]) -> None:
    source = PromptSource(str(family("chatml")))
    prompt = await source.prompt(TokensPrompt(ids=[1, 2, 3]), SCHEME)
    assert (prompt.tokens.tolist(), prompt.source) == ([1, 2, 3], "ids")
    for bad in ([-1], [2**33]):
        with pytest.raises(Unrenderable, match="invalid"):
            await source.prompt(TokensPrompt(ids=bad), SCHEME)
    await source.close()
    status = source.status()
    assert (status.state, status.detail) == ("ready", "")


async def test_the_fast_encoder_is_made_with_the_load_and_not_beside_turns(
    family: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it was looked for once much had been tokenized, the first agents of a gateway waited for it."""
    made: list[PromptStatus] = []
    prove = FastEncoder.prove.__func__  # type: ignore[attr-defined]

    def noted(cls: type[FastEncoder], tokenizer: Tokenizer) -> FastEncoder | None:
        made.append(source.status())
        return prove(cls, tokenizer)

    monkeypatch.setattr(FastEncoder, "prove", classmethod(noted))
    source = PromptSource(str(family("chatml")))
    source.prepare()
    await source.settled()
    assert source.status().state == "ready"
    for number in range(3):
        text = " ".join(str(number * 300_000 + each) for each in range(50_000))
        await source.prompt(TextPrompt(text=text), SCHEME)
    source.prepare()
    await source.settled()
    assert [each.state for each in made] == ["loading"]
    await source.close()


AFTER_A_LOAD = """
import asyncio, ctypes, sys
from pathlib import Path
from store.prompt.source import PromptSource

def megabytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

async def main():
    source = PromptSource(sys.argv[1])
    await source.loaded()
    before = megabytes()
    ctypes.CDLL(None).malloc_trim(0)
    print(before - megabytes())

asyncio.run(main())
"""


def test_memory_that_making_an_encoder_took_is_given_back(tmp_path: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(itertools.product(letters, repeat=2))
    tokens = [*letters, *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    done = subprocess.run(
        [sys.executable, "-c", AFTER_A_LOAD, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout) < 20
