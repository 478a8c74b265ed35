"""A training process: commands from standard input, reports to standard output, a JSON object a line.

Started by `turns.Process` as `python -m demo.training ORDER`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from demo.data import Corpus, draw_batch, load_corpus
from demo.measures import Memory, RoutingTimer
from demo.model import DTYPES, LanguageModel, Model, build_model, fingerprint
from moeroute.nn import MoE

SAMPLE_SECONDS = 5.0  # a slow machine writes less text


class Trainer:
    """Adam on float32 master weights; the model computes in its own dtype."""

    def __init__(self, network: LanguageModel, model: Model, steps: int) -> None:
        self.network, self.model, self.steps, self.done = network, model, steps, 0
        self.weights = list(network.parameters())
        self.half = self.weights[0].dtype != torch.float32
        self.masters = [w.detach().float() for w in self.weights] if self.half else self.weights
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=model.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self, text: Tensor, following: Tensor) -> tuple[float, list[list[int]]]:
        """One update; the loss, and the slots of each layer's experts."""
        logits, routings = self.network(text)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())
        total, load = loss, []
        for routing in routings:
            sums = routing.statistics()
            load.append(sums.tokens_per_expert)
            total = total + self.model.balance * sums.loss() + self.model.z * routing.z_loss()
        gradients = torch.autograd.grad(total, self.weights)
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient.float() if self.half else gradient
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.model.learning_rate * self._schedule()
        self.optimizer.step()
        if self.half:
            with torch.no_grad():
                for weight, master in zip(self.weights, self.masters, strict=True):
                    weight.copy_(master)
        self.done += 1
        return loss.item(), [counts.tolist() for counts in load]

    def state(self) -> dict[str, Any]:
        """All that the next step depends on, but the batch."""
        return {"done": self.done, "masters": self.masters, "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.done = state["done"]
        self.optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for weight, master, saved in zip(self.weights, self.masters, state["masters"], strict=True):
                master.copy_(saved)
                weight.copy_(saved)

    def model_bytes(self) -> int:
        """Weights, their gradients, the optimizer's state, and the float32 weights where those are others."""
        tensors = [*self.weights, *self.weights, *(self.masters if self.half else [])]
        tensors += [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        return sum(t.nbytes for t in tensors) + (sum(m.nbytes for m in self.masters) if self.half else 0)

    def _schedule(self) -> float:
        """Ten steps (or a tenth) of warm-up, then a straight line down to a tenth."""
        warmup = max(1, min(10, self.steps // 10))
        if self.done < warmup:
            return (self.done + 1) / warmup
        return 1.0 - 0.9 * (self.done - warmup) / max(1, self.steps - warmup)


class Training:
    """The body of a training process. Its public methods are the commands; each reports as it goes."""

    def __init__(self, order: dict[str, Any], report: Callable[..., None]) -> None:
        self.report = report
        self.run, self.seed = order["run"], order["seed"]
        self.dtype = DTYPES[order["dtype"]]
        self.model = Model(**order["model"])
        if order["threads"] is not None:
            torch.set_num_threads(order["threads"])
        self.corpus = load_corpus()
        self.timer = RoutingTimer()
        self.memory = Memory()

    def warm_up(self) -> None:
        """Compiles what is to be compiled, and measures a step, on a model thrown away."""
        begun = time.perf_counter()
        if self.run == "moeroute":
            _load_kernels(self.model, self.dtype)
        self.memory.kernels_are_loaded()
        compile_seconds = time.perf_counter() - begun
        trainer = Trainer(self._build(), self.model, steps=100)
        generator = torch.Generator().manual_seed(self.seed)
        seconds = [self._step(trainer, generator)["seconds"] for _ in range(4)]
        self.report("warm", step_seconds=statistics.median(seconds[1:]), first_seconds=compile_seconds + seconds[0])

    def begin(self, steps: int) -> None:
        self.memory.training_starts()
        network = self._build()
        self.trainer = Trainer(network, self.model, steps)
        for block in network.blocks:
            self.timer.watch(block.get_submodule("moe"))
        self.generator = torch.Generator().manual_seed(self.seed)
        self.report(
            "ready",
            steps=steps,
            parameters=sum(p.numel() for p in network.parameters()),
            train_bytes=self.corpus.train.shape[0],
            held_out_bytes=self.corpus.held_out.shape[0],
            initial_weights=fingerprint(network),
            threads=torch.get_num_threads(),
        )

    def save(self, file: str) -> None:
        torch.save({"trainer": self.trainer.state(), "generator": self.generator.get_state()}, file)

    def resume(self, file: str, steps: int) -> None:
        """In a new process: what `begin` makes, as it was when it was saved."""
        if self.run == "moeroute":
            _load_kernels(self.model, self.dtype)
        self.memory.kernels_are_loaded()
        self.begin(steps)
        saved = torch.load(file)
        self.trainer.load(saved["trainer"])
        self.generator.set_state(saved["generator"])

    def tell_weights(self) -> None:
        self.report("weights", step=self.trainer.done, fingerprint=fingerprint(self.trainer.network))

    def train(self, until: int) -> None:
        trainer = self.trainer
        while trainer.done < until:
            self.report("step", step=trainer.done + 1, **self._step(trainer, self.generator))
            self.memory.step_ends()
            if trainer.done % max(1, trainer.steps // 6) == 0:
                self._validate()

    def finish(self, sample: int) -> None:
        self._validate()
        self.report("memory", parts=self.memory.parts(self.trainer.model_bytes()))
        if sample:
            self.report("sample", text=_sample(self.trainer.network, self.model, self.seed, sample))
        self.report("end")

    def _build(self) -> LanguageModel:
        return build_model(self.model, self.run, self.dtype, self.seed)

    def _step(self, trainer: Trainer, generator: torch.Generator) -> dict[str, Any]:
        text, following = draw_batch(self.corpus.train, self.model.batch, self.model.context, generator)
        self.timer.take()
        begun = time.perf_counter()
        loss, load = trainer.step(text, following)
        seconds = time.perf_counter() - begun
        return {"loss": loss, "seconds": seconds, "routing_seconds": self.timer.take(), "load": load}

    def _validate(self) -> None:
        loss = _held_out_loss(self.trainer.network, self.corpus, self.model)
        self.report("validation", step=self.trainer.done, loss=loss)


def _obey() -> None:
    """A training process: commands from standard input, reports to standard output."""
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not get between the reports

    def report(event: str, **content: Any) -> None:
        reports.write(json.dumps({"event": event, **content}) + "\n")

    training = Training(json.loads(sys.argv[1]), report)
    for line in sys.stdin:
        command = json.loads(line)
        getattr(training, command.pop("do"))(**command)
        report("done")


def _load_kernels(model: Model, dtype: torch.dtype) -> None:
    """Compiles moeroute's kernels for this dtype, or loads them: a training step of the layer on a few tokens."""
    layer = MoE(8, 8, model.experts, model.k, renormalize=True).to(dtype)
    output, routing = layer(torch.ones(2, 8, dtype=dtype, requires_grad=True), return_routing=True)
    (output.float().sum() + routing.statistics().loss()).backward()


@torch.no_grad()
def _held_out_loss(network: LanguageModel, corpus: Corpus, model: Model) -> float:
    """Mean loss on held-out text, the same windows each time."""
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(4):
        text, following = draw_batch(corpus.held_out, model.batch, model.context, generator)
        logits, _ = network(text)
        losses.append(F.cross_entropy(logits.flatten(0, 1).float(), following.flatten()).item())
    return statistics.fmean(losses)


@torch.no_grad()
def _sample(network: LanguageModel, model: Model, seed: int, length: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(b"\n\ndef ")])
    begun = time.perf_counter()
    for _ in range(length):
        if time.perf_counter() - begun > SAMPLE_SECONDS:
            break
        logits, _ = network(text[:, -model.context :])
        chances = (logits[0, -1].float() / 0.8).softmax(dim=-1)
        text = torch.cat((text, torch.multinomial(chances, 1, generator=generator)[None]), dim=1)
    return bytes(text[0].tolist()).decode("utf-8", errors="replace")


if __name__ == "__main__":
    _obey()
