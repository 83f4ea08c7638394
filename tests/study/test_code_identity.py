"""What a user changes in training code is noticed by what the code does; what changes nothing is not."""

from __future__ import annotations

import cProfile
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mupscale.study.code_identity import CodeIdentity, FirstSteps, StepsTaken, describe_machine, normal_form
from mupscale.study.own_loop import OwnLoop
from mupscale.system import read_json, write_json
from paper_runs import quiet

FIRST = FirstSteps(4, 2, 0.02)
SCRIPT = """
import collections, contextlib, dataclasses, enum, functools, json, math, operator, os, types, typing
from argparse import Namespace
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
import mupscale as mu

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X.sin().sum(1, keepdim=True)

{setup}

def build(width):
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)).double()

def train(model, optimizer, steps, schedule):
    for step in range(steps):
        rows = torch.randint(16, (4,))
        x, y = X[rows], Y[rows]
        optimizer.zero_grad()
        error = model(x) - y
        ({loss}).backward()
        optimizer.step()

def held_out(model):
    return F.mse_loss(model(X[16:]), Y[16:])

def make_optimizer(model, lr):
    return family.optimizer(model, torch.optim.AdamW, lr=lr, weight_decay=0.1)

family = mu.Family(build, base=4, inputs=X[:4], init_at=4)
"""
SQUARES = "error.square().mean()"


@dataclass(frozen=True)
class Change:
    """A script before and after one change of its text.

    setup: what stands before the functions; loss: how `train` uses it; old, new: the text that changes
    """

    name: str
    setup: str
    loss: str
    old: str
    new: str

    @property
    def scripts(self) -> tuple[str, str]:
        before = SCRIPT.replace("{setup}", textwrap.dedent(self.setup)).replace("{loss}", self.loss)
        assert before.count(self.old) == 1, f"{self.name}: the text is there {before.count(self.old)} times"
        return before, before.replace(self.old, self.new)


def value(name: str, setup: str, used: str, old: str = "0.5", new: str = "0.75") -> Change:
    """A value that the loss is multiplied by."""
    return Change(name, setup, f"{used} * {SQUARES}", old, new)


def function(name: str, setup: str, called: str, old: str = "error.abs()", new: str = "error.square()") -> Change:
    """A function that makes the loss of `error`."""
    return Change(name, setup, called, old, new)


