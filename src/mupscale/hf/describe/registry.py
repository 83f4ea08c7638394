"""The descriptions of architectures by model_type; those in the folder architectures/ are found by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mupscale.hf.describe.architecture import Architecture, Config
from mupscale.hf.describe.described import Described
from mupscale.hf.describe.from_modules import FromModules
from mupscale.hf.describe.planned import PlannedArchitecture
from mupscale.hf.describe.wires import Layout
from mupscale.system import MupscaleError, checks_arguments

DESCRIPTIONS: dict[str, Architecture] = {}
"""By model_type; importing `mupscale.hf.describe` fills it."""


def architecture_of(config: Config) -> PlannedArchitecture:
    """Who plans the growth of this config's model: its description, or its modules where there is none.

    >>> architecture_of({"model_type": "llama"}).origin
    'as described'
    >>> architecture_of({"model_type": "arcee"}).origin
    'not described'
    """
    description = DESCRIPTIONS.get(str(config.get("model_type")))
    return FromModules(str(config.get("model_type"))) if description is None else Described(description)


@checks_arguments
def register(architecture: Architecture) -> Architecture:
    """Make a description known under its model_type, in place of any other.

    >>> from dataclasses import replace
    >>> from mupscale.hf.describe.architectures.llama import LLAMA
    >>> register(replace(LLAMA, model_type="my_llama")).model_type
    'my_llama'
    >>> architecture_of({"model_type": "my_llama"}).described
    True
    >>> del DESCRIPTIONS["my_llama"]
    """
    DESCRIPTIONS[architecture.model_type] = architecture
    return architecture


@checks_arguments
def extend(model_type: str, tensors: Mapping[str, Layout]) -> Architecture:
    """Add tensors that a description lacks, such as a head of one's own; patterns given here go first.

    >>> from dataclasses import replace
    >>> from mupscale.hf.describe import linear
    >>> _ = register(replace(DESCRIPTIONS["llama"], model_type="my_llama"))
    >>> mine = extend("my_llama", {"*.mixer.weight": linear("hidden", "hidden")})
    >>> mine.layout("model.layers.0.mixer.weight").out
    {-2: 'hidden'}
    >>> del DESCRIPTIONS["my_llama"]
    """
    description = DESCRIPTIONS.get(model_type)
    if description is None:
        described = ", ".join(sorted(DESCRIPTIONS))
        raise MupscaleError(f"'{model_type}' is not described yet: {described} are; register it whole")
    others = {pattern: layout for pattern, layout in description.tensors.items() if pattern not in tensors}
    return register(replace(description, tensors={**tensors, **others}))
