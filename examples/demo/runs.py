"""What the two trainings have reported so far, and what it says."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from demo.model import Model

NAMES = {"moeroute": "moeroute", "plain": "plain PyTorch"}
STEPS = 300  # fewer where they do not fit into the time

# "Trained alike": the mean training losses of the last tenth of the steps (same batches) differ by less than ALIKE of
# their value. See `verdict`.
ALIKE = 0.01
FIRST_LOSS_APART = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclasses.dataclass
class Run:
    """What the processes of one training have reported."""

    name: str
    warm: dict[str, Any] = dataclasses.field(default_factory=dict)
    ready: dict[str, Any] = dataclasses.field(default_factory=dict)
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    routing_seconds: list[float] = dataclasses.field(default_factory=list)
    load: list[list[list[int]]] = dataclasses.field(default_factory=list)  # [steps][layers][experts]
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    repeated: list[tuple[int, float]] = dataclasses.field(default_factory=list)  # (step, loss) after the resume
    weights: list[tuple[int, str]] = dataclasses.field(default_factory=list)  # (step, fingerprint): killed, resumed
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    sample: str = ""
    complete: bool = False

    def hear(self, event: dict[str, Any]) -> str:
        kind: str = event.pop("event")
        match kind:
            case "warm":
                self.warm = event
            case "ready":
                self.ready = event
            case "step" if event["step"] <= len(self.losses):
                self.repeated.append((event["step"], event["loss"]))
                return "repeated step"
            case "step":
                self.losses.append(event["loss"])
                self.seconds.append(event["seconds"])
                self.routing_seconds.append(event["routing_seconds"])
                self.load.append(event["load"])
            case "weights":
                self.weights.append((event["step"], event["fingerprint"]))
            case "validation":
                self.validation.append((event["step"], event["loss"]))
            case "memory":
                self.memory = event["parts"]
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

    def same_again(self) -> int:
        """Of the repeated steps, those with the same loss to the last digit."""
        return sum(loss == self.losses[step - 1] for step, loss in self.repeated)

    def same_weights(self) -> bool:
        """Whether killed and resumed process had the same weights at the step of the kill."""
        return len(self.weights) == 2 and self.weights[0] == self.weights[1]


def verdict(runs: dict[str, Run], dtype: str) -> tuple[bool, str]:
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


def progress_made(runs: dict[str, Run]) -> str:
    made = [f"{len(run.losses)} steps of {NAMES[run.name]}" for run in runs.values() if run.losses]
    return " and ".join(made) or "no step"
