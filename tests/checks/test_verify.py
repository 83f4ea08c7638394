"""verify: agreement over training steps, and where and why two models begin to differ."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim import Optimizer

import mupscale as mu
from mupscale.checks import Difference
from mupscale.models import GPT2, MLP
from toys import Toy, classify, language

D_IN, D_OUT = 6, 5


def vectors(*shape: int, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, *shape), torch.randint(D_OUT, (8,))) for _ in range(count)]


def tokens(count: int = 3) -> list[Tensor]:
    return [torch.randint(11, (4, 7)) for _ in range(count)]


def pair(build: Callable[[int], nn.Module], n: int, wide: int, **plan: Any) -> tuple[nn.Module, nn.Module, mu.Plan]:
    narrow, large = build(n), build(wide)
    made = mu.plan(narrow, large, **plan)
    return narrow, mu.widen(narrow, large, made), made


def mlp(width: int) -> MLP:
    return MLP(D_IN, width, D_OUT, depth=3)


class Do(nn.Module):
    """Any function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def same(h: Tensor) -> Tensor:
    return h


def between(width: int, *functions: Callable[[Tensor], Tensor]) -> nn.Sequential:
    """Functions between two layers."""
    return nn.Sequential(nn.Linear(D_IN, width), *map(Do, functions), nn.Linear(width, D_OUT))


def gpt2(heads: int, **more: Any) -> GPT2:
    return GPT2(11, 8, layers=1, heads=heads, head_dim=4, **more)


def first(report: Any) -> Difference:
    """Where the models begin to differ, which they must."""
    assert not report.ok
    assert report.first is not None
    return report.first  # type: ignore[no-any-return]


def unchanged(model: nn.Module, before: nn.Module) -> bool:
    old = before.state_dict()
    return all(torch.equal(t, old[n]) for n, t in model.state_dict().items())