VALUES = [
    value("a number", "SCALE = 0.5", "SCALE"),
    value("a list", "SCALES = [1.0, 0.5]", "SCALES[1]"),
    value("a list in a list", "SCALES = [[1.0], [0.5]]", "SCALES[1][0]"),
    value("a tuple", "SCALES = (1.0, 0.5)", "SCALES[1]"),
    value("a dict", "CONFIG = {'scale': 0.5}", "CONFIG['scale']"),
    value("a dict in a dict", "CONFIG = {'loss': {'scale': 0.5}}", "CONFIG['loss']['scale']"),
    value("a defaultdict", "CONFIG = collections.defaultdict(lambda: 0.5)", "CONFIG['scale']"),
    value("a ChainMap", "CONFIG = collections.ChainMap({}, {'scale': 0.5})", "CONFIG['scale']"),
    value("a mapping proxy", "CONFIG = types.MappingProxyType({'scale': 0.5})", "CONFIG['scale']"),
    value("a deque", "SCALES = collections.deque([0.5])", "SCALES[0]"),
    value("a set", "SCALES = {0.5}", "max(SCALES)"),
    value("a range", "ROWS = range(0, 3)", "x[list(ROWS)].abs().mean()", "range(0, 3)", "range(0, 4)"),
    value("a Namespace", "args = Namespace(scale=0.5)", "args.scale"),
    value(
        "a SimpleNamespace", "args = types.SimpleNamespace(loss=types.SimpleNamespace(scale=0.5))", "args.loss.scale"
    ),
    value(
        "a dataclass",
        """
        C = dataclasses.make_dataclass('C', ['scale'])
        config = C(0.5)
        """,
        "config.scale",
    ),
    value(
        "a dataclass's default",
        """
        @dataclasses.dataclass(frozen=True)
        class C:
            scale: float = 0.5
        config = C()
        """,
        "config.scale",
    ),
    value(
        "a NamedTuple",
        """
        C = collections.namedtuple('C', 'scale')
        config = C(0.5)
        """,
        "config.scale",
    ),
    value(
        "a class attribute",
        """
        class C:
            scale = 0.5
        """,
        "C.scale",
    ),
    value(
        "an inherited class attribute",
        """
        class A:
            scale = 0.5
        class B(A): pass
        b = B()
        """,
        "b.scale",
    ),
    value(
        "a slot",
        """
        class C:
            __slots__ = ('s',)
        c = C()
        c.s = 0.5
        """,
        "c.s",
    ),
    value(
        "an enum",
        """
        class C(enum.Enum):
            SCALE = 0.5
        """,
        "C.SCALE.value",
    ),
    value(
        "a dtype",
        "DTYPE = torch.float64",
        "error.to(DTYPE).abs().mean().double()",
        "= torch.float64\n",
        "= torch.float16\n",
    ),
    value("a text", "KIND = 'mean'", "getattr(error, KIND)()", "'mean'", "'sum'"),
    value("None", "SCALE = None", "(SCALE or 1.0)", "= None", "= 0.5"),
    value("a slice", "ROWS = [slice(0, 2)]", "x[ROWS[0]].abs().mean()", "slice(0, 2)", "slice(0, 3)"),
    value("a tensor", "SCALES = torch.tensor([1.0, 0.5])", "SCALES[1]"),
    value("a tensor in a dict", "STATE = {'scale': torch.tensor(0.5)}", "STATE['scale']"),
    value(
        "an array",
        """
        import numpy
        SCALES = numpy.array([1.0, 0.5])
        """,
        "float(SCALES[1])",
    ),
    value("the weights of a loss", "criterion = nn.HuberLoss(delta=0.5)", "criterion(model(x), y)"),
    value(
        "a buffer",
        """
        norm = nn.Module()
        norm.register_buffer('scale', torch.tensor(0.5))
        """,
        "norm.scale",
    ),
    value(
        "the seed of a generator",
        "SEED = [3]",
        "torch.rand((), generator=torch.Generator().manual_seed(SEED[0]))",
        "[3]",
        "[4]",
    ),
    value("the data", "Y = Y * 0.5", "1.0"),
]
FUNCTIONS = [
    function(
        "a helper",
        """
        def loss(error):
            return error.abs().mean()
        """,
        "loss(error)",
    ),
    function(
        "a generator expression",
        """
        def one(error):
            return error.abs()
        """,
        "sum(one(e).mean() for e in error)",
    ),
    function(
        "a comprehension",
        """
        def one(error):
            return error.abs()
        """,
        "sum([one(e).mean() for e in error])",
    ),
    function("a lambda", "loss = lambda error: error.abs().mean()", "loss(error)"),
    function("a lambda in a dict", "LOSSES = {'l': lambda error: error.abs().mean()}", "LOSSES['l'](error)"),
    function(
        "a partial",
        """
        def one(k, error):
            return k * error.abs()
        loss = functools.partial(one, 1)
        """,
        "loss(error).mean()",
    ),
    function(
        "a partial's keyword",
        """
        def one(e, *, k):
            return k * e
        loss = functools.partial(one, k=0.5)
        """,
        "loss(error).abs().mean()",
        "0.5",
        "0.75",
    ),
    function(
        "an lru_cache",
        """
        @functools.lru_cache
        def loss(k):
            return lambda error: error.abs().mean()
        """,
        "loss(1)(error)",
    ),
    function(
        "a property",
        """
        class L:
            @property
            def loss(self):
                return lambda error: error.abs().mean()
        l = L()
        """,
        "l.loss(error)",
    ),
    function(
        "a static method",
        """
        class L:
            @staticmethod
            def loss(error):
                return error.abs().mean()
        """,
        "L.loss(error)",
    ),
    function(
        "a class method",
        """
        class L:
            @classmethod
            def loss(cls, error):
                return error.abs().mean()
        """,
        "L.loss(error)",
    ),
    function(
        "an inherited method",
        """
        class A:
            def loss(self, error):
                return error.abs().mean()
        class L(A): pass
        l = L()
        """,
        "l.loss(error)",
    ),
    function(
        "a method by super",
        """
        class A:
            def loss(self, error):
                return error.abs().mean()
        class L(A):
            def loss(self, error):
                return super().loss(error)
        l = L()
        """,
        "l.loss(error)",
    ),
    function(
        "a bound method with another self",
        """
        class L:
            def __init__(self, power):
                self.config = [power]
            def loss(self, error):
                return error.abs().pow(self.config[0]).mean()
        loss = L(1).loss
        """,
        "loss(error)",
        "L(1)",
        "L(2)",
    ),
    function(
        "a callable object",
        """
        class L:
            def __call__(self, error):
                return error.abs().mean()
        l = L()
        """,
        "l(error)",
    ),
    function(
        "getattr",
        """
        class L:
            def loss(self, error):
                return error.abs().mean()
        l = L()
        """,
        "getattr(l, 'lo' + 'ss')(error)",
    ),
    function(
        "globals",
        """
        def loss(error):
            return error.abs().mean()
        """,
        "globals()['lo' + 'ss'](error)",
    ),
    function("an alias of a torch function", "loss = F.l1_loss", "loss(model(x), y)", "F.l1_loss", "F.huber_loss"),
    function(
        "a table of torch functions",
        "LOSSES = {'l': F.l1_loss}",
        "LOSSES['l'](model(x), y)",
        "F.l1_loss",
        "F.huber_loss",
    ),
    function(
        "a submodule",
        """
        m = types.ModuleType('m')
        m.sub = types.ModuleType('m.sub')
        def loss(error):
            return error.abs().mean()
        m.sub.loss = loss
        """,
        "m.sub.loss(error)",
    ),
    function(
        "a decorator",
        """
        def scaled(f):
            @functools.wraps(f)
            def inner(error):
                return 0.5 * f(error)
            return inner
        @scaled
        def loss(error):
            return error.abs().mean()
        """,
        "loss(error)",
        "0.5",
        "0.75",
    ),
    function(
        "a default",
        """
        def loss(error, k=0.5):
            return k * error.abs().mean()
        """,
        "loss(error)",
        "0.5",
        "0.75",
    ),
    function(
        "map",
        """
        def one(error):
            return error.abs()
        """,
        "sum(map(torch.mean, map(one, error)))",
    ),
    function(
        "a context manager",
        """
        @contextlib.contextmanager
        def scaling():
            yield 0.5
        def loss(error):
            with scaling() as k:
                return k * error.abs().mean()
        """,
        "loss(error)",
        "yield 0.5",
        "yield 0.75",
    ),
    function(
        "a replaced method",
        """
        class L:
            pass
        L.loss = lambda self, error: error.abs().mean()
        l = L()
        """,
        "l.loss(error)",
    ),
    function(
        "a function of autograd",
        """
        class G(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()
            @staticmethod
            def backward(ctx, g):
                return 0.5 * g
        """,
        "G.apply(error).abs().mean()",
        "0.5",
        "0.75",
    ),
]
OUTSIDE = [
    value("a file", "(FOLDER / 'scale.txt').write_text('0.5')", "float((FOLDER / 'scale.txt').read_text())"),
    value(
        "a Path",
        """
        for k in (1, 2): (FOLDER / f'{k}').write_text(str(k / 4))
        FILE = FOLDER / '1'
        """,
        "float(FILE.read_text())",
        "FOLDER / '1'",
        "FOLDER / '2'",
    ),
    value(
        "an environment variable", "os.environ['A_SCALE_OF_A_LOOP'] = '0.5'", "float(os.environ['A_SCALE_OF_A_LOOP'])"
    ),
    Change("an optimizer's keyword", "", SQUARES, "weight_decay=0.1", "weight_decay=0.2"),
    Change("betas", "", SQUARES, "weight_decay=0.1", "betas=(0.8, 0.99), weight_decay=0.1"),
    Change("an optimizer's class", "", SQUARES, "torch.optim.AdamW", "torch.optim.Adam"),
    Change("the model", "", SQUARES, "nn.Tanh()", "nn.GELU()"),
    function(
        "what is held out",
        """
        HELD = [slice(16, None)]
        X_HELD = X[HELD[0]]
        """,
        "0.0 * X_HELD.sum() + error.square().mean()",
        "F.mse_loss(model(X[16:]), Y[16:])",
        "F.mse_loss(model(X[18:]), Y[18:])",
    ),
]
LOSS = "def loss(error):\n    mean = error.abs().mean()\n    return mean"
HARMLESS = [
    function(
        "a docstring",
        """
        def loss(error):
            mean = error.abs().mean()
            return mean
        """,
        "loss(error)",
        "    mean = error",
        "    '''The mean.'''\n    mean = error",
    ),
    function(
        "a renamed local",
        """
        def loss(error):
            mean = error.abs().mean()
            return mean
        """,
        "loss(error)",
        "    mean = error.abs().mean()\n    return mean",
        "    average = error.abs().mean()\n    return average",
    ),
    function(
        "a renamed parameter",
        "loss = lambda error: error.abs().mean()",
        "loss(error)",
        "lambda error: error",
        "lambda e: e",
    ),
    function(
        "a comment",
        """
        def loss(error):
            mean = error.abs().mean()
            return mean
        """,
        "loss(error)",
        "    mean = error",
        "    # the mean\n    mean = error",
    ),
    function(
        "a counter",
        """
        class C:
            calls = 3
            def loss(self, error):
                C.calls += 1
                return error.abs().mean()
        c = C()
        """,
        "c.loss(error)",
        "calls = 3",
        "calls = 4",
    ),
    Change(
        "a function that nothing uses",
        """
        def unused():
            return 1
        """,
        SQUARES,
        "return 1",
        "return 2",
    ),
    Change(
        "two lines where one was",
        "",
        SQUARES,
        "        x, y = X[rows], Y[rows]\n",
        "        x, y = (\n            X[rows],\n            Y[rows],\n        )\n",
    ),
]
ONLY_CODE = [
    Change(
        "a part of a function as a function",
        """
        def shift(a, b):
            return a - b
        """,
        SQUARES,
        "model(x) - y",
        "shift(model(x), y)",
    ),
    Change(
        "a line that prints",
        "",
        SQUARES,
        "        optimizer.step()\n",
        "        optimizer.step()\n        print(end='')\n",
    ),
    Change("another word for the same", "", SQUARES, "error = model(x) - y", "error = torch.sub(model(x), y)"),
]
"""Changes of code that change nothing today; that they never do is not for a few steps to say."""
SHOWING = [*VALUES, *FUNCTIONS, *OUTSIDE]


