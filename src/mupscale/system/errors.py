"""The one error type of the library: everything it refuses, it refuses with a MupscaleError."""


class MupscaleError(Exception):
    """Raised for anything the user can mend; the message names what is wrong and what to do about it."""


class PlanError(MupscaleError):
    """Modules alone do not tell what a parameter's width is to it; a batch (`inputs=`) or `roles=` would."""


class Diverged(MupscaleError):
    """Training, or a program at infinite width, has left the finite numbers."""


class Interrupted(MupscaleError):
    """The user asked to stop; what was done is saved where there is a place for it."""


class ReplicaWarning(UserWarning):
    """A model grows by copies without noise, which stay equal for ever, and nobody has said that this is meant."""


class UncheckedPlan(UserWarning):
    """A model grows by a plan that nobody has tried: it follows from module types and names alone."""
