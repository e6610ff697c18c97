"""Who may do what: the admin token, clients' API keys, and the guard in front of everything."""

import hashlib
import hmac
import ipaddress
import posixpath
import re
import secrets
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import ApiError, Forbidden, NotFound, Unauthorized, send_error

Caller = Literal["admin", "client", "anonymous"]
RawHeaders = Collection[tuple[bytes, bytes]]

_OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
# Headers a reverse proxy adds: with one of them the peer's address is not the caller's.
_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip"})
_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})


class BadKeysFile(ValueError):
    """The keys file can't be used; the message says why and quotes no key."""


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


@dataclass(frozen=True, slots=True)
class ClientKey:
    """name: what a key may be called in logs and documents. tenant: whose it is, "" if that is not said."""

    name: str = ""
    tenant: str = ""


NO_KEY = ClientKey()


class ClientKeys:
    """The keys clients may use. None configured: everybody may.

    Only digests are kept, and looked up by digest, so the time of a look-up says nothing about a key.
    """

    def __init__(self, lines: Iterable[str] = ()) -> None:
        """Of each of `lines` the first word is a key; `name=` and `tenant=` may follow. Raises ValueError."""
        self._digests = dict(map(_read, lines))

    @classmethod
    def load(cls, file: str) -> "ClientKeys":
        """Keys of `file`, one a line, with `name=NAME` and `tenant=TENANT` behind if there are such.

        Blank lines and those that begin with # do not count.

        "" means no keys. Raises BadKeysFile; a file without any key is one, since it would open the gate.
        """
        if not file:
            return cls()
        try:
            lines = [line.strip() for line in Path(file).read_text("utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise BadKeysFile(f"{file}: cannot be read ({type(error).__name__})") from None
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise BadKeysFile(f"{file}: holds no key")
        try:
            return cls(keys)
        except ValueError as error:
            raise BadKeysFile(f"{file}: {error}") from None

    @property
    def required(self) -> bool:
        return bool(self._digests)

    def find(self, key: bytes) -> ClientKey | None:
        return self._digests.get(_digest(key))

    def named(self, name: str) -> ClientKey | None:
        """The first key that is called so."""
        return next((key for key in self._digests.values() if key.name == name), None)


def _read(line: str) -> tuple[bytes, ClientKey]:
    key, *rest = line.split()
    said: dict[str, str] = {}
    for word in rest:
        name, _, value = word.partition("=")
        if name not in ("name", "tenant") or not value:
            raise ValueError("only name=NAME and tenant=TENANT may follow a key")
        said[name] = value
    digest = _digest(key.encode())
    return digest, ClientKey(said.get("name") or f"sha256:{digest.hex()[:12]}", said.get("tenant", ""))


def _to_stderr(line: str) -> None:
    # Without a place to write it to, admin is nobody's; turns can be answered.
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class AdminToken:
    """The one token of the admin API. With a generated one, admin answers to this machine only."""

    def __init__(self, configured: str = "", announce: Callable[[str], None] = _to_stderr) -> None:
        self.generated = not configured
        token = configured or secrets.token_urlsafe(24)
        self._digest = _digest(token.encode())
        if self.generated:
            announce(f"admin token (made for this run, shown once, this machine only): {token}")

    def is_(self, credential: bytes) -> bool:
        """Compared in constant time."""
        return hmac.compare_digest(self._digest, _digest(credential))


def credentials(headers: RawHeaders) -> list[bytes]:
    """What the caller shows, in `Authorization: Bearer` or `x-api-key`, both alike and repeated or not."""
    found: list[bytes] = []
    if _CREDENTIALS.isdisjoint(map(bytes.lower, dict(headers))):
        return found
    for name, value in headers:
        lowered = name.lower()
        if lowered == b"x-api-key":
            found.append(value.strip())
        elif lowered == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                found.append(rest.strip())
    return [value for value in found if value]


def is_admin_path(path: str) -> bool:
    """Whether `path` means /admin under any spelling: encoded (repeatedly), doubled slashes, dots, case."""
    # What is neither encoded nor has the word in it can't come to mean it; nearly every request is that.
    if "%" not in path and "admin" not in path.casefold():
        return False
    for _ in range(4):
        decoded = unquote(path)
        if decoded == path:
            break
        path = decoded
    path = re.sub(r"[/\\]+", "/", "/" + path)
    first = posixpath.normpath(path).split("/")[1].split(";")[0]
    return first.strip().casefold() == "admin"


def _comes_from_here(scope: Scope) -> bool:
    client = scope.get("client")
    if not client or any(name.lower() in _FORWARDED for name, _ in scope["headers"]):
        return False
    return is_loopback(client[0])


def is_loopback(host: str) -> bool:
    """Whether that is an address of this machine for itself, also one of IPv4 in IPv6."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def is_preflight(method: str, fields: Mapping[bytes, bytes]) -> bool:
    """Whether a browser asks by CORS what a page may send; such a request has no body."""
    return (
        method == "OPTIONS"
        and b"access-control-request-method" in fields
        and b"transfer-encoding" not in fields
        and fields.get(b"content-length", b"0") == b"0"
    )


class Guard:
    """ASGI layer that lets nobody in without the right credential, and notes in the scope who came.

    `scope["state"]["caller"]` is "admin", "client" or "anonymous" for whatever stands behind, and "key" the
    ClientKey that was shown.
    admin_port: where /admin answers, and nothing but it and the probes; 0 means on every port.
    """

    def __init__(self, app: ASGIApp, admin: AdminToken, clients: ClientKeys, admin_port: int = 0) -> None:
        self._app = app
        self._admin = admin
        self._clients = clients
        self._admin_port = admin_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            try:
                state = scope.setdefault("state", {})
                state["caller"], state["key"] = self.admit(scope)
            except ApiError as error:
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": 1008})
                else:
                    await send_error(error, scope, send)
                return
        await self._app(scope, receive, send)

    def admit(self, scope: Scope) -> tuple[Caller, ClientKey]:
        """Who the caller is, by which key. Raises Unauthorized, Forbidden, or NotFound on the wrong port."""
        path: str = scope["path"]
        is_admin_path_ = is_admin_path(path)
        self._check_port(scope, is_admin_path_ or path in _OPEN_PATHS, is_admin_path_)
        shown = credentials(scope["headers"])
        caller: Caller = "anonymous"
        key = NO_KEY
        if shown:
            key = next((key for credential in shown if (key := self._clients.find(credential))), NO_KEY)
        if shown and any(self._admin.is_(credential) for credential in shown):
            caller = "admin" if not self._admin.generated or _comes_from_here(scope) else "anonymous"
        elif key.name:
            caller = "client"
        if is_admin_path_:
            self._check_admin(scope, caller, shown)
        elif caller == "anonymous" and self._wants_key(scope):
            raise Unauthorized(
                "the API key is not known" if shown else "an API key is needed: Authorization: Bearer KEY",
                headers={"www-authenticate": "Bearer"},
            )
        return caller, key

    def _wants_key(self, scope: Scope) -> bool:
        """A browser asks without one whether a page may send it."""
        if not self._clients.required or scope["path"] in _OPEN_PATHS:
            return False
        return not is_preflight(scope["method"], dict(scope["headers"]))

    def _check_admin(self, scope: Scope, caller: Caller, shown: list[bytes]) -> None:
        if caller == "admin":
            return
        if self._admin.generated and not _comes_from_here(scope):
            raise Forbidden("admin answers to this machine only, until admin.token is configured")
        if caller == "client":
            raise Forbidden("client keys are not for admin")
        raise Unauthorized(
            "the admin token is not right" if shown else "the admin token is needed",
            headers={"www-authenticate": "Bearer"},
        )

    def _check_port(self, scope: Scope, allowed_on_admin_port: bool, is_admin: bool) -> None:
        if not self._admin_port:
            return
        server = scope.get("server")
        on_admin_port = bool(server) and server[1] == self._admin_port
        if is_admin != on_admin_port and not (on_admin_port and allowed_on_admin_port):
            raise NotFound("not served on this port")
