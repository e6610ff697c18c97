"""What a check of the doctor found."""

from dataclasses import dataclass
from typing import Literal

Result = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. fix: what to change, if anything. warn: it works, but costs cache hits or room.

    A skip could not be decided. Only a fail fails the whole.
    """

    check: str
    result: Result
    detail: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.result:<4}  {self.check}: {self.detail}"
        return f"{text}\n      fix: {self.fix}" if self.fix else text
