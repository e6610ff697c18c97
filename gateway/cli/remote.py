"""Talking to a running gateway's admin API, for the commands that look at it from outside."""

from collections.abc import Sequence
from typing import Any

import httpx

from workers.connecting import trusting, why_not

_WHERE = "start it with `moongate serve`, or say with --url where it listens"
# As the gateway has it; without importing that for it.
_WRONG_PORT = "not served on this port"
_ADMIN_PORT = "admin has a port of its own there (admin.port): give that one with --url"
_TOKEN = "give the admin token with --admin-token or MOONGATE_ADMIN__TOKEN"  # noqa: S105


class RemoteError(Exception):
    """The gateway could not be asked: why, and in `fix` what to do."""

    def __init__(self, why: str, fix: str = "") -> None:
        super().__init__(f"{why}; {fix}" if fix else why)
        self.why = why
        self.fix = fix


def base_url(given: str) -> str:
    """A gateway's address as people write it: the scheme may be missing, a client's `/v1` may be there."""
    url = given.rstrip("/").removesuffix("/v1").rstrip("/")
    return url if "://" in url else f"http://{url}"


class RunningGateway:
    """One running gateway at `url`; `token` is its admin token. Use as a context manager."""

    def __init__(self, url: str, token: str, timeout_s: float = 30.0) -> None:
        self.url = base_url(url)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        try:
            self._client = httpx.Client(
                timeout=timeout_s, headers=headers, verify=trusting(), trust_env=False
            )
        except UnicodeEncodeError:
            raise RemoteError("the admin token has characters that no header can carry") from None

    def __enter__(self) -> "RunningGateway":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str) -> Any:
        """The JSON answer of `path`. Raises RemoteError."""
        return self._json(self._ask("GET", path))

    def explain(
        self, body: bytes, api: str = "", key: str = "", headers: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Where `body` would go, sent with the key of that name and those headers. Raises RemoteError."""
        params = [(name, said) for name, said in (("api", api), ("key", key)) if said]
        params += [("header", header) for header in headers]
        return self._json(self._ask("POST", "/admin/v1/explain", content=body, params=params))

    def ask(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: dict[str, str] | None = None,
        etag: str = "",
    ) -> Any:
        """The JSON answer of `path`; `etag` goes as If-Match. Raises RemoteError."""
        headers = {"if-match": etag} if etag else {}
        more = {} if json is None else {"json": json}
        return self._json(self._ask(method, path, params=params or {}, headers=headers, **more))

    def tagged(self, path: str) -> tuple[Any, str]:
        """The JSON answer of `path` and its ETag. Raises RemoteError."""
        answer = self._ask("GET", path)
        return self._json(answer), answer.headers.get("etag", "")

    def add_worker(self, url: str, segment: str) -> bool:
        """Register a worker; False where it was registered already. Raises RemoteError.

        segment: its share of the pool, `IP:PORT`.
        """
        asked = {"url": url, "segment": segment}
        return self._ask("POST", "/admin/v1/workers", accept=409, json=asked).status_code != 409

    def remove_worker(self, name: str, comment: str) -> None:
        """End a worker's registration; one that is not registered is fine. Raises RemoteError.

        comment: why, for the gateway's log.
        """
        self._ask("DELETE", f"/admin/v1/workers/{name}", accept=404, params={"comment": comment})

    def _json(self, answer: httpx.Response) -> Any:
        try:
            return answer.json()
        except ValueError:
            raise RemoteError(f"what answers at {self.url} is no gateway", _WHERE) from None

    def _ask(self, method: str, path: str, accept: int = 0, **more: Any) -> httpx.Response:
        try:
            answer = self._client.request(method, self.url + path, **more)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = why_not(error) or type(error).__name__
            raise RemoteError(f"no gateway answers at {self.url} ({why})", _WHERE) from None
        if answer.is_success or answer.status_code == accept:
            return answer
        said = _message(answer)
        if said == _WRONG_PORT:
            fix = _ADMIN_PORT
        else:
            fix = _TOKEN if answer.status_code == 401 else _WHERE if said is None else ""
        raise RemoteError(f"{path} answered {answer.status_code}: {said or answer.reason_phrase}", fix)


def _message(answer: httpx.Response) -> str | None:
    """What a gateway says of its error; None where something else answered."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None
