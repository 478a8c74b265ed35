"""Cases of gating: every score, group rule and dtype, with ties, NaN and given ids; its gradient in two ways."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeroute.conformance.case import Case
from moeroute.conformance.generator import Stream

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Options = dict[str, Any]
MODES: tuple[Options, ...] = (
    {"score": "softmax"},
    {"score": "softmax", "renormalize": True, "scaling_factor": 1.5},
    {"score": "sigmoid", "scaling_factor": 2.5},
    {"score": "sigmoid", "renormalize": False},
    {"score": "sqrtsoftplus", "eps": 1e-3},
    {"score": "topk_softmax"},
    {"score": "topk_sigmoid"},
    {"score": "none", "renormalize": True},
)
# Experts, k, groups, groups that stay. All of three groups of three; many slots with the scores that differ most.
SIZES = ((12, 3, 1, None), (24, 9, 8, 3), (300, 8, 1, None))
LARGE = ((40, 40, 1, None), (1025, 34, 5, 2))


def short(dtype: torch.dtype) -> str:
    """The dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def words(options: Options) -> str:
    """Options as they are in a case's name: tensors by their presence, defaults left out."""
    shown = (f"{name}={'given' if isinstance(value, Tensor) else value}" for name, value in options.items())
    return " ".join(text.replace(", ", ",").replace("torch.", "") for text in shown)


