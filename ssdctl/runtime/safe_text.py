"""Text that is safe to print, log and share: without secrets, control characters or markup.

redact_url("https://bob:pw@host/a.zip?sig=x")  # https://***@host/a.zip?***
redact_urls("GET https://host/a?sig=x failed")  # the same for every URL inside a text
redact_arguments(["--set", "kubernetes.env=TOKEN=x"])  # and the values of variables
"""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

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

# Control characters (C0, DEL, C1) but tab and newline, line separators, direction overrides,
# surrogates, invisible tags.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    "\ud800-\udfff\ufeff\U000e0000-\U000e007f]"
)


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

    def redact(argument: str) -> str:
        if variables := _VARIABLES.search(argument):
            names = [part.partition("=") for part in variables[2].split(",")]
            values = ",".join(f"{name}={HIDDEN}" if eq else HIDDEN for name, eq, _ in names)
            return argument[: variables.end(1)] + values
        return redact_urls(_SECRET_NAME.sub(rf"\1{HIDDEN}", argument))

    return [redact(argument) for argument in arguments]


def printable(text: str) -> str:
    """Escape characters that a terminal would obey; tabs and newlines stay."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_line(text: str) -> str:
    """Escape as `printable`, tabs and newlines too: the result is one line."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def printable_message(text: str) -> str:
    """Make a message printable; later lines are indented, so none looks like a message."""
    first, *more = printable(text).split("\n")
    return "\n".join([first, *(line if line[:1].isspace() else f"  {line}" for line in more)])


def listed(items: Sequence[object], most: int, separator: str = ", ") -> str:
    """Return the first items in one line, and how many more there are."""
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return separator.join(map(str, items[:most])) + more


def quoted(name: object) -> str:
    """Return a file or folder as a word of a shell's command; one like `-x` is no option."""
    text = str(name)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def quoted_folder(path: Path) -> str:
    """Return a folder as `quoted`, and a plain name as `./photos`, which is a path in any text."""
    text = quoted(path)
    return f"./{text}" if re.fullmatch(r"[\w-]+", text) else text


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 image, 2 images, 3 classes."""
    ending = "es" if noun.endswith(("s", "x")) else "s"
    return f"{number:,} {noun}{ending * (number != 1)}"


def html_table(heads: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """Return an HTML table; the text of its cells is escaped."""

    def row(tag: str, cells: Sequence[object]) -> str:
        return "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells)

    body = "".join(f"<tr>{row('td', cells)}</tr>" for cells in rows)
    head = f"<thead><tr>{row('th', heads)}</tr></thead>" if heads else ""
    return f"<table><caption>{html.escape(caption)}</caption>{head}<tbody>{body}</tbody></table>"


def open_template(path: Path, filters: Mapping[str, Any], *, autoescape: bool = False) -> Template:
    """Return a Jinja template, whose variables must all be given."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # late: few commands need it

    environment = Environment(
        loader=FileSystemLoader(path.parent),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(filters)
    return environment.get_template(path.name)
