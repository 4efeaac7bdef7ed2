"""Process of a user, and the one door through which it reaches the world."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any, Protocol, dataclass_transform


class Context(Protocol):
    """Everything that a process may ask for.  Whatever comes from elsewhere (a clock, chance, a file) is not in the
    snapshot, and a restored network would see it differently.

    A handler is one atomic event: its messages leave when it returns, and never if it raises.
    """

    @property
    def name(self) -> str:
        """Of this process."""
        ...

    @property
    def outputs(self) -> tuple[str, ...]:
        """Processes that this one can send to, each once, in the order of their channels."""
        ...

    @property
    def inputs(self) -> tuple[str, ...]:
        """Processes that can send to this one."""
        ...

    @property
    def channel(self) -> str:
        """Name of the channel that the message at hand came through; empty in ``on_start`` and ``on_timer``."""
        ...

    @property
    def now_ms(self) -> float:
        """Milliseconds of the network's clock: simulated in ``run_local``, since the epoch on Spark."""
        ...

    @property
    def random(self) -> random.Random:
        """Chance, a function of seed, process and event number: a restored process draws what it would have drawn."""
        ...

    def send(self, to: str, message: Any) -> None:
        """Send a message to a process, or through a channel by its name.

        Raises:
            UserCodeError: there is no such channel, there are several, or the type was not declared.
        """
        ...

    def timer(self, delay_ms: float, message: Any) -> None:
        """Have ``on_timer`` called with ``message``, not before ``delay_ms`` have passed.  Timers are in snapshots."""
        ...


@dataclass_transform()
class Process:
    """Base class of processes.  A subclass is made a dataclass: its declared fields are its state, and nothing else is.

    A field has any type that msgspec can encode (numbers, texts, lists, dictionaries, dataclasses ...).

    >>> class Account(Process):
    ...     balance: int = 100
    ...     def on_message(self, ctx, sender, message):
    ...         self.balance += message
    >>> Account(balance=7)
    Account(balance=7)
    >>> Account().limit = 3
    Traceback (most recent call last):
    AttributeError: Account declares no field 'limit': it would not be in a snapshot. Declare it in the class
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).__dict__["__dataclass_fields__"]:
            kind = type(self).__name__
            raise AttributeError(
                f"{kind} declares no field {name!r}: it would not be in a snapshot. Declare it in the class"
            )
        object.__setattr__(self, name, value)

    def on_start(self, ctx: Context) -> None:
        """Called once, before anything else; not after a restore.  Does nothing unless overridden."""

    def on_message(self, ctx: Context, sender: str, message: Any) -> None:
        """Called with each message.  A process that gets messages must override it."""
        raise TypeError(f"{type(self).__name__} got a message from {sender!r} and has no on_message")

    def on_timer(self, ctx: Context, message: Any) -> None:
        """Called with the message of each timer that is due.  A process that sets timers must override it."""
        raise TypeError(f"{type(self).__name__} set a timer and has no on_timer")


def state_fields(process: Process) -> dict[str, Any]:
    """The declared fields with their values."""
    return {f.name: getattr(process, f.name) for f in fields(process)}  # type: ignore[arg-type]
