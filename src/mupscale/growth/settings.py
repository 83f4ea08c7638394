"""How a model grows, as one value made of words: what recipes, commands, comparisons and records say.

Each operator has its own settings beside it (`CopiesSettings`, `FreshSettings`): one more is a field there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

from mupscale.growth.copies import Copies, CopiesSettings, NaiveCopies, Net2Net, NoiseLevel, is_replica
from mupscale.growth.depth_plans import DepthOperator, Identity, Stack
from mupscale.growth.fresh import Fresh, FreshSettings, LosslessSettings
from mupscale.growth.operator_pairs import choose_operator
from mupscale.growth.operators import Operator
from mupscale.system import MupscaleError


class OperatorSettings(Protocol):
    """Settings of one kind of operator, as a dataclass with a field for each."""

    def operator_arguments(self) -> dict[str, Any]:
        """What the operator is made with."""


@dataclass(frozen=True, kw_only=True)
class NoSettings:
    """Of an operator whose word says all of it."""

    def operator_arguments(self) -> dict[str, Any]:
        return {}


class OperatorWord(NamedTuple):
    """What makes the operator of a word, and the settings that it takes."""

    make: Callable[..., Operator]
    settings: Callable[..., OperatorSettings] = NoSettings

    @property
    def takes(self) -> frozenset[str]:
        """The names of its settings."""
        return frozenset(field.name for field in fields(self.settings))  # type: ignore[arg-type]


OPERATORS = {
    "copies": OperatorWord(Copies, CopiesSettings),
    "paired": OperatorWord(partial(Copies, paired=True), CopiesSettings),
    "fresh": OperatorWord(Fresh, FreshSettings),
    "lossless": OperatorWord(partial(Fresh, lossless=True), LosslessSettings),
    "net2net": OperatorWord(Net2Net, CopiesSettings),
    "naive": OperatorWord(NaiveCopies, CopiesSettings),
}
"""Every operator for width by its word, in recipes, comparisons, commands and files: another one is another line."""

Deepen = Literal["identity", "stack", "interleaved"]
"""What new blocks are: ones that change nothing at first, or copies of the old ones, on top or each behind its own."""

DEPTH_OPERATORS: dict[str, DepthOperator] = {
    "identity": Identity(),
    "stack": Stack("appended"),
    "interleaved": Stack("interleaved"),
}
"""Every operator for depth by its word."""


def word_in_table(word: str) -> OperatorWord:
    if word not in OPERATORS:
        *others, last = (*OPERATORS, *DEPTH_OPERATORS)
        raise MupscaleError(f"how is {word!r}, but must be {', '.join(others)} or {last}")
    return OPERATORS[word]


def words_that_take(setting: str) -> list[str]:
    """The words of the operators that have a setting."""
    return [word for word, known in OPERATORS.items() if setting in known.takes]


def word_of_operator(operator: Operator) -> str:
    """The word for operators of this class, the first of several; the name of a class that has none."""
    kind = type(operator)
    for word, known in OPERATORS.items():
        if known.make is kind:
            return word
    return kind.__name__


def usual_how(noise: NoiseLevel) -> str:
    """The word for what a growth does if nothing but its noise is said."""
    return "copies" if choose_operator(None, 1.0 if noise else None).needs_multiples else "fresh"


@dataclass(frozen=True, kw_only=True)
class HowSettings:
    """The word that stands before all settings of operators, in files as well: hashes of what is stored go by that.

    Args:
        how: how to fill new units (outside `grow`, when the checkpoint `from` is upscaled): fresh (add newly
            initialised units; the default), lossless (fresh units that leave the outputs unchanged at first), copies
            (copy every unit and add noise; the default if you give noise) or paired (copies whose noise cancels at
            first). For comparison: net2net (random copies) and naive (copies), both without the optimizer state
    """

    how: str | None = None


@dataclass(frozen=True, kw_only=True)
class GrowthSettings(FreshSettings, CopiesSettings, HowSettings):
    """What new units and new blocks are filled with, in a growth event and in a recipe that starts from a checkpoint.

    The settings of all operators are fields; one that the operator in `how` does not take must be left out.

    Args:
        deepen: what new blocks are: identity (they change nothing at first), stack (copies appended after all blocks)
            or interleaved (each copy follows its original). If only the depth grows, you can give this as `how`

    >>> GrowthSettings(how="copies", noise=0.5).build_operator()
    Copies(noise=GaussianNoise(std=0.5, unit='init'), paired=False, shrink=1.0)
    """

    deepen: Deepen = "identity"

    @property
    def growth_settings(self) -> dict[str, Any]:
        """These settings by name, without the fields that a subclass adds."""
        return {field.name: getattr(self, field.name) for field in fields(GrowthSettings)}

    @property
    def takes_noise(self) -> bool:
        return "noise" in self._operator_word.takes

    @property
    def _settled_how(self) -> str:
        return self.how or usual_how(self.noise)

    @property
    def _operator_word(self) -> OperatorWord:
        """What fills new units; copies, where `how` is about new blocks alone."""
        how = self._settled_how
        return word_in_table("copies" if how in DEPTH_OPERATORS else how)

    @property
    def foreign_settings(self) -> list[str]:
        """The settings that are given, and that what fills new units does not take."""
        takes = self._operator_word.takes
        return [name for name in self._given_settings if name not in takes]

    @property
    def _given_settings(self) -> list[str]:
        """The settings of operators that differ from their defaults."""
        given = list[str]()
        for field in self._operator_fields:
            qualifies_another = "of" in field.metadata  # a unit says nothing where there is no amount
            if getattr(self, field.name) != field.default and not qualifies_another:
                given.append(field.name)
        return given

    @property
    def _operator_fields(self) -> list[Field[Any]]:
        """The fields that are settings of operators."""
        return [field for field in fields(GrowthSettings) if field.name not in ("how", "deepen")]

    def build_operator(self) -> Operator:
        """The operator to grow in width with; an error where a setting is given that it does not take."""
        how, word = self._settled_how, self._operator_word
        if how in DEPTH_OPERATORS and self._given_settings:
            raise MupscaleError(
                f"how: {how} is for new blocks and takes no {self._given_settings[0]}: use deepen: {how}, and how for "
                "new units"
            )
        for name in self.foreign_settings:
            taker = words_that_take(name)[0]
            raise MupscaleError(f"how: {how} takes no {name}: leave {name} out, or use how: {taker}")
        settings = word.settings(**{name: getattr(self, name) for name in word.takes})
        return word.make(**settings.operator_arguments())

    def build_operators(self) -> tuple[Operator, DepthOperator]:
        """The operators to grow with, in width and in depth; where depth alone grows, `how` may name its own."""
        return self.build_operator(), DEPTH_OPERATORS[self.how if self.how in DEPTH_OPERATORS else self.deepen]

    @property
    def in_words(self) -> str:
        """What fills new units, for a line of progress."""
        how = self._settled_how
        if how in DEPTH_OPERATORS:
            return f"new blocks: {how}"
        if is_replica(self.build_operator()):
            return f"{how} without noise, which stay equal: the wide model remains a replica"
        parts = [f"{how} units"]
        if "noise" in word_in_table(how).takes:
            noise = "by parameter" if isinstance(self.noise, dict) else f"{self.noise:g}"
            parts = [f"{'' if how == 'copies' else f'{how} '}noise {noise}"]
        parts += [f"{name} {getattr(self, name)}" for name in self._given_settings if name != "noise"]
        return ", ".join(parts)
