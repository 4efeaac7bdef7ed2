"""What the fork server of the runtime tests imports once, so that a new worker is there in milliseconds."""

from cutwater.runtime.daemon import preload

preload()
