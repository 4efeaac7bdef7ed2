"""A table in an Iceberg catalog: how it is reached, and what is said where that fails."""

from __future__ import annotations

import importlib
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cutwater.connectors.secrets import check_named, secret_at
from cutwater.errors import BuildError, ConfigError, CutwaterError, StorageError

_SECRET = re.compile(r"password|secret|token$|credential|account-key|sas-token|connection-string|access-key(?!-id)")
"""In the name of a property: nobody may read its value."""
_USER_INFO = re.compile(r"://[^/@]*:[^/@]*@")
_NAMED = ("env:", "file:")
_PLACES = ("uri",)
"""Properties that hold a password now and then, so that they may be named as well."""
_REST = "cutwater.connectors.iceberg.rest_catalog"
_RETRIES = "commit.retry.num-retries"


def iceberg_library(module: str) -> Any:
    """A module of the library.

    Raises:
        BuildError: it is not installed; says how.
    """
    try:
        return importlib.import_module(f"pyiceberg.{module}")
    except ImportError:
        raise BuildError(
            "reading and writing Iceberg tables needs pyiceberg",
            hint="Install it in the driver and where the workers run: pip install 'cutwater[iceberg]'.",
        ) from None


@dataclass(frozen=True)
class IcebergTable:
    """A table and its catalog.  A picklable value that holds no secret.

    Args:
        name: of the table, with its namespace: ``"shop.orders"``.
        catalog: name of the catalog; with ``properties`` it need not be configured anywhere.
        properties: of the catalog, as pyiceberg names them.  Values of passwords and keys say where they are:
            ``"env:NAME"`` or ``"file:/path"``, which is looked up where the catalog is opened.

    Raises:
        ConfigError: no namespace, or a secret in plain.

    >>> IcebergTable.of("shop.orders", {"uri": "http://localhost:8181", "token": "hunter2"})
    Traceback (most recent call last):
    cutwater.errors.ConfigError: catalog property 'token' holds a secret...
    """

    name: str
    catalog: str
    properties: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    _opened: list[Any] = field(default_factory=list[Any], init=False, repr=False, compare=False)
    """The catalog, once this process has opened it."""

    @classmethod
    def of(cls, name: str, catalog: str | Mapping[str, object]) -> IcebergTable:
        """The table, its catalog's properties checked."""
        if not all(name.split(".")) or "." not in name:
            raise ConfigError(f"{name!r} names no Iceberg table", hint="Write namespace and name: 'shop.orders'.")
        if isinstance(catalog, str):
            return cls(name, catalog)
        given = {key: _text(value) for key, value in catalog.items()}
        for key, value in given.items():
            if _SECRET.search(key) or (key in _PLACES and _USER_INFO.search(value)):
                check_named(f"catalog property {key!r}", key, value)
        return cls(name, given.pop("name", "default"), tuple(sorted(given.items())))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": []}

    @property
    def opened_catalog(self) -> Any:
        """The catalog.

        Raises:
            BuildError: the library is not installed.
            ConfigError: a secret is not where it should be, or there is no such catalog.
            StorageError: it does not answer.
        """
        if not self._opened:
            library = iceberg_library("catalog")
            made = {key: _found(key, value) for key, value in self.properties}
            if made.get("type", "rest") == "rest" and made.get("uri", "").startswith("http"):
                made.pop("type", None)
                made.setdefault("py-catalog-impl", f"{_REST}.PatientRestCatalog")
            with self.errors("cannot open the catalog"):
                try:
                    self._opened.append(library.load_catalog(self.catalog, **made))
                except (ValueError, iceberg_library("exceptions").NoSuchPropertyException) as error:
                    raise ConfigError(
                        f"iceberg catalog {self.catalog!r} cannot be opened: {self.hidden(_first_line(error))}",
                        hint="Give its properties: catalog={'type': 'rest', 'uri': 'http://host:8181'}.",
                    ) from None
        return self._opened[0]

    def found(self) -> Any | None:
        """The table as it is now; ``None`` if there is none.

        Raises:
            ConfigError, StorageError: as ``opened_catalog``.
        """
        missing = iceberg_library("exceptions")
        with self.errors("cannot read"):
            try:
                return without_retries(self.opened_catalog.load_table(self.name))
            except (missing.NoSuchTableError, missing.NoSuchNamespaceError):
                return None

    def loaded(self) -> Any:
        """The table as it is now.

        Raises:
            StorageError: it is gone, or as ``opened_catalog``.
        """
        table = self.found()
        if table is None:
            raise StorageError(f"there is no Iceberg table {self.name!r} in catalog {self.catalog!r}")
        return table

    @contextmanager
    def errors(self, what: str) -> Generator[None]:
        """Say of errors in the block what was tried.

        Raises:
            StorageError: whatever library failed; conflicts with other writers (``CommitFailedException``) pass.
        """
        conflict = iceberg_library("exceptions").CommitFailedException
        try:
            yield
        except (CutwaterError, conflict):
            raise
        except Exception as error:
            raise StorageError(
                f"iceberg table {self.name!r}: {what}: {type(error).__name__}: {self.hidden(_first_line(error))}"
            ) from None

    def hidden(self, text: str) -> str:
        """A message of the library's without the secrets that it may quote."""
        for key, value in self.properties:
            if _is_named(key, value):
                try:
                    secret = _found(key, value)
                except ConfigError:
                    continue
                text = text.replace(secret, "***") if secret else text
        return text


def without_retries(table: Any) -> Any:
    """The table object, told never to repeat a commit by itself.

    The library repeats a refused commit on the table's new state, without asking whether the rows are in already.
    How often is a property of the table, which is changed here for this object only.
    """
    properties = {**table.metadata.properties, _RETRIES: "0"}
    table.metadata = table.metadata.model_copy(update={"properties": properties})
    return table


def _is_named(key: str, value: str) -> bool:
    return (key in _PLACES or _SECRET.search(key) is not None) and value.startswith(_NAMED)


def _found(key: str, value: str) -> str:
    return secret_at(f"catalog property {key!r}", value) if _is_named(key, value) else value


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
