"""Train such a Llama for some steps with torchtitan's own optimizer, schedule and checkpoints, under FSDP2 on the CPU.

torchrun --nproc_per_node 2 titan_run.py FOLDER STEPS SIZES CLIP [GROUPS]: resumes from the newest checkpoint in
FOLDER, if it has one, and leaves others there at every fourth step, and the losses in losses.json. SIZES: JSON, as
{"dim": 64}. CLIP: the largest norm of gradients. GROUPS: a file with the lines for the trainer's config.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
    default_adamw,
    register_moe_load_balancing_hook,
)

from titan_llama import VOCABULARY, build, clip_before_steps


def main(folder: Path, steps: int, sizes: dict[str, int], clip: float, groups: Path | None) -> None:
    """Train in one of several processes."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, mesh = build(**sizes), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    config = default_adamw(lr=2e-3, eps=1e-5)
    if groups is not None:
        scope: dict[str, Any] = {"ParamGroupConfig": ParamGroupConfig}
        exec(groups.read_text(), scope)
        config = OptimizersContainer.Config(param_groups=scope["param_groups"])
    config.implementation = "for-loop"
    optimizers = config.build(model_parts=[model])
    dims = SimpleNamespace(get_optional_mesh={"loss": mesh}.get, ep_enabled=False, tp=1)  # its own are for GPUs
    for hook in (register_moe_load_balancing_hook, clip_before_steps(clip)):  # as of ModelSpec.post_optimizer_build_fn
        hook(optimizers, [model], dims)
    schedule = LRSchedulersContainer.Config(warmup_steps=2, total_steps=20)
    schedulers = schedule.build(optimizers=optimizers, training_steps=20)
    state = _Steps()
    saving = CheckpointManager.Config(enable=True, folder="checkpoint", interval=4, last_save_model_only=False)
    checkpointer = saving.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state},
        sd_adapter=None,
        base_folder=str(folder),
    )
    checkpointer.load()
    losses = []
    for _ in range(steps):
        state.done += 1
        batch = torch.Generator().manual_seed(1000 * state.done + dist.get_rank())
        text = torch.randint(0, VOCABULARY, (4, 17), generator=batch)
        loss = torch.nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        schedulers.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
        checkpointer.save(state.done, last_step=len(losses) == steps)
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


class _Steps:
    """What torchtitan's trainer saves of itself."""

    done = 0

    def state_dict(self) -> dict[str, Tensor]:
        return {"step": torch.tensor(self.done)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.done = int(state["step"])


if __name__ == "__main__":
    where, count, chosen, largest, *rest = sys.argv[1:]
    main(Path(where), int(count), json.loads(chosen), float(largest), Path(rest[0]) if rest else None)
