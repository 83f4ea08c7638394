"""torch_geometric: message passing on a small random graph, each as nodes → hidden units → 2 outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from third_party import MODELS, Model, add, by, find

NODES, EDGES, FEATURES = 12, 40, 5


def graph() -> tuple[Tensor, Tensor]:
    """Features of the nodes, and pairs of nodes."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(NODES, FEATURES, generator=generator), torch.randint(0, NODES, (2, EDGES), generator=generator))


class TwoLayers(nn.Module):
    """Two layers of message passing with a nonlinearity between them, and a linear readout."""

    def __init__(self, first: nn.Module, second: nn.Module, width: int) -> None:
        super().__init__()
        self.first, self.second, self.readout = first, second, nn.Linear(width, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = torch.tanh(self.first(x, edges))
        return self.readout(torch.tanh(self.second(x, edges)))


def whole(name: str, path: str, **more: Any) -> None:
    """One of the library's own stacks of layers."""
    sizes = {"in_channels": FEATURES, "hidden_channels": by(8), "num_layers": 3, "out_channels": 2}
    add("torch_geometric", name, f"torch_geometric.nn.models:{path}", graph, **sizes, **more)


def layers(name: str, make: Callable[[Callable[..., nn.Module], int, int, int], nn.Module], **expected: str) -> None:
    """Two layers of a kind: `make` gets its class, the numbers of its inputs and outputs, and k."""

    def build(k: int) -> nn.Module:
        layer = find(f"torch_geometric.nn:{name}")
        return TwoLayers(make(layer, FEATURES, 8 * k, k), make(layer, 8 * k, 8 * k, k), 8 * k)

    MODELS.append(Model("torch_geometric", name, build, graph, **expected))


whole("GCN", "GCN")
whole("GCN, batch norm, jumping knowledge", "GCN", norm="batch_norm", jk="cat")
whole("GraphSAGE", "GraphSAGE")
whole("GraphSAGE, max of neighbours", "GraphSAGE", aggr="max")
whole("GIN", "GIN", train_eps=True)
whole("GAT", "GAT", heads=by(2))
whole("GATv2", "GAT", heads=by(2), v2=True)
whole("EdgeCNN", "EdgeCNN")
layers("TransformerConv", lambda layer, n, m, k: layer(n, 4, heads=2 * k, beta=True))
layers("GraphConv", lambda layer, n, m, k: layer(n, m))
layers("ChebConv", lambda layer, n, m, k: layer(n, m, K=3))
layers("TAGConv", lambda layer, n, m, k: layer(n, m))
layers("SGConv", lambda layer, n, m, k: layer(n, m, K=2))
layers("ARMAConv", lambda layer, n, m, k: layer(n, m, num_stacks=2, num_layers=2))
layers("ResGatedGraphConv", lambda layer, n, m, k: layer(n, m))
layers(
    "GatedGraphConv",
    lambda layer, n, m, k: layer(m, num_layers=2),
    refused="new_zeros.* no copies",
    why="pads the features with zeros up to the width",
)
layers("LEConv", lambda layer, n, m, k: layer(n, m))
layers("SuperGATConv", lambda layer, n, m, k: layer(n, 4, heads=2 * k))
layers("FiLMConv", lambda layer, n, m, k: layer(n, m))
layers("GeneralConv", lambda layer, n, m, k: layer(n, m, attention=True, heads=2))
