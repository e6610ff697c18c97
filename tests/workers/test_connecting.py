"""Why a connection came to nothing, in words, whatever the error is wrapped in; and whether waiting helps."""

import errno
import socket
import ssl

import pytest

from workers.connecting import lasts, why_not


def certificate() -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "CERTIFICATE_VERIFY_FAILED")
    error.verify_message = "self-signed certificate"
    return error


def tls(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, reason)
    error.reason = reason
    return error


def as_clients_wrap(cause: BaseException) -> BaseException:
    """As httpx and anyio do: an error of theirs from another, that from one error for each address."""
    try:
        try:
            raise ExceptionGroup("all addresses failed", [cause, OSError(errno.EHOSTUNREACH, "no route")])  # type: ignore[list-item]
        except ExceptionGroup as group:
            raise OSError("All connection attempts failed") from group
    except OSError as wrapped:
        error = RuntimeError("ConnectError")
        error.__context__ = wrapped
        return error


@pytest.mark.parametrize(
    ("cause", "said", "lasting"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "connection refused", False),
        (
            socket.gaierror(socket.EAI_NONAME, "unknown"),
            "its name has no address: unknown",
            False,
        ),
        (certificate(), "its certificate is not trusted: self-signed certificate", True),
        (tls("WRONG_VERSION_NUMBER"), "it speaks no TLS there, and its URL is https", True),
        (tls("SSLV3_ALERT_HANDSHAKE_FAILURE"), "TLS failed: sslv3 alert handshake failure", False),
        (RuntimeError("anything"), "", False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_the_error_at_the_bottom_tells_why(cause: BaseException, said: str, lasting: bool) -> None:
    for error in (cause, as_clients_wrap(cause)):
        assert why_not(error).startswith(said)
        assert bool(why_not(error)) == bool(said)
        assert lasts(error) == lasting
