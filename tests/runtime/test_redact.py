"""Secrets of URLs are hidden; host and path stay readable."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdctl.runtime.safe_text import redact_url, redact_urls


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://[::1]:8080/a", "http://[::1]:8080/a"),
        ("https://host/a#access_token=s3cret", "https://host/a#***"),
        ("https://b:p@host/x?q@r", "https://***@host/x?***"),
        ("https://bob:1/2@host/a", "https://***@host/a"),
        ("https://bob:hun#ter2@host/a?x=1", "https://***@host/a?***"),
        ("s3://key:secret@bucket/a", "s3://***@bucket/a"),
        ("http://bob:hunter2@[bad/a?sig=x", "http://***@[bad/a?***"),
        ("http://bob:p@ho[st/x@y", "http://***@y"),
        ("hf://org/name@v1.0", "hf://org/name@v1.0"),
        ("hf://hf_x@org/name", "hf://***@org/name"),
    ],
)
def test_urls(url: str, shown: str) -> None:
    assert redact_url(url) == shown
    assert redact_url(shown) == shown
    assert redact_urls(f"x ('{url}') failed") == f"x ('{shown}') failed"


@given(
    secret=st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="'\"<>"))
)
def test_a_secret_never_shows(secret: str) -> None:
    marked = f"{secret}S3CRET{secret}"
    for url in (f"https://bob:{marked}@host.org/a", f"https://host.org/a?sig={marked}"):
        assert "S3CRET" not in redact_url(url)
        assert "S3CRET" not in redact_urls(f"error: {url} x")