def gating_cases(num_tokens: int) -> Iterator[Case]:
    """Gating, gating with given ids, and the gradients."""
    many = tuple(itertools.product(MODES[1:4:2] + MODES[5:7], LARGE))
    for number, (mode, (experts, k, groups, kept)) in enumerate((*itertools.product(MODES, SIZES), *many)):
        for dtype in DTYPES if (experts, mode["score"]) == (12, "sigmoid") else (DTYPES[number % 3],):
            options = {**mode}
            if groups > 1:
                options |= {"num_groups": groups, "topk_groups": kept}
            if dtype is torch.bfloat16:
                options |= {"group_score": min(2 + number % 2, experts // groups), "weights_dtype": dtype}
            size = f"T={num_tokens} E={experts} k={k} {short(dtype)}"
            shape = (num_tokens, experts, k, dtype)
            biased = dtype is not torch.float16
            stream = f"gating {size} {words(mode)}"
            yield Case(
                f"gating_topk {size} {words(options)}{' biased' if biased else ''}",
                "gating_topk",
                partial(_forward, shape, options, biased),
                frozenset({"ties", "nan", "inf"}),
                stream=stream,
            )
            ids = f"{size} given ids {words(mode)}"
            yield Case(
                f"gating_topk {ids}", "gating_topk", partial(_replayed, shape, mode), frozenset({"nan", "no expert"})
            )
            yield Case(
                f"gating_topk_backward {ids}",
                "gating_topk_backward",
                partial(_backward, shape, mode, False),
                frozenset({"no expert"}),
            )
            yield Case(
                f"gating_topk_backward through autograd {ids}",
                "gating_topk_backward",
                partial(_through, shape, mode),
                frozenset({"nan", "no expert"}),
                through="autograd",
            )
            if experts <= 24:
                yield Case(
                    f"gating_topk_backward {ids} grad_scores",
                    "gating_topk_backward",
                    partial(_backward, shape, mode, True),
                    frozenset({"no expert"}),
                )
    yield from _edges()


def _edges() -> Iterator[Case]:
    """What selection gets wrong: whole rows of ties, of NaN, of infinities; sizes of one; no token."""
    for score in ("softmax", "sigmoid", "topk_softmax"):
        for what in ("ties", "ties of a few values", "nan", "minus infinity", "zeros of both signs"):
            yield Case(
                f"gating_topk edge {score} {what}",
                "gating_topk",
                partial(_edge, score, what),
                frozenset({"nan" if what == "nan" else "inf" if "infinity" in what else "ties"}),
            )
    for shape in ((1, 1, 1), (1, 9, 9), (0, 8, 2), (3, 257, 1), (2, 64, 8)):
        yield Case(
            f"gating_topk edge T={shape[0]} E={shape[1]} k={shape[2]}",
            "gating_topk",
            partial(_forward, (*shape, torch.float32), {"score": "softmax"}, False),
            frozenset({"size"}),
        )
    for dtype in DTYPES:
        for eps in (1e-20, 1e-3):
            yield Case(
                f"normalize_scores {short(dtype)} eps={eps}",
                "normalize_scores",
                partial(_normalize, dtype, eps),
                through="moeroute",
            )


def _logits(draw: Stream, shape: tuple[int, int, int, torch.dtype]) -> Tensor:
    num_tokens, experts, _, dtype = shape
    logits = draw.normal("logits", num_tokens, experts)
    logits[:1] = 0.25  # a row of ties
    return draw.odd("logits", logits).to(dtype)


def _ids(draw: Stream, shape: tuple[int, int, int, torch.dtype]) -> Tensor:
    return draw.integers("ids", -1, shape[1] + 1, shape[0], shape[2])


def _forward(shape: tuple[int, int, int, torch.dtype], options: Options, biased: bool, draw: Stream) -> Options:
    bias = {"bias": draw.normal("bias", shape[1]) * 0.125} if biased else {}
    return {"logits": _logits(draw, shape), "k": shape[2], **options, **bias}


def _replayed(shape: tuple[int, int, int, torch.dtype], mode: Options, draw: Stream) -> Options:
    return {"logits": _logits(draw, shape), "k": shape[2], **mode, "expert_ids": _ids(draw, shape)}


def _through(shape: tuple[int, int, int, torch.dtype], mode: Options, draw: Stream) -> Options:
    grads = {
        "grad_weights": draw.normal("grad_weights", shape[0], shape[2]),
        "grad_scores": draw.normal("grad_scores", shape[0], shape[1]),
    }
    return _replayed(shape, mode, draw) | grads


def _backward(shape: tuple[int, int, int, torch.dtype], mode: Options, of_scores: bool, draw: Stream) -> Options:
    num_tokens, experts, k, dtype = shape
    score = mode["score"]
    scores = draw.uniform("scores", num_tokens, experts)
    if score in ("topk_softmax", "topk_sigmoid", "none"):
        scores = scores * 4 - 2
    grads = draw.normal("grad_weights", num_tokens, k)
    return {
        "scores": scores,
        "grad_weights": grads,
        "expert_ids": _ids(draw, shape),
        "score": score,
        "renormalize": mode.get("renormalize", score in ("sigmoid", "sqrtsoftplus")),
        **{name: mode[name] for name in ("scaling_factor", "eps") if name in mode},
        **({"grad_scores": draw.normal("grad_scores", num_tokens, experts)} if of_scores else {}),
        "out_dtype": dtype,
    }


def _edge(score: str, what: str, draw: Stream) -> Options:
    logits = draw.normal("logits", 7, 40)
    if what == "ties":
        logits[:] = draw.normal("value", 7, 1)
    elif what == "ties of a few values":
        logits = draw.integers("few", -2, 3, 7, 40).float()
    elif what == "nan":
        logits[::2] = torch.nan
        logits[1, :5] = torch.nan
    elif what == "minus infinity":
        logits[:, 3:] = -torch.inf
        logits[3] = -torch.inf
        logits[4, 20] = torch.inf
    else:
        logits = torch.where(draw.chance("minus", 0.5, 7, 40), -0.0, 0.0)
    return {"logits": logits, "k": 6, "score": score}


def _normalize(dtype: torch.dtype, eps: float, draw: Stream) -> Options:
    scores = draw.uniform("scores", 11, 300)
    scores[2] = 0.0
    mask = torch.zeros(11, dtype=torch.bool)
    mask[5] = True
    return {"scores": scores.to(dtype), "eps": eps, "padding_mask": mask}
