"""Files of torch.save, read without running any code that they hold."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

from mupscale.system.doors import checks_arguments
from mupscale.system.errors import MupscaleError


@checks_arguments
def load_torch(path: str | Path) -> Any:
    """A file that torch.save wrote, loaded weights-only: tensors and plain containers, never code.

    >>> import tempfile
    >>> import torch
    >>> import mupscale as mu
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"step": 3, "weight": torch.ones(2)}, f"{folder}/run.pt")
    ...     mu.load_torch(f"{folder}/run.pt")
    {'step': 3, 'weight': tensor([1., 1.])}
    """
    import torch  # here, for `mupscale --help` has no use for it

    if Path(path).exists() and not Path(path).is_file():
        raise MupscaleError(f"{path} is no ordinary file, so no weights are read from it")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise MupscaleError(f"there is no file at {path}") from None
    except Exception as error:  # a broken pickle may raise anything
        code = re.search(r"GLOBAL (\S+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and code:
            reason = f"it holds {code[1]}, which is code, and not tensors alone; save a state_dict instead"
        else:
            first = re.split(r"\n|\. ", f"{type(error).__name__}: {error}")[0]
            reason = f"it is truncated, or no file of torch.save ({first})"
        raise MupscaleError(f"{path} cannot be loaded as weights only: {reason}") from None
