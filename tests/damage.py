"""Every small damage of a file's content, for tests that say that each is found."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["flipped", "truncated"]


def flipped(body: bytes) -> Iterator[bytes]:
    """The content with one bit of each byte turned, in each byte another one than in the byte before.

    >>> [list(damaged) for damaged in flipped(bytes(2))]
    [[1, 0], [0, 2]]
    """
    for i in range(len(body)):
        yield body[:i] + bytes([body[i] ^ 1 << i % 8]) + body[i + 1 :]


def truncated(body: bytes) -> Iterator[bytes]:
    """Every true beginning of the content."""
    for length in range(len(body)):
        yield body[:length]
