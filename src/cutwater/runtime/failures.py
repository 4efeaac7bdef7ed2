"""What failed, as text and as an error of the user's."""

from __future__ import annotations

import re
import traceback

from cutwater import errors
from cutwater.errors import CutwaterError, InvariantError, JobFailedError, StorageError


def first_line(text: str) -> str:
    """The first line that says something."""
    return next((line for line in text.splitlines() if line.strip()), "no message")


_CAUSE = re.compile(r"\s*(?:\w+\.)*(\w*(?:Error|Exception)): .*")
_NO_PYTHON = re.compile(r".*Cannot run program .*")


def root_cause(text: str) -> str:
    """The line of a Spark error that says what the Python worker raised, else its first line.

    >>> root_cause("Job aborted\\nTraceback ...\\nModuleNotFoundError: No module named 'x'\\n\\n\\tat org.apache")
    "ModuleNotFoundError: No module named 'x'"
    >>> root_cause('An error occurred\\njava.io.IOException: Cannot run program "python9": error=2')
    'java.io.IOException: Cannot run program "python9": error=2'
    """
    if found := _NO_PYTHON.search(text):
        return found[0].strip()
    python = text.partition("Traceback")[2]
    found = [line.strip() for line in python.splitlines() if _CAUSE.fullmatch(line)]
    return found[0] if found else first_line(text)


def headline(text: str) -> str:
    """What two failures have in common if they are the same one.

    Where in the stream it happened says nothing, nor does the row that happened to be the first: batches are cut
    differently in every attempt, and the workers differ in which of them reports first.  Another host is another
    failure.

    >>> headline("KeyError: 'x' on row 7 of the batch")
    "KeyError: 'x'"
    >>> headline("worker 1 on host node7 (pid 4242) was lost: silent for 12 s")
    'worker 1 on host node7 (pid #) was lost: silent for # s'
    """
    told = re.split(r" on row | \(in subtask", first_line(text))[0]
    return re.sub(r"(on host \S+)|(?<!worker )(?<!\d)\d+", lambda found: found[1] or "#", told)


def error_of(kind: str, message: str, step: str, hint: str = "") -> CutwaterError:
    """An error that a worker told of, by the name of its class.

    >>> error_of("UserCodeError", "KeyError: 'x'", "score")
    UserCodeError("KeyError: 'x'")
    """
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, CutwaterError):
        return found(message, step=step or None, hint=hint)
    return JobFailedError(f"{kind}: {message}", step=step or None, hint=hint)


def snapshot_error(error: Exception, what: str, step: str | None = None) -> CutwaterError:
    """Why a part of a snapshot is not durable: its storage failed, or the code that makes it.

    The first may be over when it is tried again.  The second is not, so it has to be told apart.

    Args:
        error: what was raised.
        what: what was being made, for the message.
        step: whose.

    >>> snapshot_error(OSError(28, "No space left on device"), "the state")
    StorageError('the state could not be written: OSError: [Errno 28] No space left on device')
    """
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, CutwaterError):
        return type(error)(error.message, step=error.step or step, hint=error.hint)
    if isinstance(error, OSError | MemoryError) or type(error) is Exception:  # RocksDB raises no class of its own
        return StorageError(f"{what} could not be written: {text}", step=step)
    story = "".join(traceback.format_exception(error))
    return InvariantError(f"{what} could not be put into a snapshot: {text}\n{story}", step=step)


def internal_error(error: BaseException) -> CutwaterError:
    """Something that the coordinator itself did wrong, with all that helps to find it."""
    story = "".join(traceback.format_exception(error))
    return InvariantError(f"the coordinator failed: {type(error).__name__}: {error}\n{story}")
