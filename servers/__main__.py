"""Fetches the servers of all tests: ``python -m servers``."""

from __future__ import annotations

from servers.jars import HOME, fetched


def main() -> None:
    for lock in sorted(HOME.glob("*.lock")):
        print(fetched(lock.stem))


if __name__ == "__main__":
    main()
