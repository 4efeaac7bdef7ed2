"""Looking up many group ids of a column: by a kernel, and to be told from NumPy by its speed only."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cutwater.state.growing_array import gather

MANY = 5_000


def columns() -> list[npt.NDArray[Any]]:
    """Of every width, whole or one of a matrix, and rows of several."""
    random = np.random.default_rng(7)
    numbers = random.integers(-(2**40), 2**40, (9_000, 3))
    plain = [numbers[:, 0].astype(kind) for kind in ("?", "u1", "i2", "i4", "f4", "i8", "f8", "M8[us]", "c16")]
    return [*plain, numbers[:, 1], numbers[::2, 2], numbers, numbers.astype("i2"), numbers[:, :2]]


@pytest.mark.parametrize("column", columns(), ids=lambda column: f"{column.dtype}{column.shape}{column.strides}")
@pytest.mark.parametrize("gids", [10, MANY])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_many_gids_are_looked_up_as_few_are(column: npt.NDArray[Any], gids: int, kind: Any) -> None:
    wanted = np.random.default_rng(gids).integers(0, len(column), gids).astype(kind)
    found = gather(column, wanted)
    assert found.dtype == column.dtype
    np.testing.assert_array_equal(found, column[wanted])
    found[:] = 0  # it is a copy
    assert column.any()


def test_gids_that_are_not_there_touch_no_other_memory() -> None:
    column, wanted = np.arange(9_000), np.arange(MANY, dtype=np.int32)[::-1].copy()
    wanted[17] = -1
    assert gather(column, wanted)[17] == column[-1]
    wanted[17] = len(column)
    with pytest.raises(IndexError, match="out of bounds"):
        gather(column, wanted)
    with pytest.raises(IndexError, match="out of bounds"):
        gather(column[:0], wanted)
