"""Connecting to workers: which certificates are believed, and in words why it came to nothing."""

import os
import socket
import ssl
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, cast

# As OpenSSL calls an answer that is none of TLS.
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST")


class BadAuthorities(ValueError):
    """The file of authorities can't be used; the message says why."""


def trusting(ca_file: str = "") -> ssl.SSLContext:
    """What https:// workers are verified by: `ca_file` (PEM), or what this system trusts.

    Raises BadAuthorities.
    """
    with _readable(ca_file):
        return ssl.create_default_context(cafile=ca_file or None)


class Authorities:
    """What https:// workers are verified by, and by whose file. `context` stays the same object."""

    def __init__(self, file: str = "") -> None:
        """Raises BadAuthorities."""
        self.file: Final = file
        self._stamp = _stamp(file)
        self.context: Final = trusting(file)

    def renew(self) -> bool:
        """Verify also by what the file holds by now; False: it is as it was. Raises BadAuthorities.

        What it held before is believed on: OpenSSL forgets no authority.
        """
        stamp = _stamp(self.file)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        with _readable(self.file):
            self.context.load_verify_locations(self.file)
        return True


@contextmanager
def _readable(file: str) -> Generator[None]:
    try:
        yield
    except ssl.SSLError:
        raise BadAuthorities(f"{file}: holds no certificate in PEM form") from None
    except OSError as error:
        raise BadAuthorities(f"{file}: {error.strerror or 'cannot be read'}") from None


def _stamp(file: str) -> tuple[int, int, int] | None:
    """Of its content, followed through links: another one where it is another. None: it is not there."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def in_url(host: str) -> str:
    """`host` as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def why_not(error: BaseException) -> str:
    """What kept a connection from being made, by what is at the bottom of `error`; "" if nothing tells."""
    return next((said for cause in reversed(_causes(error)) if (said := _said(cause))), "")


def lasts(error: BaseException) -> bool:
    """Whether what kept a connection from being made is nothing that waiting mends: wrong TLS, or none."""
    tls = next((cause for cause in _causes(error) if isinstance(cause, ssl.SSLError)), None)
    return isinstance(tls, ssl.SSLCertVerificationError) or (tls is not None and tls.reason in _NO_TLS)


def _causes(error: BaseException) -> list[BaseException]:
    """`error`, what it came from, and so on down; of a group (one for each address of a name) the first."""
    causes = [error]
    while True:
        last = causes[-1]
        cause = last.__cause__ or last.__context__
        if cause is None and isinstance(last, BaseExceptionGroup):
            cause = cast("BaseExceptionGroup[BaseException]", last).exceptions[0]
        if cause is None:
            return causes
        causes.append(cause)


def _said(error: BaseException) -> str:
    """What `error` itself tells, in words for operators."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        if error.reason in _NO_TLS:
            return "it speaks no TLS there, and its URL is https"
        return f"TLS failed: {(error.reason or 'no reason given').lower().replace('_', ' ')}"
    if isinstance(error, socket.gaierror):
        return f"its name has no address: {error.strerror}"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return ""
