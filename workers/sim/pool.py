"""The pool side of the simulated engine: real objects through the real Mooncake store client."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast

import mooncake.store as mooncake  # pyright: ignore[reportMissingImports]
import numpy as np

from store.keys import KeyLayout

logger = logging.getLogger(__name__)

# What every call of the client answers for every key when the master cannot be reached.
_RPC_FAIL: Final = -900
_PROBE_S: Final = 0.05
# After the client refused its set-up, for whatever it has against it; each try takes a second.
_SETUP_AGAIN_S: Final = 5.0
# The client's allocators start there.
_LEAST_SEGMENT: Final = 16 << 20


class StoreClient(Protocol):
    """What is used of `mooncake.store.MooncakeDistributedStore`, which has no types of its own."""

    def setup(
        self, hostname: str, metadata: str, segment: int, buffer: int, protocol: str, device: str, master: str
    ) -> int: ...
    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def batch_put_from(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int], config: Any
    ) -> list[int]: ...
    def batch_get_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]: ...
    def remove_all(self, force: bool) -> int: ...
    def close(self) -> int: ...


class SimPool:
    """Puts, finds and loads KV blocks as a vLLM worker with the store connector does, over TCP.

    Calls block (0.2 to 10 ms) and come from one thread at a time, not from an event loop. They never raise:
    without a master everything is a miss and nothing is stored, and they work again when it is back. What an
    earlier master knew is then lost, the worker's own segment is mounted again by the client.

    segment: name of the own segment, `IP:PORT`, where blocks of this worker go while there is room.
    block_bytes: size of one object; a block is one object for each key of the layout.
    segment_bytes: memory given to the pool, at least 16 MiB (ValueError).
    """

    def __init__(
        self,
        master: str,
        segment: str,
        layout: KeyLayout,
        *,
        block_bytes: int = 16 << 10,
        segment_bytes: int = 64 << 20,
    ) -> None:
        if segment_bytes < _LEAST_SEGMENT:
            raise ValueError(f"a segment has at least {_LEAST_SEGMENT} bytes, not {segment_bytes}")
        host, _, port = master.rpartition(":")
        self._master: Final = (host, int(port))
        self._segment: Final = segment
        self._segment_bytes: Final = segment_bytes
        self._layout: Final = layout
        # Every object is written from and read into this one block: the simulation has no use for the bytes.
        self._block = np.zeros(block_bytes, dtype=np.uint8)
        self._replicate = cast(Any, mooncake).ReplicateConfig()
        self._replicate.preferred_segment = segment
        self._store: StoreClient | None = None
        self._reachable = True
        self._setup_at = 0.0
        self._lock = threading.Lock()

    @property
    def block_bytes(self) -> int:
        return self._block.nbytes

    def connect(self) -> bool:
        """Mounts the segment now instead of at the first call. False when the master does not answer."""
        with self._lock:
            return self._client() is not None

    def exists(self, digests: Sequence[bytes]) -> list[bool]:
        """Whether each block is complete in the pool. Takes leases, as vLLM's look-up does."""
        return self._per_block(digests, _find, lambda code: code == 1)

    def prefix(self, digests: Sequence[bytes]) -> int:
        """How many leading blocks are complete in the pool."""
        found = self.exists(digests)
        return found.index(False) if False in found else len(found)

    def put(self, digests: Sequence[bytes]) -> list[bool]:
        """Stores the blocks that are not there yet. True for each that this call stored."""
        missing = [digest for digest, there in zip(digests, self.exists(digests), strict=True) if not there]
        address, size = self._block.ctypes.data, self._block.nbytes

        def write(store: StoreClient, keys: list[str]) -> list[int]:
            return store.batch_put_from(keys, [address] * len(keys), [size] * len(keys), self._replicate)

        stored = dict(zip(missing, self._per_block(missing, write, lambda code: code == 0), strict=True))
        return [stored.pop(digest, False) for digest in digests]

    def get(self, digests: Sequence[bytes]) -> list[bool]:
        """Loads the blocks, over the network unless they lie in the own segment. False: not loaded."""
        address, size = self._block.ctypes.data, self._block.nbytes

        def read(store: StoreClient, keys: list[str]) -> list[int]:
            return store.batch_get_into(keys, [address] * len(keys), [size] * len(keys))

        return self._per_block(digests, read, lambda code: code == size)

    def clear(self) -> None:
        """Empties the pool for every worker, as a reset with `reset_external=true` does."""
        with self._lock:
            store = self._client()
            if store is not None:
                store.remove_all(True)

    def close(self) -> None:
        """Unmounts the segment; its blocks are gone then. Takes 2 s, in which the client's threads end."""
        with self._lock:
            if self._store is not None and self._answers():
                self._store.close()
            self._store = None

    def _per_block(
        self,
        digests: Sequence[bytes],
        call: Callable[[StoreClient, list[str]], list[int]],
        good: Callable[[int], bool],
    ) -> list[bool]:
        """One batch over all keys of all blocks; a block is good when all its keys are."""
        if not digests:
            return []
        keys = [key for digest in digests for key in self._layout.keys(digest)]
        with self._lock:
            codes = self._call(call, keys)
        each = len(keys) // len(digests)
        return [all(map(good, codes[at : at + each])) for at in range(0, len(keys), each)]

    def _call(self, call: Callable[[StoreClient, list[str]], list[int]], keys: list[str]) -> list[int]:
        store = self._client()
        if store is None:
            return [_RPC_FAIL] * len(keys)
        codes = call(store, keys)
        self._reachable = _RPC_FAIL not in codes
        return codes

    def _client(self) -> StoreClient | None:
        """The client, or None while the master is away: its calls would then take 4.3 s each (measured)."""
        if (not self._reachable or self._store is None) and not self._answers():
            return None
        if self._store is None and time.monotonic() >= self._setup_at:
            self._store = self._connected()
            self._setup_at = time.monotonic() + _SETUP_AGAIN_S
        return self._store

    def _answers(self) -> bool:
        try:
            with socket.create_connection(self._master, timeout=_PROBE_S):
                return True
        except OSError:
            return False

    def _connected(self) -> StoreClient | None:
        store = cast(StoreClient, cast(Any, mooncake).MooncakeDistributedStore())
        host, port = self._master
        code = store.setup(
            self._segment,
            "P2PHANDSHAKE",
            self._segment_bytes,
            max(_LEAST_SEGMENT, 2 * self._block.nbytes),
            "tcp",
            "",
            f"{host}:{port}",
        )
        if code != 0:
            logger.warning("no pool: the store client answers %d at set-up", code)
            return None
        if (code := store.register_buffer(self._block.ctypes.data, self._block.nbytes)) != 0:
            logger.warning("no pool: the store client answers %d to its buffer", code)
            store.close()
            return None
        return store


def _find(store: StoreClient, keys: list[str]) -> list[int]:
    return store.batch_is_exist(keys)