# agreement


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equivalent_models_agree_at_every_step(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    narrow, wide, plan = pair(mlp, 4, 12)
    data = vectors(D_IN, count=1)
    report = mu.verify(narrow, wide, plan, data, classify, optimizer=torch.optim.AdamW, lr=0.05, steps=12)
    assert report.ok
    assert report.first is None
    assert len(report.differences) == len(report.losses) == 13
    assert report.tolerance == 1e-10
    assert report.max_relative_difference == max(report.differences) < report.tolerance
    assert report.losses[-1][0] < 0.9 * report.losses[0][0]
    for ours, theirs in report.losses:
        assert ours == pytest.approx(theirs, rel=1e-3)


def test_batches_may_be_endless_and_are_used_again_from_the_start() -> None:
    narrow, wide, plan = pair(mlp, 4, 8)
    drawn = []

    def endless() -> Any:
        while True:
            drawn.append(0)
            yield vectors(D_IN, count=1)[0]

    assert mu.verify(narrow, wide, plan, endless(), classify, optimizer=torch.optim.SGD, lr=0.1, steps=5).ok
    assert len(drawn) == 6
    one = vectors(D_IN, count=1)
    report = mu.verify(narrow, wide, plan, one, classify, optimizer=torch.optim.SGD, lr=0.3, steps=5)
    assert sorted(loss for loss, _ in report.losses) == [loss for loss, _ in reversed(report.losses)]


def test_models_and_optimizer_are_left_as_they_were(float64: None) -> None:
    narrow, wide, plan = pair(lambda n: nn.Sequential(nn.Linear(D_IN, n), nn.BatchNorm1d(n), nn.Linear(n, D_OUT)), 4, 8)
    opt = torch.optim.AdamW(narrow.parameters(), lr=0.1)
    classify(narrow, vectors(D_IN)[0]).backward()
    opt.step()
    mu.widen(narrow, wide, plan)
    kept, kept_wide, state = copy.deepcopy(narrow), copy.deepcopy(wide), copy.deepcopy(opt.state_dict())
    grads = [None if p.grad is None else p.grad.clone() for p in narrow.parameters()]
    report = mu.verify(narrow, wide, plan, vectors(D_IN), classify, optimizer=opt, steps=5, clip=0.1)
    assert report.ok, report
    assert unchanged(narrow, kept)
    assert unchanged(wide, kept_wide)
    assert str(opt.state_dict()) == str(state)
    assert all(torch.equal(p.grad, g) for p, g in zip(narrow.parameters(), grads, strict=True))  # type: ignore[arg-type]
    assert all(p.grad is None for p in wide.parameters())
    assert not any(m._forward_hooks for m in (*narrow.modules(), *wide.modules()))
    classify(narrow, vectors(D_IN)[0]).backward()
    opt.step()  # still the narrow model's own
    assert not unchanged(narrow, kept)


def test_an_optimizers_state_goes_along(float64: None) -> None:
    """A class starts without momentum, so it does something else than the object in mid-training."""
    narrow, wide, plan = pair(mlp, 4, 8)
    opt = torch.optim.SGD(narrow.parameters(), lr=0.2, momentum=0.9)
    data = vectors(D_IN)
    for batch in data:
        opt.zero_grad()
        classify(narrow, batch).backward()
        opt.step()
    mu.widen(narrow, wide, plan)
    with_state = mu.verify(narrow, wide, plan, data, classify, optimizer=opt, steps=4)
    without = mu.verify(narrow, wide, plan, data, classify, optimizer=torch.optim.SGD, lr=0.2, momentum=0.9, steps=4)
    assert with_state.ok
    assert without.ok
    assert with_state.losses[0] == pytest.approx(without.losses[0])
    assert with_state.losses[2] != pytest.approx(without.losses[2], rel=1e-3)


def test_a_familys_optimizer_is_taken_as_it_is(float64: None) -> None:
    family = mu.Family(mlp, base=4)
    model = family.init(8)
    opt = family.optimizer(model, torch.optim.AdamW, lr=0.05, weight_decay=0.1)
    wide, _ = family.upscale(model, opt, width=24, exact=True)
    assert mu.verify(model, wide, family.widening(8, 24), vectors(D_IN), classify, optimizer=opt).ok


@pytest.mark.parametrize(
    ("optimizer", "given"),
    [
        (torch.optim.SGD, {"clip": 0.05}),
        (torch.optim.AdamW, {"schedule": lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)}),
    ],
    ids=["clipping is width-invariant", "a schedule drives both"],
)
def test_what_both_are_trained_with_matters(float64: None, optimizer: type[Optimizer], given: dict[str, Any]) -> None:
    narrow, wide, plan = pair(mlp, 4, 12)
    data, lr = vectors(D_IN), 0.5 if optimizer is torch.optim.SGD else 0.05
    reports = [
        mu.verify(narrow, wide, plan, data, classify, optimizer=optimizer, lr=lr, steps=6, **some)
        for some in ({}, given)
    ]
    assert all(report.ok for report in reports)
    assert reports[0].losses[-1] != pytest.approx(reports[1].losses[-1], rel=1e-2)


def handed(n: int) -> nn.Module:
    """As in transformers: `attn_dropout.p` goes to scaled_dot_product_attention while the attention trains."""

    def forward(model: Any, x: Tensor) -> Tensor:
        return model.last(F.dropout(model.first(x), model.drop.p if model.training else 0.0))

    return Toy(forward, first=nn.Linear(D_IN, n), drop=nn.Dropout(0.5), last=nn.Linear(n, D_OUT))


def dropped(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(D_IN, 4 * n), nn.Dropout(0.5), nn.Linear(4 * n, D_OUT))


def with_attention(n: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 3)),
        nn.Linear(3, 4 * n),
        nn.TransformerEncoderLayer(4 * n, n, 4 * n, dropout=0.5, batch_first=True),
        nn.Flatten(),
        nn.Unflatten(1, (2, -1)),
        nn.AdaptiveAvgPool2d((1, None)),
        nn.Flatten(),
        nn.Linear(4 * n, D_OUT),
    )


