"""The command `mupscale`."""

from mupscale.cli.command_table import main

__all__ = ["main"]