def find(script: str, folder: Path, *, file: str = "a_script.py", **given: Any) -> tuple[str, list[str]]:
    """Which version of the code this script is, in a folder that may know others; and what is said of it."""
    scope: dict[str, Any] = {"__name__": "a_script", "FOLDER": folder}
    code = compile(script, file, "exec", dont_inherit=True)
    exec(code, scope)
    functions = [scope[name] for name in ("family", "train", "held_out", "make_optimizer")]
    loop = OwnLoop(*functions, lr=0.02, folder=folder, note=quiet, **given)
    return loop._make_identity().find(folder, FIRST)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SCALE_OF_A_LOOP", "")


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("change", [pytest.param(one, id=one.name.replace(" ", "-")) for one in [*SHOWING, *ONLY_CODE]])
def test_a_change_is_noticed(change: Change, tmp_path: Path) -> None:
    """Wherever a value is kept, and however a function is reached; and the same script again is not taken for other."""
    before, after = change.scripts
    first, _ = find(before, tmp_path)
    again, _ = find(before, tmp_path)
    changed, lines = find(after, tmp_path)
    assert first == again != changed
    assert "are not used: " in lines[0]


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("change", [pytest.param(one, id=one.name.replace(" ", "-")) for one in HARMLESS])
def test_what_changes_nothing_is_not_trained_again(change: Change, tmp_path: Path) -> None:
    before, after = change.scripts
    first, _ = find(before, tmp_path)
    changed, (line,) = find(after, tmp_path)
    assert first == changed
    assert "end as they did then, to the bit, and the code that ran in them has not changed" in line


