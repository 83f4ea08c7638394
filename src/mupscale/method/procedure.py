"""The paper's Steps 0 to 4 and the comparison, as one run that can be cut anywhere and goes on where it was.

Everything is in the run's folder: method.json, the study, a folder for each model (an ordinary run), summary.json and
the report. A stage that is done is read, not trained.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mupscale.checks import coord_check
from mupscale.method.costs import costs, gain
from mupscale.method.large import train_large
from mupscale.method.settings import Method
from mupscale.method.stages import label, size
from mupscale.method.summary import Summary
from mupscale.method.tuning import Tuned, tune
from mupscale.method.verdict import verdict, warnings
from mupscale.method.workshop import Note, Workshop, say
from mupscale.sweep import findings
from mupscale.train import Recipe, Width, cast_input

_EXAMPLES = 256  # in a batch of the coordinate check, at most; of text so many tokens
_FEW = 8  # examples, below which the check is made at smaller widths
_AFFORDABLE = 5e10  # FLOPs of a step of the check
_WIDE_ENOUGH = 64  # below this width the readout's own start shows in a coordinate check


def run_method(recipe: Recipe, method: Method, folder: str | Path, *, command: str = "", note: Note = say) -> Summary:
    """All of it, from wherever it stands, to summary.json."""
    shop = Workshop(recipe, method, Path(folder), note)
    shop.open()
    tuned = tune(shop)
    runs, more = train_large(shop, tuned)
    sweeps = [*tuned.sweeps, *more]
    stages = shop.stages(sweeps)
    found, parts = costs(runs, stages, tuned.sweeps), gain(runs)
    summary = Summary(
        name=shop.folder.resolve().name,
        command=command,
        recipe=recipe.to_json(),
        method=method.to_json(),
        sweeps=sweeps,
        choice=tuned.choice,
        runs=runs,
        stages=stages,
        costs=found,
        gain=parts,
        verdict=verdict(runs, found, parts),
        warnings=[
            *tuned.sentences,
            *warnings(tuned.sweeps, runs),
            *(f"{sweep.name}: {found}" for sweep in more for found in findings(sweep)),
        ],
    )
    summary.save(shop.folder)  # the answer first: the check below is one picture of its page
    summary = replace(summary, coords=_coordinates(shop, tuned.choice.base_lr))
    summary.save(shop.folder)
    return summary


def run_sweeps(recipe: Recipe, method: Method, folder: str | Path, *, worker: bool = False, note: Note = say) -> Tuned:
    """Step 0 alone; with a storage that others reach, one worker of many."""
    shop = Workshop(recipe, method, Path(folder), note)
    shop.open()
    return tune(shop, worker)


def _coordinates(shop: Workshop, lr: float) -> dict[str, Any] | None:
    """The coordinate check: is the family set up right at all? From the smallest width, or 64 where that is cheap."""
    recipe, protocol = shop.recipe, shop.protocol
    small = min(shop.method.widths, key=size)
    start = small if isinstance(small, dict) else small * math.ceil(_WIDE_ENOUGH / small)
    if _examples(shop, protocol.times(start, 4)) < _FEW:
        start = small
    widths = [protocol.times(start, factor) for factor in (1, 2, 4)]
    asked = {"lr": lr, "widths": widths}
    path = shop.folder / "coordinates.json"
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["asked"] == asked:
            return dict(kept["check"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    shop.note(f"coordinate check: widths {', '.join(map(label, widths))}")
    data, loss, count = protocol.data, recipe.loss_function(), _examples(shop, widths[-1])
    batches = [_on_cpu(data.batch(recipe.seeds.data, number * count, count)) for number in range(3)]

    def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(model(cast_input(batch[0], recipe)), batch[1])

    hyper: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in recipe.optimizer.init_args.items()}
    try:
        check = coord_check(
            recipe.family(),
            widths,
            batches,
            objective,
            recipe.optimizer_class(),
            steps=3,
            seeds=1,
            dtype=recipe.dtype(),
            **{**hyper, "lr": lr},
        )
    except Exception as error:  # one picture of the report, and no reason to lose a run
        shop.note(f"the coordinate check could not be made: {' '.join(str(error).split())[:160]}")
        return None
    made = {"title": check.title, "rows": [asdict(row) for row in check.rows]}
    shop.write(path.name, {"asked": asked, "check": made})
    return made


def _examples(shop: Workshop, width: Width) -> int:
    """How many examples a batch of the check may have, for it to take seconds on a CPU."""
    cost = shop.protocol.flops_per_step(width)
    affordable = _EXAMPLES if cost is None else int(_AFFORDABLE * shop.recipe.batch / cost)
    return max(1, min(shop.recipe.batch, _EXAMPLES // shop.protocol.data.per_example, affordable))


def _on_cpu(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Where the check's models are."""
    return batch[0].cpu(), batch[1].cpu()
