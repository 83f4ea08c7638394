"""Models that are not made at other sizes, as where a closure holds a size: for what is said then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import mupscale as mu
from mupscale.planning.miniatures import Resizing


@contextmanager
def without_resizing() -> Iterator[None]:
    """Inside, no model can be made at a third size."""
    with mock.patch.object(Resizing, "copy", side_effect=mu.MupscaleError("a size is nowhere to be seen")):
        yield
