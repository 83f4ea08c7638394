"""OLMo 3: OLMo 2 with a sliding window in some layers, which is no matter of width."""

from dataclasses import replace

from mupscale.hf.describe.architectures.olmo2 import OLMO2
from mupscale.hf.describe.registry import register

OLMO3 = register(replace(OLMO2, model_type="olmo3"))
