"""An architecture that is described: every plan follows from the config and the names and shapes of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mupscale.core import Plan, Shape
from mupscale.hf.describe.architecture import Architecture, Config
from mupscale.hf.describe.multipliers import Ratios, Times
from mupscale.hf.describe.planned import Evidence, PlannedArchitecture


class Described(PlannedArchitecture):
    """Plans by a description. It is trusted, so that the wide model may be written without a comparison."""

    described = True
    origin = "as described"
    evidence = Evidence(required=False, training_steps=0, dtypes=("float32",))

    def __init__(self, description: Architecture) -> None:
        super().__init__(description.model_type)
        self.description = description

    def wide_config(self, config: Config, times: Times) -> dict[str, Any]:
        """By the fields that the description names."""
        return self.description.wide_config(config, times)

    def sizes(self, config: Config) -> dict[str, Any]:
        """Defaults included."""
        described = self.description
        fields = (described.hidden, described.ffn or "feed-forward size", described.heads)
        sizes = {name: described.value(config, name) for name in fields}
        sizes[fields[1]] = described.ffn_size(config)
        return {**sizes, "key/value heads": described.kv_heads(config), "head_dim": described.head_size(config)}

    def parts(self, config: Config) -> dict[str, int]:
        """Defaults included."""
        return self.description.parts(config)

    def how_to_tell_the_initialisation(self, config: Config) -> str:
        """By the config."""
        return f"write '{self.description.std}', the std of the model's own initialisation, into config.json"

    def obstacles(self, config: Config, times: Times) -> list[str]:
        """As described."""
        described, size = self.description, self.description.parts(config)
        reasons = [why] if (why := described.not_lossless(config, times)) else []
        alike = size["hidden"] == size.get("ffn") and times.hidden == times.ffn != 1
        if alike and any(layout.norm == "layer" for layout in described.tensors.values()):
            reasons.append(
                "its feed-forward layers have the size of its residual stream, so the plan cannot tell the two apart"
            )
        return reasons

    def is_tied(self, config: Config) -> bool:
        """By the config."""
        return self.description.is_tied(config)

    def wires_of(self, name: str, dimensions: int) -> dict[int, str]:
        """By the tensor's layout."""
        layout = self.description.layout(name)
        return {d % dimensions: wire for side in (layout.out, layout.in_) for d, wire in side.items()}

    def plan_to_record(self, config: Config, times: Times, *, fresh: bool) -> None:
        """Nothing: the description makes the plan again."""

    def plan_files(
        self,
        config: Config,
        times: Times,
        shapes: Mapping[str, Shape],
        *,
        recorded: Plan | None = None,
        fresh: bool = True,
    ) -> Plan:
        """A description knows the names in files, too."""
        return self.description.plan(config, times, shapes)

    def plan_parameters(self, config: Config, times: Times, shapes: Mapping[str, Shape], *, fresh: bool = True) -> Plan:
        """By the names and narrow shapes."""
        return self.description.plan(config, times, shapes)

    def plan_unchanged(self, config: Config, shapes: Mapping[str, Shape], *, means: bool) -> Plan:
        """By the std in the config."""
        return self.description.plan(config, Ratios() if means else Times(), shapes)

    def plan_wide_parameters(self, config: Config, times: Times, shapes: Mapping[str, Shape]) -> Plan:
        """By the names and wide shapes."""
        return self.description.plan(config, times, shapes, wide=True)

    def check_unverified(self) -> None:
        """The description is enough."""

    def check_too_large_to_train(self, needed: str) -> None:
        """None is needed."""

    def check_without_record(self, folder: Path) -> None:
        """The sizes in both configs tell how it grew."""

    def check_constant_outputs(self, folder: Path) -> None:
        """The description does not need them."""

    def advice(self) -> str:
        """Nothing else."""
        return ""