@pytest.mark.parametrize("build", [dropped, with_attention, handed], ids=["module", "attention", "handed on"])
def test_dropout_is_silenced_which_is_said_and_training_goes_on(
    float64: None, build: Callable[[int], nn.Module]
) -> None:
    narrow, wide, plan = pair(build, 2, 6)
    report = mu.verify(narrow.train(), wide.train(), plan, vectors(D_IN), classify, optimizer=torch.optim.SGD, lr=0.1)
    assert report.ok, report
    assert report.dropout
    assert str(report).endswith("without dropout")
    assert any(isinstance(m, nn.Dropout) and m.training and m.p == 0.5 for m in narrow.modules())


def test_dropout_inside_attention_is_silenced(float64: None) -> None:
    """GPT2 hands its rate to scaled_dot_product_attention; no module of its own could be switched off."""
    narrow, wide, plan = pair(lambda n: gpt2(n, dropout=0.3), 2, 4)
    report = mu.verify(narrow, wide, plan, tokens(), language, optimizer=torch.optim.AdamW, lr=0.01, steps=4)
    assert report.ok, report
    assert narrow.h[0].attn.dropout == 0.3


def test_statistics_copied_otherwise_than_their_norm_are_seen_in_training(float64: None) -> None:
    """Outputs agree as long as the model trains: only the buffers tell that evaluation will not."""

    def build(n: int) -> nn.Module:
        norm, join = nn.BatchNorm1d(2 * n), nn.Unflatten(1, (n, 2))
        return nn.Sequential(nn.Linear(D_IN, 2 * n), norm, join, nn.Linear(2, 1), nn.Flatten(), nn.Linear(n, D_OUT))

    blocks = {
        "0.weight": mu.Role(out=0, in_=1, out_block=2),
        "0.bias": mu.Role(out=0, out_block=2),
        "1.weight": mu.Role(out=0, out_block=2),
        "1.bias": mu.Role(out=0, out_block=2),
    }
    reports = []
    for roles in (blocks, {**blocks, "1.running_*": mu.Role(out=0, out_block=2)}):
        narrow, wide, plan = pair(build, 3, 6, roles=roles)
        reports.append(mu.verify(narrow, wide, plan, vectors(D_IN), classify, optimizer=torch.optim.SGD, lr=0.1))
    wrong, right = reports
    assert right.ok, right
    assert wrong.max_relative_difference < 1e-10
    assert (first(wrong).kind, first(wrong).name) == ("buffer", "1.running_mean")
    assert "buffer '1.running_mean' differs first" in str(wrong)


def test_buffers_that_are_not_finite_agree(float64: None) -> None:
    """A causal mask of −∞."""

    def masked(n: int) -> nn.Module:
        parts = {"first": nn.Linear(D_IN, n), "last": nn.Linear(n, D_OUT), "mask": torch.tensor([0.0, float("-inf")])}
        return Toy(lambda model, x: model.last(model.first(x) * model.mask.softmax(0)[0]), **parts)

    narrow, wide, plan = pair(masked, 4, 8)
    assert mu.verify(narrow, wide, plan, vectors(D_IN), classify).ok


def test_rounding_is_told_from_the_cause(float64: None) -> None:
    """A module that computes in float32 is named where nothing else differs, and not where something does."""

    def norm(h: Tensor) -> Tensor:
        return F.layer_norm(h.float(), h.shape[-1:]).to(h)

    narrow, wide, plan = pair(lambda n: between(n, norm, same), 32, 96)
    assert mu.verify(narrow, wide, plan, vectors(D_IN), classify).ok  # its float32 is float64, too
    report = mu.verify(narrow, wide, plan, vectors(D_IN), classify, in_float64=False, tolerance=1e-10)
    assert first(report).name == "1"
    assert "tolerance=1e-4" in first(report).advice
    assert mu.verify(narrow, wide, plan, vectors(D_IN), classify, in_float64=False, tolerance=1e-4).ok
    wide[2].function = lambda h: 1.5 * h
    assert first(mu.verify(narrow, wide, plan, vectors(D_IN), classify)).name == "2"


