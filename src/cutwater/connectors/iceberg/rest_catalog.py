"""A REST catalog that does not wait for ever.  The library finds this class by its name, once it is installed."""

from __future__ import annotations

import functools
from typing import Any

from pyiceberg.catalog.rest import RestCatalog

ANSWER_S = 60.0
"""How long a server may take for an answer, or a piece of it."""


class PatientRestCatalog(RestCatalog):
    """``RestCatalog``, whose requests end: the library's wait for as long as the server does."""

    def _create_session(self) -> Any:
        session: Any = super()._create_session()
        session.request = functools.partial(session.request, timeout=ANSWER_S)
        return session
