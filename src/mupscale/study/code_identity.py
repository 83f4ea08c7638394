"""Which version of a user's training code a stretch was trained by: told by what the code does in its first steps.

The code is run for a few steps from a seeded start. Where these steps end, which of the user's code ran in them, and
which numbers it was given identify it. Python objects are not searched for what might have changed: a value that
training uses shows in where the steps end, wherever it is kept.
"""

from __future__ import annotations

import dis
import hashlib
import math
import platform
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from mupscale.core import WholeWidth, Width
from mupscale.study.tree import hash_values
from mupscale.system import MupscaleError, read_json, write_json

_FILE = "code.json"
"""In a study's folder: every version of the code that has trained there."""
_SAME_ELSEWHERE = 0.01
"""Two machines, or two versions of torch, round differently: the relative difference that is not the code's."""
_MOST_SPREAD = 0.1
"""Steps that end further apart than this when they are repeated do not tell one version of the code from another."""
_LEAST_SPREAD, _FAR = 1e-9, 1e9  # the least: of tries that differ in the optimizer's state alone
_PART = 200  # of the smallest size's steps are tried at a time: 1 % when they are tried twice
_LEAST, _MOST = 2, 10  # steps; momentum acts from the second on
_COMPILED = ("torch_dynamo_resume", "__compiled_fn", "__resume_at")
"""Names in code that torch.compile has written, which differs from one time to the next."""
_TYPED_IN = ("<stdin", "<console", "<input", "<ipython-input", "<python-input", "<doctest", "<cell", "<command")
"""Names of files that stand for code which was typed in: Python's prompt, notebooks."""
_PYTHON = Path(sysconfig.get_paths()["stdlib"]).resolve()


