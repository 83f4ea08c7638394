"""What a run trains on: tables, images and text, from local files or shipped with the package."""

from mupscale.data.in_memory import CIFAR100, CoverType, CoverTypeSample, Images, Shapes, Split, Table, covtype_sample
from mupscale.data.own_data import TableFile, as_data
from mupscale.data.packing import Shakespeare, Text, info, tinyshakespeare, tokenize
from mupscale.data.stand_in import StandIn
from mupscale.data.stream import Data

__all__ = [
    "CIFAR100",
    "CoverType",
    "CoverTypeSample",
    "Data",
    "Images",
    "Shakespeare",
    "Shapes",
    "Split",
    "StandIn",
    "TableFile",
    "Text",
    "as_data",
    "covtype_sample",
    "info",
    "tinyshakespeare",
    "tokenize",
]
