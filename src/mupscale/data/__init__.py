"""What a run trains on: tables, images and text, from local files or shipped with the package."""

from mupscale.data.images import CIFAR100, Images, Shapes
from mupscale.data.own_sources import as_data
from mupscale.data.own_tables import TableFile
from mupscale.data.packing import info, tokenize
from mupscale.data.stream import Data
from mupscale.data.tabular import CoverType, CoverTypeSample, Split, Table, covtype_sample
from mupscale.data.text import Shakespeare, Text, tinyshakespeare

__all__ = [
    "CIFAR100",
    "CoverType",
    "CoverTypeSample",
    "Data",
    "Images",
    "Shakespeare",
    "Shapes",
    "Split",
    "Table",
    "TableFile",
    "Text",
    "as_data",
    "covtype_sample",
    "info",
    "tinyshakespeare",
    "tokenize",
]
