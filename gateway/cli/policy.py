"""`moongate policy`: the policy document of a running gateway."""

import getpass
import json
import sys
import time
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.options import ConfigOption, TokenOption, UrlOption, fail, running

policy = typer.Typer(name="policy", help="Read and change the policy of a running gateway.")

File = Annotated[str, typer.Argument(help="File with a policy document, JSON or TOML, or - for stdin.")]
Comment = Annotated[str, typer.Option("--comment", help="Why, for the history.")]
IfMatch = Annotated[str, typer.Option("--if-match", help="Only if this version is in force: its number.")]


@policy.command()
def get(url: UrlOption = None, admin_token: TokenOption = None, config: ConfigOption = None) -> None:
    """Print the document in force; its version goes to standard error."""
    found = _ask("GET", "", url, admin_token, config)
    print(f"version {found['version']} by {found['author'] or 'unknown'}", file=sys.stderr)
    print(json.dumps(found["document"], indent=2))


@policy.command()
def put(
    file: File,
    comment: Comment = "",
    if_match: IfMatch = "",
    url: UrlOption = None,
    admin_token: TokenOption = None,
    config: ConfigOption = None,
) -> None:
    """Bring a document into force at once; turns under way end as they were placed."""
    document = _document(file)
    found = _ask("PUT", "", url, admin_token, config, json=document, params=_why(comment), if_match=if_match)
    print(f"version {found['version']} is in force")
    for warning in _ask("POST", "/validate", url, admin_token, config, json=document)["warnings"]:
        print(f"warning: {warning}")


@policy.command()
def validate(
    file: File, url: UrlOption = None, admin_token: TokenOption = None, config: ConfigOption = None
) -> None:
    """Check a document, and try it on the last decisions. Changes nothing."""
    found = _ask("POST", "/validate", url, admin_token, config, json=_document(file))
    print("the document is valid")
    for warning in found["warnings"]:
        print(f"warning: {warning}")
    recent = found["recent"]
    if recent["turns"]:
        moved = f"of the last {recent['turns']} turns it would have moved {recent['changed']}"
        before, after = recent["predicted_ttft_ms_before"], recent["predicted_ttft_ms_after"]
        print(f"{moved}: expected time to first token {before:.1f} -> {after:.1f} ms,")
        print(f"tokens to compute {recent['uncached_tokens_before']} -> {recent['uncached_tokens_after']}")
    else:
        print("before and after are not compared: there is no turn lately that both policies could place")
    if found["not_judged"]:
        print(f"warning: {found['not_judged']} of the last turns are not judged: headers were not kept then")
    if recent["unplaced"]:
        print(f"warning: {recent['unplaced']} of the last turns would have been turned away: nobody may")
    if recent["failed"]:
        print(f"warning: the policy failed for {recent['failed']} of the last turns: {recent['fault']}")


@policy.command()
def history(url: UrlOption = None, admin_token: TokenOption = None, config: ConfigOption = None) -> None:
    """The versions there were, with what each changed; the newest first."""
    for version in _ask("GET", "/history", url, admin_token, config)["versions"]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(version["time"]))
        print(f"version {version['version']}  {when}  {version['author']}  {version['comment']}".rstrip())
        for line in version["diff"].splitlines()[2:]:
            print(f"  {line}")


@policy.command()
def rollback(
    version: Annotated[int | None, typer.Argument(help="Default: the one before the present.")] = None,
    comment: Comment = "",
    if_match: IfMatch = "",
    url: UrlOption = None,
    admin_token: TokenOption = None,
    config: ConfigOption = None,
) -> None:
    """Bring an earlier version's document into force again."""
    body = {} if version is None else {"version": version}
    found = _ask(
        "POST", "/rollback", url, admin_token, config, json=body, params=_why(comment), if_match=if_match
    )
    print(f"version {found['version']} is in force: {found['comment']}")


def _ask(
    method: str,
    path: str,
    url: str | None,
    admin_token: str | None,
    config: Path | None,
    *,
    json: Any = None,
    params: dict[str, str] | None = None,
    if_match: str = "",
) -> Any:
    from gateway.cli.remote import RemoteError

    try:
        with running(url, admin_token, config) as gateway:
            etag = ""
            if if_match:
                now, tag = gateway.tagged("/admin/v1/policy")
                etag = tag if str(now["version"]) == if_match else f'"{if_match}"'
            return gateway.ask(method, "/admin/v1/policy" + path, json=json, params=params, etag=etag)
    except RemoteError as error:
        fail(str(error), 1)


def _why(comment: str) -> dict[str, str]:
    try:
        author = getpass.getuser()
    except (KeyError, OSError):
        author = ""
    return {"author": author, "comment": comment}


def _document(file: str) -> Any:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{file}: {error}", 1)
    try:
        return json.loads(text)
    except ValueError as fault:
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            of = f"JSON: {fault}" if text.lstrip().startswith("{") else f"TOML: {error}"
            fail(f"{file}: not valid {of}", 1)
