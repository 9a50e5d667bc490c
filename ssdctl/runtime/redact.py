"""Remove secrets from URLs before they are printed, logged or written to shared files.

redact_url("https://bob:pw@host/a.zip?sig=x")  # https://***@host/a.zip?***
redact_urls("GET https://host/a?sig=x failed")  # the same for every URL inside a text
redact_arguments(["--set", "kubernetes.env=TOKEN=x"])  # and the values of variables
"""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "***"
_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_PARTS = re.compile(
    r"(?P<scheme>[^:/]+://)(?P<address>[^?#]*)(?P<query>\?[^#]*)?(?P<fragment>#.*)?", re.DOTALL
)
_HOST = re.compile(r"([^:/\[\]]*|\[[^\]/]*\])(:[0-9]+)?(/|$)")
_MODEL = re.compile(r"[^@:/]*/[^@:]*(@|:?$)")  # org/name@revision is not user@host
# A list of variables: `kubernetes.env=A=1,B=2`, or SSDCTL_KUBERNETES__ENV.
_VARIABLES = re.compile(r"(kubernetes[._]+env\s*=)(.*)", re.IGNORECASE | re.DOTALL)
_SECRET_NAME = re.compile(
    r"([\w.-]*(?:token|secret|passw|pwd|api_?-?key|access_?-?key|credential)[\w.-]*=)(.*)",
    re.IGNORECASE | re.DOTALL,
)
# A request's path in the messages of urllib3: "with url: /a.zip?sig=x".
_TARGET = re.compile(r"(\burl: /[^\s?]*)\?[^\s)]*")


def redact_url(url: str) -> str:
    """Replace user name, password, query and fragment of a URL by `***`.

    Passwords with unescaped characters are hidden, too: everything up to the last @ of the path.
    """
    parts = _PARTS.fullmatch(url)
    if parts is None:
        return url
    scheme, address = parts["scheme"], parts["address"]
    if scheme.lower() == "hf://" and _MODEL.match(address):
        return url
    _, at, host = address.rpartition("@")
    is_valid = _HOST.match(host) is not None
    if not is_valid and "@" in url[len(scheme) + len(address) :]:  # a password with ? or #
        return redact_url(f"{scheme}{HIDDEN}@{url.rpartition('@')[2]}")
    query = f"?{HIDDEN}" if parts["query"] else ""
    fragment = f"#{HIDDEN}" if parts["fragment"] else ""
    return f"{scheme}{HIDDEN if at else ''}{at}{host}{query}{fragment}"


def redact_urls(text: str) -> str:
    """Redact every URL that a text contains."""
    text = _URL.sub(lambda match: redact_url(match[0]), text)
    return _TARGET.sub(rf"\1?{HIDDEN}", text)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Redact a command line: URLs, values of `kubernetes.env`, and of names as API_TOKEN."""
    return [_redact_argument(argument) for argument in arguments]


def _redact_argument(argument: str) -> str:
    if variables := _VARIABLES.search(argument):
        start = argument[: variables.end(1)]
        names = [part.partition("=") for part in variables[2].split(",")]
        return start + ",".join(f"{name}={HIDDEN}" if eq else HIDDEN for name, eq, _ in names)
    return redact_urls(_SECRET_NAME.sub(rf"\1{HIDDEN}", argument))
