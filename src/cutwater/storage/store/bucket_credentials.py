"""Credentials in a file, as AWS tools know it, read again before and when they expire.

The library takes those of the environment, of a web identity and of the machine's role itself, and renews what can be
renewed.  What it does not read is the file of ``AWS_SHARED_CREDENTIALS_FILE``, which a sidecar or a cron job renews.
"""

from __future__ import annotations

import configparser
import os
import stat
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from cutwater.errors import ConfigError

if TYPE_CHECKING:
    from obstore.store import S3Credential

FILE_VARIABLE, PROFILE_VARIABLE = "AWS_SHARED_CREDENTIALS_FILE", "AWS_PROFILE"
_RENEWED_S = 60
"""So often the file is read: who renews it need not tell."""
_FILE_BYTES_MAX = 1 << 16


class CredentialsFile:
    """Gives the credentials in a file.

    Args:
        path: of the file.
        profile: section of it.
    """

    def __init__(self, path: str, profile: str) -> None:
        self._path, self._profile = path, profile

    def __repr__(self) -> str:
        return f"CredentialsFile({self._path!r}, {self._profile!r})"

    def __call__(self) -> S3Credential:
        """What the file says now.

        Raises:
            ConfigError: it cannot be read, or says nothing of the profile.
        """
        section = self._section()
        try:
            key, secret = section["aws_access_key_id"], section["aws_secret_access_key"]
        except KeyError as error:
            raise ConfigError(
                f"{self._path} has no {error.args[0]} for profile {self._profile!r}",
                hint=f"Look at {FILE_VARIABLE} and {PROFILE_VARIABLE}.",
            ) from None
        again = datetime.now(UTC) + timedelta(seconds=_RENEWED_S)
        token = section.get("aws_session_token")
        return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": again}

    def _section(self) -> Mapping[str, str]:
        parser = configparser.ConfigParser(interpolation=None)
        try:
            with open(self._path, "rb", opener=_without_waiting) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise ConfigError(f"{self._path} is not a file", hint=f"Look at {FILE_VARIABLE}.")
                parser.read_string(file.read(_FILE_BYTES_MAX).decode())
            return dict(parser[self._profile])
        except OSError as error:
            raise ConfigError(
                f"{self._path} cannot be read: {error.strerror}", hint=f"Look at {FILE_VARIABLE}."
            ) from None
        except (KeyError, UnicodeDecodeError, configparser.Error):  # whose messages quote lines, and so secrets
            raise ConfigError(
                f"{self._path} has no profile {self._profile!r}, or is no file of credentials",
                hint=f"Look at {FILE_VARIABLE} and {PROFILE_VARIABLE}.",
            ) from None


def credentials_file(environment: Mapping[str, str]) -> CredentialsFile | None:
    """The file that the environment names; ``None`` if it names none, or has the key itself.

    Raises:
        ConfigError: the file cannot be used.

    >>> credentials_file({"AWS_ACCESS_KEY_ID": "k"})
    """
    path = environment.get(FILE_VARIABLE, "")
    if not path or environment.get("AWS_ACCESS_KEY_ID"):
        return None
    found = CredentialsFile(path, environment.get(PROFILE_VARIABLE, "") or "default")
    found()
    return found


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
