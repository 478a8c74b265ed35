"""Train a small MoE language model, in one process or in several with the experts spread over them.

    python examples/train_moe.py --steps 20 --out out/one
    torchrun --nproc-per-node 2 examples/train_moe.py --steps 20 --out out/two

Both see the same batches and write the same `loss.csv` to rounding. A run that was interrupted goes on from its last
checkpoint, with the same bits as one that was not; a checkpoint of two processes can be loaded by one, and the other
way round. docs/expert_parallel.md explains what is done here with losses and gradients:

- the loss is the sum over a process's own tokens, divided by the number of all tokens;
- gradients of what every process has are added up in float32; those of experts already are sums over all processes.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from demo.data import draw_batch, load_corpus
from demo.model import DTYPES, LanguageModel, Model
from moeroute.expert_parallel import ExpertParallel, clip_grad_norm_
from moeroute.nn import Routing


class Trainer:
    """The model, float32 weights for the optimizer, and where the run is."""

    def __init__(self, chosen: argparse.Namespace, sizes: Model) -> None:
        self.chosen, self.sizes = chosen, sizes
        self.ranks, self.rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.mesh: DeviceMesh | None = None
        torch.manual_seed(chosen.seed)
        self.model = LanguageModel(sizes)
        if self.ranks > 1:
            self.mesh = init_device_mesh("cpu", (self.ranks,), mesh_dim_names=("ep",))
            parallelize_module(self.model, self.mesh["ep"], {"blocks.*.moe.experts": ExpertParallel(self.model)})
        self.masters = {name: local(p).detach().clone() for name, p in self.model.named_parameters()}
        self.model.to(DTYPES[chosen.dtype])
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr=chosen.learning_rate)
        self.generator = torch.Generator().manual_seed(chosen.seed)
        self.corpus = load_corpus()
        self.done = 0

    def step(self) -> float:
        """One update; the loss of all tokens. A loss that is no number changes nothing."""
        text, following = draw_batch(self.corpus.train, self.sizes.batch, self.sizes.context, self.generator)
        all_tokens = text.numel()
        text, following = (part.tensor_split(self.ranks)[self.rank] for part in (text, following))
        logits, routings = self.model(text)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), following.flatten(), reduction="sum") / all_tokens
        total = loss
        routing: Routing
        for routing in routings:
            group = dist.group.WORLD if self.ranks > 1 else None
            total = total + self.sizes.balance * routing.balance_loss("global_batch", group=group)
            total = total + self.sizes.z * routing.z_loss() * (text.numel() / all_tokens)
        value = self.add_up(loss.detach().double().reshape(1)).item()
        if not math.isfinite(value):
            return value
        self.model.zero_grad()
        total.backward()
        self.update()
        self.done += 1
        return float(torch.tensor(value, dtype=torch.float32))

    def update(self) -> None:
        parameters = dict(self.model.named_parameters())
        shared = [p for p in parameters.values() if not isinstance(p, DTensor)]
        flat = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.float().flatten() for p in shared])
        self.add_up(flat)
        for parameter, grad in zip(shared, flat.split([p.numel() for p in shared]), strict=True):
            parameter.grad = grad.view(parameter.shape).to(parameter.dtype)
        norm = clip_grad_norm_(parameters.values(), math.inf)
        factor = min(1.0, self.chosen.clip / (float(norm) + 1e-6))
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                self.masters[name].grad = local(parameter.grad).float() * factor
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in parameters.items():
                local(parameter).copy_(self.masters[name])

    def add_up(self, tensor: Tensor) -> Tensor:
        if self.ranks > 1:
            dist.all_reduce(tensor)
        return tensor

    # ------------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """All that the next step depends on; experts as DTensors, which any number of processes loads."""
        state: dict[str, Any] = {}
        for (name, master), parameter in zip(self.masters.items(), self.model.parameters(), strict=True):
            kept = self.optimizer.state.get(master) or {
                "step": torch.tensor(0.0), "exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)
            }  # fmt: skip
            self.optimizer.state[master] = kept
            for kind, tensor in (("weights", master), ("mean", kept["exp_avg"]), ("square", kept["exp_avg_sq"])):
                state[f"{kind}.{name}"] = whole(tensor, parameter)
            state[f"steps.{name}"] = kept["step"]
        state["generator"] = self.generator.get_state()
        state["run"] = torch.tensor([self.done, self.chosen.threads, self.chosen.seed])
        return state

    def save(self) -> None:
        """All of a checkpoint or nothing: written beside, then moved into place."""
        folder = self.chosen.out / f"step-{self.done:06}"
        partial = folder.with_suffix(".partial")
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        self.wait()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is meant to be, in one process
            state_dict_saver.save(self.state(), checkpoint_id=partial, no_dist=self.ranks == 1)
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
            for old in checkpoints(self.chosen.out)[:-2]:
                shutil.rmtree(old)
        self.wait()

    def load(self, folder: Path) -> None:
        state = self.state()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                state_dict_loader.load(state, checkpoint_id=folder, no_dist=self.ranks == 1)
        except CheckpointException as error:  # a BaseException
            reasons = "; ".join(sorted({str(reason) for reason, _ in error.failures.values()}))
            raise SystemExit(f"train_moe: {folder} is of another configuration: {reasons}") from error
        except RuntimeError as error:
            raise SystemExit(f"train_moe: {folder} is of another configuration: {error}") from error
        self.generator.set_state(state["generator"])
        self.done, threads, seed = state["run"].tolist()
        if seed != self.chosen.seed:
            raise SystemExit(f"train_moe: {folder} was trained with --seed {seed}; got {self.chosen.seed}")
        if threads != self.chosen.threads and self.rank == 0:
            sys.stderr.write(
                f"train_moe: warning: {folder} was trained with --threads {threads}, now {self.chosen.threads}: the "
                "bits of products depend on it\n"
            )
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                local(parameter).copy_(self.masters[name])

    def wait(self) -> None:
        if self.ranks > 1:
            dist.barrier()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train until `--steps`; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="of the whole run, those before an interruption included")
    parser.add_argument("--threads", type=int, default=1, help="of each process; the bits depend on it (default: 1)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--out", type=Path, default=Path("out/train_moe"), help="loss.csv and the checkpoints")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints (default: 10)")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    for name in ("layers", "width", "heads", "experts", "k", "intermediate", "context", "batch"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Model, name), help="of the model of `make demo`")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    names = ("layers", "width", "heads", "experts", "k", "intermediate", "context", "batch")
    sizes = Model(**{name: getattr(chosen, name) for name in names})
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group("gloo")
    try:
        return train(Trainer(chosen, sizes))
    finally:
        if several:
            dist.destroy_process_group()


def train(trainer: Trainer) -> int:
    chosen = trainer.chosen
    chosen.out.mkdir(parents=True, exist_ok=True)
    if found := checkpoints(chosen.out):
        trainer.load(found[-1])
    losses = chosen.out / "loss.csv"
    if trainer.rank == 0:
        before = list(csv.reader(losses.read_text().splitlines()))[1:] if losses.exists() else []
        rows = [["step", "loss"], *(row for row in before if int(row[0]) <= trainer.done)]
        losses.write_text("".join(f"{','.join(row)}\n" for row in rows))
    while trainer.done < chosen.steps:
        loss = trainer.step()
        if not math.isfinite(loss):
            if trainer.rank == 0:
                last = [folder.name for folder in checkpoints(chosen.out)][-1:]
                kept = f"the last good checkpoint is {last[0]}" if last else "there is no checkpoint yet"
                sys.stderr.write(f"train_moe: the loss of step {trainer.done + 1} is {loss}: stopped; {kept}\n")
            return 1
        if trainer.rank == 0:
            with losses.open("a") as file:
                file.write(f"{trainer.done},{loss!r}\n")
        if trainer.done % chosen.save_every == 0 or trainer.done == chosen.steps:
            trainer.save()
    return 0


def checkpoints(out: Path) -> list[Path]:
    """Those that are whole, by step."""
    return sorted(folder for folder in out.glob("step-*") if folder.suffix != ".partial")


def local(tensor: Any) -> Tensor:
    """This process's part."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def whole(part: Tensor, like: Tensor) -> Tensor:
    """A part of a tensor as the DTensor that it is a part of."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(part, like.device_mesh, [Shard(0)], shape=like.shape, stride=like.stride())


if __name__ == "__main__":
    sys.exit(main())
