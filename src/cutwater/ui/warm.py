"""The command ``warm``: kernels compiled before the first job wants them."""

from __future__ import annotations

import click

from cutwater.errors import ConfigError


@click.command()
def warm() -> None:
    """Compile all kernels, once per machine and installation.

    Some twenty seconds, which the first job would need piece by piece.  From then on Spark's daemon loads them before
    it starts a worker, so that replacements of lost workers begin sooner.  Run it as the user of the workers.
    """
    from cutwater.runtime.chains.warm import is_warm, warm_up
    from cutwater.state.kernels import cache_directory

    place = cache_directory()
    if place is None:
        raise ConfigError(
            "there is no folder where compiled kernels could be kept",
            hint="Set NUMBA_CACHE_DIR to a folder that you can write and nobody else can.",
        )
    if is_warm():
        click.echo(f"The kernels of this installation were compiled before, and are kept in {place}")
        return
    click.echo("Compiling the kernels of this installation")
    warm_up()
    click.echo(f"They are kept in {place}")
