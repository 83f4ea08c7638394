"""Plans: between two modules and of a family, tied weights, attention heads, wrappers, composition, JSON."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import mupscale as mu
from exactness import assert_goes_on, train_and_widen
from mupscale import Axis, Family, MupscaleError, Plan, Role, Rule
from mupscale.checks.equivalence import Report
from mupscale.models import GPT2, MLP, ResNet18
from mupscale.planning.from_modules import _REGISTRY as registry
from refusals import refuses

pytestmark = pytest.mark.usefixtures("float64")

ADAMW: dict[str, float] = {"lr": 0.02, "weight_decay": 0.3, "eps": 1e-3}


def sequences(shape: tuple[int, ...] = (3, 5)) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(4, *shape, 3)
    return [(batch, batch[..., :2].sin() + batch.mean(1, keepdim=True)[..., :2]) for batch in x]


def tokens() -> list[tuple[Tensor, Tensor]]:
    ids = torch.randint(0, 7, (4, 3, 6))
    return [(batch[:, :-1], batch[:, 1:]) for batch in ids]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    out = model(x)
    return (
        nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())
        if y.dtype == torch.long
        else (out - y).square().mean()
    )


def trained_apart(
    narrow: nn.Module, wide: nn.Module, batches: list[Any], *, static: bool = False, **plan: Any
) -> Report:
    """Train with AdamW, widen, train both on for six steps (or only compare outputs)."""
    return train_and_widen(narrow, wide, batches, loss, torch.optim.AdamW, static=static, hyper=ADAMW, **plan)


def assert_equivalent(narrow: nn.Module, wide: nn.Module, batches: list[Any], **given: Any) -> None:
    assert_goes_on(trained_apart(narrow, wide, batches, **given))


def gpt2(heads: int = 2, head_dim: int = 2, **kwargs: Any) -> GPT2:
    return GPT2(7, 5, layers=1, heads=heads, head_dim=head_dim, **kwargs)


# Between two modules.


def test_three_numbers_of_every_parameter() -> None:
    """A different k per layer: 2 and 3."""
    plan = mu.plan(MLP(5, [4, 6], 3), MLP(5, [8, 18], 3))
    assert plan.rules == {
        "layers.0.weight": Rule(2, 1),
        "layers.0.bias": Rule(2, 1),
        "layers.1.weight": Rule(3, 2),
        "layers.1.bias": Rule(3, 1),
        "layers.2.weight": Rule(1, 3),
        "layers.2.bias": Rule(1, 1),
    }
    assert list(plan) == list(plan.parameters) == list(plan.rules)
    entry = plan["layers.1.weight"]
    assert (entry.narrow, entry.wide, entry.axes) == ((6, 4), (18, 8), {0: Axis(3, side="out"), 1: Axis(2, side="in")})
    assert (entry.out, entry.in_, entry.fold, entry.names) == ((0,), (1,), 1, ("layers.1.weight",))


def test_a_different_k_per_layer_trains_alike() -> None:
    x = torch.randn(4, 6, 5)
    batches = [(batch, batch[:, :3].sin()) for batch in x]
    assert_equivalent(MLP(5, [4, 6], 3, activation="tanh"), MLP(5, [8, 18], 3, activation="tanh"), batches)


@pytest.mark.parametrize("build", [lambda w: MLP(5, w, 3), lambda w: ResNet18(w, 5), lambda w: gpt2(heads=w)])
def test_the_wide_model_may_be_on_the_meta_device(build: Callable[[int], nn.Module]) -> None:
    narrow = build(2)
    with torch.device("meta"):
        sketch, small = build(4), build(2)
    plan = mu.plan(narrow, sketch)
    assert all(p.is_meta for p in sketch.parameters())
    assert plan == mu.plan(narrow, build(4)) == mu.plan(small, sketch)


def test_a_model_of_the_same_width_has_a_plan_that_does_nothing() -> None:
    plan = mu.plan(gpt2(), gpt2())
    assert set(plan.rules.values()) == {Rule()}
    assert not any(entry.axes for entry in (*plan.parameters.values(), *plan.buffers.values()))


def test_buffers_are_planned_too() -> None:
    plan = mu.plan(ResNet18(2), ResNet18(4))
    assert plan.buffers["bn1.running_var"].axes == {0: Axis(2, side="out")}
    assert plan.buffers["bn1.num_batches_tracked"].axes == {}
    assert plan["bn1.running_mean"] is plan.buffers["bn1.running_mean"]


class Tables(nn.Module):
    """Input times a buffer over d units, or times a single number, which no state dict may hold."""

    def __init__(self, d: int, values: Callable[[int], Tensor], *, saved: bool = False) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, d), nn.Linear(d, 2)
        self.register_buffer("table", values(d), persistent=saved)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.stem(x) * self.table))


@pytest.mark.parametrize("values", [lambda d: torch.arange(d) / d, lambda d: torch.tensor(d**0.5)])
def test_a_buffer_that_depends_on_the_width_and_is_not_saved_is_refused(values: Callable[[int], Tensor]) -> None:
    """Its copy would be exact until the wide model is built anew, from a checkpoint say."""
    with pytest.raises(MupscaleError, match=r"'table' .* depends on the width and is not saved .*persistent=True"):
        mu.plan(Tables(4, values), Tables(8, values))
    narrow, wide = Tables(4, values, saved=True), Tables(8, values, saved=True)
    assert_equivalent(narrow, wide, sequences())
    role = Role(out=tuple(range(narrow.table.dim())))
    assert_equivalent(Tables(4, values), Tables(8, values), sequences(), roles={"table": role})


def test_a_buffer_that_is_not_saved_may_be_computed_anew() -> None:
    """Where that gives the copies, or where it has nothing to do with the width."""
    for values in (torch.ones, lambda d: torch.tensor(0.5)):
        assert mu.plan(Tables(4, values), Tables(8, values)).buffers["table"].narrow in ((4,), ())
    with torch.device("meta"):
        wide = Tables(8, torch.ones)
    assert mu.plan(Tables(4, torch.ones), wide).buffers["table"].wide == (8,)
    refuses("is not saved", mu.plan, Tables(4, torch.arange), wide)


def test_parametrised_layers() -> None:
    """torch gives each of them a class of its own; a weight norm's gain takes what the norm of copies lacks."""

    class Normed(nn.Module):
        def __init__(self, d: int) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(3, d), nn.Linear(d, 2)
            self.body = nn.utils.parametrizations.weight_norm(nn.Linear(d, d))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(torch.tanh(self.stem(x)))))

    narrow, wide = Normed(4), Normed(12)
    refuses(r"weight\.original1.*ParametrizationList does not show which .*inputs=", mu.plan, narrow, wide)
    roles = {"*.original1": Role(out=0, in_=1), "*.original0": Role(out=0, fold=3**-0.5)}
    assert_equivalent(narrow, wide, sequences(), roles=roles)