def test_the_catalogue_is_whole() -> None:
    """76 changes, of which 3 are noticed without need."""
    names = [one.name for one in [*SHOWING, *ONLY_CODE, *HARMLESS]]
    assert len({*names}) == len(names) == 76


# ------------------------------------------------------------------------------------------------ what acts later


LATER = [
    function("code", "", "error.square().mean() * (2 if step > 1000 else 1)", "else 1)", "else 1 + 0 * step)"),
    function(
        "a number", "LATE = 1000", "error.square().mean() * (2 if step > LATE else 1)", "LATE = 1000", "LATE = 2000"
    ),
    function(
        "a default",
        """
        def two(step, at=1000):
            return 2 if step > at else 1
        """,
        "error.square().mean() * two(step)",
        "1000",
        "2000",
    ),
    function(
        "a closure",
        """
        def late(at):
            return lambda step: 2 if step > at else 1
        two = late(1000)
        """,
        "error.square().mean() * two(step)",
        "1000",
        "2000",
    ),
    function(
        "a keyword",
        """
        def two(step, *, at):
            return 2 if step > at else 1
        late = {'at': 1000}
        """,
        "error.square().mean() * two(step, **late)",
        "1000",
        "2000",
    ),
]


@pytest.mark.parametrize("change", [pytest.param(one, id=one.name.replace(" ", "-")) for one in LATER])
def test_code_and_numbers_of_functions_that_ran_count_where_they_act_later(change: Change, tmp_path: Path) -> None:
    before, after = change.scripts
    first, _ = find(before, tmp_path)
    assert find(before, tmp_path)[0] == first
    assert find(after, tmp_path)[0] != first


