"""Reading one field of a multipart form where it lies, without taking the form apart."""

import re

_BOUNDARY = re.compile(
    rb'^multipart/form-data\s*;.*?\bboundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE
)
_NAME = re.compile(rb'^content-disposition:\s*form-data\s*;(?:.*?;)?\s*name="?([^";\r\n]*)"?', re.I | re.M)
# A part's own header lines; no field of an API has longer ones.
_HEAD_BYTES = 8192
# Workers' own parser takes no more.
_MOST_PARTS = 1000


def field_span(body: bytes, content_type: bytes, name: bytes) -> tuple[int, int] | None:
    """Where the value of the field `name` begins and ends in `body`; None if there is no such field.

    Files are stepped over with one search each, so a large one costs no copy.
    """
    found = _BOUNDARY.match(content_type)
    if found is None:
        return None
    delimiter = b"--" + (found[1] or found[2])
    at = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter) + 2
    for _ in range(_MOST_PARTS):
        head = body.find(b"\r\n", at) if at >= 0 else -1
        if head < 0:
            return None
        end_of_head = body.find(b"\r\n\r\n", head, head + _HEAD_BYTES)
        end = body.find(b"\r\n" + delimiter, head)
        if end_of_head < 0 or end < 0:
            return None
        named = _NAME.search(body, head, end_of_head + 2)
        if named is not None and named[1] == name and end_of_head + 4 <= end:
            return end_of_head + 4, end
        at = end + 2
    return None
