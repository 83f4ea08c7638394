"""The command `mupscale`."""

from mupscale.cli.commands import main

__all__ = [
    "main",
]
