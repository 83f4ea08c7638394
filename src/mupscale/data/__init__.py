"""Data that ships with the package, so that everything runs offline from a fresh install."""

from mupscale.data.embedded import Split, covtype_sample

__all__ = ["Split", "covtype_sample"]
