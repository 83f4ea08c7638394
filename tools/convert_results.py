"""The stored summaries of results/, from the formats before there was one study, into format 3, with their recipes.

    python tools/convert_results.py

Run once, when comparison/ and method/ became study/; it stays as a record of what each number of the stored files was.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from mupscale.study import (
    BudgetPoint,
    ContenderRuns,
    Curve,
    Search,
    StageSpent,
    StudySettings,
    StudySummary,
    SystemRuns,
    Tried,
    answer_comparison,
    check_forecast,
)
from mupscale.study.contenders import USUAL_IN_PAPER
from mupscale.study.wording import write_paper_words, write_pay_words
from mupscale.system import parse_record

RESULTS = Path(__file__).parents[1] / "results"
NAMES = {
    "base": "base",
    "scratch": "from-scratch",
    "scratch-drop": "from-scratch-changed",
    "scratch-own": "from-scratch-own",
    "continued": "continued",
    "continued-own": "continued-own",
    "continued-late": "continued-late",
    "exact": "copies-without-noise",
    "upscaled": "copies",
    "upscaled-own": "copies-own",
    "upscaled-plain": "copies-plain",
    "net2net": "net2net",
    "naive": "naive-widening",
}
BASELINES = ["scratch", "scratch-drop", "continued"]
USUAL = {"measure": "train", "sampler": "grid", "trials": None, "pruner": "none", "engine": "auto", "storage": None}
"""What needs not be said."""
# ------------------------------------------------------------------------------------------------ comparisons


def convert_comparison(old: dict[str, Any]) -> StudySummary:
    """What `mupscale run` wrote, formats 1 and 2; the words are written anew."""
    runs = parse_record(SystemRuns, old["large"])
    answer = answer_comparison(runs)
    assert answer == old["answer"], old["name"]
    held = check_forecast(old["forecast"], runs, answer)
    assert [row["held"] for row in held] == [row["held"] for row in old["forecast"]["held"]], old["name"]
    tuned = [
        Search(
            one["name"].replace("the base model", "base"),
            one["lr"],
            one["noise"],
            [Tried(**cell) for cell in one["tried"]],
            one["remarks"],
        )
        for one in old["tuned"]
    ]
    summary = StudySummary(
        name=old["name"],
        command=old["command"],
        preset="pay",
        recipe=old["recipe"],
        settings=StudySettings(**{"prune": 0, **old["settings"]}).to_json(),
        tuned=tuned,
        small=[parse_record(SystemRuns, one) for one in old["small"]],
        large=runs,
        base=old["base"],
        forecast={**old["forecast"], "held": held},
        answer=answer,
        stages=[StageSpent(**one) for one in old["stages"]],
        notes=old["notes"],
    )
    return write_pay_words(summary)


# ----------------------------------------------------------------------------------------- the paper's method


def convert_method(old: dict[str, Any]) -> StudySummary:
    """What `mupscale run --paper` wrote, format 1."""
    by_name = {one["name"]: one for one in old["runs"]}
    large = SystemRuns(
        narrow=by_name["base"]["width"],
        wide=by_name["upscaled"]["width"],
        base_cost=old["costs"]["base"],
        unit="steps" if by_name["base"]["flops_per_step"] is None else "FLOPs",
        contenders=[convert_runs(one) for one in old["runs"]],
    )
    gain = {NAMES.get(key.replace("_", "-"), key): value for key, value in old["gain"].items()}
    base = by_name["base"]
    summary = StudySummary(
        name=old["name"],
        command=with_flag(old["command"]),
        preset="paper",
        recipe=old["recipe"],
        settings=convert_method_settings(old["method"], old["recipe"]["optimizer"]["init_args"]["lr"]).to_json(),
        sentences=old["verdict"],
        tuned=[convert_sweep(one) for one in old["sweeps"]],
        large=large,
        base={"from": None, "steps": base["steps"], "lr": old["choice"]["base_lr"], "width": base["width"]},
        answer={"sentence": old["verdict"][0], "costs": old["costs"], "gain": gain, "choice": old["choice"]},
        stages=[StageSpent(one["name"], one["flops"], one["seconds"]) for one in old["stages"]],
        notes=[re.sub(r"^[a-z-]+(?=:)", lambda name: NAMES.get(name[0], name[0]), note) for note in old["warnings"]],
        coords=old["coords"],
    )
    return write_paper_words(summary)


def with_flag(command: str) -> str:
    """A command of before the paper's comparison had to be asked for."""
    return command if "--paper" in command or "run" not in command.split() else f"{command} --paper"


