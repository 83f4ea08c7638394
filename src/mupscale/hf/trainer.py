"""Callbacks of transformers' Trainer: growth, and clipping by the norm that the first model's gradient would have.

A model grows in the middle of a run, with optimizer and scheduler, where they are. And a finished model may leave the
run: its learning rate falls to zero in a branch, and the trunk goes on, or grows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Annotated, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mupscale import checkpoint, system
from mupscale.core import Plan, RuleSet, naming
from mupscale.growth import Deepen, NewTensor, Operator, choose_operator, replica_in_words, upscale_untried
from mupscale.hf import groups
from mupscale.hf.building import Config, require_transformers
from mupscale.hf.config_family import ConfigFamily, names_in_files, names_in_model
from mupscale.hf.config_fields import Times
from mupscale.hf.groups import check_rules, plan_for_model, refuse_untrainable, shapes_of
from mupscale.hf.output_folder import CARD_FILE, OPTIMIZER_FILE, sizes_in_words, write_size_card
from mupscale.hf.record import GrowthStep, PlannedGrowth, Record, plan_growths, settle_growth
from mupscale.hf.source import open_source
from mupscale.hf.verifying import load_pretrained
from mupscale.optim import DECAY_RULE, FROM_GROUP, Schedule, clip_grad_norm_, following_rules, widen_scheduler
from mupscale.system import MupscaleError, checks_arguments, warn

_THEIRS = "_mupscale_max_grad_norm"


class InvariantClipping(require_transformers().TrainerCallback):  # type: ignore[misc]
    """Clips the Trainer's model and puts its mupscale.json beside every checkpoint, while it is in charge of the model.

    Of several callbacks that a Trainer has, the one that made the model what it is now is in charge.
    """

    def __init__(self, max_norm: float | None = None) -> None:
        self.max_norm = max_norm
        self.norm: torch.Tensor | None = None
        self.plan: Plan | None = None
        self.record: Record | None = None

    def take_charge(self, model: nn.Module, plan: Plan, record: Record) -> None:
        """Clip this model from now on, by the norm that belongs to this plan."""
        self.plan, self.record = plan, record
        _IN_CHARGE[model] = self
        model.save_pretrained = MethodType(save_pretrained, model)  # type: ignore[assignment]

    def switch_off_theirs(self, args: Any) -> None:
        """Have the Trainer not clip; its max_grad_norm is ours, where we were given none."""
        theirs = args.max_grad_norm or vars(args).get(_THEIRS, 0.0)  # an interrupted run could not give it back
        if self.max_norm is None:
            self.max_norm = theirs
        setattr(args, _THEIRS, theirs)
        args.max_grad_norm = 0.0

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Whoever was in charge in another Trainer is so no longer."""
        if kwargs.get("model") is not None:
            _IN_CHARGE.pop(kwargs["model"], None)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clip, after the gradients of all accumulated batches have come together."""
        if _IN_CHARGE.get(kwargs["model"]) is self and self.plan is not None and self.max_norm:
            self.norm = clip_grad_norm_(kwargs["model"], self.max_norm, self.plan)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the norm in the Trainer's history."""
        is_ours = self.norm is not None and _IN_CHARGE.get(kwargs["model"]) is self
        if is_ours and state.log_history and "loss" in state.log_history[-1]:
            assert self.norm is not None
            state.log_history[-1]["invariant_grad_norm"] = self.norm.item()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put mupscale.json beside what was saved."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        is_ours = _IN_CHARGE.get(kwargs["model"]) is self and state.is_world_process_zero
        if is_ours and self.record is not None and folder.is_dir():
            self.record.save(folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the arguments as they were."""
        if _THEIRS in vars(args):
            args.max_grad_norm = vars(args).pop(_THEIRS)


def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """A grown model's own, with its mupscale.json; as a method of the model it is copied and pickled with it."""
    saved = type(self).save_pretrained(self, save_directory, *args, **kwargs)
    one = _IN_CHARGE.get(self)
    if one is not None and one.record is not None and kwargs.get("is_main_process", True):
        one.record.save(Path(save_directory))
    return saved


def say_in_log(state: Any, text: str, **values: Any) -> None:
    """A line for the person who watches the run, and an entry in the Trainer's history."""
    state.log_history.append({"epoch": state.epoch, "step": state.global_step, **values})
    if state.is_local_process_zero:
        system.print_at_once(f"step {state.global_step}: {text}")


_IN_CHARGE: WeakKeyDictionary[nn.Module, InvariantClipping] = WeakKeyDictionary()


@checks_arguments
class Clip(InvariantClipping):
    """`Trainer(…, callbacks=[Clip("path/to/wide")])`: clips by the norm that the small model's gradient would have.

    It takes over max_grad_norm of the training arguments (or a max_norm of its own; 0 is none) and switches the
    Trainer's clipping off while it trains. The norm is logged as `invariant_grad_norm`. Every checkpoint that the
    Trainer saves gets its mupscale.json, so that it can be upscaled again.

    >>> clip = Clip("path/to/wide", max_norm=1.0)  # the folder is read when training begins
    >>> clip.max_norm
    1.0
    """

    def __init__(self, path: str | Path, max_norm: float | None = None) -> None:
        super().__init__(max_norm)
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the Trainer's clipping over, unless the model has grown since in this Trainer."""
        if args.fp16:
            raise MupscaleError(
                "Clip cannot clip gradients that fp16 has scaled: train with bf16=True, or in float32 (fp16=False)"
            )
        if args.deepspeed:
            raise MupscaleError("DeepSpeed hides the gradients, so Clip cannot clip them. Train with DDP or FSDP2")
        self.switch_off_theirs(args)
        if _IN_CHARGE.get(kwargs["model"]) in (None, self):
            self.begin(kwargs["model"])

    def begin(self, model: nn.Module) -> None:
        """Read the folder, and be in charge of the model."""
        self.take_charge(model, groups.plan(self.path, model), Record.load(self.path))


@torch.no_grad()
def grow_in_memory(
    model: Any, optimizer: Optimizer, step: PlannedGrowth, lr: float | None = None
) -> tuple[nn.Module, Optimizer]:
    """The model grown once, with the weights that `hf.upscale` would write, and its optimizer; lr: as in `upscale`."""
    plan, growth, like = step.by_model, step.growth, next(model.parameters())
    config = type(model.config).from_dict(dict(step.config))
    config._attn_implementation = model.config._attn_implementation
    wide: nn.Module = type(model)(config).to(device=like.device, dtype=like.dtype).train(model.training)
    plan = plan.with_initial("drawn_as", names_in_files(wide))
    for name, p in naming.parameters(wide).items():
        if (new := NewTensor.of(name, plan, growth.seed)) is not None:
            p.copy_(new.whole(tuple(p.shape), p.dtype))
    operator = growth.grow if growth.is_width else choose_operator(None, plan=plan)
    _, grown = upscale_untried(model, wide, plan, optimizer, grow=operator, lr=lr, seed=growth.seed)
    assert grown is not None
    return wide, grown


_STEPS = system.Must(
    "the number of steps after which the model grows, 1 or more. To grow it before training, use mupscale.hf.upscale, "
    "and train the wide checkpoint",
    lambda at: at >= 1,
)


@checks_arguments
class GrowTrainerCallback(InvariantClipping):
    """`Trainer(…, callbacks=[GrowTrainerCallback(at=500, times=2)])`: the model grows after this many steps.

    times, or hidden, ffn, heads and kv: how wide it becomes; grow, noise, exact, seed: how, all as in `hf.upscale`, by
    fresh units if nothing is said. layers: how many it gets, and deepen: what new ones are; with layers alone the width
    stays. lr: the learning rate at the step of growth, where the schedule may have fallen far below learning_rate, in
    the small model's units; the schedule goes on from it, with all its rates in that ratio. scale_lr, in its place: by
    what all rates are multiplied from then on, such as 0.5. rules: by which weight decay grows.
    The small model is saved as narrow-checkpoint-STEP, with its optimizer's state, which save_total_limit does not
    count; the grown one as checkpoint-STEP with a mupscale.json.
    The Trainer keeps its model object, which has the grown weights from then on; clipping (max_grad_norm) is then by
    the norm that the small model's gradient would have, and load_best_model_at_end chooses among checkpoints of the
    grown model. A Trainer may have several such callbacks, each for a step of its own. After a stop, make the same
    Trainer with the same callbacks, and go on with `trainer.train(resume_from_checkpoint=callback.resume(trainer))`,
    where callback is any of them.

    >>> GrowTrainerCallback(at=500, times=2, scale_lr=0.5).at
    500
    """

    def __init__(
        self,
        at: Annotated[int, _STEPS],
        *,
        times: int | str | Mapping[str, int] | Times | None = None,
        hidden: int | None = None,
        ffn: int | None = None,
        heads: int | None = None,
        kv: int | None = None,
        layers: int | None = None,
        deepen: Deepen = "identity",
        grow: Operator | None = None,
        noise: float | None = None,
        exact: bool = False,
        lr: system.NotNegative | None = None,
        scale_lr: float = 1.0,
        seed: int = 0,
        rules: RuleSet | None = None,
    ) -> None:
        super().__init__()
        if not (scale_lr > 0 and math.isfinite(scale_lr)) or (lr is not None and scale_lr != 1):
            raise MupscaleError(
                f"scale_lr= is a positive factor for the learning rates, instead of lr=, not {scale_lr!r} with "
                f"lr={lr!r}"
            )
        check_rules(rules, layers)
        self.at, self.exact, self.lr, self.scale_lr, self.rules = at, exact, lr, scale_lr, rules or RuleSet()
        self.asked: dict[str, Any] = {"times": times, "layers": layers, "deepen": deepen, "grow": grow, "noise": noise}
        sizes = {"hidden": hidden, "ffn": ffn, "heads": heads, "kv": kv}
        self.asked |= {"sizes": sizes, "exact": exact, "seed": seed}
        self._loading: Any = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Have a checkpoint of the grown model met by a sentence, and not by a list of shapes, where it is loaded."""
        super().on_init_end(args, state, control, **kwargs)
        if kwargs.get("model") is not None and self not in (growths := _GROWTHS.setdefault(kwargs["model"], [])):
            growths.append(self)
        if self._loading is None and kwargs.get("model") is not None:
            self._loading = kwargs["model"].register_load_state_dict_pre_hook(self._check_loaded)

    def _check_loaded(self, model: nn.Module, tensors: dict[str, Any], *rest: Any) -> None:
        """Refuse weights of another size, or of another number of layers, than the model has before its growth."""
        own, loaded = model.state_dict(), {one.names[0] for one in names_in_model(model, tensors).values()}
        differs = any(own[name].shape != tensor.shape for name, tensor in tensors.items() if name in own)
        differs |= self.asked["layers"] is not None and not loaded <= own.keys()
        if self.plan is None and differs:
            raise MupscaleError(
                f"this checkpoint holds the model that grew after step {self.at}, but this Trainer's model has not "
                "grown. Continue with trainer.train(resume_from_checkpoint=callback.resume(trainer))"
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse now what could not grow later."""
        if self._loading is not None:  # whatever was to be loaded has been
            self._loading.remove()
            self._loading = None
        refuse_untrainable(kwargs["model"])
        if args.world_size > 1 or args.deepspeed or args.torch_compile:
            raise MupscaleError(
                "GrowTrainerCallback grows a model in one process, uncompiled. With several processes, stop at this "
                "step, widen the checkpoint with mupscale upscale --optimizer-state, and continue from it"
            )
        if self.plan is not None:  # resumed after the growth
            self.switch_off_theirs(args)
        elif state.global_step < self.at:
            earlier = [one for one in growths_of(kwargs["model"]) if one.at < self.at and one.plan is None]
            if not earlier:  # else it cannot be judged yet
                width = self._asked(kwargs["model"])[0]
                ConfigFamily(_config_of(kwargs["model"])).plan(width.times, initial=False)
                if width.is_replica and not self.exact:
                    warn(replica_in_words(), system.ReplicaWarning)
            if state.max_steps < self.at:
                warn(
                    f"the model will not grow: GrowTrainerCallback(at={self.at}) waits for step {self.at}, but this "
                    f"run ends after step {state.max_steps}. Give an earlier at=, or train longer"
                )
        else:
            raise MupscaleError(
                f"this run continues from step {state.global_step}, but its model grew after step {self.at}. Continue "
                "with trainer.train(resume_from_checkpoint=callback.resume(trainer))"
            )

    def resume(self, trainer: Any) -> str | None:
        """The newest whole checkpoint in a Trainer's folder, if there is one; the Trainer's model gets its size."""
        folders = Path(trainer.args.output_dir).glob("checkpoint-*")
        found = {int(folder.name[11:]): folder for folder in folders if folder.name[11:].isdecimal()}
        step = next((step for step in sorted(found, reverse=True) if _is_whole(found[step], step)), None)
        if step is None:
            return None
        callbacks = trainer.callback_handler.callbacks
        clip = next((one for one in callbacks if isinstance(one, Clip)), None)
        growths = {self, *(one for one in callbacks if isinstance(one, GrowTrainerCallback))}
        for growth in sorted(growths, key=lambda one: one.at):
            if step >= growth.at and growth.plan is None:
                if clip is not None and _IN_CHARGE.get(trainer.model) is None:
                    clip.begin(trainer.model)
                growth._grow(trainer.model, trainer.create_optimizer(), None)  # its values are the checkpoint's soon
        held, told = (_size_of(config) for config in (open_source(found[step]).config, trainer.model.config.to_dict()))
        if held != told:
            raise MupscaleError(
                f"{found[step]} holds a model of {held}, but after step {step} this Trainer's would have {told}: make "
                "it with the model and the callbacks that it had, or begin in a different output_dir"
            )
        _load_renamed(trainer.model, found[step])
        if (one := _IN_CHARGE.get(trainer.model)) is not None:  # which was made again from another learning rate
            one.record = Record.find(found[step]) or one.record
        return str(found[step])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Grow, if this was the step."""
        if state.global_step != self.at:
            return control
        model, optimizer = kwargs["model"], _unwrapped(kwargs["optimizer"])
        earlier = _IN_CHARGE.get(model)
        if not isinstance(earlier, GrowTrainerCallback) or earlier.at != self.at:
            folder = Path(args.output_dir) / f"narrow-checkpoint-{self.at}"  # checkpoint-… would count for the rotation
            model.save_pretrained(folder)
            torch.save(optimizer.state_dict(), folder / OPTIMIZER_FILE)
        if self.lr is not None and all(math.isclose(self.lr, rate, rel_tol=1e-3) for rate in _rates(optimizer)):
            warn(  # lr= is easily taken for a rate that the schedule is to begin with
                f"lr={self.lr:g} changes nothing: the schedule has that rate after step {self.at}. For half of the "
                f"rates from here on, give lr={self.lr / 2:g}"
            )
        before, rates = _size(model), _told_rates(optimizer)
        self._grow(model, optimizer, kwargs["lr_scheduler"])
        after = _size(model)
        told = ", ".join(f"{name} {a:,} → {after[name]:,}" for name, a in before.items() if a != after[name])
        say_in_log(state, f"the model has grown: {told}; learning rate {rates} → {_told_rates(optimizer)}", **after)
        self.switch_off_theirs(args)
        # the best so far is a small model, whose weights could not be loaded at the end
        state.best_metric = state.best_model_checkpoint = state.best_global_step = None
        control.should_save = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the arguments as they were, and the best model whole where it was loaded."""
        super().on_train_end(args, state, control, **kwargs)
        if args.load_best_model_at_end and state.best_model_checkpoint and _IN_CHARGE.get(kwargs["model"]) is self:
            _load_renamed(kwargs["model"], Path(state.best_model_checkpoint))

    def _asked(self, model: nn.Module) -> list[GrowthStep]:
        return settle_growth(_config_of(model), shapes_of(model), **self.asked)

    def _grow(self, model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
        """Grow all three in place, since the Trainer's loop holds on to them."""
        refuse_untrainable(model)
        (width, *deeper), config = self._asked(model), _config_of(model)
        earlier, lr, rates, scale_lr = _IN_CHARGE.get(model), self.lr, _rates(optimizer), self.scale_lr
        if lr is not None:
            scale_lr = lr / next((rate for rate in rates if rate), 1.0)
        elif scale_lr != 1:
            lr = rates[0] * scale_lr
            if not all(math.isclose(rate, rates[0], rel_tol=1e-6) for rate in rates):
                raise MupscaleError(
                    f"scale_lr= takes parameter groups of one learning rate, and after step {self.at} they have "
                    f"{', '.join(f'{rate:g}' for rate in sorted(set(rates)))}: give lr="
                )
        record = (earlier and earlier.record) or Record(config)
        grown, grown_optimizer = nn.Module.__new__(type(model)), optimizer
        grown.__dict__.update(model.__dict__)
        growths = deeper if deeper and width.times == Times() else [width, *deeper]
        growths[-1] = replace(growths[-1], scale_lr=scale_lr)
        steps = plan_growths(growths, config, None, record)
        with following_rules(optimizer, self.rules):
            for number, step in enumerate(steps):
                from_group = [group.get(FROM_GROUP) for group in grown_optimizer.param_groups]
                at_last = lr if step is steps[-1] else None
                grown, grown_optimizer = grow_in_memory(grown, grown_optimizer, step, at_last)
                if number:  # schedulers go by the groups of the first optimizer
                    for group in grown_optimizer.param_groups:
                        group[FROM_GROUP] = from_group[group[FROM_GROUP]]
                record = record.then(step.growth.with_noise_as_it_was(), step.by_model)
            record = replace(record, decay=optimizer.param_groups[0].get(DECAY_RULE, record.decay))
        is_lossless = width.fresh is not None and width.fresh.lossless
        if is_lossless and (reasons := ConfigFamily(config).obstacles(width.times, steps[0].by_model)):
            warn(f"the growth is not lossless: {'; '.join(reasons)}")
        widened = None if scheduler is None else widen_scheduler(scheduler, grown_optimizer)
        model.__dict__.clear()
        model.__dict__.update(grown.__dict__)
        optimizer.param_groups, optimizer.state = grown_optimizer.param_groups, grown_optimizer.state
        if widened is not None:
            kept = ("optimizer", "step")  # the scheduler counts the steps of the optimizer that it knows
            scheduler.__dict__.update({name: value for name, value in vars(widened).items() if name not in kept})
        self.max_norm = None if earlier is None else earlier.max_norm
        self.take_charge(model, plan_for_model(model, record), record)


def _unwrapped(optimizer: Any) -> Optimizer:
    """What accelerate wraps."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _config_of(model: Any) -> dict[str, Any]:
    """The model's config as it is once it was saved, with the class and the dtype."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {**model.config.to_dict(), "architectures": [type(model).__name__], "dtype": dtype}


_GROWTHS: WeakKeyDictionary[nn.Module, list[GrowTrainerCallback]] = WeakKeyDictionary()
"""The growths that a Trainer's model was to have, when the Trainer was made."""


def growths_of(model: nn.Module | None) -> list[GrowTrainerCallback]:
    """The growths that a Trainer's model is to have, as far as the Trainer has met them."""
    return [] if model is None else _GROWTHS.get(model, [])


def _load_renamed(model: Any, folder: Path) -> None:
    """Load a checkpoint some of whose tensors have other names than the model's, by which alone the Trainer loads.

    It would leave GPT-NeoX's readout, or a mixture's experts, as they are.
    """
    source = open_source(folder)
    if not source.tensors.keys() <= model.state_dict().keys():
        model.load_state_dict(load_pretrained(source, model.dtype)[0].state_dict())


def _size_of(config: Config) -> str:
    return ", ".join(f"{name} {size:,}" for name, size in sizes_in_words(config).items())


def _size(model: Any) -> dict[str, int]:
    """What a line in the log says of a model's size."""
    return {**sizes_in_words(model.config.to_dict()), "parameters": sum(p.numel() for p in model.parameters())}


def _told_rates(optimizer: Optimizer) -> str:
    """The smallest and the largest learning rate of its groups."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return f"{max(rates):.3g}" if min(rates) == max(rates) else f"{min(rates):.3g} to {max(rates):.3g}"


def _rates(optimizer: Optimizer) -> list[float]:
    """The learning rates of its groups, in the small model's units."""
    return [float(group["lr"]) / group.get("lr_factor", 1.0) for group in optimizer.param_groups]


def _is_whole(folder: Path, step: int) -> bool:
    """Whether a Trainer has finished this checkpoint: its state is the last that is written."""
    try:
        state = system.read_json(folder / "trainer_state.json")
    except (OSError, MupscaleError):
        return False
    return isinstance(state, dict) and state.get("global_step") == step


_COUNT = system.Must("a number of steps, 1 or more", lambda steps: steps >= 1)
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
        model, inner = kwargs["model"], _unwrapped(kwargs["optimizer"])
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
            system.replace_text(card, f"{card.read_text(encoding='utf-8')}\nIts evaluation: {', '.join(found)}.\n")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What is evaluated from here on may be another model, or other data."""
        self._last = None

    def _finish(self, args: Any, state: Any, model: Any, tokenizer: Any) -> Path:
        """The model's own folder, whole or not at all; one that a killed run has left is made again."""
        config: Any = naming.unwrap(model).config
        name = self.name or f"hidden-{config.hidden_size}-layers-{config.num_hidden_layers}"
        # of earlier branches, which the log has, the steps are none of the trunk's
        earlier = [e for e in state.log_history if "finished_size" in e and e["step"] <= self.begin]
        trunk = self.begin - sum(entry.get("branch_steps", 0) for entry in earlier)
        named = " and ".join(f"`{entry['finished_size']}`" for entry in earlier)
        others = f"; finished before it: {named}" if earlier else ""
        sizes = ", ".join(f"{part} {size:,}" for part, size in sizes_in_words(config.to_dict()).items())
        count = sum(p.numel() for p in model.parameters())
        story = _STORY.format(parameters=count, sizes=sizes, trunk=trunk, steps=self.steps, others=others)
        folder = Path(args.output_dir) / "sizes" / name
        if folder.exists():
            system.remove(folder)
        with system.appearing(folder) as hidden:
            model.save_pretrained(hidden)
            if tokenizer is not None:
                tokenizer.save_pretrained(hidden)
            write_size_card(hidden, name, config.to_dict(), story)
        return folder
