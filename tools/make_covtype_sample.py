"""Make the CoverType sample that ships in the package: python tools/make_covtype_sample.py path/to/covtype.data.gz

A stratified sample of the UCI data set, one-hot columns packed into one number each.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

ROWS, TRAIN = 15_000, 12_000
TARGET = Path(__file__).parents[1] / "src" / "mupscale" / "data" / "covtype.npz"


def main(source: str) -> None:
    table = np.loadtxt(source, delimiter=",", dtype=np.int16)
    generator = np.random.default_rng(0)
    label = table[:, -1] - 1
    picked = []
    for value in np.unique(label):
        rows = generator.permutation(np.flatnonzero(label == value))
        picked.append(rows[: round(ROWS * len(rows) / len(table))])
    rows = generator.permutation(np.concatenate(picked))
    sample = table[rows]
    np.savez_compressed(
        TARGET,
        continuous=sample[:, :10],
        wilderness=sample[:, 10:14].argmax(1).astype(np.uint8),
        soil=sample[:, 14:54].argmax(1).astype(np.uint8),
        label=(sample[:, 54] - 1).astype(np.uint8),
        train=np.arange(len(rows)) < TRAIN,
    )
    print(f"{len(rows)} rows, {TARGET.stat().st_size / 1e3:.0f} kB in {TARGET.name}")


if __name__ == "__main__":
    main(sys.argv[1])
