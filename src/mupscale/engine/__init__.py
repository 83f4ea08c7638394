"""Many runs as one program, and one after another where that cannot be; the numbers are the same."""

from mupscale.engine.dispatch import Engine, train_many
from mupscale.engine.jobs import Tell
from mupscale.engine.outcomes import Outcome, Status, finished
from mupscale.engine.stack import Stack
from mupscale.engine.stackable import NotStackable

__all__ = [
    "Engine",
    "NotStackable",
    "Outcome",
    "Stack",
    "Status",
    "Tell",
    "finished",
    "train_many",
]