@dataclass(frozen=True)
class FirstSteps:
    """What is tried: so many steps at a size and a learning rate. A folder keeps to the first that it has had."""

    width: WholeWidth
    steps: int
    lr: float

    @classmethod
    def of(cls, width: WholeWidth, trained: int, lr: float) -> FirstSteps:
        """trained: the steps that the size trains for altogether."""
        return cls(width, max(_LEAST, min(_MOST, trained // _PART)), lr)

    @property
    def phrase(self) -> str:
        return f"{self.steps} steps of train at {Width.of(self.width).phrase}"


@dataclass(frozen=True)
class StepsTaken:
    """Where first steps led: the weights that they began with, and what they have made of them."""

    initial: Mapping[str, Tensor]
    model: nn.Module
    optimizer: Optimizer
    loss: float | None


@dataclass(frozen=True)
class Evidence:
    """What first steps show of the code.

    Args:
        start: a hash of the weights at the start; empty: they differ whenever the steps are repeated
        end: a hash of weights, optimizer state and held-out loss at the end; empty: likewise
        loss: held-out, at the end
        moves: how far every tensor of the model has moved, in two numbers each, to compare ends that are not the same
        code: hashes of the user's functions that ran, by name
        numbers: that these functions were given, or read by a name of their own, as text
    """

    start: str
    end: str
    loss: float | None
    moves: list[float]
    code: dict[str, list[str]]
    numbers: dict[str, str]

    def distance(self, other: Evidence) -> float:
        """How far two ends are apart, relative to how far training has moved."""
        if self.end and self.end == other.end:
            return 0.0
        if len(self.moves) != len(other.moves) or (self.loss is None) != (other.loss is None):
            return math.inf
        apart = math.dist(self.moves, other.moves)
        moved = max(math.hypot(*self.moves), math.hypot(*other.moves))
        distance = apart / moved if moved else 0.0
        if self.loss is not None and other.loss is not None and self.loss != other.loss:
            distance = max(distance, abs(self.loss - other.loss) / max(abs(self.loss), abs(other.loss)))
        return distance if math.isfinite(distance) else math.inf

    def repeated(self, again: Evidence) -> Evidence:
        """What holds in both of two tries; all code that ran in either, since caches are filled in the first."""
        code = {
            name: sorted({*self.code.get(name, []), *again.code.get(name, [])})
            for name in sorted({*self.code, *again.code})
        }
        numbers = {name: text for name, text in self.numbers.items() if again.numbers.get(name) == text}
        start = self.start if self.start == again.start else ""
        end = self.end if self.end == again.end else ""
        return replace(self, start=start, end=end, code=code, numbers=numbers)


@dataclass(frozen=True)
class CodeVersion:
    """A version of the user's code, as the folder remembers it.

    Args:
        id: the part that it has in the names of its stretches
        version: the user's own word for it
        family: a hash of what the family is: its base width, its rules, and the shapes of its parameters
        machine: on which the steps were taken, and by which versions of Python and torch
        spread: how far two tries ended apart
        steps: that were tried
        evidence: what they have shown
    """

    id: str
    version: str | None
    family: str
    machine: list[str]
    spread: float
    steps: FirstSteps
    evidence: Evidence

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> CodeVersion:
        parts = {"steps": FirstSteps(**told["steps"]), "evidence": Evidence(**told["evidence"])}
        return cls(**{**told, **parts})

    def tolerance(self, before: CodeVersion) -> float:
        """The distance at which ends count as the same: none where both are reproducible on one machine."""
        if before.spread > _MOST_SPREAD:
            return math.inf
        spread = max(before.spread, self.spread if self.spread <= _MOST_SPREAD else 0.0)
        if self.machine == before.machine and spread == 0:
            return 0.0
        return max(_SAME_ELSEWHERE, 4 * spread)

    def differences(self, before: CodeVersion) -> list[str]:
        """What has changed since an earlier version, in words; nothing if it is the same."""
        found = []
        if self.version != before.version:
            found.append(f"version is {self.version!r} ({before.version!r} then)")
        if self.family != before.family:
            found.append("the family has changed: its base width, its rules or the shapes of its parameters")
        found += self._changed_code(before)
        tolerance = self.tolerance(before)
        found += self._changed_numbers(before, tolerance)
        if not found:  # else the changed code is the reason
            found += self._changed_end(before, tolerance)
        return found

    def _changed_code(self, before: CodeVersion) -> list[str]:
        """Functions that have run in both and are not the same; which functions run may depend on caches."""
        if self.machine[0] != before.machine[0]:
            return []  # another Python compiles the same text to other code
        changed = []
        for name, ours in self.evidence.code.items():
            theirs = before.evidence.code.get(name, [])
            # several functions may have one name, such as <lambda>, and a cache may keep some of them from running
            if not ({*ours} <= {*theirs} or {*theirs} <= {*ours}):
                changed.append(name)
        return [f"the code of {', '.join(changed)} has changed"] if changed else []

    def _changed_numbers(self, before: CodeVersion, tolerance: float) -> list[str]:
        relative = tolerance if math.isfinite(tolerance) else 0.0
        changed = []
        for name, text in self.evidence.numbers.items():
            then = before.evidence.numbers.get(name, text)
            if then != text and not math.isclose(float(then), float(text), rel_tol=relative):
                changed.append(f"{name} is {text} ({then} then)")
        return changed

    def _changed_end(self, before: CodeVersion, tolerance: float) -> list[str]:
        ours, theirs = self.evidence, before.evidence
        if self.machine == before.machine and ours.start and theirs.start and ours.start != theirs.start:
            return ["the family starts its models with other weights"]
        if ours.distance(theirs) <= tolerance:
            return []
        told = f"the first {self.steps.phrase} end with other weights"
        if ours.loss != theirs.loss:
            told = f"the first {self.steps.phrase} end at held-out loss {_show(ours.loss)} ({_show(theirs.loss)} then)"
        return [f"{told}: the data, or a value that they use, has changed"]


@dataclass
class CodeIdentity:
    """Tells which version of the code a study trains with, and says so.

    Args:
        take: takes first steps with the user's functions
        family: a hash of what the family is
        version: the user's own word for the version
        device: that models are trained on
    """

    take: Callable[[FirstSteps], StepsTaken]
    family: str
    version: str | None
    device: str | torch.device
    machine: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.machine = describe_machine(self.device)

    def find(self, folder: Path, steps: FirstSteps) -> tuple[str, list[str]]:
        """The id of the version, and lines that say what it rests on. steps: to be taken in a new folder."""
        known = _read_versions(folder / _FILE)
        # The same steps as before, or nothing can be compared; but another family may not have their size
        for version in known:
            if version.family == self.family:
                steps = version.steps
        first = self._try(steps)
        now = self._version(steps, first, 0.0)
        if (same := _same_as(now, known)) is not None:
            return same.id, [f"  {_count_finished(folder, same.id)}: {_describe_match(now, same)}"]
        # Not seen before. A second try tells whether that is chance
        again = self._try(steps)
        spread = first.distance(again) if first.end == again.end else max(first.distance(again), _LEAST_SPREAD)
        now = self._version(steps, first.repeated(again), spread)
        if now.spread and (same := _same_as(now, known)) is not None:
            return same.id, [f"  {_count_finished(folder, same.id)}: {_describe_match(now, same)}"]
        taken = {one.id for one in known}
        while now.id in taken:
            now = replace(now, id=hash_values([now.id, "another"]))
        write_json(folder / _FILE, [asdict(one) for one in [*known, now]])
        lines = [f"  {_describe_new(now)}"]
        if known:
            finished = _count_finished(folder, known[-1].id, "are not used")
            lines.insert(0, f"  {finished}: {'; '.join(now.differences(known[-1]))}")
        elif list((folder / "stretches").glob("*/end.json")):
            lines.insert(0, f"  {folder} does not say which code has trained its stretches: they are not used")
        return now.id, lines

    def _try(self, steps: FirstSteps) -> Evidence:
        with _without_compiling(), _watched_code() as watch:
            taken = self.take(steps)
        return Evidence(
            start=hash_states(taken.initial),
            end=hash_values([hash_states(taken.model.state_dict(), taken.optimizer.state_dict()), repr(taken.loss)]),
            loss=taken.loss,
            moves=_measure_moves(taken.initial, taken.model.state_dict()),
            code=watch.code,
            numbers=watch.numbers,
        )

    def _version(self, steps: FirstSteps, evidence: Evidence, spread: float) -> CodeVersion:
        content = [self.version, self.family, evidence.start, evidence.end, evidence.code, evidence.numbers]
        spread = min(spread, _FAR)  # JSON has no infinity
        return CodeVersion(hash_values(content), self.version, self.family, self.machine, spread, steps, evidence)


def describe_machine(device: str | torch.device) -> list[str]:
    """What decides how sums are rounded; Python's version first, which decides how code is compiled."""
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    cores = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    return [".".join(platform.python_version_tuple()[:2]), torch.__version__, name, platform.machine(), cores]


def hash_states(*states: Any) -> str:
    """What tells the tensors and values of these from any others."""
    digest = hashlib.sha256()
    for value in tree_leaves([dict(state) for state in states]):
        is_tensor = isinstance(value, Tensor)
        digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy() if is_tensor else repr(value).encode())
    return digest.hexdigest()[:16]


def _measure_moves(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[float]:
    """Of every tensor, the norm of its change, and a sum with fixed weights that tells changes of one norm apart."""
    moves = []
    for name, start in before.items():
        end = after.get(name)
        if not isinstance(end, Tensor) or end.shape != start.shape or not end.is_floating_point():
            continue
        change = (end.detach().cpu().double() - start.cpu().double()).flatten()
        weights = torch.arange(len(change), dtype=torch.float64).cos()
        moves += [change.norm().item(), (change @ weights).item()]
    return moves if all(map(math.isfinite, moves)) else []


# ---------------------------------------------------------------------------------------------- what the folder knows


def _read_versions(path: Path) -> list[CodeVersion]:
    """None where the file is damaged or not there: a version's id follows from what it does, and is found again."""
    try:
        return [CodeVersion.from_json(each) for each in read_json(path)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, MupscaleError):
        return []


def _same_as(now: CodeVersion, known: Sequence[CodeVersion]) -> CodeVersion | None:
    return next((one for one in reversed(known) if not now.differences(one)), None)


def _count_finished(folder: Path, code: str, what: str = "are reused where they are needed") -> str:
    """How many stretches that version has finished, in words."""
    count = 0
    for path in (folder / "stretches").glob("*/end.json"):
        try:
            count += read_json(path).get("code") == code
        except (OSError, ValueError, AttributeError, MupscaleError):
            continue
    if count == 1:
        return f"1 finished stretch {what.replace('are', 'is', 1).replace('they are', 'it is')}"
    return f"{count} finished stretches {what}"


def _describe_match(now: CodeVersion, same: CodeVersion) -> str:
    tolerance = now.tolerance(same)
    if not now.evidence.code:
        code = "none of your functions that ran in them can be read"
    elif now.machine[0] != same.machine[0]:
        code = f"their code is not compared, since this is Python {now.machine[0]} and that was {same.machine[0]}"
    else:
        code = "the code that ran in them has not changed"
    if math.isinf(tolerance):
        return f"{now.steps.phrase} do not end the same when they are repeated, so ends are not compared, and {code}"
    how_near = "to the bit" if tolerance == 0 else f"to within {tolerance:.0%}"
    return f"{now.steps.phrase} end as they did then, {how_near}, and {code}"


def _describe_new(now: CodeVersion) -> str:
    """What a version is recognised by, and what is left to the user's own word."""
    ran = len(now.evidence.code)
    functions = f"the code of {'the function' if ran == 1 else f'the {ran} functions'} of yours that ran in them"
    advice = "Give OwnLoop another version= if you change something that acts only later"
    if now.spread > _MOST_SPREAD:
        ended = "far apart" if now.spread >= 1 else f"{now.spread:.0%} apart"
        ended = f"{ended}: training is not reproducible"
        evidence = [functions] if ran else ["the shapes of the model's parameters alone"]
        advice = "Give OwnLoop another version= if you change anything else, such as data or values"
    elif now.spread:
        ended = "nearly the same"
        evidence = [f"where these steps end, to within {max(_SAME_ELSEWHERE, 4 * now.spread):.0%}"]
    else:
        ended = "the same to the bit"
        evidence = ["where these steps end"]
    if ran and functions not in evidence:
        evidence.append(functions)
    recognised = " and by ".join(evidence)
    return (
        f"{now.steps.phrase}, taken twice, ended {ended}. Finished stretches are recognised by {recognised}. {advice}"
    )


# ---------------------------------------------------------------------------------------------- which code ran


@dataclass
class _CodeWatch:
    """Called by Python whenever a function begins; keeps the user's functions, and the numbers of their first call."""

    seen: dict[int, CodeType] = field(default_factory=dict)
    code: dict[str, list[str]] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event != "call" or id(code) in self.seen:
            return
        self.seen[id(code)] = code  # kept, so that no other has its id
        is_compiled = code.co_name.startswith(_COMPILED) or any(name.startswith(_COMPILED) for name in code.co_names)
        if code.co_name == "<module>" or is_compiled or not _is_users(frame):
            return
        name = code.co_qualname.replace("<locals>.", "")
        forms = self.code.setdefault(name, [])
        form = hash_values(normal_form(code))
        if form not in forms:
            forms.append(form)
        for variable, value in _visible_names(frame):
            if isinstance(value, bool | int | float):
                self.numbers.setdefault(f"{variable} in {name}", repr(value + 0))


@contextmanager
def _watched_code() -> Iterator[_CodeWatch]:
    watch = _CodeWatch()
    # Before Python 3.12, cProfile stands there as an object, which cannot be set as a function can
    before: Any = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield watch
    finally:
        if before is None or callable(before):
            sys.setprofile(before)
        else:
            sys.setprofile(None)
            before.enable()


@contextmanager
def _without_compiling() -> Iterator[None]:
    """Run what torch.compile has taken as it was written: a few steps are not worth compiling for."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled yet, and importing it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _visible_names(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """What a function has as it begins: arguments and what it closes over, and the globals that its code names."""
    yield from frame.f_locals.items()
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.opname == "LOAD_GLOBAL" and instruction.argval in frame.f_globals:
            yield instruction.argval, frame.f_globals[instruction.argval]


def _is_users(frame: FrameType) -> bool:
    """Whether somebody who writes a loop may edit it: not Python's, not installed, not ours."""
    module = str(frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] not in ("mupscale", "torch") and _is_users_file(frame.f_code.co_filename)


@cache
def _is_users_file(file: str) -> bool:
    if file.startswith("<"):
        return file.startswith(_TYPED_IN)  # other code without a file is generated, by torch.compile for one
    path = Path(file).resolve()
    return not {"site-packages", "dist-packages"} & {*path.parts} and _PYTHON not in path.parents


def normal_form(code: CodeType, around: dict[str, int] | None = None) -> list[Any]:
    """What a function's code does: without docstrings, comments, lines, and the names of its local variables.

    around: numbers of the variables around it, which stand for their names.
    """
    own: dict[str, int] = {}
    around = own if around is None else around

    def number(variable: str) -> str:
        if variable in code.co_freevars:
            return f"outer {around.setdefault(variable, len(around))}"
        return f"{own.setdefault(variable, len(own))}"

    form: list[Any] = [code.co_argcount, code.co_kwonlyargcount, code.co_flags & _KIND]
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name in ("MAKE_CELL", "LOAD_CLOSURE"):
            value = ""  # in alphabetical order, which a new name changes
        elif "FAST" in name or "DEREF" in name:
            value = [number(each) for each in (value if isinstance(value, tuple) else (value,))]
        elif isinstance(value, CodeType):
            value = normal_form(value, own)
        elif isinstance(value, frozenset):
            value = sorted(map(repr, value))
        form.append([name, value if isinstance(value, list) else repr(value)])
    return form


_KIND = 0x04 | 0x08 | 0x20 | 0x80 | 0x100 | 0x200
"""Flags of code: *args, **kwargs, generator, coroutine, iterable coroutine, asynchronous generator."""


def _show(loss: float | None) -> str:
    return "diverged" if loss is None else f"{loss:.6g}"