def test_fresh_measures_the_narrow_models_own_initialisation() -> None:
    torch.manual_seed(0)
    plan = mu.plan(MLP(5, 200, 3), MLP(5, 400, 3), fresh=lambda: MLP(5, 200, 3))
    uniform = math.sqrt(1 / 3)  # nn.Linear draws from ±1/√fan_in
    assert plan.fresh["layers.0.weight"] == pytest.approx(uniform / math.sqrt(5), rel=0.05)
    assert plan.fresh["layers.1.weight"] == pytest.approx(uniform / math.sqrt(400), rel=0.05)
    assert plan.fresh["layers.3.weight"] == pytest.approx(uniform / math.sqrt(200) / 2, rel=0.1)
    with pytest.raises(MupscaleError, match="fresh= builds another model than the one that grows"):
        mu.plan(MLP(5, 200, 3), MLP(5, 400, 3), fresh=MLP(5, 400, 3))


# Tied parameters, found by identity.


class Tied(nn.Module):
    """An embedding used as readout, too; with what comes between them."""

    def __init__(self, d: int, *between: nn.Module, tied: bool = True, norm_first: bool = False) -> None:
        super().__init__()
        if norm_first:
            self.norm: nn.Module = nn.LayerNorm(d)
        self.embedding = nn.Embedding(7, d)
        self.between = nn.Sequential(*between)
        self.norm_first = norm_first
        self.readout = nn.Linear(d, 7)
        if tied:
            self.readout.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.between(self.embedding(ids))
        return self.readout(self.norm(x) if self.norm_first else x)


def test_tied_readout_folds_into_the_norm_before_it() -> None:
    plan = mu.plan(gpt2(heads=2), gpt2(heads=6))
    assert plan.rules["ln_f.weight"] == plan.rules["ln_f.bias"] == Rule(3, 1, Fraction(1, 3))
    assert plan.rules["wte.weight"] == Rule(3, 1)
    assert plan["wte.weight"].names == ("wte.weight", "lm_head.weight")
    assert "lm_head.weight" not in plan.parameters
    folded = {name for name, rule in plan.rules.items() if rule.fold != 1}
    assert folded == {"ln_f.weight", "ln_f.bias"}


def test_an_untied_readout_folds_nothing() -> None:
    rules = mu.plan(gpt2(heads=2, tied=False), gpt2(heads=6, tied=False)).rules
    assert rules["lm_head.weight"] == Rule(1, 3)
    assert all(rule.fold == 1 for rule in rules.values())


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_tied_readout_trains_alike(norm: type[nn.Module]) -> None:
    narrow, wide = (Tied(d, nn.Linear(d, d), nn.Tanh(), norm(d)) for d in (4, 12))
    assert_equivalent(narrow, wide, tokens())


def test_tied_readout_registered_before_the_embedding() -> None:
    """The first name leads, whichever it is."""

    class Reversed(Tied):
        def __init__(self, d: int) -> None:
            super().__init__(d, nn.Linear(d, d), nn.RMSNorm(d))
            embedding = self.embedding
            del self.embedding
            self.embedding = embedding

    narrow, wide = Reversed(4), Reversed(8)
    assert mu.plan(narrow, wide)["readout.weight"].names == ("readout.weight", "embedding.weight")
    assert_equivalent(narrow, wide, tokens())


def test_tied_readout_without_a_norm_is_refused_with_a_remedy() -> None:
    narrow, wide = (Tied(d, nn.Linear(d, d), nn.Tanh()) for d in (4, 8))
    refuses(r"'readout\.weight' is tied.*'between\.0', a Linear.*inputs=.*roles=.*untie", mu.plan, narrow, wide)
    refuses("is none that is known to", mu.plan, *(Tied(d, nn.LayerNorm(d, elementwise_affine=False)) for d in (4, 8)))


def test_the_norm_of_a_tied_readout_can_be_named() -> None:
    """The remedy of the error, for a norm that is not the last module."""
    narrow, wide = (Tied(d, nn.Linear(d, d), norm_first=True) for d in (4, 8))
    error = refuses("is none that is known to", mu.plan, narrow, wide)
    assert "roles={'NORM.*': mupscale.Role(out=0, fold=lambda out, in_: 1 / out)}" in error
    named = {"norm.*": Role(out=0, fold=lambda out, in_: 1 / out)}
    assert mu.plan(narrow, wide, roles=named).rules["norm.bias"] == Rule(2, 1, 0.5)
    assert_equivalent(narrow, wide, tokens(), roles=named)


def test_a_fold_of_another_kind_leaves_the_tied_readouts_to_its_norm() -> None:
    narrow, wide = (Tied(d, nn.Linear(d, d), nn.Linear(d, d), nn.RMSNorm(d)) for d in (4, 8))
    roles = {"between.0.weight": Role(out=0, in_=1, fold=0.25), "between.0.bias": Role(out=0, fold=0.25)}
    assert mu.plan(narrow, wide, roles=roles).rules["between.2.weight"] == Rule(2, 1, Fraction(1, 2))


def test_a_final_norm_registered_before_the_layers_is_asked_for() -> None:
    """Each layer ends with a norm of its own, which is not the one before the readout."""

    class Early(Tied):
        def __init__(self, d: int) -> None:
            super().__init__(d, norm_first=True)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.LayerNorm(d)) for _ in range(2))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            for layer in self.layers:
                x = x + layer(x)
            return self.readout(self.norm(x))

    narrow, wide = Early(4), Early(8)
    refuses(r"'layers\.1\.1', a LayerNorm\) is none.*name the norm, roles=", mu.plan, narrow, wide)
    assert_equivalent(narrow, wide, tokens(), roles={"norm.*": Role(out=0, fold=lambda out, in_: 1 / out)})


def test_tied_in_one_model_only_is_refused() -> None:
    for first, second in itertools.permutations([True, False]):
        with pytest.raises(MupscaleError, match=r"'embedding\.weight' is tied .* in only one of the two models"):
            mu.plan(Tied(4, nn.LayerNorm(4), tied=first), Tied(8, nn.LayerNorm(8), tied=second))


def test_tied_parameters_that_contradict_each_other_are_refused() -> None:
    class Twice(nn.Module):
        def __init__(self, d: int, attn: nn.Module) -> None:
            super().__init__()
            self.inner, self.attn = nn.Linear(d, d), attn
            self.inner.weight = attn.q_proj.weight  # one by one here, whole heads there

    narrow, wide = (Twice(2 * n, Heads(2 * n, n, 2, tells={"num_heads": n})) for n in (2, 4))
    refuses(r"tied parameters inner\.weight, attn\.q_proj\.weight have contra", mu.plan, narrow, wide)


