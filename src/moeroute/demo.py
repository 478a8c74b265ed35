"""`moeroute demo`: a byte-level Mixture-of-Experts language model learns the Python standard library.

Two runs of the same model, with the same initial weights and the same batches: one routes with this
package (`moeroute.nn.MoE`), one with plain PyTorch (`PlainMoE`: topk, argsort, index_select,
index_add). The experts and everything else are the same code. Each run has a process of its own, so
that neither finds the other's memory; they take turns of some steps, so that a busy moment of the
machine meets both:

    run()  progress, table, charts, files   -- commands -->   python -m moeroute.demo  Training
                                            <-- reports --    (a JSON object a line, both ways)

Only the parent writes files, each at once and as a whole. The training processes do not see Ctrl-C:
the parent ends them and saves what it has heard so far.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import dataclasses
import gc
import hashlib
import importlib.util
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moeroute import check, memory, report
from moeroute.nn import Experts, MoE
from moeroute.ops.balance import BalanceStatistics, balance_statistics, router_z_loss

if TYPE_CHECKING:
    from rich.console import Console

PACKAGES = ("rich", "matplotlib")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NAMES = {"moeroute": "moeroute", "plain": "plain PyTorch"}

STEPS = 300
TURN = 5  # steps of one run before the other's turn
SECONDS = 110.0  # for everything; steps are cut to keep it
RESERVE = 10.0  # of it for held-out losses, sample text and charts

# "Trained alike": the mean training losses of the last tenth of the steps (same batches) differ by less
# than ALIKE of their value. See `_verdict`.
ALIKE = 0.01
SAMPLE = 300  # bytes of generated text
FIRST_LOSS_APART = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of the language model and its batches."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    experts: int = 16
    k: int = 4
    intermediate: int = 128
    context: int = 128
    batch: int = 12
    learning_rate: float = 3e-3
    balance: float = 2e-2  # coefficients of the two auxiliary losses
    z: float = 1e-3

    @property
    def tokens(self) -> int:
        return self.batch * self.context


# ---------------------------------------------------------------------------------------------------
# Text: the standard library's sources, pydoc's topics, the Zen of Python, the licence where installed.
# ---------------------------------------------------------------------------------------------------

LARGEST_CORPUS = 12_000_000  # bytes
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "ensurepip"}


class Corpus(NamedTuple):
    train: Tensor  # uint8
    held_out: Tensor  # uint8: every twentieth document


def load_corpus() -> Corpus:
    """The same bytes in the same order whenever the same Python is asked."""
    library = Path(sysconfig.get_path("stdlib"))
    documents = list(_prose(library))
    size = sum(map(len, documents))
    for path in sorted(library.rglob("*.py")):
        if SKIPPED.isdisjoint(path.relative_to(library).parts):
            with contextlib.suppress(OSError):
                documents.append(path.read_bytes())
                size += len(documents[-1])
        if size > LARGEST_CORPUS:
            break
    if size < 100_000:
        raise RuntimeError(f"moeroute.demo: found only {size} bytes of the standard library's text in {library}")
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for index, document in enumerate(documents):
        parts[index % 20 == 19].append(document)
    train, held_out = (torch.frombuffer(bytearray(b"\n\n".join(part)), dtype=torch.uint8) for part in parts)
    return Corpus(train, held_out)


def _prose(library: Path) -> Iterator[bytes]:
    with contextlib.suppress(ImportError):  # some distributions package it apart
        from pydoc_data.topics import topics

        for name in sorted(topics):
            yield topics[name].encode()
    zen = library / "this.py"
    if zen.is_file():
        found = re.search(r'"""(.*?)"""', zen.read_text(encoding="utf-8"), re.DOTALL)
        if found:
            yield codecs.decode(found[1], "rot13").encode()
    for licence in (library / "LICENSE.txt", library.parent.parent / "LICENSE.txt"):
        if licence.is_file():
            yield licence.read_bytes()


def draw_batch(text: Tensor, model: Model, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(bytes, next bytes), both [batch, context] int64."""
    starts = torch.randint(text.shape[0] - model.context, (model.batch,), generator=generator)
    windows = text[starts[:, None] + torch.arange(model.context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


# ---------------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------------


class PlainRouting(NamedTuple):
    expert_ids: Tensor
    scores: Tensor
    logits: Tensor

    def statistics(self) -> BalanceStatistics:
        return balance_statistics(self.scores, self.expert_ids)

    def z_loss(self) -> Tensor:
        return router_z_loss(self.logits)


class PlainRouter(nn.Module):
    """softmax, topk, renormalise; the parameter of `moeroute.nn.Router`."""

    def __init__(self, hidden_size: int, num_experts: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))

    def forward(self, tokens: Tensor) -> tuple[Tensor, PlainRouting]:
        logits = F.linear(tokens.float(), self.weight.float())
        scores = logits.softmax(dim=-1)
        weights, expert_ids = scores.topk(self.k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, PlainRouting(expert_ids, scores, logits)


class PlainMoE(nn.Module):
    """`moeroute.nn.MoE` with the routing as one writes it in PyTorch; same parameters, same experts."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, k: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.router = PlainRouter(hidden_size, num_experts, k)
        self.experts = Experts(num_experts, hidden_size, intermediate_size)

    def forward(self, x: Tensor, *, return_routing: bool = True) -> tuple[Tensor, PlainRouting]:
        tokens = x.reshape(-1, x.shape[-1])
        weights, routing = self.router(tokens)
        slots = routing.expert_ids.reshape(-1)
        order = slots.argsort(stable=True)
        token_of_row = order // weights.shape[1]
        rows = tokens.index_select(0, token_of_row)
        rows = self.experts(rows, slots.bincount(minlength=self.num_experts))
        rows = rows * weights.reshape(-1).index_select(0, order)[:, None]
        output = torch.zeros(tokens.shape, dtype=rows.dtype).index_add(0, token_of_row, rows)
        return output.to(x.dtype).reshape(x.shape), routing


class Block(nn.Module):
    def __init__(self, model: Model, plain: bool) -> None:
        super().__init__()
        self.heads = model.heads
        self.attention_norm = nn.RMSNorm(model.width)
        self.qkv = nn.Linear(model.width, 3 * model.width, bias=False)
        self.project = nn.Linear(model.width, model.width, bias=False)
        self.moe_norm = nn.RMSNorm(model.width)
        sizes = model.width, model.intermediate, model.experts, model.k
        self.moe = PlainMoE(*sizes) if plain else MoE(*sizes, score="softmax", renormalize=True)
        # A model this narrow learns faster from unit variance than from the layer's normal(0, 0.02).
        experts, depth = self.moe.experts, 2 * model.layers
        for weight, variance in (
            (self.qkv.weight, 1 / model.width),
            (experts.gate_up_proj, 1 / model.width),
            (self.project.weight, 1 / (model.width * depth)),
            (experts.down_proj, 1 / (model.intermediate * depth)),
        ):
            nn.init.normal_(weight, std=variance**0.5)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        batch, context, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = (_rotate(part, *rotation).to(v.dtype) for part in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, context, width))
        output, routing = self.moe(self.moe_norm(x), return_routing=True)
        return x + output, routing


def _rotation(context: int, size: int) -> tuple[Tensor, Tensor]:
    """Sines and cosines of rotary position embedding, [context, size / 2]."""
    frequencies = 1000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(context)[:, None] * frequencies
    return angles.sin(), angles.cos()


def _rotate(x: Tensor, sine: Tensor, cosine: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, left * sine + right * cosine), dim=-1)


class LanguageModel(nn.Module):
    def __init__(self, model: Model, plain: bool = False) -> None:
        super().__init__()
        self.head_size = model.width // model.heads
        self.embed = nn.Embedding(256, model.width)  # normal(0, 1)
        self.blocks = nn.ModuleList([Block(model, plain) for _ in range(model.layers)])
        self.norm = nn.RMSNorm(model.width)
        self.head = nn.Linear(model.width, 256, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, text: Tensor) -> tuple[Tensor, list[Any]]:
        """[batch, n] bytes to next-byte logits [batch, n, 256], and the routing of each layer."""
        x = self.embed(text)
        rotation = _rotation(text.shape[1], self.head_size)
        routings = []
        for block in self.blocks:
            x, routing = block(x, rotation)
            routings.append(routing)
        return self.head(self.norm(x)), routings


def build_model(model: Model, run: str, dtype: torch.dtype, seed: int) -> LanguageModel:
    """Both runs start from the weights of the moeroute model."""
    torch.manual_seed(seed)
    ours = LanguageModel(model)
    if run == "moeroute":
        return ours.to(dtype)
    plain = LanguageModel(model, plain=True)
    plain.load_state_dict(ours.state_dict())
    return plain.to(dtype)


# ---------------------------------------------------------------------------------------------------
# What routing costs: stamps around it, in the forward and in the backward pass
# ---------------------------------------------------------------------------------------------------


class _Stamp(torch.autograd.Function):
    """Identity; tells the time when the forward and when the backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, going: Callable[[], None], coming: Callable[[], None]) -> Tensor:
        ctx.coming = coming
        going()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.coming()
        return grads[0], None, None


class RoutingTimer:
    """Seconds in a layer outside its experts: router, selection, plan, permute and unpermute, and back.

    Forward, the clock runs from the router's input to the experts' input and from their output to the
    layer's output. Autograd runs nodes in reverse order of creation, so in the backward pass the same
    four places bound the same work.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started: float | None = None

    def watch(self, layer: nn.Module) -> None:
        def stamp_input(going: Callable[[], None], coming: Callable[[], None]) -> Callable[..., Any]:
            return lambda module, inputs: (_Stamp.apply(inputs[0], going, coming), *inputs[1:])

        def stamp_output(module: nn.Module, inputs: Any, output: Any) -> Any:
            if isinstance(output, Tensor):
                return _Stamp.apply(output, self._start, self._stop)
            return (_Stamp.apply(output[0], self._stop, self._start), *output[1:])

        router, experts = layer.get_submodule("router"), layer.get_submodule("experts")
        router.register_forward_pre_hook(stamp_input(self._start, self._stop))
        experts.register_forward_pre_hook(stamp_input(self._stop, self._start))
        experts.register_forward_hook(stamp_output)
        layer.register_forward_hook(stamp_output)

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _start(self) -> None:
        self._started = time.perf_counter()

    def _stop(self) -> None:
        if self._started is not None:
            self.seconds += time.perf_counter() - self._started
            self._started = None


# ---------------------------------------------------------------------------------------------------
# The training process
# ---------------------------------------------------------------------------------------------------


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

    def warm_up(self) -> None:
        """Compiles what is to be compiled, on a model thrown away."""
        trainer = Trainer(self._build(), self.model, STEPS)
        generator = torch.Generator().manual_seed(self.seed)
        seconds = [self._step(trainer, generator)["seconds"] for _ in range(4)]
        self.report("warm", step_seconds=statistics.median(seconds[1:]), first_seconds=seconds[0])

    def begin(self, steps: int) -> None:
        self.memory = Memory.start()
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
            initial_weights=_fingerprint(network),
            threads=torch.get_num_threads(),
        )

    def train(self, until: int) -> None:
        trainer = self.trainer
        while trainer.done < until:
            self.report("step", step=trainer.done + 1, **self._step(trainer, self.generator))
            if trainer.done % max(1, trainer.steps // 6) == 0:
                self._validate()

    def finish(self, sample: int) -> None:
        self._validate()
        self.report("memory", **self.memory.report())
        if sample:
            self.report("sample", text=_sample(self.trainer.network, self.model, self.seed, sample))
        self.report("end")

    def _build(self) -> LanguageModel:
        return build_model(self.model, self.run, self.dtype, self.seed)

    def _step(self, trainer: Trainer, generator: torch.Generator) -> dict[str, Any]:
        text, following = draw_batch(self.corpus.train, self.model, generator)
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


def _fingerprint(network: LanguageModel) -> str:
    digest = hashlib.sha256()
    for name, weight in sorted(network.state_dict().items()):
        digest.update(name.encode() + weight.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def _held_out_loss(network: LanguageModel, corpus: Corpus, model: Model) -> float:
    """Mean loss on held-out text, the same windows each time."""
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(4):
        text, following = draw_batch(corpus.held_out, model, generator)
        logits, _ = network(text)
        losses.append(F.cross_entropy(logits.flatten(0, 1).float(), following.flatten()).item())
    return statistics.fmean(losses)


@torch.no_grad()
def _sample(network: LanguageModel, model: Model, seed: int, length: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(b"\n\ndef ")])
    begun = time.perf_counter()
    for _ in range(length):
        if time.perf_counter() - begun > RESERVE / 2:
            break
        logits, _ = network(text[:, -model.context :])
        chances = (logits[0, -1].float() / 0.8).softmax(dim=-1)
        text = torch.cat((text, torch.multinomial(chances, 1, generator=generator)[None]), dim=1)
    return bytes(text[0].tolist()).decode("utf-8", errors="replace")


class Memory(NamedTuple):
    """Peak resident memory. Where the system can reset its mark (Linux), that of the training alone."""

    before: int | None

    @classmethod
    def start(cls) -> Memory:
        # What the warm-up has left in free lists goes back first: it would be used again unseen.
        gc.collect()
        memory.empty_cache()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc only
        try:
            Path("/proc/self/clear_refs").write_text("5")
            return cls(cls._status("VmRSS"))
        except (OSError, LookupError):
            return cls(None)

    def report(self) -> dict[str, int | None]:
        if self.before is not None:
            peak = self._status("VmHWM")
            return {"peak_bytes": peak, "training_bytes": max(0, peak - self.before)}
        try:
            import resource
        except ImportError:  # Windows
            return {"peak_bytes": None, "training_bytes": None}
        unit = 1 if sys.platform == "darwin" else 1024
        return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "training_bytes": None}

    @staticmethod
    def _status(key: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
        raise LookupError(key)


# ---------------------------------------------------------------------------------------------------
# The parent: what has been heard so far, the screen, the files
# ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """What one training process has reported."""

    name: str
    warm: dict[str, Any] = dataclasses.field(default_factory=dict)
    ready: dict[str, Any] = dataclasses.field(default_factory=dict)
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    routing_seconds: list[float] = dataclasses.field(default_factory=list)
    load: list[list[list[int]]] = dataclasses.field(default_factory=list)  # [steps][layers][experts]
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    peak_bytes: int | None = None
    training_bytes: int | None = None
    sample: str = ""
    complete: bool = False

    def hear(self, event: dict[str, Any]) -> str:
        kind: str = event.pop("event")
        match kind:
            case "warm":
                self.warm = event
            case "ready":
                self.ready = event
            case "step":
                self.losses.append(event["loss"])
                self.seconds.append(event["seconds"])
                self.routing_seconds.append(event["routing_seconds"])
                self.load.append(event["load"])
            case "validation":
                self.validation.append((event["step"], event["loss"]))
            case "memory":
                self.peak_bytes, self.training_bytes = event["peak_bytes"], event["training_bytes"]
            case "sample":
                self.sample = event["text"]
            case "end":
                self.complete = True
        return kind

    def tokens_per_second(self, model: Model, last: int = 0) -> float:
        """By the median step: one that another program has disturbed says nothing about the code."""
        return model.tokens / max(statistics.median(self.seconds[-last:]), 1e-9)

    def final_loss(self) -> float:
        """Mean of the last tenth of the steps."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 10) :])

    def routing_share(self) -> float:
        parts = zip(self.routing_seconds, self.seconds, strict=True)
        return statistics.median(routing / max(step, 1e-9) for routing, step in parts)


class _Ended(Exception):
    """A training process ended early."""


def run(
    steps: int | None = None,
    seed: int = 0,
    dtype: str | torch.dtype = "float32",
    threads: int | None = None,
    out: str | Path = "out",
) -> int:
    """Trains both models, prints a table and writes the charts. Returns an exit status: 0, 1, or 130 (Ctrl-C).

    Args:
        steps: None means 300, or as many as fit into two minutes; a given number is kept.
        seed: of weights, batches and sample.
        dtype: float32 or bfloat16, or the name of one (weights and activations; the optimizer keeps float32 weights).
        threads: of each training process; None leaves it to torch.
        out: folder for ``loss.png``, ``expert_load.png``, ``sample.txt`` and ``results.json``.
    """
    if steps is not None:
        check.integer("demo", "steps", steps, minimum=1)
    check.integer("demo", "seed", seed, minimum=0, maximum=2**63 - 1)
    dtype = check.one_of("demo", "dtype", str(dtype).removeprefix("torch."), tuple(DTYPES))
    if threads is not None:
        check.integer("demo", "threads", threads, minimum=1)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"moeroute demo needs {' and '.join(missing)}: pip install 'moeroute[demo]'"
            f" (or: pip install {' '.join(missing)})\n"
        )
        return 1
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise check.wrong_value("demo", "out", "a folder that can be written", f"{folder} ({error})") from error

    from rich.console import Console

    console = Console(highlight=False)
    order = {"seed": seed, "dtype": dtype, "threads": threads, "model": dataclasses.asdict(Model())}
    runs = {name: Run(name) for name in NAMES}
    begun = time.perf_counter()
    status = 0
    try:
        _both(console, runs, order, steps, begun)
    except KeyboardInterrupt:
        console.print(f"\n[bold]Interrupted[/] after {_progress_made(runs)}.", soft_wrap=True)
        status = 130
    except _Ended as error:
        console.print(f"\n[bold red]{error}[/], after {_progress_made(runs)}.", soft_wrap=True)
        status = 1
    saved: list[str] = []
    try:
        _save(folder, runs, order, saved)
    except KeyboardInterrupt:
        console.print("\n[bold]Interrupted[/] while saving.")
        status = 130
    if status == 0:
        _print_table(console, runs, order)
        _print_verdict(console, runs, dtype)
        _print_sample(console, runs["moeroute"])
        console.print(f"Both runs and everything around them: {time.perf_counter() - begun:.0f} s.")
    _say_saved(console, folder, saved)
    return status