def test_what_else_acts_later_is_the_users_to_say(tmp_path: Path) -> None:
    """A value in a list that nothing reads in the first steps; the line says which word there is for it."""
    before, after = Change("", "LATE = [1000]", f"{SQUARES} * (2 if step > LATE[0] else 1)", "[1000]", "[2000]").scripts
    first, (said,) = find(before, tmp_path)
    assert "Give OwnLoop another version= if you change something that acts only later" in said
    assert find(after, tmp_path)[0] == first
    second, lines = find(after, tmp_path, version="late is 2000")
    assert second != first
    assert "are not used: version is 'late is 2000' (None then)" in lines[0]
    assert find(before, tmp_path)[0] == first


def test_the_lines_name_what_has_changed(tmp_path: Path) -> None:
    changes = [*(LATER[:2]), Change("", "", SQUARES, "Y = X.sin()", "Y = X.cos()")]
    told = []
    for number, change in enumerate(changes):
        before, after = change.scripts
        find(before, tmp_path / str(number))
        told.append(find(after, tmp_path / str(number))[1][0].partition("are not used: ")[2])
    assert told[0] == "the code of train has changed"
    assert told[1] == "LATE in train is 2000 (1000 then)"
    assert told[2].startswith("the first 2 steps of train at width 4 end at held-out loss ")


# ------------------------------------------------------------------------------------------------ not reproducible


def stub(ends: list[float], **given: Any) -> CodeIdentity:
    """Of a training that ends at these weights in turn, from 0 and beside one that is always at 1."""

    def take(first: FirstSteps) -> StepsTaken:
        model = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1.0, ends.pop(0)]]))
        return StepsTaken({"weight": torch.zeros(1, 2)}, model, torch.optim.SGD(model.parameters(), 0.1), 1.0)

    identity = CodeIdentity(take, "a family", None, "cpu")
    return replace(identity, **given)


def test_training_that_nearly_repeats_itself_is_compared_to_within_what_it_varies(tmp_path: Path) -> None:
    first, (said,) = stub([1.0, 1.0001]).find(tmp_path, FIRST)
    assert (
        "taken twice, ended nearly the same. Finished stretches are recognised by where these steps end, to within 1"
        in said
    )
    same, (said,) = stub([1.0002]).find(tmp_path, FIRST)
    assert same == first
    assert "end as they did then, to within 1%, and the code that ran in them has not changed" in said
    other, _ = stub([1.1, 1.1001]).find(tmp_path, FIRST)
    assert other != first


def test_training_that_does_not_repeat_itself_rests_on_its_code(tmp_path: Path) -> None:
    script = SCRIPT.replace("{setup}", "").replace("{loss}", SQUARES)
    script = script.replace("torch.randint(16, (4,))", "torch.randint(16, (4,), generator=OWN)").replace(
        "Y = X", "OWN = torch.Generator()\nY = X"
    )
    first, (said,) = find(script, tmp_path)
    assert "training is not reproducible. Finished stretches are recognised by the code of the 4 functions" in said
    assert "Give OwnLoop another version= if you change anything else, such as data or values" in said
    same, (said,) = find(script.replace("Generator()", "Generator().manual_seed(7)"), tmp_path)
    assert same == first
    assert "do not end the same when they are repeated, so ends are not compared" in said
    assert find(script.replace("error.square()", "error.abs()"), tmp_path)[0] != first


def test_where_no_code_can_be_read_the_lines_say_so(tmp_path: Path) -> None:
    """Of a script that was generated, or compiled to a library."""
    script = SCRIPT.replace("{setup}", "").replace("{loss}", SQUARES)
    _, (said,) = find(script, tmp_path, file="<string>")
    assert "recognised by where these steps end. Give" in said
    _, (said,) = find(script, tmp_path, file="<string>")
    assert "and none of your functions that ran in them can be read" in said
    _, (typed_in,) = find(script, tmp_path / "notebook", file="<ipython-input-1>")
    assert "the 4 functions of yours" in typed_in


def test_reproducible_training_that_no_longer_is_counts_as_other_code(tmp_path: Path) -> None:
    first, _ = stub([1.0, 1.0]).find(tmp_path, FIRST)
    assert stub([5.0, 9.0]).find(tmp_path, FIRST)[0] != first


