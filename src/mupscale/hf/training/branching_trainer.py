"""Branches of a run of transformers' Trainer: a finished model leaves it, and the run goes on from where it was.

trunk ────────┬───────▶ goes on, or grows
              └ decay
                finished: OUT/sizes/hidden-64-layers-4
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mupscale import checkpoint
from mupscale.core import naming
from mupscale.hf.describe import require_transformers
from mupscale.hf.files import CARD_FILE, sizes_in_words, write_size_card
from mupscale.hf.training.growing_trainer import growths_of
from mupscale.hf.training.invariant_clipping import say_in_log
from mupscale.system import MupscaleError, Must, appearing, checks_arguments, remove, replace_text
from mupscale.train import Schedule

_COUNT = Must("a number of steps, 1 or more", lambda steps: steps >= 1)
_CONSTANT = ("constant", "constant_with_warmup")
_STORY = (
    "This model of {parameters:,} parameters ({sizes}) is one size of a family that was trained in one run: it left "
    "the trunk after {trunk:,} of the trunk's steps, and its learning rate then fell to zero over {steps:,} steps. "
    "mupscale made the sizes{others}."
)


@checks_arguments
class BranchTrainerCallback(require_transformers().TrainerCallback):  # type: ignore[misc]
    """`BranchTrainerCallback(at=500, steps=125)`, for several sizes out of one run of the Trainer.

    The steps before `at` are a branch: the learning rate falls to zero over them. After step `at` the model is
    finished and is written to OUT/sizes, with config, weights, tokenizer and card. Then the run goes on with model and
    optimizer as they were before the branch; meanwhile they lie in OUT/trunk-STEP. A growth after the same step stands
    behind the branch in `callbacks=`. The trunk trains at a constant rate (lr_scheduler_type "constant", or
    "constant_with_warmup"). A branch to the end of the run is its last size, and nothing is put back after it. name: of
    the folder in OUT/sizes. After a stop go on as with `GrowTrainerCallback`.

    >>> BranchTrainerCallback(at=500, steps=125).begin
    375
    """

    def __init__(self, at: Annotated[int, _COUNT], steps: Annotated[int, _COUNT], *, name: str | None = None) -> None:
        if steps >= at:
            raise MupscaleError(
                f"a branch of {steps} steps that ends after step {at} leaves no steps for the trunk before it"
            )
        if name is not None and (Path(name).name != name or name.startswith(".")):
            raise MupscaleError(f"name= is {name!r}, but is the name of a folder in OUT/sizes")
        self.at, self.steps, self.begin, self.name = at, steps, at - steps, name
        self._schedulers: WeakSet[LambdaLR] = WeakSet()
        self._last: Path | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse a growth that would be done before the trunk is put back."""
        if any(growth.at == self.at for growth in growths_of(kwargs.get("model"))):
            raise MupscaleError(
                f"the model grows after step {self.at}, where a branch ends: put BranchTrainerCallback before "
                "GrowTrainerCallback in callbacks=, so the trunk grows, not the branch"
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what cannot branch, and have the rates fall in the branch."""
        if args.world_size > 1 or args.deepspeed or args.torch_compile:
            raise MupscaleError("BranchTrainerCallback works in one process, uncompiled")
        scheduler, kind = kwargs["lr_scheduler"], str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
        if kind not in _CONSTANT or not isinstance(scheduler, LambdaLR):
            raise MupscaleError(
                "the trunk trains at a constant learning rate, and each branch has its own decay, but "
                f"lr_scheduler_type is {kind}. Give {' or '.join(_CONSTANT)}"
            )
        if state.max_steps < self.at:
            raise MupscaleError(f"a branch ends after step {self.at}, but this run ends after {state.max_steps}")
        if self.begin <= state.global_step < self.at and not self._trunk(args).is_file():
            raise MupscaleError(
                f"{self._trunk(args)} is gone, and the trunk would continue from it. Resume from an earlier checkpoint"
            )
        if scheduler not in self._schedulers:
            self._schedulers.add(scheduler)
            scheduler.lr_lambdas = [self._within(each) for each in scheduler.lr_lambdas]

    def _within(self, outer: Any) -> Any:
        """A schedule's function of the step, times this branch's."""
        decay = Schedule("wsd", decay=self.steps)

        def multiple(step: int) -> float:
            is_inside = self.begin <= step < self.at
            return float(outer(step)) * (decay.at(step - self.begin, self.steps) if is_inside else 1.0)

        return multiple

    def _trunk(self, args: Any) -> Path:
        return Path(args.output_dir) / f"trunk-{self.begin}" / "model.safetensors"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Keep the trunk where the branch begins; finish the branch where it ends."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        inner: Optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        if state.global_step == self.begin:
            checkpoint.save(self._trunk(args), model, inner)
        if state.global_step != self.at:
            return control
        folder = self._finish(args, state, model, kwargs.get("processing_class"))
        say_in_log(state, f"this size is finished: {folder}", finished_size=folder.name, branch_steps=self.steps)
        if state.global_step < state.max_steps:
            rates = [group["lr"] for group in inner.param_groups]  # of the next step, the branch is over
            checkpoint.load(self._trunk(args), model, inner)
            for group, rate in zip(inner.param_groups, rates, strict=True):
                group["lr"] = rate
            state.best_metric = state.best_model_checkpoint = state.best_global_step = None  # it was the branch's
            control.should_save = True
        else:
            self._last = folder
            control.should_evaluate |= args.eval_strategy != "no"
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the loss of the last size into its card; after other branches it is the trunk that is evaluated."""
        found = [f"{name} {value:.4g}" for name, value in kwargs["metrics"].items() if name.endswith("_loss")]
        if self._last is not None and found:
            card = self._last / CARD_FILE
            replace_text(card, f"{card.read_text(encoding='utf-8')}\nIts evaluation: {', '.join(found)}.\n")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What is evaluated from here on may be another model, or other data."""
        self._last = None

    def _finish(self, args: Any, state: Any, model: Any, tokenizer: Any) -> Path:
        """The model's own folder, whole or not at all; one that a killed run has left is made again."""
        config: Any = naming.unwrap(model).config
        name = self.name or f"hidden-{config.hidden_size}-layers-{config.num_hidden_layers}"
        folder = Path(args.output_dir) / "sizes" / name
        if folder.exists():
            remove(folder)
        with appearing(folder) as hidden:
            model.save_pretrained(hidden)
            if tokenizer is not None:
                tokenizer.save_pretrained(hidden)
            write_size_card(hidden, name, config.to_dict(), self._story(state, model))
        return folder

    def _story(self, state: Any, model: Any) -> str:
        """Of earlier branches, which the log has, the steps are none of the trunk's."""
        earlier = [e for e in state.log_history if "finished_size" in e and e["step"] <= self.begin]
        trunk = self.begin - sum(entry.get("branch_steps", 0) for entry in earlier)
        named = " and ".join(f"`{entry['finished_size']}`" for entry in earlier)
        others = f"; finished before it: {named}" if earlier else ""
        config: Any = naming.unwrap(model).config
        sizes = ", ".join(f"{part} {size:,}" for part, size in sizes_in_words(config.to_dict()).items())
        count = sum(p.numel() for p in model.parameters())
        return _STORY.format(parameters=count, sizes=sizes, trunk=trunk, steps=self.steps, others=others)