def _both(console: Console, runs: dict[str, Run], order: dict[str, Any], asked: int | None, begun: float) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:>13}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(compact=True),
    )
    model = Model(**order["model"])
    with contextlib.ExitStack() as stack:
        processes = {}
        for name in runs:
            processes[name] = _Process({**order, "run": name})
            stack.callback(processes[name].close)
        progress = stack.enter_context(Progress(*columns, console=console, disable=not console.is_terminal))
        tasks = {name: progress.add_task(NAMES[name], total=None, state="starts, compiles") for name in runs}

        def ask(name: str, do: str, **arguments: Any) -> None:
            run = runs[name]
            for event in processes[name].ask(do, **arguments):
                if run.hear(event) == "step":
                    _show_step(console, run, model)
                    state = f"loss {run.losses[-1]:.3f}  {run.tokens_per_second(model, last=20):,.0f} tokens/s"
                    progress.update(tasks[name], completed=len(run.losses), state=state)

        for name in runs:
            ask(name, "warm_up")
        steps = asked or _steps_that_fit(runs, SECONDS - RESERVE - (time.perf_counter() - begun))
        for name in runs:
            ask(name, "begin", steps=steps)
            progress.reset(tasks[name], total=steps)
        _say_setting(console, runs, order, asked)
        turn_seconds = 0.0
        for until in range(TURN, steps + TURN, TURN):
            started = time.perf_counter()
            if asked is None and until > TURN and started - begun + turn_seconds > SECONDS - RESERVE:
                console.print(f"The machine got slower: no time for more than {until - TURN} of {steps} steps.")
                break
            for name in runs:
                ask(name, "train", until=min(until, steps))
            turn_seconds = time.perf_counter() - started
        for name in runs:
            ask(name, "finish", sample=0 if name == "plain" else SAMPLE)