def test_wrapped_models() -> None:
    narrow, wide, plan = pair(mlp, 4, 8)
    opt = torch.optim.SGD(narrow.parameters(), lr=0.1)
    report = mu.verify(nn.DataParallel(narrow), torch.compile(wide, backend="eager"), plan, vectors(D_IN), classify)
    assert report.ok
    report = mu.verify(nn.DataParallel(narrow), wide, plan, vectors(D_IN), classify, optimizer=opt)
    assert report.ok


# disagreement: the first module, and why


class Attention(nn.Module):
    """Multi-head attention that does not tell of its heads in words that are known; grouped queries if group > 1."""

    def __init__(self, kv: int, group: int = 1, head: int = 4, width: int = 8) -> None:
        super().__init__()
        self.shape = (kv, group, head)
        self.q = nn.Linear(width, kv * group * head)
        self.k, self.v = nn.Linear(width, kv * head), nn.Linear(width, kv * head)
        self.o = nn.Linear(kv * group * head, width)

    def forward(self, x: Tensor) -> Tensor:
        kv, group, head = self.shape
        q = self.q(x).unflatten(-1, (kv, group, head)).permute(0, 2, 3, 1, 4)
        k, v = (p(x).unflatten(-1, (kv, 1, head)).permute(0, 2, 3, 1, 4) for p in (self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q))
        return self.o(mixed.permute(0, 3, 1, 2, 4).flatten(2))


def mixer(kv: int, group: int = 1) -> nn.Module:
    """Attention over three positions between an input and an output layer of fixed width."""

    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.input(x)
        return model.output((x + model.attn(x)).mean(1))

    return Toy(forward, input=nn.Linear(D_IN, 8), attn=Attention(kv, group), output=nn.Linear(8, D_OUT))


def conv(width: int) -> nn.Module:
    """A convolution, a flatten to C·H·W, a readout."""
    flat = Do(lambda h: torch.relu(h).flatten(1))
    return nn.Sequential(nn.Conv2d(3, width, 3), flat, nn.Linear(width * 4, D_OUT))


def divided(width: int) -> nn.Module:
    """A division by √width in forward."""

    def forward(model: Any, x: Tensor) -> Tensor:
        return model.c(torch.tanh(model.b(torch.tanh(model.a(x)))) / model.b.out_features**0.5)

    return Toy(forward, a=nn.Linear(D_IN, width), b=nn.Linear(width, width), c=nn.Linear(width, D_OUT))


def bare(width: int) -> nn.Module:
    """A bare parameter in the model's own forward."""
    out = nn.Parameter(torch.randn(width, D_OUT))
    return Toy(lambda m, x: torch.tanh(m.input(x)) @ m.out + x.mean(), input=nn.Linear(D_IN, width), out=out)


OUT = mu.Role(out=0, in_=1, out_block=4)
HEADS = {
    "attn.[qkv].bias": mu.Role(out=0, out_block=4),
    "attn.[qkv].*": OUT,
    "attn.o.weight": mu.Role(out=0, in_=1, in_block=4),
}
FLAT = {"2.weight": mu.Role(out=0, in_=1, in_block=4)}


@pytest.mark.parametrize(
    ("build", "sizes", "shape", "name", "words", "wrong", "right"),
    [
        (mixer, (2, 4), (3, D_IN), "attn.o", ["heads"], {}, HEADS),
        (conv, (3, 6), (3, 4, 4), "2", ["flatten", "in_block"], {}, FLAT),
        (divided, (4, 16), (D_IN,), "c", ["constant in forward that depends on the width"], {}, None),
        (
            lambda n: between(n, lambda h: h * n**-0.5),
            *((4, 16), (D_IN,), "1", ["0.5 times what it should be"], {}, None),
        ),
        (bare, (4, 8), (D_IN,), "Toy", ["tied"], {"out": mu.Role(out=0)}, None),  # it is summed over
    ],
    ids=["heads", "flatten", "constant", "constant of a module", "bare parameter"],
)
def test_the_first_module_that_differs_is_named_with_the_usual_cause(
    float64: None,
    build: Callable[[int], nn.Module],
    sizes: tuple[int, int],
    shape: tuple[int, ...],
    name: str,
    words: list[str],
    wrong: dict[str, mu.Role],
    right: dict[str, mu.Role] | None,
) -> None:
    report = mu.verify(*pair(build, *sizes, roles=wrong), vectors(*shape), classify)
    assert (first(report).name, first(report).kind) == (name, "module")
    assert all(word in first(report).advice for word in words)
    if right is not None:
        pairs = pair(build, *sizes, roles=right)
        assert mu.verify(*pairs, vectors(*shape), classify, optimizer=torch.optim.AdamW, lr=0.01).ok


