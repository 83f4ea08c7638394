"""Deeper models: what stays, what learns, what is carried over, and what is refused; and whose plan is whose."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale as mu
from deep_models import (
    REFUSED,
    RESIDUAL,
    Deepening,
    PlainBlock,
    Residual,
    Stages,
    Stream,
    TiedByFunction,
    images,
    tokens,
)
from mupscale.growth import grow_optimizer
from mupscale.models import GPT2
from refusals import refuses
from weights import identical, take_step, unchanged

pytestmark = pytest.mark.usefixtures("float64")
each_growth = pytest.mark.parametrize("grow", [mu.Identity(), mu.Stack("interleaved")], ids=["identity", "stack"])


def pair(model: Deepening, shallow: int = 2, deep: int = 5) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    small, large = model.build(shallow), model.build(deep)
    inputs = model.inputs()
    if inputs.is_floating_point():
        inputs = inputs.to(next(small.parameters()).dtype)
    return small, large, inputs


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    output = model(inputs).flatten(0, -2)
    return F.cross_entropy(output, torch.arange(len(output)) % output.shape[-1])


def step(model: nn.Module, optimizer: Any, inputs: Tensor) -> None:
    torch.manual_seed(1)
    take_step(optimizer, loss_of(model, inputs))


@pytest.mark.parametrize("name", RESIDUAL)
def test_identity_keeps_outputs_and_gradients_and_new_blocks_learn(name: str) -> None:
    """Output projections move at the first step, everything else in a new block at the second."""
    model = RESIDUAL[name]
    shallow, deep, inputs = pair(model)
    plan = mu.plan_depth(shallow, deep, inputs=inputs, blocks=model.blocks)
    mu.upscale(shallow, deep, plan)
    for mode in (False, True):
        shallow.train(mode), deep.train(mode)
        outputs = []
        for each in (shallow, deep):
            torch.manual_seed(1)
            outputs.append(each(inputs).detach())
        if name != "dropout" or not mode:
            assert float((outputs[0] - outputs[1]).abs().max()) < 1e-12 * float(outputs[0].abs().max() + 1)
    shallow.eval(), deep.eval()
    for each in (shallow, deep):
        loss_of(each, inputs).backward()
    ours = dict(shallow.named_parameters())
    for deep_name, p in deep.named_parameters():
        origin = plan.sources[deep_name]
        if not origin.is_new and ours[origin.name].grad is not None:
            torch.testing.assert_close(p.grad, ours[origin.name].grad, rtol=1e-10, atol=1e-12)
    before = {n: p.detach().clone() for n, p in deep.named_parameters()}
    optimizer = torch.optim.SGD(deep.parameters(), lr=0.5)
    optimizer.step()
    new = [n for n in before if plan.sources[n].is_new]
    silent = {n for n in new if plan.sources[n].kind == "silent"}
    assert {n for n in new if not torch.equal(dict(deep.named_parameters())[n], before[n])} == silent
    step(deep, optimizer, inputs)
    stuck = {n for n in new if torch.equal(dict(deep.named_parameters())[n], before[n])}
    assert not stuck - {n for n in new if not n.endswith("weight")}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    model, reason = REFUSED[name]
    shallow, deep, inputs = pair(model)
    with unchanged(deep):
        refuses(reason, mu.plan_depth if name == "not-found" else mu.upscale, shallow, deep, inputs=inputs)


def test_bad_input() -> None:
    shallow, deep, inputs = pair(RESIDUAL["gpt2"])
    refuses("needs more of them", mu.plan_depth, deep, shallow, inputs=inputs)
    refuses("no more blocks", mu.plan_depth, shallow, pair(RESIDUAL["gpt2"])[0], inputs=inputs)
    refuses("Pass inputs=", mu.upscale, shallow, deep)
    refuses("3 new blocks", mu.upscale, shallow, deep, grow=mu.Identity(at=(1,)), inputs=inputs)
    with pytest.raises(mu.MupscaleError, match="more than the number of blocks"):
        mu.plan_depth(shallow, GPT2(12, 8, width=8, head_dim=4, layers=4), inputs=inputs)
    with pytest.raises(mu.MupscaleError, match=r"'ln_1\.weight' has shape"):
        mu.plan_depth(shallow, GPT2(11, 8, width=16, head_dim=4, layers=4), inputs=inputs)
    mixed = Stream(2, Residual)
    mixed.blocks.append(PlainBlock())
    longer = Stream(4, Residual)
    longer.blocks[3] = PlainBlock()
    longer.blocks.append(PlainBlock())
    refuses("different classes", mu.plan_depth, mixed, longer, inputs=tokens())
    refuses("order= is", mu.Stack, "sideways")
    with torch.device("meta"):
        meta = GPT2(11, 8, width=8, head_dim=4, layers=3)
    refuses("meta device", mu.upscale, shallow, meta, inputs=inputs)


def test_a_name_that_has_another_shape_is_another_block_and_no_width() -> None:
    shallow, deep, inputs = pair(RESIDUAL["stages-in-one-list"])
    mu.upscale(shallow, deep, inputs=inputs)
    torch.testing.assert_close(deep(inputs), shallow(inputs), rtol=1e-12, atol=1e-12)
    with pytest.raises(mu.MupscaleError, match="Depth grows by blocks of one shape"):  # and no talk of the batch
        mu.upscale(pair(RESIDUAL["resnet"])[0], Stages(4), grow=mu.Stack(), inputs=images().double())


def test_a_list_of_other_blocks_says_so() -> None:
    """Not that only widths may differ: the list is longer, but nothing tells what a new block is."""
    narrow, wide = Stream(2, Residual), Stream(4, Residual)
    narrow.blocks.append(PlainBlock()), wide.blocks.extend((PlainBlock(), PlainBlock()))
    refuses("different classes", mu.upscale, narrow, wide, inputs=tokens())


def test_a_model_whose_copies_use_its_own_weights_is_grown_and_said_to_be_untried() -> None:
    shallow, deep, inputs = pair(Deepening(TiedByFunction))
    with pytest.warns(mu.UncheckedPlan, match=r"a copy of the model still uses 'embed\.weight' of the original"):
        mu.upscale(shallow, deep, inputs=inputs)
    torch.testing.assert_close(deep(inputs), shallow(inputs), rtol=1e-12, atol=1e-12)


def test_positions() -> None:
    shallow, deep, inputs = pair(RESIDUAL["gpt2"])
    mu.upscale(shallow, deep, grow=mu.Identity(at=(0, 2, 4)), inputs=inputs)
    weights = [block.attn.c_attn.weight for block in deep.h]
    ours = [block.attn.c_attn.weight for block in shallow.h]
    assert torch.equal(weights[1], ours[0])
    assert torch.equal(weights[3], ours[1])
    assert torch.equal(shallow(inputs), deep(inputs))


def test_a_stage_whose_first_block_has_another_shape() -> None:
    """Stacking by turns would put the block that changes the shape in the middle; each behind its own works."""
    torch.manual_seed(0)
    shallow, deep = Stages(2), Stages(4)
    refuses("of one shape", mu.upscale, shallow, deep, grow=mu.Stack())
    plan = mu.plan_depth(shallow, deep, inputs=images().double())
    assert plan.sources["two.1.conv1.weight"].name == "two.1.conv1.weight"
    assert not plan.sources["two.2.conv1.weight"].is_new


@pytest.mark.parametrize("order", ["appended", "interleaved"])
def test_stack_copies_blocks_and_says_how_much_changes(order: Any) -> None:
    shallow, deep, inputs = pair(RESIDUAL["gpt2"], 2, 4)
    with pytest.warns(UserWarning, match="outputs differ by"):
        mu.upscale(shallow, deep, grow=mu.Stack(order), inputs=inputs)
    sources = [0, 1, 0, 1] if order == "appended" else [0, 0, 1, 1]
    for block, number in zip(deep.h, sources, strict=True):
        assert torch.equal(block.mlp.c_proj.weight, shallow.h[number].mlp.c_proj.weight)


@pytest.mark.parametrize("with_inputs", [False, True])
def test_a_plan_knows_its_operator(with_inputs: bool) -> None:
    """What a plan for Stack writes is what Stack writes, whether or not grow= is said again."""
    shallow, deep, inputs = pair(RESIDUAL["gpt2"], 2, 4)
    grow = mu.Stack("interleaved")
    plan = mu.plan_depth(shallow, deep, inputs=inputs, grow=grow)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mu.upscale(shallow, deep, plan, inputs=inputs if with_inputs else None)
    assert ["outputs differ by" in str(warning.message) for warning in caught] == [True] * with_inputs
    other = RESIDUAL["gpt2"].build(4)
    mu.upscale(shallow, other, grow=grow)
    assert identical(deep, other)


def test_a_plan_says_what_new_blocks_are() -> None:
    shallow, deep, inputs = pair(RESIDUAL["gpt2"], 2, 4)
    optimizer = torch.optim.AdamW(shallow.parameters())
    for ours, theirs in (
        (mu.Stack(), mu.Identity()),
        (mu.Identity(), mu.Stack()),
        (mu.Stack(), mu.Stack("interleaved")),
    ):
        plan = mu.plan_depth(shallow, deep, inputs=inputs, grow=ours)
        said = r"plan says .*leave out grow=, or make the plan with plan_depth"
        with unchanged(deep):
            refuses(said, mu.upscale, shallow, deep, plan, optimizer, grow=theirs)


def test_a_plan_shows_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    shallow, deep, inputs = pair(RESIDUAL["gpt2"], 2, 4)
    stack = mu.plan_depth(shallow, deep, inputs=inputs, grow=mu.Stack())
    assert str(stack).splitlines() == [
        "block  comes from  starts",
        "h.0    h.0         as it was",
        "h.1    h.1         as it was",
        "h.2    h.0         a copy",
        "h.3    h.1         a copy",
        "blocks are copied: the function changes",
    ]
    lines = str(mu.plan_depth(shallow, deep, inputs=inputs, rules=mu.RuleSet(depth="complete"))).splitlines()
    assert lines[1:5] == [
        "h.0    h.0         as it was",
        "h.1    h.0         new, and writes nothing yet",
        "h.2    h.1         as it was",
        "h.3    h.1         new, and writes nothing yet",
    ]
    assert "h.*.attn.c_proj.bias, h.*.attn.c_proj.weight" in lines[5]
    assert "learning rates follow the depth" in lines[5]
    assert "<td>a copy</td>" in stack._repr_html_()


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-3}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@each_growth
def test_optimizer_state(name: str, grow: Any) -> None:
    shallow, deep, inputs = pair(RESIDUAL["gpt2"])
    cls, hyper = OPTIMIZERS[name]
    optimizer: Any = cls(shallow.parameters(), **hyper)
    for _ in range(3):
        step(shallow, optimizer, inputs)
    plan = mu.plan_depth(shallow, deep, inputs=inputs, grow=grow)
    mu.upscale(shallow, deep, plan)
    deeper = grow_optimizer(optimizer, shallow, deep, plan)
    ours = dict(shallow.named_parameters())
    held = {id(p) for group in deeper.param_groups for p in group["params"]}
    for deep_name, p in deep.named_parameters():
        origin = plan.sources[deep_name]
        assert id(p) in held
        if origin.is_new and isinstance(grow, mu.Identity):
            assert p not in deeper.state
        else:
            for key, value in optimizer.state[ours[origin.name]].items():
                torch.testing.assert_close(deeper.state[p][key], value, rtol=0, atol=0)
                if isinstance(value, Tensor):
                    assert deeper.state[p][key] is not value
    step(deep, deeper, inputs)


def test_the_users_groups_and_frozen_parameters() -> None:
    """A new block is in the groups of the block that it comes from; what was not trained is not."""
    shallow, deep, inputs = pair(RESIDUAL["gpt2"])
    rest = [p for n, p in shallow.named_parameters() if "wte" not in n and p.dim() == 2]
    gains = [p for p in shallow.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": rest, "weight_decay": 0.3}, {"params": gains}], lr=0.1, weight_decay=0)
    plan = mu.plan_depth(shallow, deep, inputs=inputs)
    deeper = grow_optimizer(optimizer, shallow, mu.upscale(shallow, deep, plan)[0], plan)
    counts = {group["weight_decay"]: len(group["params"]) for group in deeper.param_groups}
    assert counts == {0.3: 4 * 5 + 1, 0: 8 * 5 + 2}


# ---------------------------------------------------------------------------------------------- plans after growths

TOKENS = torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(0))


def build(layers: int, width: int = 8) -> nn.Module:
    return GPT2(11, 8, width=width, head_dim=4, layers=layers)


def trained(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = build(layers)
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, adam, TOKENS)
    return model, adam


@each_growth
def test_a_plan_for_blocks_is_a_plan(grow: Any, tmp_path: Path) -> None:
    """It goes through a file, gives groups and a norm to clip by, and `upscale` grows by it."""
    (shallow, adam), deep, other = trained(1), build(2), build(2)
    other.load_state_dict(deep.state_dict())
    plan = mu.plan_depth(shallow, deep, inputs=TOKENS, grow=grow)
    assert mu.Plan.from_json(plan.to_json()) == plan
    deepened = mu.upscale(shallow, other, plan)[0]
    grown, deep_adam = mu.upscale(shallow, deep, plan, adam)
    assert identical(grown, deepened)
    old, new = shallow.get_parameter("h.0.mlp.c_fc.weight"), grown.get_parameter("h.1.mlp.c_fc.weight")
    assert (new in deep_adam.state) == isinstance(grow, mu.Stack)
    if isinstance(grow, mu.Stack):
        assert torch.equal(deep_adam.state[new]["exp_avg"], adam.state[old]["exp_avg"])
    mu.save(tmp_path / "deep.safetensors", grown, deep_adam, plan)
    assert mu.load(tmp_path / "deep.safetensors", build(2)).plan == plan
    assert norm(grown, plan) == norm(grown)
    assert {group["lr"] for group in mu.param_groups(grown, plan, torch.optim.AdamW, lr=0.1)} == {0.1}


def test_upscale_grows_what_differs() -> None:
    (shallow, adam), deep = trained(1), build(3)
    deep, deep_adam = mu.upscale(shallow, deep, optimizer=adam, inputs=TOKENS)
    assert torch.equal(deep(TOKENS), shallow(TOKENS))
    assert deep_adam is not None
    with pytest.warns(UserWarning, match="copied blocks change the function"):
        mu.upscale(shallow, build(2), grow=mu.Stack(), inputs=TOKENS)
    for said in ({"noise": 1.0}, {"grow": mu.Copies()}):
        refuses("only the depth grows", mu.upscale, shallow, build(2), inputs=TOKENS, **said)


@each_growth
def test_wider_and_deeper_in_one_call(grow: Any) -> None:
    """What one call writes, to the bit, is what two would: weights, optimizer state and groups."""
    narrow, adam = trained(2)
    deep, other = build(4, 16), build(4, 16)
    other.load_state_dict(deep.state_dict())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "copied blocks change the function")
        grown, one = mu.upscale(narrow, deep, None, adam, grow=(mu.Copies(), grow), exact=True, inputs=TOKENS)
        wide, first = mu.upscale(narrow, build(2, 16), None, adam, exact=True, inputs=TOKENS)
        expected, two = mu.upscale(wide, other, None, first, grow=grow, inputs=TOKENS)
    if isinstance(grow, mu.Identity):
        torch.testing.assert_close(grown(TOKENS), narrow(TOKENS), rtol=1e-10, atol=1e-12)
    rates = [{n: g["lr"] for g in opt.param_groups for n in g["param_names"]} for opt in (one, two)]
    assert rates[0] == pytest.approx(rates[1], rel=1e-12)
    for p, q in zip(grown.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=0)
        assert one.state[p].keys() == two.state[q].keys()
        for key in one.state[p]:
            torch.testing.assert_close(one.state[p][key], two.state[q][key], rtol=1e-12, atol=0)


def test_fresh_units_and_silent_blocks_in_one_call() -> None:
    """The default: old units keep their weights in old blocks, at any wider width; new blocks write nothing."""
    (narrow, adam), deep = trained(1), build(2, 12)
    grown, _ = mu.upscale(narrow, deep, optimizer=adam, inputs=TOKENS, fresh=lambda: build(1))
    old = narrow.get_parameter("h.0.mlp.c_fc.weight")
    plan = mu.plan(narrow, build(1, 12), inputs=TOKENS, grow=mu.Fresh())
    entry = plan["h.0.mlp.c_fc.weight"]
    there = grown.get_parameter("h.0.mlp.c_fc.weight")[mu.index_of_old(entry.narrow, entry.axes)]
    assert torch.equal(there, old)
    assert not grown.get_parameter("h.1.mlp.c_proj.weight").any()


@each_growth
def test_wider_and_then_deeper_is_one_plan(grow: Any) -> None:
    """What a tensor is made of after two growths, and its rule, are in `first.then(second)`, and back from a file."""
    narrow, wide, deep = build(2), build(2, 16), build(4, 16)
    first = mu.plan(narrow, wide, inputs=TOKENS)
    whole = first.then(mu.plan_depth(wide, deep, inputs=TOKENS, grow=grow))
    assert whole.rules["h.3.mlp.c_fc.weight"] == first.rules["h.1.mlp.c_fc.weight"]
    assert whole.sources["h.3.mlp.c_fc.weight"].name == "h.1.mlp.c_fc.weight"
    assert whole.sources["h.3.mlp.c_fc.weight"].kind == ("copy" if isinstance(grow, mu.Stack) else "drawn")
    assert mu.Plan.from_json(whole.to_json()) == whole
    whole.check(narrow, "narrow"), whole.check(deep)


def test_a_plan_of_another_model_is_refused() -> None:
    shallow, deep = build(1), build(2)
    plan = mu.plan(build(2), build(2, 16), inputs=TOKENS)
    refuses("lacks", mu.upscale, shallow, deep, plan, exact=True)
    refuses("lacks", grow_optimizer, torch.optim.AdamW(shallow.parameters()), shallow, deep, plan)
    depth = mu.plan_depth(shallow, deep, inputs=TOKENS)
    refuses("fresh units", mu.widen, shallow, deep, depth)
    refuses("fresh units", mu.upscale, shallow, deep, depth, exact=True)


def norm(model: nn.Module, plan: mu.Plan | None = None) -> float:
    model.zero_grad()
    loss_of(model, TOKENS).backward()
    if plan is None:
        return float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    return float(mu.clip_grad_norm_(model, 1e9, plan))


def test_what_the_message_says_is_right_for_a_deepened_model() -> None:
    torch.manual_seed(0)
    narrow = build(1)
    wide, _ = mu.upscale(narrow, build(1, 16), inputs=TOKENS, exact=True)
    deep = mu.upscale(wide, build(2, 16), inputs=TOKENS)[0]
    deepened = mu.upscale(narrow, base := build(2), inputs=TOKENS)[0]
    plan = mu.plan(base, deep, inputs=TOKENS)
    same = mu.widen(deepened, build(2, 16), plan)
    assert norm(same, plan) == pytest.approx(norm(deepened), rel=1e-9)