def _steps_that_fit(runs: dict[str, Run], seconds: float) -> int:
    return max(TURN, min(STEPS, int(seconds / sum(run.warm["step_seconds"] for run in runs.values()))))


def _show_step(console: Console, run: Run, model: Model) -> None:
    """A line now and then where no progress bar can be drawn."""
    step, steps = len(run.losses), run.ready["steps"]
    if not console.is_terminal and (step in (1, steps) or step % max(1, steps // 10) == 0):
        speed = f"{run.tokens_per_second(model, last=20):,.0f} tokens/s"
        console.print(f"{NAMES[run.name]:>13}  step {step}/{steps}  loss {run.losses[-1]:.3f}  {speed}")


def _machine_is_busy() -> bool:
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.7


class _Process:
    """A training process, and the conversation with it."""

    def __init__(self, order: dict[str, Any]) -> None:
        environment = dict(os.environ)
        package_folder = str(Path(__file__).absolute().parent.parent)
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([package_folder, *([inherited] if inherited else [])])
        if "OMP_WAIT_POLICY" not in environment:
            # GNU OpenMP's idle threads spin for milliseconds and starve the others where anything else runs:
            # steps of 1 to 8 s instead of 0.1 (measured). Without spinning they take 0.16, always; with a
            # short spin 0.1 on an idle machine.
            environment.setdefault("GOMP_SPINCOUNT", "0" if _machine_is_busy() else "10000")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "moeroute.demo", json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C goes to the parent alone
        )

    def ask(self, do: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """Gives a command and yields the reports until it is done."""
        commands, reports = self._process.stdin, self._process.stdout
        assert commands is not None  # noqa: S101  # pipes were asked for
        assert reports is not None  # noqa: S101
        with contextlib.suppress(BrokenPipeError):  # then there is no report either
            commands.write(json.dumps({"do": do, **arguments}) + "\n")
            commands.flush()
        for line in reports:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "done":
                return
            yield event
        status = self._process.wait()
        if status < 0:
            raise _Ended(f"A training process was killed by {signal.Signals(-status).name} (out of memory?)")
        raise _Ended(f"A training process failed with status {status}; its message stands above")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _progress_made(runs: dict[str, Run]) -> str:
    made = [f"{len(run.losses)} steps of {NAMES[run.name]}" for run in runs.values() if run.losses]
    return " and ".join(made) or "no step"


# ---------------------------------------------------------------------------------------------------
# Screen
# ---------------------------------------------------------------------------------------------------


def _say_setting(console: Console, runs: dict[str, Run], order: dict[str, Any], asked: int | None) -> None:
    model, ours = Model(**order["model"]), runs["moeroute"]
    ready = ours.ready
    console.print(
        f"{model.layers} layers of width {model.width}, {model.experts} experts of which a token takes {model.k};"
        f" {ready['parameters'] / 1e6:.1f} M parameters in {order['dtype']}, {ready['threads']} threads.\n"
        f"{ready['train_bytes'] / 1e6:.1f} MB of the standard library's text to learn,"
        f" {ready['held_out_bytes'] / 1e6:.1f} MB held out; {model.tokens} bytes a step.\n"
        f"First step, kernels compiled or loaded: {ours.warm['first_seconds']:.1f} s.",
        soft_wrap=True,
    )
    if asked is None and ready["steps"] < STEPS:
        console.print(
            f"This machine is slow for {STEPS} steps in two minutes: {ready['steps']} steps instead"
            " (--steps to insist).",
            soft_wrap=True,
        )


def _megabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e6:,.0f} MB"


def _print_table(console: Console, runs: dict[str, Run], order: dict[str, Any]) -> None:
    from rich.table import Table

    model = Model(**order["model"])
    both = list(runs.values())
    steps = len(both[0].losses)
    table = Table(title=f"{steps} steps of {model.tokens} bytes, {order['dtype']}", title_justify="left")
    table.add_column("")
    for run in both:
        table.add_column(NAMES[run.name], justify="right")

    def row(name: str, value: Callable[[Run], str]) -> None:
        table.add_row(name, *(value(run) for run in both))

    row("loss, first step (nats per byte)", lambda r: f"{r.losses[0]:.6f}")
    row(f"loss, mean of the last {max(1, steps // 10)} steps", lambda r: f"{r.final_loss():.4f}")
    row("loss on held-out text", lambda r: f"{r.validation[-1][1]:.4f}")
    row("tokens/s (median step)", lambda r: f"{r.tokens_per_second(model):,.0f}")
    row("routing, ms a step", lambda r: f"{statistics.median(r.routing_seconds) * 1e3:.1f}")
    row("routing, share of a step", lambda r: f"{r.routing_share():.1%}")
    row("peak memory of the process", lambda r: _megabytes(r.peak_bytes))
    if all(r.training_bytes is not None for r in both):
        row("  of it weights, optimizer, activations", lambda r: _megabytes(r.training_bytes))
    console.print(table)
    console.print(
        "Routing is everything in the layers but the experts: router, selection, plan, permute, unpermute,"
        " forward and backward.",
        soft_wrap=True,
    )


def _verdict(runs: dict[str, Run], dtype: str) -> tuple[bool, str]:
    """Whether both trained alike, and in what numbers.

    The two routings compute the same function and round differently, so the runs drift apart slowly, as
    two runs do that differ in the last bit of one weight. What must agree: the weights they start from,
    the first loss up to rounding, and the losses at the end (mean of the last tenth of the steps) within
    1 %, half of what another seed changes (measured).
    """
    ours, plain = runs["moeroute"], runs["plain"]
    same_start = ours.ready["initial_weights"] == plain.ready["initial_weights"]
    first = abs(ours.losses[0] - plain.losses[0])
    final = abs(ours.final_loss() - plain.final_loss())
    held_out = abs(ours.validation[-1][1] - plain.validation[-1][1])
    share = final / plain.final_loss()
    alike = same_start and first <= FIRST_LOSS_APART[dtype] and share <= ALIKE
    numbers = (
        f"losses {first:.1e} apart at the first step, {final:.4f} ({share:.2%}) at the end, {held_out:.4f} on"
        f" held-out text; alike means at most {FIRST_LOSS_APART[dtype]:.0e} at first and {ALIKE:.0%} at the end"
        + ("" if same_start else "; and they did not start from the same weights")
    )
    return alike, numbers


def _print_verdict(console: Console, runs: dict[str, Run], dtype: str) -> None:
    alike, numbers = _verdict(runs, dtype)
    words = "[bold green]Both trained alike[/]" if alike else "[bold red]They did not train alike[/]"
    console.print(f"{words}: {numbers}.", soft_wrap=True)


def _print_sample(console: Console, run: Run) -> None:
    from rich.panel import Panel
    from rich.text import Text

    console.print(
        Panel(Text(_printable(run.sample.strip())), title="Text written by the moeroute model", title_align="left")
    )


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text.expandtabs(4))