def test_a_tied_readout_without_its_fold(float64: None) -> None:
    narrow, wide, plan = pair(gpt2, 2, 6)
    entries = {n: e.with_constants(fold=1) if n.startswith("ln_f") else e for n, e in plan.parameters.items()}
    wrong = replace(plan, parameters=entries)
    mu.widen(narrow, wide, wrong)
    found = first(mu.verify(narrow, wide, wrong, tokens(), language))
    assert (found.name, found.kind) == ("lm_head", "module")
    assert found.relative == pytest.approx(2.0)
    assert "3 times what it should be" in found.advice
    assert "tied" in found.advice


def test_grouped_queries_copied_head_by_head_differ_after_the_first_update(float64: None) -> None:
    """Every static check passes; only training shows it, and then a parameter is named."""
    narrow, wide, plan = pair(lambda k: mixer(k, 2), 2, 4, roles=HEADS)
    data = vectors(3, D_IN)
    assert mu.verify(narrow, wide, plan, data, classify).ok
    report = mu.verify(narrow, wide, plan, data, classify, optimizer=torch.optim.AdamW, lr=0.05, steps=5)
    assert report.differences[0] < 1e-10 < 1e-4 < report.differences[1]
    assert first(report).kind == "parameter"
    assert first(report).name.startswith("attn.")
    assert "grouped-query" in first(report).advice
    right = {
        "attn.q.weight": replace(OUT, out_block=8),
        "attn.q.bias": mu.Role(out=0, out_block=8),
        **HEADS,
        "attn.o.weight": mu.Role(out=0, in_=1, in_block=8),
    }
    pairs = pair(lambda k: mixer(k, 2), 2, 4, roles=right)
    assert mu.verify(*pairs, data, classify, optimizer=torch.optim.AdamW, lr=0.05, steps=5).ok


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_noise_that_was_left_in_is_named(dtype: torch.dtype) -> None:
    """In float32 such a model is allowed float32's rounding, and that is said, too."""
    narrow, wide, plan = pair(mlp, 4, 8)
    narrow, wide = narrow.to(dtype), wide.to(dtype)
    data = [(x.to(dtype), y) for x, y in vectors(D_IN)]
    mu.upscale(narrow, wide, mu.plan(narrow, wide, fresh=mlp(4), inputs=data[0][0]), noise=0.5)
    report = mu.verify(narrow, wide, plan, data, classify, optimizer=torch.optim.SGD, lr=0.1, steps=1)
    assert "Usually noise" in first(report).advice
    assert "heads" not in first(report).advice
    assert report.tolerance == (1e-10 if dtype == torch.float64 else 1e-4)
    assert ("the wide one is not what the plan writes" in report.verdict) == (dtype == torch.float32)
    given = mu.verify(narrow, wide, plan, data, classify, tolerance=1e-3)
    assert "(tolerance 1e-03), loss" in given.verdict


def test_the_models_own_precision_is_said_where_float64_is_not_wanted() -> None:
    narrow, wide, plan = pair(mlp, 4, 8)
    report = mu.verify(narrow, wide, plan, vectors(D_IN), classify, in_float64=False)
    assert "(tolerance 1e-04, that of the models' own precision), loss" in report.verdict
    assert mu.verify(narrow, wide, plan, vectors(D_IN), classify).reason == ""


def test_a_model_that_diverges_is_not_ok() -> None:
    narrow, wide, plan = pair(mlp, 4, 8)
    report = mu.verify(narrow, wide, plan, vectors(D_IN), classify, optimizer=torch.optim.SGD, lr=1e300, steps=5)
    assert not report.ok
    assert report.max_relative_difference == float("inf")


