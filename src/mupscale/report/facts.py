"""What a summary says, as rows of words: final losses, costs, stages, the recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mupscale.core import Width
from mupscale.method import Runs, Summary
from mupscale.plots import words
from mupscale.system import MupscaleError

_COSTS = (
    ("base", "The base model, one run", words.format_flops),
    ("tuning", "Tuning: all sweeps and their small base models", words.format_flops),
    ("scratch_total", "The wide model from scratch, for as many steps as the upscaled one", words.format_flops),
    ("scratch_min_loss", "Its lowest training loss in these steps", words.format_loss),
    ("upscaled_to_scratch_loss", "The upscaled model, until it reaches that loss", words.format_flops),
    ("speedup_sunk", "Speed-up if the base model is there already", words.format_factor),
    ("speedup_base_charged", "Speed-up with the base model's training charged", words.format_factor),
    ("speedup_all_charged", "Speed-up with the base model and tuning charged", words.format_factor),
    ("tuning_speedup", "Tuning runs small for the price of one at the target width", words.format_factor),
)
_REACHED = {"upscaled_to_scratch_loss", "speedup_sunk", "speedup_base_charged", "speedup_all_charged"}


def format_width(width: Any) -> str:
    """A width as a summary holds it; what is none, in a damaged one, is shown as it is.

    >>> format_width(4096), format_width({"head_dim": 32, "heads": 4})
    ('4,096', 'head_dim 32, heads 4')
    """
    try:
        return Width.of(width).shown(words.format_count)
    except MupscaleError:
        return words.format_count(width)


def list_costs(summary: Summary) -> list[tuple[str, str, str]]:
    """Key, meaning and value of each cost that is there."""
    return [(key, what, format_cost(summary, key)) for key, what, _ in _COSTS if key in summary.costs]


def format_cost(summary: Summary, key: str) -> str:
    """One of them; without a number it says whether the loss was not reached or the cost is not known."""
    value = summary.costs.get(key)
    if words.is_finite_number(value):
        return next(shown for name, _, shown in _COSTS if name == key)(value)
    reachable = words.is_finite_number(summary.costs.get("scratch_total"))
    return "not reached" if key in _REACHED and reachable else "unknown"


def list_finals(summary: Summary) -> list[list[str]]:
    """A row per model: label, width, learning rate, noise, steps, final losses, accuracy, cost of a run."""
    return [
        [
            _labelled(runs),
            format_width(runs.width),
            _rate(runs),
            "per parameter" if isinstance(runs.noise, dict) else words.format_setting(runs.noise),
            words.format_count(runs.steps),
            _two_lines(runs.finals()),
            _two_lines(last_scores(runs, "held_out_losses")),
            _two_lines(last_scores(runs, "accuracy")),
            words.format_flops(run_flops(runs)) if run_flops(runs) is not None else "unknown",
        ]
        for runs in summary.runs
    ]


FINALS_HEAD = (
    "model",
    "width",
    "learning rate",
    "noise",
    "steps",
    "final training loss",
    "held-out loss",
    "accuracy",
    "cost of a run",
)


def last_scores(runs: Runs, what: str) -> list[float]:
    """Each finished seed's last held-out score of a kind."""
    scores = [getattr(curve, what) for curve in runs.curves if curve.status != "diverged"]
    return [values[-1] for values in scores if values and words.is_finite_number(values[-1])]


def format_final(summary: Summary, name: str) -> str:
    """A model's final loss, with its range; or that it diverged."""
    runs = summary.get(name)
    if runs is None:
        return words.UNKNOWN
    return words.format_spread(runs.finals()) if runs.finals() else "diverged"


def run_flops(runs: Runs) -> float | None:
    """Of one run, the base model's not included."""
    return runs.steps * runs.flops_per_step if words.is_finite_number(runs.flops_per_step) else None


def sum_stages(summary: Summary) -> tuple[float | None, float]:
    """FLOPs and seconds of all stages."""
    costs = [stage.flops for stage in summary.stages if words.is_finite_number(stage.flops)]
    seconds = sum(stage.seconds for stage in summary.stages if words.is_finite_number(stage.seconds))
    return (sum(costs) if costs and len(costs) == len(summary.stages) else None), seconds


def list_stages(summary: Summary) -> Iterator[list[str]]:
    """A row per stage, and the total."""
    for stage in summary.stages:
        yield [stage.name, _or_unknown(stage.flops), words.format_duration(stage.seconds)]
    flops, seconds = sum_stages(summary)
    if len(summary.stages) > 1:
        yield ["together", _or_unknown(flops), words.format_duration(seconds)]


def format_recipe(summary: Summary) -> str:
    """The recipe with its section `method`."""
    return format_values({**summary.recipe, "method": summary.recipe.get("method") or summary.method})


def format_values(values: Mapping[str, Any]) -> str:
    """Nested values as YAML where PyYAML is there; JSON is YAML, too.

    >>> print(format_values({"width": 8}).replace("{", "").replace("}", "").replace('"', "").strip())
    width: 8
    """
    try:
        import yaml
    except ImportError:
        return json.dumps(values, indent=2, ensure_ascii=False)
    return str(yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=100))


def describe_noise(summary: Summary) -> tuple[str, str]:
    """The chosen noise, and what it is measured in."""
    unit = {
        "init": "1 is as much as a fresh initialisation has",
        "theory": "in the paper's constants",
        "signal": "relative to the spectral norm of each weight",
    }
    choice = summary.choice
    more = unit.get(choice.unit, f"unit {choice.unit}")
    if choice.plain is not None:
        more += f"; plain transfer: {words.format_setting(choice.plain[0])}"
    return words.format_setting(choice.noise), more


def describe_setting(summary: Summary) -> str:
    """What was trained, in a line: model, data, optimizer, widths."""
    return " · ".join(part for part in (*name_parts(summary.recipe), _widths(summary)) if part)


def name_parts(recipe: Mapping[str, Any]) -> list[str]:
    """The classes of a recipe's model, data and optimizer, as far as it names them.

    >>> name_parts({"model": {"class_path": "mupscale.models.MLP"}})
    ['MLP']
    """
    names = [_class(recipe.get(part)) for part in ("model", "data", "optimizer")]
    return [name for name in names if name]


def _widths(summary: Summary) -> str:
    base, upscaled = summary.get("base"), summary.get("upscaled") or summary.get("scratch")
    if base is None or upscaled is None:
        return ""
    small = summary.method.get("widths") or []
    tuned = f", tuned at {' and '.join(format_width(width) for width in small)}" if small else ""
    return f"width {format_width(base.width)} → {format_width(upscaled.width)}{tuned}"


def _two_lines(values: list[float]) -> str:
    return words.format_spread(values).replace(" (", "\n(")


def _class(spec: Any) -> str:
    path = spec.get("class_path", "") if isinstance(spec, dict) else ""
    return str(path).rpartition(".")[2]


def _labelled(runs: Runs) -> str:
    lost = sum(curve.status == "diverged" for curve in runs.curves)
    return (runs.label or runs.name) + (f" ({lost} of {len(runs.curves)} diverged)" if lost else "")


def _rate(runs: Runs) -> str:
    if runs.drop is None or runs.drop_lr is None:
        return words.format_setting(runs.lr)
    return f"{words.format_setting(runs.lr)} → {words.format_setting(runs.drop_lr)}"


def _or_unknown(flops: float | None) -> str:
    return words.format_flops(flops) if words.is_finite_number(flops) else "unknown"
