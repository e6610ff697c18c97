"""The policy document in force and those before it: changed whole, kept on disk, never half applied."""

import asyncio
import difflib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from gateway import errors
from policies.document import BadDocument, Document, plain, read
from policies.plan import Plan

logger = logging.getLogger(__name__)

_HISTORY: Final = 100


class Version(msgspec.Struct, frozen=True):
    """`time` in Unix seconds; `document` as JSON would have it."""

    number: int
    time: float
    author: str
    comment: str
    document: dict[str, Any]

    @property
    def etag(self) -> str:
        """Of number and document: numbers begin anew where a file of versions was lost or is another."""
        return f'"{self.number}-{digest_of(self.document)}"'


def digest_of(document: dict[str, Any]) -> str:
    """12 hex digits that tell documents apart."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:12]


class _File(msgspec.Struct):
    """configured: what the settings said when it was written."""

    configured: dict[str, Any]
    versions: list[Version]


class PolicyVersions:
    """`apply` is given each plan that comes into force. `path` None: history ends with the process.

    A document set here outlives a restart, until the settings themselves name another policy: then those win.
    """

    def __init__(self, configured: Document, path: Path | None, apply: Callable[[Plan], None]) -> None:
        """Raises what a policy that can't be made raises. A file that can't be read is said, and ignored."""
        self._configured = plain(configured)
        self._path = path
        self._apply = apply
        self._changing = asyncio.Lock()
        self._versions: list[Version] = []
        plan, why = Plan(configured), ""
        if path is not None:
            plan, why = self._restored(path) or (plan, why)
        if not self._versions or plain(plan.document) != self._versions[-1].document:
            self._versions = [*self._versions, self._next(plain(plan.document), "configuration", why)]
        apply(plan)

    @property
    def current(self) -> Version:
        return self._versions[-1]

    @property
    def history(self) -> list[Version]:
        """The newest first."""
        return self._versions[::-1]

    def diff(self, version: Version) -> str:
        """What `version` changed, as lines of a unified diff; all of it for the first one."""
        at = self._versions.index(version)
        before = self._versions[at - 1].document if at else {}
        return "\n".join(difflib.unified_diff(_lines(before), _lines(version.document), lineterm="", n=1))

    async def put(self, given: object, *, author: str, comment: str, if_match: str | None = None) -> Version:
        """Bring a document into force. Raises InvalidRequest, PreconditionFailed: nothing has changed.

        if_match: as the header has it, None where there is none.
        """
        plan = plan_of(given)
        async with self._changing:
            self._check(if_match)
            return await self._change(plan, author, comment)

    async def rollback(
        self, number: int | None, *, author: str, comment: str, if_match: str | None = None
    ) -> Version:
        """Bring an earlier document into force again, as a new version; None: the one before this."""
        async with self._changing:
            self._check(if_match)
            if number is None:
                if len(self._versions) < 2:
                    raise errors.Conflict("there is no earlier version")
                found = self._versions[-2]
            else:
                found = next((v for v in self._versions if v.number == number), None)
            if found is None:
                known = ", ".join(str(v.number) for v in self._versions)
                raise errors.NotFound(f"no version {number} is kept; there are {known}", param="version")
            plan = plan_of(found.document)
            return await self._change(plan, author, comment or f"rollback to version {found.number}")

    def _check(self, if_match: str | None) -> None:
        if if_match is None:
            return
        tags = [tag for each in if_match.split(",") if (tag := each.strip())]
        if not tags:
            raise errors.InvalidRequest("If-Match names no version", param="if-match")
        if "*" not in tags and self.current.etag not in tags:
            raise errors.PreconditionFailed(
                f"the policy is at version {self.current.number} by now", headers={"etag": self.current.etag}
            )

    async def _change(self, plan: Plan, author: str, comment: str) -> Version:
        version = self._next(plain(plan.document), author, comment)
        versions = [*self._versions, version][-_HISTORY:]
        if self._path is not None:
            content = msgspec.json.format(msgspec.json.encode(_File(self._configured, versions)), indent=2)
            try:
                await asyncio.to_thread(_write, self._path, content)
            except OSError as error:
                logger.error("the policy could not be kept: %s", error)
                raise errors.InternalError("the policy can't be kept on disk; it is as it was") from None
        self._versions = versions
        self._apply(plan)
        said = [f"by {author!r}"] if author else []
        said += [repr(comment)] if comment else []
        logger.info(
            "policy version %s is in force: %s%s",
            *(version.etag.strip('"'), plan.document.policy, f" ({', '.join(said)})" if said else ""),
        )
        return version

    def _next(self, document: dict[str, Any], author: str, comment: str) -> Version:
        number = self._versions[-1].number + 1 if self._versions else 1
        return Version(number, time.time(), author, comment, document)

    def _restored(self, path: Path) -> tuple[Plan, str] | None:
        """The newest kept document that can be used, and what to say of it in the history."""
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=_File)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            logger.error(
                "the policy kept in %s can't be used, the configured one is in force: %s", path, error
            )
            return None
        self._versions = kept.versions
        if kept.configured != self._configured:
            logger.warning("the settings name another policy than before; that one is in force")
            return None
        for version in reversed(kept.versions):
            try:
                plan = Plan(read(version.document))
            except BadDocument as error:
                logger.error("version %d kept in %s can't be used: %s", version.number, path, error)
                continue
            if version is kept.versions[-1]:
                return plan, ""
            logger.warning("version %d is in force again", version.number)
            return plan, f"version {version.number}, as later ones can't be used"
        logger.error("no version kept in %s can be used; the configured policy is in force", path)
        return None


def plan_of(given: object) -> Plan:
    """Raises InvalidRequest, with the path to blame."""
    try:
        return Plan(read(given))
    except BadDocument as error:
        raise errors.InvalidRequest(str(error), param=error.path or None) from None


def _lines(document: dict[str, Any]) -> list[str]:
    return json.dumps(document, indent=2, sort_keys=True).splitlines()


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        # Else a machine that loses power may come back with the new name and nothing in the file.
        os.fsync(file.fileno())
    beside.replace(path)
