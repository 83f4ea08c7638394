"""Training many runs at once, as one program where they can be stacked; the numbers are those of `run_recipe`.

dispatch          train_many
stackable         what the runs of a stack must share
stack             many runs as one program
stack_run         a stack from its first step to its last
stacked_training  as many stacks as memory needs
serial            one run after another, for what cannot be stacked
training_job      what train_many was asked for and how far it is, on disk
outcomes          how runs ended
watching          a bar for a person
memory            how many runs fit
vmapped, replicas, batch_streams, updates, cuda_graph
                  the parts of a stack: model, parameters, batches, optimizer, a step on the GPU
"""

from mupscale.engine.dispatch import Engine, train_many
from mupscale.engine.outcomes import Outcome, Status, read_outcome
from mupscale.engine.stack import RunStack
from mupscale.engine.stackable import NotStackable
from mupscale.engine.training_job import PointCallback
from mupscale.engine.watching import lowest_loss_bar

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
