"""What upscaling a checkpoint on disk costs, and the memory it takes: python bench/upscale.py

A LLaMA of 207M numbers becomes one of 697M, in float32. Everything runs in a process of its own that tells the CPU
seconds (user and system) after its imports (torch, and transformers, which is asked what a complete model has) and its
highest resident memory; the rounds alternate, and the figures are medians (and the best) of ratios within a round, so
that the machine's speed cancels. Floors: one read of the input and one write of the output; and, in memory, one copy of
the input into an empty output, and the same saved. Copies, copies with noise, and fresh units (twice as wide, too) are
measured. Their cost has a part that does not grow with the file: learning the roles of the parameters on a miniature.
Each round measures it on a checkpoint of the same 12 layers that is tiny, and takes it off before dividing by a floor.
Then memory against size: checkpoints of zeros, written sparse, up to what the disk allows.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20
SHARD = 500_000_000
NOISE = 0.3
# what each may cost beyond its constant, as a multiple of one read and one write
OURS = {"ours": 1.0, "ours with noise": 1.3, "ours fresh": 1.3, "ours lossless": 2.0}
CONSTANT = 10  # CPU seconds that the miniature may take
SIZES = {  # hidden size, layers, feed-forward units, key/value heads
    "constant": (128, 12, 352, 1),
    "0.2B": (1024, 12, 2816, 8),
    "0.7B": (2048, 12, 5632, 16),
    "3B": (3072, 26, 8192, 24),
    "7B": (4096, 32, 11008, 32),
}


def write_llama(folder: Path, size: str, *, zeros: bool = False) -> None:
    """config.json and model.safetensors of a LLaMA with head_dim 64; zeros take no room on the disk."""
    import torch

    from mupscale.system import make_header, raw_bytes

    hidden, layers, ffn, kv = SIZES[size]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": kv,
        "vocab_size": 32000,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    }
    shapes = {
        "model.embed_tokens.weight": (32000, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (32000, hidden),
    }
    for i in range(layers):
        block = {
            **{f"self_attn.{n}_proj.weight": (hidden if n in "qo" else kv * 64, hidden) for n in "qkvo"},
            **{f"mlp.{n}_proj.weight": (ffn, hidden) for n in ("gate", "up")},
            "mlp.down_proj.weight": (hidden, ffn),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in block.items()}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    head, _ = make_header({name: (torch.float32, shape) for name, shape in shapes.items()}, {"format": "pt"})
    left = 4 * sum(math.prod(shape) for shape in shapes.values())
    some = raw_bytes(0.02 * torch.randn(4 * MIB, generator=torch.Generator().manual_seed(0)))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(head)
        if zeros:
            file.truncate(len(head) + left)
            return
        while left:
            left -= file.write(some[: min(left, some.nbytes)])


def read_and_write(source: Path, out: Path) -> None:
    """Floor: the bytes of the input read, those of the output written, from a buffer that stays in the cache."""
    buffer = memoryview(bytearray(MIB))
    with open(source / "model.safetensors", "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    left = output_bytes(source)
    with open(out, "wb", buffering=0) as file:
        while left:
            left -= file.write(buffer[: min(left, MIB)])


def copy_in_memory(source: Path, out: Path, *, save: bool) -> None:
    """Floor: an output without values, and one pass that copies the input into every part of it."""
    import torch
    from safetensors.torch import load_file, save_file

    made = {}
    for name, narrow in load_file(source / "model.safetensors").items():
        wide = torch.empty([n if n == 32000 else 2 * n for n in narrow.shape])
        for row in range(0, wide.shape[0], narrow.shape[0]):
            rows = wide[row : row + narrow.shape[0]]
            for column in range(0, rows.shape[-1], narrow.shape[-1]) if narrow.dim() == 2 else [0]:
                rows[..., column : column + narrow.shape[-1]] = narrow
        made[name] = wide
    if save:
        save_file(made, out)


def ours(source: Path, out: Path, noise: float, threads: int | None) -> None:
    from mupscale.hf.upscaling import upscale

    upscale(source, out, noise=noise, exact=not noise, shard_size=SHARD, verify=False, threads=threads, progress=False)


def ours_fresh(source: Path, out: Path, threads: int | None, *, lossless: bool = False) -> None:
    """The same output by fresh units, so that the bytes written are those of the copies."""
    from mupscale.growth import Fresh
    from mupscale.hf.upscaling import upscale

    grow = Fresh(lossless=lossless)
    upscale(source, out, times=2, grow=grow, shard_size=SHARD, verify=False, threads=threads, progress=False)


def output_bytes(source: Path) -> int:
    from mupscale.hf.source import open_source

    shapes = open_source(source).shapes.values()
    return 4 * sum(math.prod(n if n == 32000 else 2 * n for n in shape) for shape in shapes)


def work(stage: str, source: Path, out: Path, threads: int | None) -> None:
    """One measurement, in this process."""
    stages: dict[str, Callable[[], None]] = {
        "read and write": lambda: read_and_write(source, out),
        "copy in memory": lambda: copy_in_memory(source, out, save=False),
        "copy and save": lambda: copy_in_memory(source, out, save=True),
        "ours": lambda: ours(source, out, 0.0, threads),
        "ours with noise": lambda: ours(source, out, NOISE, threads),
        "ours fresh": lambda: ours_fresh(source, out, threads),
        "ours lossless": lambda: ours_fresh(source, out, threads, lossless=True),
    }
    import transformers.models.llama.modeling_llama  # noqa: F401  # which `upscale` asks what a complete model has

    import mupscale.hf.upscaling  # noqa: F401

    before = resource.getrusage(resource.RUSAGE_SELF)
    stages[stage]()
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"cpu": cpu, "peak": after.ru_maxrss * 1024, "imports": before.ru_maxrss * 1024}))


def measure(stage: str, source: Path, folder: Path, threads: int | None) -> dict[str, float]:
    out = folder / "out"
    words = [sys.executable, __file__, "--work", stage, "--source", str(source), "--out", str(out)]
    words += [] if threads is None else ["--threads", str(threads)]
    answer = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
    return json.loads(answer.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: the temporary one)")
    sizes = list(SIZES)[1:]
    parser.add_argument("--sizes", nargs="*", default=sizes, help=f"of memory against size: {', '.join(sizes)}")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.source, args.out, args.threads)
        return
    with tempfile.TemporaryDirectory(prefix="mupscale-bench-", dir=args.folder) as name:
        costs(Path(name), args.repeats, args.threads)
        memory(Path(name), args.sizes, args.threads)


def costs(folder: Path, repeats: int, threads: int | None) -> None:
    source, tiny = folder / "small", folder / "tiny"
    write_llama(source, "0.2B")
    write_llama(tiny, "constant")
    stages = ["read and write", "copy in memory", "copy and save", *OURS]
    found: dict[str, list[dict[str, float]]] = {stage: [] for stage in stages}
    constants: dict[str, list[float]] = {stage: [] for stage in OURS}
    for _ in range(repeats):
        for stage in stages:
            found[stage].append(measure(stage, source, folder, threads))
        for stage in OURS:
            constants[stage].append(measure(stage, tiny, folder, threads)["cpu"])
    size = (source / "model.safetensors").stat().st_size
    print(f"LLaMA float32, {size / 1e9:.2f} GB → {output_bytes(source) / 1e9:.2f} GB, shards of {SHARD / 1e6:.0f} MB")
    for stage, values in found.items():
        cpu, peak = (statistics.median(v[key] for v in values) for key in ("cpu", "peak"))
        imports = statistics.median(v["imports"] for v in values)
        print(f"{stage:16} {cpu:6.2f} CPU s, peak {peak / MIB:6.0f} MiB, of them {imports / MIB:.0f} MiB imports")
    for stage, seconds in constants.items():
        print(f"{stage}, what does not grow: {statistics.median(seconds):.2f} CPU s  (target ≤ {CONSTANT})")
    for stage, target in OURS.items():
        rounds = zip(found[stage], constants[stage], found["read and write"], strict=True)
        ratios = [(whole["cpu"] - constant) / floor["cpu"] for whole, constant, floor in rounds]
        middle = statistics.median(ratios)
        print(f"{stage} beyond it / read and write: {middle:.2f}, best {min(ratios):.2f}  (target ≤ {target})")
    highest = max(v["peak"] for stage in OURS for v in found[stage])
    print(f"highest memory / one shard: {highest / SHARD:.2f}  (target ≤ 1.1)")


def memory(folder: Path, sizes: list[str], threads: int | None) -> None:
    for size in sizes:
        source = folder / f"zeros-{size}"
        write_llama(source, size, zeros=True)
        needed, free = output_bytes(source), shutil.disk_usage(folder).free
        label = f"{size} ({needed / 1e9:.1f} GB written)"
        if needed * 1.1 > free:
            print(f"{label}: the disk has {free / 1e9:.0f} GB left, so it is left out")
            continue
        made = measure("ours", source, folder, threads)
        print(
            f"{label}: peak {made['peak'] / MIB:.0f} MiB, of them {made['imports'] / MIB:.0f} MiB imports", flush=True
        )


if __name__ == "__main__":
    main()
