"""Remove secrets from URLs before they are printed, logged or written to shared files.

redact_url("https://bob:pw@host/a.zip?sig=x")  # https://***@host/a.zip?***
redact_urls("GET https://host/a?sig=x failed")  # the same for every URL inside a text
"""

from __future__ import annotations

import re

HIDDEN = "***"
_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_PARTS = re.compile(
    r"(?P<scheme>[^:/]+://)(?P<authority>[^/?#]*)(?P<path>[^?#]*)(?P<query>\?[^#]*)?(?P<rest>#.*)?",
    re.DOTALL,
)
# A request's path in the messages of urllib3: "with url: /a.zip?sig=x".
_TARGET = re.compile(r"(\burl: /[^\s?]*)\?[^\s)]*")


def redact_url(url: str) -> str:
    """Replace user name, password, query and fragment of a URL by `***`."""
    parts = _PARTS.fullmatch(url)
    if parts is None:
        return url
    authority, path = parts["authority"], parts["path"]
    _, at, host = authority.rpartition("@")
    has_port = re.fullmatch(r"([^:\[\]]*|\[[^\]]*\])(:[0-9]*)?", host)
    if not has_port and "@" in url:
        # A password with an unescaped slash, question mark or hash: hide up to the last @.
        return redact_url(f"{parts['scheme']}{HIDDEN}@{url.rpartition('@')[2]}")
    shown = f"{parts['scheme']}{HIDDEN if at else ''}{at}{host}{path}"
    if parts["query"]:
        shown += f"?{HIDDEN}"
    if parts["rest"]:
        shown += f"#{HIDDEN}"
    return shown


def redact_urls(text: str) -> str:
    """Redact every URL that a text contains."""
    text = _URL.sub(lambda match: redact_url(match[0]), text)
    return _TARGET.sub(rf"\1?{HIDDEN}", text)
