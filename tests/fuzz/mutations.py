"""Hypothesis strategies that damage valid input: bytes in places, JSON values by others.

One draw per input keeps them fast. Nothing is shrunk: an input has at most five mutations.
"""

import copy
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

MAX_MUTATIONS = 5
EXTREMES = (
    *(b"", b"\0", b"\xff", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\n", b"\x1b[2J", b"\xed\xa0\x80"),
    *(b"-1", b"0", b"1e999", b"nan", b"-inf", b"9" * 400, b"9223372036854775808", b"1.5"),
    *(b"../", b"/", b"\\", b'"', b"'", b"[", b"{", b"]" * 3, b"[" * 3000, b"a" * 70_000, b"="),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**31, 2**63, 2**64, -(2**63), 10**400, 1e308, -0.0, 1e-320),
    *(float("nan"), float("inf"), float("-inf")),
    *("", "\0", "\ud800", "a\nb", "\x1b[2J", "../../x", "/etc/passwd", "x" * 70_000, "\u4e2d", "1"),
    *([], [[]], {}, {"": None}, [0] * 5000, "[" * 2000),
)


def mutated_bytes(
    samples: Sequence[bytes], tokens: Sequence[bytes] = ()
) -> st.SearchStrategy[bytes]:
    """Return inputs that differ from one of the samples in one to five places.

    Args:
        samples: Valid inputs.
        tokens: What is inserted, besides the extremes; words of the format.
    """
    words = (*EXTREMES, *tokens)
    return _random().map(lambda rng: _mutate(rng.choice(samples), words, rng))


def _random() -> st.SearchStrategy[random.Random]:
    """Return generators of one seed each: a draw per mutation would take longer than a parser."""
    return st.randoms(use_true_random=True)


def _mutate(sample: bytes, words: Sequence[bytes], rng: random.Random) -> bytes:
    content = bytearray(sample)
    for _ in range(rng.randint(1, MAX_MUTATIONS)):
        kind = rng.randrange(7)
        place = rng.randint(0, len(content))
        length = rng.randint(1, 64)
        if kind == 0:
            content[place : place + 1] = rng.randbytes(1)
        elif kind == 1:
            content[place:place] = rng.choice(words)
        elif kind == 2:
            content[place : place + length] = rng.choice(words)
        elif kind == 3:
            del content[place : place + length]
        elif kind == 4:  # a part twice, or in another place
            other = rng.randint(0, len(content))
            content[place:place] = content[other : other + length]
        elif kind == 5 and content:  # one bit
            content[place % len(content)] ^= 1 << rng.randrange(8)
        elif rng.random() < 0.3:
            del content[place:]
    return bytes(content)


def mutated_tree(samples: Sequence[Any], values: Sequence[Any] = ()) -> st.SearchStrategy[Any]:
    """Return nested lists and dicts: one to three nodes are replaced, removed, repeated or wrapped.

    Args:
        samples: Valid ones.
        values: What replaces a node, besides `VALUES`.
    """
    replacements = (*VALUES, *values)
    return _random().map(lambda rng: _mutate_tree(rng.choice(samples), replacements, rng))


def _mutate_tree(sample: Any, replacements: Sequence[Any], rng: random.Random) -> Any:
    root = [copy.copy(sample)]
    for _ in range(rng.randint(1, 3)):
        nodes = list(_nodes(root))
        parent, key = rng.choice(nodes)
        kind = rng.randrange(8)
        if kind == 0 and parent is not root:
            del parent[key]
        elif kind == 1 and isinstance(parent[key], list):
            parent[key] = parent[key] * 3
        elif kind == 2:
            parent[key] = [parent[key]]
        else:
            parent[key] = rng.choice(replacements)
    return root[0]


def _nodes(parent: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every node; containers are copied, so that the sample stays."""
    for key in list(parent if isinstance(parent, dict) else range(len(parent))):
        if isinstance(parent[key], (dict, list)):
            parent[key] = copy.copy(parent[key])
        yield parent, key
        if isinstance(parent[key], (dict, list)) and len(parent[key]) < 1000:
            yield from _nodes(parent[key])


def mutated_json(samples: Sequence[Any]) -> st.SearchStrategy[bytes]:
    """Return JSON text: of mutated values, or mutated itself."""
    texts = [json.dumps(sample).encode() for sample in samples]
    values = mutated_tree(samples).map(lambda value: json.dumps(value).encode())
    return st.one_of(values, values, mutated_bytes(texts))
