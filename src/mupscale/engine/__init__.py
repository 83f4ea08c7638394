"""Training many runs at once, as one program where they can be stacked; the numbers are those of `run_recipe`.

many_runs         train_many: what it was asked for, as many stacks as memory needs, and one run after another
stack             many runs as one program, with their batches, and what they must share
replicas          its parts: the model; its parameters, their updates, a step on the GPU
"""

from mupscale.engine.many_runs import Engine, Outcome, PointCallback, lowest_loss_bar, read_outcome, train_many
from mupscale.engine.replicas import NotStackable
from mupscale.engine.stack import RunStack

__all__ = ["Outcome", "train_many"]
