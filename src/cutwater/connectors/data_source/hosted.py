"""A user's data source as the job holds it: class and options, of which instances are made where they are needed."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cutwater.connectors.data_source import spark_api
from cutwater.connectors.secrets import check_named, secret_at
from cutwater.errors import BuildError, ConfigError, CutwaterError, DataError, UserCodeError

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSource


class SecretText(str):
    """A secret that is an option: text for the user's code, and only its place for whoever pickles it.

    >>> import pickle
    >>> password = SecretText("option 'password'", "file:/dev/null")
    >>> b"/dev/null" in pickle.dumps(password), repr(password)
    (True, "'***'")
    """

    _what: str
    _place: str

    def __new__(cls, what: str, place: str) -> SecretText:
        made = super().__new__(cls, secret_at(what, place))
        made._what, made._place = what, place
        return made

    def __reduce__(self) -> tuple[object, ...]:
        return SecretText, (self._what, self._place)

    def __repr__(self) -> str:
        return "'***'"


@dataclass(frozen=True)
class Hosted:
    """A data source of the user's.

    Args:
        of: its class, or an instance, which is pickled with the job.
        options: for the class.
        secrets: further options: where each lies, ``"env:NAME"`` or ``"file:/path"``.

    Raises:
        ConfigError: no data source; options for an instance; a secret that is given and not named.
        BuildError: there is no PySpark.
    """

    of: type[DataSource] | DataSource
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    secrets: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        base = spark_api.data_source_class()
        if not issubclass(self.cls, base):
            raise ConfigError(
                f"{self.cls.__name__} is no DataSource of PySpark",
                hint="Give the class that you would register with spark.dataSource.register(...), or an instance.",
            )
        if not isinstance(self.of, type) and (self.options or self.secrets):
            raise ConfigError(f"an instance of {self.name} has its options already", hint="Give the class with them.")
        for name, place in self.secrets.items():
            check_named(f"option {name!r} of {self.name}", name, place)

    @property
    def cls(self) -> type[DataSource]:
        """Of the data source."""
        return self.of if isinstance(self.of, type) else type(self.of)

    @property
    def name(self) -> str:
        """For messages."""
        return self.cls.__name__

    def made(self) -> DataSource:
        """An instance.

        Raises:
            ConfigError: a secret is not there.
            UserCodeError: the class fails.
        """
        if not isinstance(self.of, type):
            return self.of
        hidden = {name: SecretText(f"option {name!r} of {self.name}", at) for name, at in self.secrets.items()}
        with self.calling("the data source cannot be made"):
            return self.of(spark_api.case_insensitive({**self.options, **hidden}))

    def schema(self, given: object) -> Any:
        """The schema, as Spark has it: that which is given, else that which the data source tells.

        Raises:
            BuildError: neither is one.
        """
        if given is not None:
            return spark_api.struct_type(given)
        try:
            with self.calling("schema() failed"):
                told = self.made().schema()
        except UserCodeError as error:
            raise BuildError(error.message, hint="Or say it: cw.data_source(..., schema='id long').") from error
        return spark_api.struct_type(told)

    @contextlib.contextmanager
    def calling(self, what: str) -> Generator[None, None, None]:
        """What fails inside is the user's code, and is said to be.

        Args:
            what: is being done, and with which partition or offset.

        Raises:
            UserCodeError: with the user's own traceback.
        """
        try:
            yield
        except DataError as error:
            raise UserCodeError(f"{self.name}: {what}: {error.message}", hint=error.hint) from error
        except CutwaterError:
            raise
        except Exception as error:
            told = "".join(traceback.format_exception(error))
            raise UserCodeError(f"{self.name}: {what}:\n{self._without_secrets(told)}") from error

    def _without_secrets(self, text: str) -> str:
        for name, place in self.secrets.items():
            with contextlib.suppress(ConfigError):
                text = text.replace(secret_at(name, place) or "***", "***")
        return text


def pickled_by(hosted: Hosted, value: object, what: str) -> str:
    """``spark_api.pickled`` of what the user's code made.

    Raises:
        UserCodeError: it cannot be pickled.
    """
    with hosted.calling(f"{what} cannot be pickled"):
        return spark_api.pickled(value)
