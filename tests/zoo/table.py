"""All third-party models of the zoo, and the tables in docs/third-party-models.md and docs/third-party-table.md.

python tests/zoo/table.py      # prints the tables as the docs have them; a test compares the two
"""

from __future__ import annotations

import models_diffusers
import models_peft
import models_timm
import models_torch_geometric
import models_vit_pytorch
import models_x_transformers
from third_party import MODELS

__all__ = ["LIBRARIES", "MODELS", "counts", "rows"]

# importing one of these modules puts its models on the list
_SOURCES = models_timm, models_diffusers, models_torch_geometric, models_x_transformers, models_vit_pytorch, models_peft
LIBRARIES = {
    "timm": ("timm",),
    "diffusers": ("diffusers",),
    "torch_geometric": ("torch_geometric",),
    "x-transformers": ("x_transformers",),
    "vit-pytorch": ("vit_pytorch",),
    "peft": ("peft", "transformers"),
}
"""The packages that a library's models need, by its name in the table."""


def counts() -> list[str]:
    """For every library, how many of its models are exact, and how many refused."""
    found = []
    for library in (*LIBRARIES, "all"):
        refused = [bool(model.refused) for model in MODELS if library in (model.library, "all")]
        found.append(f"| {library} | {len(refused)} | {refused.count(False)} | {refused.count(True)} |")
    return found


def rows() -> list[str]:
    """One row for every model, library by library."""
    return [
        f"| {model.library} | {model.name} | {f'refused: {model.why}' if model.refused else 'exact'} |"
        for library in LIBRARIES
        for model in MODELS
        if model.library == library
    ]


if __name__ == "__main__":
    print("| library | models | exact | refused |\n| --- | --- | --- | --- |", *counts(), sep="\n")
    print("\n| library | model | widening |\n| --- | --- | --- |", *rows(), sep="\n")