@pytest.mark.parametrize("whole", [True, False])
def test_shared_layers_with_equal_roles_are_one_parameter(whole: bool) -> None:
    """A layer used twice, or two layers with one weight."""

    class Shared(nn.Module):
        def __init__(self, d: int) -> None:
            super().__init__()
            self.stem, self.first, self.head = nn.Linear(3, d), nn.Linear(d, d), nn.Linear(d, 2)
            self.second = self.first if whole else nn.Linear(d, d)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.second(torch.tanh(self.first(torch.tanh(self.stem(x)))))))

    narrow, wide = Shared(4), Shared(8)
    assert mu.plan(narrow, wide)["first.weight"].names == ("first.weight", "second.weight")
    assert_equivalent(narrow, wide, sequences())


# Attention heads, recognised from the modules' own attributes.


def attention(query: Tensor, key: Tensor, value: Tensor, heads: int, kv_heads: int, scale: float | None) -> Tensor:
    """(B, T, heads · head_dim) queries on (B, T, kv_heads · head_dim) keys and values."""
    query, key, value = (
        x.unflatten(-1, (n, -1)).transpose(1, 2) for x, n in ((query, heads), (key, kv_heads), (value, kv_heads))
    )
    key, value = (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    mixed: Tensor = torch.softmax(scale * query @ key.mT, -1) @ value
    return mixed.transpose(1, 2).flatten(2)


class Heads(nn.Module):
    """Attention of some style with n heads, saying of itself only what `tells` holds: {"num_heads": n}."""

    def __init__(
        self,
        d: int,
        n: int,
        size: int,
        style: str = "separate",
        *,
        kv: int | None = None,
        factor: float | None = None,
        norm: str = "",
        tells: dict[str, int | float] | None = None,
    ) -> None:
        super().__init__()
        kv = n if kv is None else kv
        self.facts, self.sizes, self.style, self.norm = (n, kv, factor), (n * size, kv * size, kv * size), style, norm
        for name, value in (tells or {}).items():
            setattr(self, name, value)
        inner, kv_inner, _ = self.sizes
        if style in ("fused", "unnamed"):
            self.add_module("qkv" if style == "fused" else "a", nn.Linear(d, inner + 2 * kv_inner))
            self.add_module("proj" if style == "fused" else "b", nn.Linear(inner, d))
        elif style == "to_out":
            self.to_q, self.to_kv = nn.Linear(d, inner), nn.Linear(d, 2 * kv_inner, bias=False)
            self.to_out = nn.Sequential(nn.Linear(inner, d), nn.Dropout(0.1))
        else:
            self.q_proj, self.k_proj = nn.Linear(d, inner), nn.Linear(d, kv_inner, bias=False)
            self.v_proj, self.o_proj = nn.Linear(d, kv_inner), nn.Linear(inner, d)
        if norm == "all heads":
            self.q_norm, self.k_norm = nn.RMSNorm(inner), nn.RMSNorm(kv_inner)
        elif norm:
            gain = norm != "without gain"
            self.q_norm, self.k_norm = (nn.RMSNorm(size, elementwise_affine=gain) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        n, kv, _ = self.facts
        *projections, out = (module for module in self.children() if not isinstance(module, nn.RMSNorm))
        query, key, value = torch.cat([project(x) for project in projections], -1).split(self.sizes, -1)
        if self.norm == "all heads":
            query, key = self.q_norm(query), self.k_norm(key)
        elif self.norm:
            query = self.q_norm(query.unflatten(-1, (n, -1))).flatten(-2)
            key = self.k_norm(key.unflatten(-1, (kv, -1))).flatten(-2)
        return out(attention(query, key, value, *self.facts))


class Block(nn.Module):
    """Input (…, 3) → d units, attention around a shortcut → output (…, 2)."""

    def __init__(self, d: int, attn: nn.Module) -> None:
        super().__init__()
        self.stem, self.attn, self.head = nn.Linear(3, d), attn, nn.Linear(d, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = 2 * self.stem(x)
        return self.head(torch.tanh(x + self.attn(x)))


HEADS = ["num_heads", "n_heads", "n_head", "nhead", "num_attention_heads", "heads"]
KV_HEADS = ["num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads"]
HEAD_DIM = ["head_dim", "d_head", "dim_head", "head_size", "attention_head_size"]


@pytest.mark.quick("*-separate", "num_heads--*", "num_heads-head_dim-*")
@pytest.mark.parametrize(
    ("heads", "head_dim", "style"),
    [
        *((heads, "", style) for heads in HEADS for style in ("separate", "fused")),
        *(("num_heads", head_dim, style) for head_dim in HEAD_DIM for style in ("separate", "fused")),
        *(("num_heads", head_dim, "to_out") for head_dim in ("", "head_dim")),
    ],
)
def test_growing_heads_are_recognised(heads: str, head_dim: str, style: str) -> None:
    def net(n: int) -> nn.Module:
        tells = {heads: n, head_dim: 3} if head_dim else {heads: n}
        return Block(3 * n, Heads(3 * n, n, 3, style, tells=tells))

    assert_equivalent(net(2), net(4), sequences())


def test_growing_heads_are_recognised_in_a_class_with_roles_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registering its bare matrix, as the error says, must not hide the heads."""
    monkeypatch.setattr("mupscale.planning.from_modules._REGISTRY", dict(registry))

    class Skewed(Heads):
        def __init__(self, n: int) -> None:
            super().__init__(3 * n, n, 3, "fused", tells={"num_heads": n})
            self.skew = nn.Parameter(0.3 * torch.randn(3 * n, 3 * n))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x @ self.skew.T

    narrow, wide = (Block(3 * n, Skewed(n)) for n in (2, 4))
    refuses("Skewed does not show", mu.plan, narrow, wide)
    mu.register_roles(Skewed, skew=Role(out=0, in_=1))
    assert_equivalent(narrow, wide, sequences())


def test_two_layers_with_the_name_of_an_output_projection_are_asked_for() -> None:
    """A model that is its own attention: its readout is called `out`, and is not of the heads."""

    class Small(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.n_head = n
            self.stem, self.qkv = nn.Linear(3, 2 * n), nn.Linear(2 * n, 6 * n)
            self.proj, self.out = nn.Linear(2 * n, 2 * n), nn.Linear(2 * n, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = 2 * self.stem(x)
            mixed = self.proj(attention(*self.qkv(x).chunk(3, -1), self.n_head, self.n_head, None))
            return self.out(torch.tanh(x + mixed))

    narrow, wide = Small(2), Small(4)
    refuses(r"were not recognised by name \(stem, qkv, proj, out\)", mu.plan, narrow, wide)
    roles = {
        "qkv.weight": Role(out=0, in_=1, out_block=2),
        "qkv.bias": Role(out=0, out_block=2),
        "proj.weight": Role(out=0, in_=1, in_block=2),
    }
    assert_equivalent(narrow, wide, sequences(), roles=roles)


@pytest.mark.parametrize("group", [1, 2])
def test_a_query_key_value_holds_each_heads_three_parts_together(group: int) -> None:
    """As in GPT-NeoX, BLOOM and Falcon: the query heads of a group, its key and its value, then the next group."""

    class ByHead(nn.Module):
        def __init__(self, kv: int, size: int = 2) -> None:
            super().__init__()
            self.num_heads, self.num_kv_heads, self.head_dim = kv * group, kv, size
            self.query_key_value = nn.Linear(4 * kv, kv * (group + 2) * size)
            self.dense = nn.Linear(kv * group * size, 4 * kv)

        def forward(self, x: Tensor) -> Tensor:
            parts = self.query_key_value(x).unflatten(-1, (self.num_kv_heads, group + 2, self.head_dim))
            query, key, value = (p.flatten(2) for p in parts.split([group, 1, 1], -2))
            return self.dense(attention(query, key, value, self.num_heads, self.num_kv_heads, None))

    assert_equivalent(*(Block(4 * kv, ByHead(kv)) for kv in (2, 4)), sequences())


@pytest.mark.parametrize("style", ["separate", "fused"])
def test_heads_that_nothing_tells_of_are_split(style: str) -> None:
    """The control: without the attribute the same net fails, already before any step."""
    narrow, wide = (Block(3 * n, Heads(3 * n, n, 3, style)) for n in (2, 4))
    report = trained_apart(narrow, wide, sequences(), static=True)
    assert report.max_relative_difference > 1e-4


@pytest.mark.parametrize("style", ["separate", "fused", "to_out"])
def test_heads_may_grow_while_the_residual_stream_does_not(style: str) -> None:
    narrow, wide = (Block(4, Heads(4, n, 3, style, tells={"num_heads": n})) for n in (2, 6))
    assert_equivalent(narrow, wide, sequences())


@pytest.mark.quick("*-separate", "num_key_value_heads-*")
@pytest.mark.parametrize("style", ["separate", "fused", "to_out"])
@pytest.mark.parametrize("kv_name", KV_HEADS)
def test_grouped_queries_are_copied_as_whole_groups(kv_name: str, style: str) -> None:
    """4 query heads on 2 key/value heads → 8 on 4."""

    def net(n: int) -> nn.Module:
        return Block(2 * n, Heads(2 * n, n, 2, style, kv=n // 2, tells={"num_heads": n, kv_name: n // 2}))

    narrow, wide = net(4), net(8)
    plan = mu.plan(narrow, wide)
    out = {"separate": "o_proj", "fused": "proj", "to_out": "to_out.0"}[style]
    assert plan[f"attn.{out}.weight"].axes[1] == Axis(2, block=4, side="in")
    if style == "fused":
        assert plan["attn.qkv.weight"].axes[0] == Axis(2, sections=((8, 4), (4, 2), (4, 2)), side="out")
    assert_equivalent(narrow, wide, sequences())


def test_grouped_queries_copied_head_by_head_pass_the_static_check_only() -> None:
    """Copies of one key/value head then receive different gradients: why verify trains."""

    def net(n: int) -> nn.Module:
        return Block(2 * n, Heads(2 * n, n, 2, kv=n // 2, tells={"num_heads": n, "num_kv_heads": n // 2}))

    one_by_one = {
        "attn.q_proj.weight": Role(out=0, in_=1, out_block=2),
        "attn.q_proj.bias": Role(out=0, out_block=2),
        "attn.o_proj.weight": Role(out=0, in_=1, in_block=2),
    }
    static = trained_apart(net(4), net(8), sequences(), static=True, roles=one_by_one)
    assert static.ok
    assert static.max_relative_difference <= 1e-10
    dynamic = trained_apart(net(4), net(8), sequences(), roles=one_by_one)
    assert dynamic.differences[0] <= 1e-10
    assert dynamic.max_relative_difference > 1e-4
    assert not dynamic.ok
    assert "grouped-query" in str(dynamic.first)


@pytest.mark.parametrize("style", ["separate", "to_out"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_query_heads_may_grow_alone(kv_heads: int, style: str) -> None:
    """Multi-query attention: the key/value heads stay, and their projections end in a fixed width."""

    def net(n: int) -> nn.Module:
        return Block(2 * n, Heads(2 * n, n, 2, style, kv=kv_heads, tells={"num_heads": n, "num_kv_heads": kv_heads}))

    narrow, wide = net(4), net(8)
    assert mu.plan(narrow, wide).rules[f"attn.{'k_proj' if style == 'separate' else 'to_kv'}.weight"] == Rule(1, 2)
    assert_equivalent(narrow, wide, sequences())


def test_query_heads_growing_alone_in_a_fused_projection_are_refused() -> None:
    narrow, wide = (
        Block(2 * n, Heads(2 * n, n, 2, "fused", kv=1, tells={"num_heads": n, "num_kv_heads": 1})) for n in (4, 8)
    )
    refuses(r"attention 'attn'.*1 times, in one fused projection. Grow both", mu.plan, narrow, wide)


@pytest.mark.parametrize(("heads", "kv_heads"), [((4, 8), (1, 4)), ((4, 4), (2, 4))])
def test_key_value_heads_that_grow_otherwise_are_refused(heads: tuple[int, int], kv_heads: tuple[int, int]) -> None:
    narrow, wide = (
        Block(2 * n, Heads(2 * n, n, 2, kv=kv, tells={"num_heads": n, "num_kv_heads": kv}))
        for n, kv in zip(heads, kv_heads, strict=True)
    )
    refuses(r"attention 'attn': query heads grow \d times and key/value heads \d times", mu.plan, narrow, wide)


@pytest.mark.parametrize("style", ["separate", "fused"])
@pytest.mark.parametrize("norm", ["all heads", "per head"])
def test_norms_of_queries_and_keys_follow_the_heads(norm: str, style: str) -> None:
    def net(n: int) -> nn.Module:
        tells = {"num_heads": n, "num_kv_heads": n // 2}
        return Block(2 * n, Heads(2 * n, n, 2, style, kv=n // 2, norm=norm, tells=tells))

    assert_equivalent(net(4), net(8), sequences())


def test_a_block_that_holds_its_own_projections_and_an_mlp() -> None:
    """The MLP's c_proj is no output projection of heads, though it has the name of one."""

    class Whole(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.n_head = n
            self.c_attn, self.c_proj = nn.Linear(2 * n, 6 * n), nn.Linear(2 * n, 2 * n)
            self.mlp = nn.ModuleDict({"c_fc": nn.Linear(2 * n, 4 * n), "c_proj": nn.Linear(4 * n, 2 * n)})

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.c_proj(attention(*self.c_attn(x).chunk(3, -1), self.n_head, self.n_head, None))
            return x + self.mlp["c_proj"](torch.tanh(self.mlp["c_fc"](x)))

    assert_equivalent(Block(4, Whole(2)), Block(8, Whole(4)), sequences())


def test_heads_told_by_a_config() -> None:
    class Config:
        def __init__(self, n: int) -> None:
            self.num_attention_heads, self.num_key_value_heads, self.head_dim = n, n // 2, 2

    class SomeAttention(Heads):
        def __init__(self, n: int) -> None:
            super().__init__(2 * n, n, 2, kv=n // 2)
            self.config = Config(n)

    assert_equivalent(Block(8, SomeAttention(4)), Block(16, SomeAttention(8)), sequences())


def test_a_container_that_knows_the_number_of_heads_leaves_it_to_its_attention() -> None:
    class Encoder(Block):
        def __init__(self, n: int) -> None:
            super().__init__(2 * n, Heads(2 * n, n, 2, "fused", tells={"num_heads": n}))
            self.n_heads = n

    assert_equivalent(Encoder(2), Encoder(4), sequences())


@pytest.mark.parametrize("names", ["x, yz, u", "query, kv, last"])
@pytest.mark.parametrize("tells", [{}, {"head_dim": 2}])
def test_projections_of_unknown_names_are_asked_for(tells: dict[str, int], names: str) -> None:
    """Also where it is the output's alone that nobody can tell, as in BERT's attention, where that is another's."""
    query, both, out = names.split(", ")

    class OddAttention(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.num_heads = n
            for name, value in tells.items():
                setattr(self, name, value)
            for name, times in ((query, 1), (both, 2), (out, 1)):
                self.add_module(name, nn.Linear(2 * n, 2 * n * times))

        def forward(self, x: Tensor) -> Tensor:
            first, second, last = self.children()
            return last(attention(first(x), *second(x).chunk(2, -1), self.num_heads, self.num_heads, None))

    narrow, wide = Block(4, OddAttention(2)), Block(8, OddAttention(4))
    said = rf"attention 'attn'.*were not recognised by name \({names}\).*inputs="
    refuses(said, mu.plan, narrow, wide)
    told = {
        f"attn.{out}.weight": Role(out=0, in_=1, in_block=2),
        f"attn.{out}.bias": Role(out=0),
        "attn.*.weight": Role(out=0, in_=1, out_block=2),
        "attn.*.bias": Role(out=0, out_block=2),
    }
    assert_equivalent(narrow, wide, sequences(), roles=told)


# head_dim growing: attention must scale as 1/head_dim, or the query projection takes what is missing.


def growing(size: int, factor: float, name: str = "scale", **kwargs: Any) -> nn.Module:
    """Two heads of this size whose attention scales by the factor and says so."""
    return Block(8, Heads(8, 2, size, factor=factor, tells={"num_heads": 2, "head_dim": size, name: factor}, **kwargs))


@pytest.mark.parametrize("name", ["scale", "scaling", "softmax_scale"])
@pytest.mark.parametrize("style", ["separate", "to_out"])
def test_growing_head_dim_folds_what_the_scale_lacks_into_the_query(name: str, style: str) -> None:
    """1/√head_dim: the query's weight and bias take 1/√k."""
    narrow, wide = (growing(size, size**-0.5, name, style=style) for size in (2, 6))
    rules, query = mu.plan(narrow, wide).rules, "q_proj" if style == "separate" else "to_q"
    assert rules[f"attn.{query}.weight"].fold == rules[f"attn.{query}.bias"].fold == pytest.approx(3**-0.5)
    assert sum(rule.fold != 1 for rule in rules.values()) == 2
    assert_equivalent(narrow, wide, sequences())


@pytest.mark.parametrize("factor", [1, 1.0, 0.5])
def test_a_constant_scale_folds_all_of_it(factor: float) -> None:
    narrow, wide = growing(2, factor), growing(6, factor)
    assert mu.plan(narrow, wide).rules["attn.q_proj.weight"].fold == pytest.approx(1 / 3)
    assert_equivalent(narrow, wide, sequences())


@pytest.mark.parametrize("name", ["scale", "unheard_of"])
@pytest.mark.parametrize("style", ["separate", "fused"])
def test_growing_head_dim_under_one_over_head_dim_folds_nothing(style: str, name: str) -> None:
    """Told or not."""
    narrow, wide = (growing(size, 1 / size, name, style=style) for size in (2, 6))
    assert all(rule.fold == 1 for rule in mu.plan(narrow, wide).rules.values())
    assert_equivalent(narrow, wide, sequences())


def test_a_scale_that_nothing_tells_of_is_taken_for_one_over_head_dim() -> None:
    """The control: verify sees that it is not."""
    narrow, wide = (growing(size, size**-0.5, "unheard_of") for size in (2, 6))
    assert not trained_apart(narrow, wide, sequences(), static=True).ok


def test_growing_head_dim_of_a_fused_projection_is_refused_under_one_over_its_root() -> None:
    with pytest.raises(MupscaleError, match=r"attention 'h\.0\.attn': head_dim grows 2 times.*attention_multiplier"):
        mu.plan(gpt2(head_dim=2), gpt2(head_dim=4))
    plan = mu.plan(gpt2(head_dim=2, attention_multiplier=1.0), gpt2(head_dim=4, attention_multiplier=1.0))
    assert plan.rules["h.0.attn.c_attn.weight"] == Rule(2, 2)


@pytest.mark.parametrize("style", ["separate", "fused"])
def test_a_norm_of_the_queries_takes_the_fold(style: str) -> None:
    """A factor on the projection would be normalised away; the norm's gain keeps it, also behind a fused one."""
    narrow, wide = (growing(size, size**-0.5, style=style, norm="per head") for size in (2, 6))
    rules = mu.plan(narrow, wide).rules
    assert {name for name, rule in rules.items() if rule.fold != 1} == {"attn.q_norm.weight"}
    assert_equivalent(narrow, wide, sequences())


def test_a_norm_without_gain_has_nothing_to_fold_into() -> None:
    narrow, wide = (growing(size, size**-0.5, norm="without gain") for size in (2, 6))
    refuses(r"attention 'attn'.*in the queries, .* a norm without a gain", mu.plan, narrow, wide)


def test_heads_and_head_dim_growing_at_once_cannot_be_copied_but_scale_under_mup() -> None:
    widths = {"heads": 2, "head_dim": 2}
    family = Family(lambda heads, head_dim: gpt2(heads, head_dim, attention_multiplier=1.0), base=widths)
    plan = family.plan({"heads": 4, "head_dim": 6})
    assert plan.rules["h.0.attn.c_attn.weight"] == plan.rules["h.0.attn.c_proj.weight"] == Rule(6, 6)
    with pytest.raises(MupscaleError, match=r"heads and head_dim both grow. Grow only one of them"):
        family.widening(widths, {"heads": 4, "head_dim": 4})


# Names do not depend on what a model is wrapped in.


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Inner(nn.Module):
    """A submodule of one's own with the name that DDP uses."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.module = gpt2(heads=n)


def compiled_inside(model: Any) -> nn.Module:
    """torch.compile on a block and on a layer of it."""
    model.h[0] = torch.compile(model.h[0])
    model.h[0].attn.c_attn = torch.compile(model.h[0].attn.c_attn)
    model.ln_f = torch.compile(model.ln_f)
    model.lm_head = torch.compile(model.lm_head)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": DataParallel,
    "DDP": DistributedDataParallel,
    "torch.compile": torch.compile,
    "compiled DDP": lambda model: torch.compile(DistributedDataParallel(model)),
    "DDP of a compiled model": lambda model: DistributedDataParallel(torch.compile(model)),
    "compiled submodules": compiled_inside,
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_plan_does_not_depend_on_wrappers(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Heads growing, tied readout: everything is recognised behind the wrapper, and weights get there."""
    narrow, wide = gpt2(heads=2), gpt2(heads=4)
    bare = mu.plan(narrow, wide)
    expected = mu.widen(narrow, copy.deepcopy(wide), bare).state_dict()
    state = narrow.state_dict()
    wrapped_wide = wrap(copy.deepcopy(wide))
    assert mu.plan(narrow, wrapped_wide) == bare
    mu.widen(narrow, wrapped_wide, bare)
    wrapped = wrap(narrow)
    assert mu.plan(wrapped, wide) == mu.plan(wrapped, wrapped_wide) == bare
    found = dict(zip(expected, wrapped_wide.state_dict().values(), strict=True))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(a, b) for a, b in zip(state.values(), wrapped.state_dict().values(), strict=True))


def test_a_submodule_called_module_keeps_its_name() -> None:
    plan = mu.plan(DataParallel(Inner(2)), Inner(4))
    assert plan["module.wte.weight"].names == ("module.wte.weight", "module.lm_head.weight")
    assert plan.rules["module.ln_f.weight"].fold == Fraction(1, 2)


def test_a_plan_survives_deepcopy_and_conversion_of_the_models() -> None:
    """It lives beside the model, by name."""
    narrow, wide = gpt2(heads=2), gpt2(heads=4)
    plan = mu.plan(narrow, wide)
    narrow, wide = copy.deepcopy(narrow).to(torch.bfloat16), copy.deepcopy(wide).to(torch.bfloat16)
    assert mu.plan(narrow, wide) == plan == copy.deepcopy(plan)
    assert plan.check(wide).keys() == plan.parameters.keys()


# To and from JSON.


def exactly_equal(ours: Plan, theirs: Plan) -> bool:
    """Equal, and the numbers of one type: 1/3 as a Fraction is not 0.333… as a float."""
    numbers = [
        [
            type(n)
            for e in (*p.parameters.values(), *p.buffers.values())
            for n in (e.fold, *(a.times for a in e.axes.values()))
        ]
        for p in (ours, theirs)
    ]
    return ours == theirs and numbers[0] == numbers[1] and ours.rules == theirs.rules


def mlp_family(**kwargs: Any) -> Family:
    return Family(lambda width: MLP(5, width, 3), base=6, init_at=6, **kwargs)


def gpt2_family(**kwargs: Any) -> Family:
    return Family(lambda heads: gpt2(heads=heads), base=6, init_at=6, **kwargs)


def fused_gqa(n: int) -> nn.Module:
    tells = {"num_heads": n, "num_kv_heads": n // 2}
    return Block(2 * n, Heads(2 * n, n, 2, "fused", kv=n // 2, tells=tells))


PLANS: dict[str, Callable[[], Plan]] = {
    "widening": lambda: mu.plan(MLP(5, [4, 6], 3), MLP(5, [8, 18], 3)),
    "buffers": lambda: mu.plan(ResNet18(2), ResNet18(4)),
    "tied, a fold of 1/3": lambda: mu.plan(gpt2(heads=2), gpt2(heads=6)),
    "sections": lambda: mu.plan(fused_gqa(4), fused_gqa(8)),
    "a fold of 1/√3": lambda: mu.plan(growing(2, 2**-0.5), growing(6, 6**-0.5)),
    "μP at 7/6": lambda: mlp_family().plan(7),
    "μP at 1/3, tied": lambda: gpt2_family().plan(2),
    "with the initialisation": lambda: mlp_family().widening(6, 12),
}


@pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)
def test_json_round_trip_is_exact(make: Callable[[], Plan], tmp_path: Path) -> None:
    plan = make()
    assert exactly_equal(Plan.from_json(plan.to_json()), plan)
    plan.save(tmp_path / "plan.json")
    assert exactly_equal(Plan.load(tmp_path / "plan.json"), plan)


def test_fractions_and_the_initialisation_are_in_the_round_trip() -> None:
    """What the test above stands on."""
    assert PLANS["μP at 7/6"]().rules["layers.1.weight"] == Rule(Fraction(7, 6), Fraction(7, 6))
    assert PLANS["μP at 1/3, tied"]().rules["ln_f.bias"] == Rule(Fraction(1, 3), 1, 3)
    fresh = PLANS["with the initialisation"]().fresh
    assert all(std > 0 for std in fresh.values())


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"format": "other", "parameters": {}}', '{"format": "mupscale.plan/2"}']
)
def test_what_is_not_a_plan_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    for read in (lambda: Plan.from_json(text), lambda: Plan.load(tmp_path / "plan.json")):
        refuses("not a plan written by mupscale", read)


def test_a_truncated_plan_is_refused() -> None:
    text = PLANS["tied, a fold of 1/3"]().to_json()
    for part in (0.2, 0.5, 0.9):
        refuses("not a plan written by mupscale", Plan.from_json, text[: int(part * len(text))])


# Composition.


def scaled_family(
    base: Any, build: Callable[..., nn.Module] = lambda size: gpt2(2, size, attention_multiplier=1.0)
) -> Family:
    return Family(build, base=base, init_at=base)


def two_widths() -> Family:
    widths = {"heads": 2, "head_dim": 2}
    return scaled_family(widths, lambda heads, head_dim: gpt2(heads, head_dim, attention_multiplier=1.0))


def transposed(c: int) -> nn.Module:
    return nn.Sequential(nn.ConvTranspose2d(c, c, 3, groups=c), nn.Linear(c, 2))


FAMILIES: dict[str, tuple[Callable[[], Family], Any, Any]] = {
    "MLP": (mlp_family, 6, 12),
    "MLP at a width that is no multiple": (mlp_family, 7, 21),
    "MLP narrower than its base": (mlp_family, 4, 8),
    "MLP from base 1": (lambda: Family(lambda width: MLP(5, width, 3), base=1, init_at=6), 6, 12),
    "ResNet18": (lambda: scaled_family(2, lambda width: ResNet18(width, 5)), 4, 12),
    "GPT2, head_dim growing": (lambda: scaled_family(2), 3, 6),
    "GPT2, heads growing": (lambda: Family(lambda heads: gpt2(heads), base={"heads": 2}), {"heads": 3}, {"heads": 6}),
    "GPT2, heads growing from the base on": (gpt2_family, 6, 12),
    "GPT2, untied": (lambda: scaled_family(2, lambda heads: gpt2(heads, tied=False)), 3, 6),
    "GPT2 of two widths, heads growing": (two_widths, {"heads": 4, "head_dim": 2}, {"heads": 8, "head_dim": 2}),
    "GPT2 of two widths, head_dim growing": (two_widths, {"heads": 2, "head_dim": 4}, {"heads": 2, "head_dim": 8}),
    "fused grouped queries": (lambda: scaled_family(4, fused_gqa), 8, 16),
    "depthwise ConvTranspose2d, from the base on": (lambda: scaled_family(4, transposed), 4, 8),
}


@pytest.mark.quick(
    "GPT2, head_dim growing",
    "GPT2, heads growing",
    "fused grouped queries",
    "MLP narrower than its base",
    "GPT2 of two widths, heads growing",
)
@pytest.mark.parametrize(("make", "n", "kn"), FAMILIES.values(), ids=FAMILIES)
def test_mup_at_n_then_widening_is_mup_at_kn(make: Callable[[], Family], n: Any, kn: Any) -> None:
    """The master check of transfer: what a small model was tuned to is what the widened one should have."""
    family = make()
    widening = family.widening(n, kn)
    composed = family.plan(n).then(widening)
    assert composed.parameters == family.plan(kn).parameters
    assert composed.buffers == family.plan(kn).buffers
    assert composed.rules == {name: rule * widening.rules[name] for name, rule in family.plan(n).rules.items()}
    assert composed.fresh == widening.fresh


def test_mup_at_n_then_widening_is_mup_at_kn_where_the_query_takes_a_root() -> None:
    """Folds of 1/√k are floats: equal up to rounding."""
    family = Family(lambda size: growing(size, size**-0.5), base=2, init_at=2)
    composed, direct = family.plan(4).then(family.widening(4, 12)).rules, family.plan(12).rules
    for name, rule in direct.items():
        assert (composed[name].out, composed[name].in_) == (rule.out, rule.in_)
        assert composed[name].fold == pytest.approx(rule.fold, rel=1e-15)
    assert direct["attn.q_proj.weight"].fold == pytest.approx(6**-0.5)


@pytest.mark.parametrize(
    "build",
    [lambda k: MLP(5, [4 * k, 6], 3), lambda k: gpt2(2 * k), lambda k: fused_gqa(4 * k)],
    ids=["mlp", "gpt2", "gqa"],
)
def test_widening_twice_is_widening_once(build: Callable[[int], nn.Module]) -> None:
    small, middle, large, direct = build(1), build(2), build(6), build(6)
    first, second = mu.plan(small, middle), mu.plan(middle, large)
    assert first.then(second) == mu.plan(small, large)
    mu.widen(mu.widen(small, middle, first), large, second)
    mu.widen(small, direct, first.then(second))
    for ours, theirs in zip(large.parameters(), direct.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0)


def test_widening_one_axis_and_then_another_is_widening_both() -> None:
    """What did not grow in one of the two plans has no axis there."""
    small, middle, large = MLP(5, [4, 6], 3), MLP(5, [8, 6], 3), MLP(5, [8, 18], 3)
    first, second = mu.plan(small, middle), mu.plan(middle, large)
    assert first["layers.1.weight"].out != second["layers.1.weight"].out
    assert first.then(second) == mu.plan(small, large)
    mu.widen(mu.widen(small, middle, first), large, second)
    x = torch.randn(4, 5)
    torch.testing.assert_close(large(x), small(x), rtol=1e-12, atol=1e-12)


def test_plans_of_different_models_do_not_compose() -> None:
    plan = mu.plan(MLP(5, 4, 3), MLP(5, 8, 3))
    with pytest.raises(MupscaleError, match="different models do not compose: their parameters have different names"):
        plan.then(mu.plan(MLP(5, 8, 3, depth=3), MLP(5, 16, 3, depth=3)))
    refuses(r"'layers\.0\.weight' ends with shape \(8, 5\).*starts with \(4, 5\)", plan.then, plan)
    heads, sizes = (
        mu.plan(gpt2(a, b, attention_multiplier=1.0), gpt2(c, d, attention_multiplier=1.0))
        for a, b, c, d in ((2, 2, 4, 2), (4, 2, 4, 4))
    )
    refuses(r"do not compose. Widen in one step", heads.then, sizes)


# What is refused.


def test_a_plan_checks_that_a_model_is_its_own() -> None:
    plan = mu.plan(MLP(5, 4, 3), MLP(5, 8, 3))
    assert list(plan.check(MLP(5, 8, 3))) == list(plan.check(MLP(5, 4, 3), "narrow")) == list(plan)
    refuses(r"for a different model: 'layers\.0\.weight' has shape \(4, 5\).*\(8, 5\)", plan.check, MLP(5, 4, 3))
    refuses(r"the plan lacks the parameter 'layers\.4\.weight' and 1 more", plan.check, MLP(5, 8, 3, depth=5))
    refuses(r"the wide model lacks the parameter 'layers\.3\.weight' and 1 more", plan.check, MLP(5, 8, 3, depth=3))
    with pytest.raises(MupscaleError, match="the plan has no parameter 'head'"):
        plan["head"]


class Plain(nn.Module):
    """One bare parameter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())


NO_MULTIPLE = "dimension 0 does not grow by a whole multiple"
REFUSED: dict[str, tuple[nn.Module, nn.Module, str]] = {
    "deeper": (
        MLP(5, 4, 3),
        MLP(5, 8, 3, depth=5),
        r"the narrow model lacks the module 'layers\.4' that the wide model has: .*the same class and depth",
    ),
    "less deep": (MLP(5, 4, 3), MLP(5, 8, 3, depth=3), r"the wide model lacks the module 'layers\.3' that the narrow"),
    "no bias": (
        MLP(5, 4, 3),
        MLP(5, 8, 3, bias=False),
        r"the wide model lacks the parameter 'layers\.0\.bias' and 3 more that the narrow model has",
    ),
    "another class": (
        nn.Sequential(nn.Linear(3, 4)),
        nn.Sequential(nn.Conv2d(3, 8, 1)),
        r"'0' is a Linear in the narrow model and a Conv2d in the wide one",
    ),
    "another class of the whole": (nn.Linear(3, 4), nn.Conv1d(3, 8, 1), "'the model' is a Linear .* and a Conv1d"),
    "narrower": (
        MLP(5, 8, 3),
        MLP(5, 4, 3),
        r"'layers\.0\.weight' of shape \(8, 5\) → \(4, 5\): .* 0 becomes narrower",
    ),
    "no multiple": (MLP(5, 4, 3), MLP(5, 6, 3), rf"'layers\.0\.weight'.*{NO_MULTIPLE}. Sizes that fit: 8, 12, 16, …"),
    "lazy": (
        nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)),
        nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 2)),
        r"'0\.weight' is not initialised yet. Run the lazy module on a batch first",
    ),
    "int8": (
        Plain(torch.zeros(4, dtype=torch.int8)),
        Plain(torch.zeros(8, dtype=torch.int8)),
        r"'weight' has dtype torch\.int8: only floating-point parameters",
    ),
    "other dimensions": (
        Plain(torch.zeros(4)),
        Plain(torch.zeros(8, 1)),
        "'weight' has 1 dimensions in the narrow model and 2 in the wide",
    ),
    "empty": (nn.LayerNorm(0), nn.LayerNorm(4), f"'weight'.*{NO_MULTIPLE}"),
}


@pytest.mark.parametrize(("narrow", "wide", "message"), REFUSED.values(), ids=REFUSED)
def test_models_that_do_not_widen_are_refused(narrow: nn.Module, wide: nn.Module, message: str) -> None:
    lazy = any(nn.parameter.is_lazy(p) for p in narrow.parameters())
    before = {} if lazy else {name: tensor.clone() for name, tensor in wide.state_dict().items()}
    refuses(message, mu.plan, narrow, wide)
    assert all(torch.equal(tensor, before[name]) for name, tensor in wide.state_dict().items() if before)


def test_one_model_twice_is_refused() -> None:
    model = MLP(5, 4, 3)
    refuses(r"the same module. Build a second, wider one", mu.plan, model, model)


def test_blocks_must_divide_the_axis() -> None:
    with pytest.raises(MupscaleError, match=r"'layers\.1\.weight': dimension 1 of 4 units.*blocks of 3"):
        mu.plan(MLP(5, 4, 3), MLP(5, 8, 3), roles={"layers.1.weight": Role(out=0, in_=1, in_block=3)})


def test_widths_of_a_family_need_not_divide() -> None:
    """μP scales where copying cannot."""
    assert mlp_family().plan(7).rules["layers.3.weight"] == Rule(1, Fraction(7, 6))
    refuses("dimension 0 does not grow by a whole multiple", mlp_family().widening, 6, 7)


def test_an_axis_of_a_family_is_a_width_even_where_it_does_not_grow() -> None:
    """A fact of the family, not of k."""
    entry = mlp_family().plan(6)["layers.1.weight"]
    assert entry.rule == Rule()
    assert (entry.out, entry.in_) == ((0,), (1,))
    readout = mlp_family().plan(6)["layers.3.weight"]
    assert (readout.out, readout.in_) == ((), (1,))


def test_a_plan_is_copied_and_pickled_after_use() -> None:
    """Worker processes get it so; what it keeps to be quick at every step must not stand in the way."""
    family = mu.Family(lambda width: MLP(3, width, 2), base=8)
    model, plan = family.init(16), family.plan(16)
    model(torch.randn(2, 3)).sum().backward()
    mu.clip_grad_norm_(model, 1.0, plan)
    assert copy.deepcopy(plan) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan


# A norm with gain 1 + w: what scales is not what is stored.


class OffsetNorm(nn.Module):
    """RMSNorm with gain 1 + w, as Gemma's."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], 1 + self.weight)


OFFSET = {"between.1.weight": Role(out=0, fold=lambda out, in_: 1 / out, offset=1)}


def offset_model(d: int) -> Tied:
    model = Tied(d, nn.Linear(d, d), OffsetNorm(d))
    with torch.no_grad():
        model.between[1].weight.normal_(0, 0.3)
    return model


def test_an_offset_is_kept_in_files_and_compositions() -> None:
    first = mu.plan(offset_model(4), offset_model(8), roles=OFFSET)
    entry = first["between.1.weight"]
    assert (entry.rule, entry.offset, entry.shift) == (Rule(2, 1, 0.5), 1, -0.5)
    assert exactly_equal(Plan.from_json(first.to_json()), first)
    assert first["between.0.weight"].shift == first["embedding.weight"].shift == 0
    both = first.then(mu.plan(offset_model(8), offset_model(24), roles=OFFSET))
    assert both["between.1.weight"].shift == pytest.approx(1 / 6 - 1)
    plain = {"between.1.weight": Role(out=0, fold=lambda out, in_: 1 / out)}
    with pytest.raises(MupscaleError, match=r"do not compose: 'between\.1\.weight'"):
        first.then(mu.plan(offset_model(8), offset_model(24), roles=plain))


def test_gain_1_plus_w_takes_the_fold_of_a_tied_readout_and_trains_alike() -> None:
    narrow, wide = offset_model(4), offset_model(12)
    plan = mu.plan(narrow, wide, roles=OFFSET)
    mu.widen(narrow, wide, plan)
    gains = 1 + narrow.between[1].weight.repeat_interleave(3)
    torch.testing.assert_close(1 + wide.between[1].weight, gains / 3)
    gain, rest = [narrow.between[1].weight], [p for n, p in narrow.named_parameters() if n not in OFFSET]
    groups = [{"params": gain, "weight_decay": 0.0}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    report = mu.verify(narrow, wide, plan, tokens(), loss, optimizer=optimizer, steps=20, clip=0.5)
    assert report.ok, str(report)
    without = {"between.1.weight": Role(out=0, fold=lambda out, in_: 1 / out)}
    report = trained_apart(narrow, wide, tokens(), static=True, roles=without)
    assert report.max_relative_difference > 1e-2


def test_a_fresh_gain_of_1_plus_w_starts_at_its_fold() -> None:
    """μP's initial value of a constant is the constant times its fold: 1 + w = 1/k."""
    family = Family(lambda d: Tied(d, nn.Linear(d, d), OffsetNorm(d)), base=64, roles=OFFSET)
    model = family.init(128)
    assert isinstance(model, Tied)
    torch.testing.assert_close(model.between[1].weight, torch.full((128,), -0.5))
