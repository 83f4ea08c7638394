"""The laboratory on CUDA: used where there is one, with the numbers of the CPU. `pytest -m gpu`"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mupscale.theory import Finite, Limit, MLPSetup, Program, Sign, Stage, finite, limit, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
INPUTS, TARGETS = torch.tensor([[1.0, 0.3], [-0.4, 0.9]]), torch.tensor([[0.8], [-0.6]])


def program(mlp: MLPSetup) -> object:
    def outputs(p: Program) -> Tensor:
        return run(p, mlp, INPUTS, TARGETS, [Stage(4, 0.3), Stage(4, 0.2, 2, 0.5)]).outputs

    return outputs


def test_a_gpu_is_used_where_there_is_one() -> None:
    assert Limit(10).device.type == Finite(10).device.type == "cuda"
    assert Limit(10).vector().is_cuda


@pytest.mark.parametrize(
    "mlp", [MLPSetup(3, "tanh", momentum=0.5), MLPSetup(4, "relu"), MLPSetup(3, "tanh", entrywise=Sign(0.3))]
)
def test_the_limit_is_that_of_the_cpu(mlp: MLPSetup) -> None:
    samples = 8000 if mlp.entrywise is None else 1000
    found, wanted = (limit(program(mlp), k=2, samples=samples, seeds=4, device=d) for d in ("cuda", "cpu"))
    error = (found.standard_error**2 + wanted.standard_error**2).mean().sqrt()
    assert float((found.mean - wanted.mean).square().mean().sqrt()) < 3 * error < 0.05


@pytest.mark.parametrize("dense", [True, False])
def test_wide_networks_on_the_gpu_meet_the_limit(dense: bool) -> None:
    found = finite(program(MLPSetup(3, "tanh")), 2048, k=2, seeds=16, dense=dense)
    wanted = limit(program(MLPSetup(3, "tanh")), k=2, samples=20_000, seeds=4)
    error = (found.standard_error**2 + wanted.standard_error**2).mean().sqrt()
    assert float((found.mean - wanted.mean).square().mean().sqrt()) < 3 * error < 0.03