def convert_runs(old: dict[str, Any]) -> ContenderRuns:
    """One model of the paper's comparison: one budget, and curves."""
    curves = [parse_record(Curve, one) for one in old["curves"]]
    steps, per_step = old["steps"], old["flops_per_step"]
    return ContenderRuns(
        name=NAMES[old["name"]],
        width=old["width"],
        lr=old["lr"],
        noise=old["noise"],
        points=[BudgetPoint(1.0, steps, steps * (per_step or 1.0), [curve.final() for curve in curves])],
        label=old["label"],
        cost_per_step=per_step,
        change=None if old["drop"] is None else (old["drop"], old["drop_lr"]),
        curves=curves,
    )


def convert_sweep(old: dict[str, Any]) -> Search:
    """Sweep 1 or 2 at one small width."""
    full = max(one["steps"] for one in old["trials"])
    trials = [
        Tried(
            one["lr"],
            one["noise"],
            [None] if one["status"] == "diverged" else one["by_seed"] or [one["curve"][-1][1]],
            one["steps"] / full if one["status"] == "pruned" else 1.0,
            [(int(step), loss) for step, loss in one["curve"]],
            one["steps"],
            one["flops"],
        )
        for one in old["trials"]
    ]
    finished = [one for one in trials if one.final is not None]
    best = min(finished, key=lambda one: (one.final, one.noise, one.lr))
    more = {"width": old["width"], "start": old["start"], "measure": old["measure"], "sampler": old["sampler"]}
    return Search(old["name"], best.lr, best.noise, trials, label=old["name"], **more)


def convert_method_settings(old: dict[str, Any], lr: float) -> StudySettings:
    """The section `method` as a section `study`."""
    return StudySettings(**convert_section(old, lr)).resolved(USUAL_IN_PAPER, "train")


def convert_section(old: dict[str, Any], lr: float) -> dict[str, Any]:
    """The values that the section gives, under their new names; where no learning rates were given, the one it was."""
    values: dict[str, Any] = {"widths": old["widths"], "lrs": old.get("lrs") or [lr], "grown_lrs": old["upscaled_lrs"]}
    values["noises"] = old["noises"]
    same = ("seeds", "measure", "sampler", "trials", "pruner", "engine", "storage", "retries")
    values |= {name: old[name] for name in same if name in old}
    values["small_seeds"] = old.get("sweep_seeds", 1)
    assert old.get("baselines", BASELINES) == BASELINES  # which now are the usual contenders
    return {name: value for name, value in values.items() if name not in USUAL or value != USUAL[name]}


# --------------------------------------------------------------------------------------------------- files


def convert_recipe(path: Path) -> None:
    """The section `method:` of a recipe as `study:`, with the comments of everything else."""
    text = path.read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    section = convert_section(values["method"], values["optimizer"]["init_args"]["lr"])
    head, found, tail = re.split(r"(?m)^(method:.*\n)", text)
    about = found.partition("#")[2].strip().replace("`mupscale run`", "`mupscale run --paper`")
    assert all(line.startswith((" ", "-")) for line in tail.splitlines() if line), path
    lines = [f"study:                 # {about}", *(f"  {name}: {_shown(value)}" for name, value in section.items())]
    path.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


def _shown(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()


def main() -> None:
    """Convert every stored result."""
    for path in sorted(RESULTS.glob("comparison-*/comparison.json")):
        summary = convert_comparison(json.loads(path.read_text(encoding="utf-8")))
        text = json.dumps(summary.to_json(), indent=1) + "\n"
        path.with_name("summary.json").write_text(text, encoding="utf-8")
        path.unlink()
    for path in sorted(RESULTS.glob("*/summary.json")):
        old = json.loads(path.read_text(encoding="utf-8"))
        if old["format"] == 1:
            text = json.dumps(convert_method(old).to_json(), separators=(",", ":")) + "\n"
            path.write_text(text, encoding="utf-8")
    for path in sorted(RESULTS.glob("*/recipe.yaml")):
        if "method" in yaml.safe_load(path.read_text(encoding="utf-8")):
            convert_recipe(path)


if __name__ == "__main__":
    main()
