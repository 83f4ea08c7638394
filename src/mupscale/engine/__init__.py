"""Training many runs at once, as one program where they can be stacked; the numbers are those of `run_recipe`.

dispatch          train_many, one run after another for what cannot be stacked, and a bar for a person
stackable         what the runs of a stack must share
stack             many runs as one program, with their batches
stacked_training  as many stacks as memory needs, each from its first step to its last
training_job      what train_many was asked for and how far it is, on disk; how runs ended
vmapped, replicas
                  the parts of a stack: the model; its parameters, their updates, a step on the GPU
"""

from mupscale.engine.dispatch import Engine, lowest_loss_bar, train_many
from mupscale.engine.stack import RunStack
from mupscale.engine.stackable import NotStackable
from mupscale.engine.training_job import Outcome, PointCallback, Status, read_outcome

__all__ = [
    "Engine",
    "NotStackable",
    "Outcome",
    "PointCallback",
    "RunStack",
    "Status",
    "lowest_loss_bar",
    "read_outcome",
    "train_many",
]