# errors and words


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("at least one batch", {"batches": []}),
        ("must call the model", {"loss": lambda model, batch: sum(p.sum() for p in model.parameters())}),
        ("different model", {"narrow": mlp(2)}),
        ("not the narrow model's", {"optimizer": torch.optim.SGD(mlp(4).parameters(), lr=0.1)}),
    ],
)
def test_what_cannot_be_compared_is_told(words: str, change: dict[str, Any]) -> None:
    narrow, wide, plan = pair(mlp, 4, 8)
    given = {"narrow": narrow, "wide": wide, "plan": plan, "batches": vectors(D_IN), "loss": classify}
    with pytest.raises(mu.MupscaleError, match=words):
        mu.verify(**{**given, **change})


def test_an_output_that_grows() -> None:
    with pytest.raises(mu.MupscaleError, match=r"\(8, 8\) and \(8, 16\).*does not grow"):
        mu.verify(*pair(lambda n: nn.Linear(D_IN, n), 8, 16), vectors(D_IN), classify)


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD])
def test_the_report_reads_well(optimizer: type[Optimizer] | None) -> None:
    narrow, wide, plan = pair(mlp, 4, 8)
    given = {} if optimizer is None else {"optimizer": optimizer, "lr": 0.1, "steps": 20}
    good = mu.verify(narrow, wide, plan, vectors(D_IN), classify, **given)
    assert good.verdict.startswith("equivalent: largest relative output difference ")
    assert f"over {given.get('steps', 0)} steps (tolerance 1e-10), loss " in good.verdict
    assert "\n" not in good.verdict
    head, *lines, last = str(good).splitlines()
    assert head.split()[:3] == ["step", "difference", "allowed"]
    assert [int(line.split()[0]) for line in lines] == ([0, 3, 6, 9, 11, 14, 17, 20] if given else [0])
    assert last == good.verdict
    assert good._repr_html_().count("<tr>") == len(lines) + 1
    bad = mu.verify(narrow, mlp(8), plan, vectors(D_IN), classify, **given)
    first, second = bad.verdict.splitlines()
    assert first.startswith("NOT equivalent: ")
    assert second.startswith("module 'layers.0' differs first (by ")


# rounding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_small_mistake_does_not_hide_in_rounding(dtype: torch.dtype) -> None:
    narrow, wide, plan = pair(lambda n: between(n, same).to(dtype), 8, 24)
    data = [(x.to(dtype), y) for x, y in vectors(D_IN)]
    assert mu.verify(narrow, wide, plan, data, classify, optimizer=torch.optim.AdamW, lr=0.01, steps=5).ok
    wide[1].function = lambda h: (1 + 1e-6) * h
    for given in ({"optimizer": torch.optim.AdamW, "lr": 0.01, "steps": 5}, {}):
        assert "rounding" not in first(mu.verify(narrow, wide, plan, data, classify, **given)).advice


def test_a_local_response_norm_in_float32() -> None:
    norm = nn.LocalResponseNorm(3)
    pairs = pair(lambda n: between(n, lambda h: norm(h[..., None])[..., 0]), 8, 16)
    assert not mu.verify(*pairs, vectors(D_IN), classify).ok


def test_rounding_that_a_model_blows_up_is_not_a_mistake(float64: None) -> None:
    """A logistic map in the middle: last bits of the sum before it grow by orders of magnitude."""

    def chaos(h: Tensor) -> Tensor:
        h = torch.sigmoid(h)
        for _ in range(45):
            h = 3.9 * h * (1 - h)
        return h

    def build(n: int) -> nn.Module:
        return nn.Sequential(nn.Linear(D_IN, n), nn.Tanh(), nn.Linear(n, n), Do(chaos), nn.Linear(n, D_OUT))

    narrow, wide, plan = pair(build, 16, 48)
    strict = mu.verify(narrow, wide, plan, vectors(D_IN), classify, tolerance=1e-10)
    assert not strict.ok
    report = mu.verify(narrow, wide, plan, vectors(D_IN), classify)
    assert report.ok, report
    assert "where rounding alone goes so far" in str(report)
    wide[3].function = lambda h: 1.01 * chaos(h)
    assert not mu.verify(narrow, wide, plan, vectors(D_IN), classify).ok


