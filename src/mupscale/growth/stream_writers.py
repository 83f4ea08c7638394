"""What writes into the residual stream of a shallow model and of a deep one, found by running them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from mupscale.core import naming
from mupscale.growth.depth_operators import Place
from mupscale.planning import BlockList, Writers, find_writers
from mupscale.system import MupscaleError

_Run = tuple[dict[str, Writers], dict[str, str]]


class StreamWriters:
    """What writes into the residual stream: given, or found by running the models when it is asked for.

    given: by the path of a block of the shallow model. inputs: the batch to run on, where it is not given.
    """

    def __init__(
        self,
        shallow: nn.Module,
        deep: nn.Module,
        lists: Sequence[BlockList],
        inputs: Any,
        given: Mapping[str, Writers] | None,
    ) -> None:
        self._models, self._inputs, self._given = (shallow, deep), inputs, given
        self._paths = ([p for one in lists for p in one.shallow], [p for one in lists for p in one.deep])
        self._runs: list[_Run | None] = [None, None]

    def of_block(self, one: BlockList, number: int, place: Place) -> Writers:
        """Of a block of the deep model, by names relative to it: those of the block that it is, or is made after.

        Where that one cannot be without effect, as the first block of a stage that changes the shape, or where it is
        the only one of its list and its end is not seen, the deep model's own block is looked at.
        """
        path = one.shallow[place.block]
        written = self._shallow().get(path)
        if written is not None and all(f"{one.deep[number]}.{name}" in self._deep_names() for name in written):
            return written
        if place.is_new and self._given is None and not any(p.is_meta for p in self._models[1].parameters()):
            writers, reasons = self._run(1)
            if one.deep[number] in writers:
                return writers[one.deep[number]]
            if path not in self._run(0)[1] or self._differ(path, one.deep[number]):
                raise _unlike(one.deep[number], reasons[one.deep[number]])
        raise _unlike(
            path, "no known part writes into the stream" if self._given is not None else self._run(0)[1][path]
        )

    def _shallow(self) -> Mapping[str, Writers]:
        return self._run(0)[0] if self._given is None else self._given

    def _deep_names(self) -> Mapping[str, nn.Parameter]:
        return naming.parameters(self._models[1])

    def _differ(self, path: str, deep_path: str) -> bool:
        """Whether a block of the shallow model and one of the deep model have other tensors."""
        shapes = [
            {n.removeprefix(p): q.shape for n, q in naming.parameters(model).items() if n.startswith(f"{p}.")}
            for model, p in zip(self._models, (path, deep_path), strict=True)
        ]
        return shapes[0] != shapes[1]

    def _run(self, which: int) -> _Run:
        if self._inputs is None:
            raise MupscaleError(
                "the library runs the model to find what a block writes into the residual stream. Pass inputs=: a "
                "small batch, as the model is called"
            )
        run = self._runs[which]
        if run is None:
            run = self._runs[which] = find_writers(self._models[which], self._paths[which], self._inputs)
        return run


def _unlike(path: str, reason: str) -> MupscaleError:
    return MupscaleError(
        f"'{path}' cannot start as identity: {reason}. Grow by Stack(), which copies blocks and changes the function, "
        "or widen the model instead"
    )
