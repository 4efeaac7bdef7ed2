"""What other installed packages provide: objects that they name as entry points, loaded when somebody asks for one.

A package says in its ``pyproject.toml``, for example::

    [project.entry-points."cutwater.connectors"]
    queue = "cutwater_queue:queue"
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module, metadata

from cutwater.errors import ConfigError

CONNECTORS = "cutwater.connectors"
"""Group of functions (or classes) that make sources and sinks, by their names."""
STORES = "cutwater.stores"
"""Group of openers of stores, by the schemes of their URIs."""


@dataclass(frozen=True)
class Provided:
    """An object of an installed package."""

    name: str
    value: str
    """Where it lies: ``module:attribute``."""
    package: str
    version: str

    def load(self) -> object:
        """The object.

        Raises:
            ConfigError: it cannot be imported; names the package.
        """
        module, _, attributes = self.value.partition(":")
        try:
            found: object = import_module(module.strip())
            for attribute in filter(None, attributes.partition("[")[0].strip().split(".")):
                found = getattr(found, attribute)
        except Exception as error:
            raise ConfigError(
                f"the package {self.package} {self.version} provides {self.name!r}, but {self.value} cannot be "
                f"imported: {type(error).__name__}: {error}",
                hint=f"Install {self.package} again, or look for a version that goes with this one of Cutwater.",
            ) from error
        return found


def provided(group: str) -> list[Provided]:
    """What the installed packages provide in a group, by name and package; nothing is imported.

    A package whose metadata cannot be read provides nothing.

    >>> provided("cutwater.no_such_group")
    []
    """
    found: list[Provided] = []
    seen = set[str]()
    for distribution in metadata.distributions():
        try:
            package, version = str(distribution.metadata["Name"]), distribution.version
            names = [(point.name, point.value) for point in distribution.entry_points if point.group == group]
        except Exception:  # metadata of another program's package: half removed, or not in the format
            continue
        if _normal(package) not in seen:  # the first on the path is the one that is imported
            found += [Provided(name, value, package, version) for name, value in names]
        seen.add(_normal(package))
    return sorted(found, key=lambda one: (one.name, one.package))


def find(group: str, name: str) -> Provided | None:
    """The one that is called so.

    Raises:
        ConfigError: several packages provide one.
    """
    found = [one for one in provided(group) if one.name == name]
    if len(found) > 1:
        raise ConfigError(
            f"several packages provide {name!r}: {', '.join(f'{one.package} {one.version}' for one in found)}",
            hint="Uninstall all but one of them.",
        )
    return found[0] if found else None


def package_of(module: str) -> tuple[str, str] | None:
    """Name and version of the installed package that a module belongs to, if one does.

    >>> package_of("pyarrow.compute")[0], package_of("no_such_module")
    ('pyarrow', None)
    """
    top = module.partition(".")[0]
    for one in (*provided(CONNECTORS), *provided(STORES)):
        if one.value.partition(":")[0].partition(".")[0].strip() == top:
            return one.package, one.version
    names = metadata.packages_distributions().get(top)
    return (names[0], metadata.version(names[0])) if names else None


def _normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()
