"""Types that are decoded are worked out when their module is imported, never by the first thread that needs one.

msgspec (0.22 and before) works out what it knows of a struct at the first use of the type: it hangs a record of the
fields at the class, and fills it in afterwards by running Python code.  A thread that decodes the type meanwhile finds
the unfinished record, follows a null pointer, and the process ends with a segmentation fault.  An import runs in one
thread.
"""

from __future__ import annotations

from typing import Any

import msgspec


def prepare(*types: Any) -> None:
    """Make types fit to be decoded in several threads at once; called below their definition, at import.

    ``tests/data/test_prepared_types.py`` finds what is decoded without it.

    >>> class Point(msgspec.Struct):
    ...     x: int
    >>> prepare(Point)
    >>> msgspec.json.decode(b'{"x": 1}', type=Point)
    Point(x=1)
    """
    for each in types:
        msgspec.json.Decoder(each)
