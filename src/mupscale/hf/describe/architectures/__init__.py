"""The architectures that are described, one file each: a new file here is all that a new architecture needs."""

import pkgutil
from importlib import import_module

__all__: list[str] = []

for _file in pkgutil.iter_modules(__path__, f"{__name__}."):
    import_module(_file.name)
