"""Mamba 2: a state space with heads in groups, each of which shares what it writes into its states and reads from them.

Whole groups are copied, and the wide config has more of them. Head size and state size stay.
"""

import math
import statistics
from dataclasses import replace

from mupscale.hf.describe.architecture import Architecture, Config, Wires
from mupscale.hf.describe.architectures.llama import HEADS, OTHERS, TIED
from mupscale.hf.describe.multipliers import Ratios, Times, grown
from mupscale.hf.describe.registry import register
from mupscale.hf.describe.wires import Layout, Wire, linear, table, vector
from mupscale.system import setting


def _wires(wires: Wires, config: Config) -> Wires:
    heads, groups, size, state = (MAMBA2.number(config, n) for n in ("num_heads", "n_groups", "head_dim", "state_size"))
    times = wires["queries"].times
    inner = Wire(heads * size, times, heads // groups * size)
    states = Wire(groups * state, times, state)
    each_head = Wire(heads, times, heads // groups)
    mixed = inner | states | states
    return {"queries": inner, "mixed": mixed, "all": inner | mixed | each_head, "each_head": each_head}


def _also(config: Config, times: Times) -> Config:
    return {"n_groups": grown(MAMBA2.number(config, "n_groups"), times.heads)}


def _uniform(config: Config, inputs: int) -> float:
    """What torch's own initialisation of so many inputs is, by the config's std."""
    return float((3 * inputs) ** -0.5 / (MAMBA2.initial_std(config) or 0.1))


def _of_convolution(config: Config) -> float:
    return _uniform(config, MAMBA2.number(config, "conv_kernel"))


def _of_outputs(config: Config) -> float:
    return _uniform(config, MAMBA2.number(config, "num_heads") * MAMBA2.number(config, "head_dim"))


def _decays(config: Config) -> list[float]:
    """What A_log of a layer starts as; a new layer's is drawn with the same mean and spread."""
    return [math.log(head) for head in range(1, MAMBA2.number(config, "num_heads") + 1)]


def _time_steps(config: Config) -> tuple[float, float]:
    """The logarithms between which those of dt lie evenly; dt_bias, through a softplus, is close to them."""
    return math.log(MAMBA2.value(config, "time_step_min")), math.log(MAMBA2.value(config, "time_step_max"))


def _of_decays(config: Config) -> float:
    return statistics.pstdev(_decays(config)) / (MAMBA2.initial_std(config) or 0.1)


def _of_time_steps(config: Config) -> float:
    least, most = _time_steps(config)
    return (most - least) / 12**0.5 / (MAMBA2.initial_std(config) or 0.1)


def _refuse(config: Config, times: Times) -> str:
    if times.hidden != times.heads:
        return (
            "Mamba 2 has as many units in its heads as expand × hidden_size: let hidden and heads grow by the same "
            f"factor, as in {setting('times', times.hidden if times.hidden != 1 else times.heads)}"
        )
    if isinstance(times, Ratios):
        return (
            "the decays of Mamba 2 (A_log) start as log 1, 2, 3, … over the heads of a layer, so the start of new "
            f"heads beside trained ones is undefined. Grow by copies, as in {setting('times', 2)}"
        )
    return ""


MAMBA2 = register(
    Architecture(
        "mamba2",
        tensors={
            "*.mixer.in_proj.weight": linear("all", "hidden"),
            "*.mixer.in_proj.bias": vector("all"),
            "*.mixer.conv1d.weight": Layout({-3: "mixed"}, {}),
            "*.mixer.conv1d.bias": vector("mixed"),
            "*.mixer.A_log": vector("each_head"),
            "*.mixer.D": vector("each_head"),
            "*.mixer.dt_bias": vector("each_head"),
            "*.mixer.norm.weight": vector("queries").in_norm("rms"),
            "*.mixer.out_proj.weight": linear("hidden", "queries"),
            "*.mixer.out_proj.bias": vector("hidden"),
            "*embedding*.weight": table("hidden"),
            "*norm*.weight": vector("hidden").in_norm("rms"),
            **HEADS,
        },
        tied=replace(TIED, embedding="*embedding*.weight", norm=("*norm_f.weight",), others=OTHERS),
        ffn=None,
        heads="num_heads",
        head_dim="head_dim",
        defaults={
            "hidden_size": 4096,
            "num_heads": 128,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "initializer_range": 0.1,
            "time_step_min": 0.001,
            "time_step_max": 0.1,
        },
        wires=_wires,
        init={
            "*.mixer.conv1d.weight": _of_convolution,
            "*.mixer.out_proj.weight": _of_outputs,
            "*.mixer.A_log": _of_decays,
            "*.mixer.dt_bias": _of_time_steps,
        },
        start={
            "*.mixer.A_log": lambda config: statistics.fmean(_decays(config)),
            "*.mixer.dt_bias": lambda config: statistics.fmean(_time_steps(config)),
            "*.mixer.D": lambda config: 1.0,
        },
        also=_also,
        refuse=_refuse,
    )
)