def test_a_chance_difference_is_tried_again_before_anything_is_thrown_away(tmp_path: Path) -> None:
    first, _ = stub([1.0, 1.0]).find(tmp_path, FIRST)
    assert stub([1.0001, 1.0]).find(tmp_path, FIRST)[0] == first


def test_another_machine_rounds_differently(tmp_path: Path) -> None:
    first, _ = stub([1.0, 1.0]).find(tmp_path, FIRST)
    elsewhere = describe_machine("cpu")
    elsewhere[1] = "another torch"
    identity = stub([1.0001])
    identity.machine = elsewhere
    found, (said,) = identity.find(tmp_path, FIRST)
    assert found == first
    assert "to within 1%" in said
    identity = stub([1.1, 1.1])
    identity.machine = elsewhere
    assert identity.find(tmp_path, FIRST)[0] != first


def test_another_python_compiles_to_other_code(tmp_path: Path) -> None:
    script = SCRIPT.replace("{setup}", "").replace("{loss}", SQUARES)
    first, _ = find(script, tmp_path)
    (told,) = read_json(tmp_path / "code.json")
    told["machine"][0], told["evidence"]["code"]["train"] = "3.1", ["other"]
    write_json(tmp_path / "code.json", [told])
    found, (said,) = find(script, tmp_path)
    assert found == first
    assert "their code is not compared" in said


# ------------------------------------------------------------------------------------------------ the folder


def test_the_file_may_be_lost_or_damaged(tmp_path: Path) -> None:
    script = LATER[0].scripts[0]
    first, _ = find(script, tmp_path)
    (tmp_path / "code.json").write_text("[{")
    assert find(script, tmp_path)[0] == first
    (tmp_path / "code.json").unlink()
    write_json(tmp_path / "stretches" / "of-an-earlier-version" / "end.json", {"loss": 1.0})
    found, lines = find(script, tmp_path)
    assert found == first
    assert "does not say which code has trained its stretches: they are not used" in lines[0]


def test_what_a_cache_keeps_from_running_is_not_missed(tmp_path: Path) -> None:
    """A second study in the same process finds the caches of the first."""
    change = next(one for one in FUNCTIONS if one.name == "an lru_cache")
    scope: dict[str, Any] = {"__name__": "a_script"}
    exec(compile(change.scripts[0], "a_script.py", "exec", dont_inherit=True), scope)
    functions = [scope[name] for name in ("family", "train", "held_out", "make_optimizer")]
    loop = OwnLoop(*functions, lr=0.02, folder=tmp_path, note=quiet)
    assert len({loop._make_identity().find(tmp_path, FIRST)[0] for _ in range(2)}) == 1


def test_a_hundredth_of_the_smallest_sizes_steps_are_tried_twice() -> None:
    assert [FirstSteps.of(4, steps, 0.1).steps for steps in (10, 400, 1000, 10**6)] == [2, 2, 5, 10]


def test_a_profiler_of_the_users_goes_on(tmp_path: Path) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    stub([1.0, 1.0]).find(tmp_path, FIRST)
    abs(-1)
    profiler.disable()
    assert any("abs" in str(entry.code) for entry in profiler.getstats())

    def watch(*given: object) -> None:
        pass

    sys.setprofile(watch)
    try:
        stub([1.0]).find(tmp_path, FIRST)
        assert sys.getprofile() is watch
    finally:
        sys.setprofile(None)


@pytest.mark.slow
def test_a_compiled_model_is_watched_as_any_other(tmp_path: Path) -> None:
    script = SCRIPT.replace("{setup}", "step_of = torch.compile(lambda model, x: model(x), backend='eager')")
    script = script.replace("{loss}", SQUARES).replace("model(x) - y", "step_of(model, x) - y")
    first, (said,) = find(script, tmp_path)
    assert "ended the same to the bit" in said
    assert find(script, tmp_path)[0] == first


def test_names_of_variables_do_not_count_and_which_variable_it_is_does() -> None:
    def form(text: str) -> list[Any]:
        scope: dict[str, Any] = {}
        exec(text, scope)
        return normal_form(scope["f"].__code__)

    text = "def f(a):\n    b = a + 1\n    c = a * 2\n    return lambda x: x * {} + {}"
    assert form(text.format("b", "c")) == form(text.replace("b", "z").format("z", "c").replace("lamzda", "lambda"))
    assert form(text.format("b", "c")) != form(text.format("c", "b"))