def _say_saved(console: Console, folder: Path, saved: list[str]) -> None:
    if saved:
        console.print(f"Saved in {folder.resolve()}: {', '.join(saved)}", soft_wrap=True)
    else:
        console.print("Nothing was saved.")


# ---------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------


def _save(folder: Path, runs: dict[str, Run], order: dict[str, Any], saved: list[str]) -> None:
    """Everything that the runs so far allow; `saved` gets the name of each file that is complete."""
    ours = runs["moeroute"]

    def save(name: str, content: Callable[[], bytes]) -> None:
        report.write(folder / name, content())
        saved.append(name)

    if ours.losses:
        save("results.json", lambda: _results(runs, order))
        save("loss.png", lambda: _loss_chart(runs))
        save("expert_load.png", lambda: _load_chart(ours))
    if ours.sample:
        save("sample.txt", ours.sample.encode)


def _results(runs: dict[str, Run], order: dict[str, Any]) -> bytes:
    results: dict[str, Any] = {
        "setting": order,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "runs": {name: dataclasses.asdict(run) for name, run in runs.items() if run.losses},
    }
    if all(run.complete for run in runs.values()):
        results["alike"], results["verdict"] = _verdict(runs, order["dtype"])
    return json.dumps(results).encode()


def _loss_chart(runs: dict[str, Run]) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), dpi=120, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    styles = {"moeroute": ("C0", "-", 2.0), "plain": ("C1", "--", 1.2)}
    for name, run in runs.items():
        if run.losses:
            color, line, width = styles[name]
            steps = range(1, len(run.losses) + 1)
            top.plot(steps, run.losses, color=color, linestyle=line, linewidth=width, label=NAMES[name])
            if run.validation:
                marker = "o" if name == "moeroute" else "x"
                label = f"{NAMES[name]}, held-out text"
                top.plot(*zip(*run.validation, strict=True), marker, color=color, label=label, zorder=3)
    top.set_ylabel("loss (nats per byte)")
    top.set_title("Same model, same batches, two ways to route")
    top.legend()
    top.grid(alpha=0.3)
    both = zip(runs["moeroute"].losses, runs["plain"].losses, strict=False)
    apart = [abs(ours - plain) for ours, plain in both]
    if any(apart):
        bottom.semilogy(range(1, len(apart) + 1), [a or float("nan") for a in apart], color="C3", linewidth=1)
    else:
        words = "no difference" if apart else "no second run yet"
        bottom.text(0.5, 0.5, words, transform=bottom.transAxes, ha="center", va="center")
    bottom.set_ylabel("|difference|")
    bottom.set_xlabel("step")
    bottom.grid(alpha=0.3)
    return report.png(figure)


def _load_chart(run: Run) -> bytes:
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    load = torch.tensor(run.load, dtype=torch.float32)  # [steps, layers, experts]
    share = load / load.mean(dim=-1, keepdim=True)
    steps, layers, experts = share.shape
    figure = Figure(figsize=(9, 1.2 + 1.7 * layers), dpi=120, layout="constrained")
    axes = figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
    norm = TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=max(2.0, float(share.quantile(0.995))))
    for layer, axis in enumerate(axes):
        image = axis.imshow(
            share[:, layer].T.numpy(),
            aspect="auto",
            interpolation="nearest",
            cmap="RdBu_r",
            norm=norm,
            extent=(0.5, steps + 0.5, experts - 0.5, -0.5),
        )
        axis.set_ylabel(f"layer {layer}\nexpert")
        axis.set_yticks(range(0, experts, max(1, experts // 4)))
    axes[0].set_title("Load of the experts over training (moeroute)")
    axes[-1].set_xlabel("step")
    bar = figure.colorbar(image, ax=list(axes), extend="max")
    bar.set_label("slots of the expert / equal share (1 = balanced)")
    return report.png(figure)


if __name__ == "__main__":
    _obey()
