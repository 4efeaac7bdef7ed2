"""A handle that shows itself: in a shell, by ``print``, and as HTML in a notebook."""

from __future__ import annotations

import abc

from cutwater.runtime.status.status import JobStatus


class Shown(abc.ABC):
    """Is shown as its ``status``."""

    @property
    @abc.abstractmethod
    def status(self) -> JobStatus:
        """What is shown."""

    def __repr__(self) -> str:
        return repr(self.status).replace("JobStatus", type(self).__name__, 1)

    def __str__(self) -> str:
        return str(self.status)

    def _repr_html_(self) -> str:
        from cutwater.runtime.status.text import as_html

        return as_html(self.status)
