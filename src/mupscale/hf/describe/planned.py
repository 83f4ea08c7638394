"""What upscaling, verification and training ask of an architecture, whether it is described or not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mupscale.core import Plan, Shape
from mupscale.hf.describe.architecture import Config
from mupscale.hf.describe.config_fields import ffn_that_follows_hidden
from mupscale.hf.describe.multipliers import PartTimes, Times
from mupscale.system import MupscaleError, setting


@dataclass(frozen=True)
class Evidence:
    """What a comparison of the small and the wide model must show before the wide one is kept.

    required: the wide model is refused where the two cannot be compared. training_steps: how long they must agree in
    training; 0 where their outputs suffice. dtypes: of the comparison, the preferred one first.
    """

    required: bool
    training_steps: int
    dtypes: tuple[str, ...]


class PlannedArchitecture(ABC):
    """How models of one model_type grow: `Described` knows it, `FromModules` runs two models, or asks their modules.

    described: whether there is a description. origin: where the plan comes from, in words. evidence: what has to be
    shown of a wide model. A config is always the narrow model's config.json.
    """

    described: ClassVar[bool]
    origin: ClassVar[str]
    evidence: ClassVar[Evidence]

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type

    def origin_of(self, plan: Plan) -> str:
        """Where this plan comes from, in words."""
        return self.origin

    @abstractmethod
    def wide_config(self, config: Config, times: Times) -> dict[str, Any]:
        """config.json of the wide model."""

    @abstractmethod
    def sizes(self, config: Config) -> dict[str, Any]:
        """Every size that can grow, and head_dim, under names for messages."""

    @abstractmethod
    def parts(self, config: Config) -> dict[str, int]:
        """The sizes that can be asked for: hidden, ffn, heads and kv, as far as the config has them."""

    @abstractmethod
    def how_to_tell_the_initialisation(self, config: Config) -> str:
        """What to do where it is not known what fresh units would be drawn from."""

    @abstractmethod
    def obstacles(self, config: Config, times: Times) -> list[str]:
        """Why a growth that is to keep the function cannot, beyond what the plan shows."""

    @abstractmethod
    def is_tied(self, config: Config) -> bool | None:
        """Whether the readout is the embedding; None where only the model itself can tell."""

    @abstractmethod
    def wires_of(self, name: str, dimensions: int) -> dict[int, str]:
        """The wire at each dimension of a tensor, where they have names."""

    @abstractmethod
    def plan_to_record(self, config: Config, times: Times, *, fresh: bool) -> Plan | None:
        """The plan by the model's own names that mupscale.json must hold; None where it can be made again at any time.

        fresh: measure the initial stds, too, which noise and fresh units need.
        """

    @abstractmethod
    def plan_files(
        self,
        config: Config,
        times: Times,
        shapes: Mapping[str, Shape],
        *,
        recorded: Plan | None = None,
        fresh: bool = True,
    ) -> Plan:
        """The plan for the tensors of the files, which have these narrow shapes.

        recorded: what plan_to_record gave for this growth, if it is at hand.
        """

    @abstractmethod
    def plan_parameters(self, config: Config, times: Times, shapes: Mapping[str, Shape], *, fresh: bool = True) -> Plan:
        """The plan for a narrow model's parameters, which have these shapes."""

    @abstractmethod
    def plan_unchanged(self, config: Config, shapes: Mapping[str, Shape], *, means: bool) -> Plan:
        """A plan by which nothing grows, for the initial values of a model's parameters, which have these shapes.

        means: know them, too, which fresh units need.
        """

    @abstractmethod
    def plan_wide_parameters(self, config: Config, times: Times, shapes: Mapping[str, Shape]) -> Plan:
        """The plan for a wide model's parameters, which have these shapes, where nothing else is on record."""

    def check_grown(self, plan: Plan, times: Times, config: Config) -> None:
        """An error where nothing grows, or, of an architecture that is not described, only a part."""
        growing = sum(entry.narrow != entry.wide for entry in plan.parameters.values())
        remedy = "have other names than usual; describe the architecture (mupscale.hf.register)"
        if growing == 0 and times != Times():
            raise MupscaleError(f"nothing of '{self.model_type}' would grow: the sizes in its config {remedy}")
        whole = times.hidden != 1 and not isinstance(times, PartTimes)
        if not whole or not self.evidence.required or 2 * growing >= len(plan.parameters):
            return
        few = f"only {growing} of {len(plan.parameters)} tensors of '{self.model_type}' would grow"
        if times.ffn == 1 and (size := ffn_that_follows_hidden(config, times)) is not None:
            raise MupscaleError(
                f"{few}, since its config makes the size of its feed-forward layers of the hidden size: let ffn grow "
                f"as hidden does, {times.hidden} times ({setting('ffn', size)})"
            )
        raise MupscaleError(f"{few}: the other sizes in its config {remedy}")

    @abstractmethod
    def check_unverified(self) -> None:
        """Raise where a wide checkpoint must not be written without a comparison."""

    @abstractmethod
    def check_too_large_to_train(self, needed: str) -> None:
        """Raise where the models must be compared in training, and memory for that (`needed`) is lacking."""

    @abstractmethod
    def check_without_record(self, folder: Path) -> None:
        """Raise where the sizes in two configs do not tell how the checkpoint in `folder` grew."""

    @abstractmethod
    def check_constant_outputs(self, folder: Path) -> None:
        """Raise where outputs that do not depend on the input show nothing of the model in `folder`."""

    @abstractmethod
    def advice(self) -> str:
        """What else may be done about a wide model that differs; may be empty."""