def test_a_loss_with_tensors_of_its_own_keeps_its_precision() -> None:
    mixing = torch.randn(D_OUT, 2)
    loss = lambda model, batch: (model(batch[0]) @ mixing).mean()  # noqa: E731
    report = mu.verify(*pair(mlp, 4, 8), vectors(D_IN), loss)
    assert report.ok
    assert report.tolerance == 1e-4


def weight_normed(width: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # there is a newer weight_norm
        middle = nn.utils.weight_norm(nn.Linear(width, width))
    return nn.Sequential(nn.Linear(D_IN, width), nn.Tanh(), middle, nn.Tanh(), nn.Linear(width, D_OUT))


def pruned(width: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(D_IN, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, D_OUT))
    prune.l1_unstructured(model[2], "weight", amount=0.3)
    return model


@pytest.mark.parametrize("build", [weight_normed, pruned])
def test_modules_that_keep_a_computed_weight(build: Callable[[int], nn.Module], float64: None) -> None:
    """Old-style weight_norm and prune: deepcopy refuses the tensor that they leave in the module."""
    narrow, wide = build(4), build(8)
    data = vectors(D_IN)
    plan = mu.plan(narrow, wide, inputs=data[0][0])
    mu.widen(narrow, wide, plan)
    report = mu.verify(narrow, wide, plan, data, classify, optimizer=torch.optim.AdamW, lr=0.01, steps=5)
    assert report.ok, report


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_buffer_that_was_not_widened_shows_in_every_precision(dtype: torch.dtype) -> None:
    """Copies in float64 are written once more by the plan only where the wide model was."""
    narrow, wide = (nn.Sequential(nn.Linear(D_IN, n), nn.BatchNorm1d(n), nn.Linear(n, D_OUT)).to(dtype) for n in (4, 8))
    narrow[1].running_mean += 1
    plan = mu.plan(narrow, wide)
    mu.widen(narrow, wide, plan)
    data = [(x.to(dtype), y) for x, y in vectors(D_IN)]
    assert mu.verify(narrow, wide, plan, data, classify).ok
    wide[1].running_mean -= 1
    assert first(mu.verify(narrow, wide, plan, data, classify)).name == "1.running_mean"


def test_steps_that_move_no_weight_show_nothing_of_training() -> None:
    narrow, wide, plan = pair(mlp, 4, 8)
    for lr, unmoved in ((0.0, True), (0.1, False)):
        report = mu.verify(narrow, wide, plan, vectors(D_IN), classify, optimizer=torch.optim.SGD, lr=lr, steps=2)
        assert report.ok
        assert report.unmoved is unmoved
        assert ("No weight moved" in str(report)) is unmoved
    assert "No weight moved" not in str(mu.verify(narrow, wide, plan, vectors(D_IN), classify))


@pytest.mark.parametrize(
    ("build", "width", "grow"),
    [
        (mlp, 12, mu.Fresh()),
        (mlp, 16, mu.Fresh(lossless=True)),
        (lambda n: between(n, torch.tanh, lambda h: h / n), 16, mu.Fresh()),
    ],
    ids=["between multiples", "lossless", "weights times what forward divides by"],
)
def test_after_fresh_units_the_old_ones_are_compared(
    build: Callable[[int], nn.Module], width: int, grow: mu.Fresh
) -> None:
    """And a model that was never grown is told from one that was."""
    narrow, wide, x = build(8), build(width), torch.randn(5, D_IN)
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    plan = mu.plan(narrow, wide, inputs=x, grow=grow)
    assert "NOT as they were" in str(mu.verify(narrow, wide, plan, [x], loss))
    mu.upscale(narrow, wide, plan, grow=grow, inputs=x)
    report = mu.verify(narrow, wide, plan, [x], loss, optimizer=torch.optim.Adam, lr=0.1)
    assert report.ok
    assert "the old ones are as they were. With the new ones the outputs differ by" in report.verdict
    assert ("Between models whose sizes are whole multiples" in report.verdict) is (width == 12)
