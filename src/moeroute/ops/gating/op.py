"""Choosing experts: from router logits to weights, expert ids and scores, and the way back.

Rungs, as in every room: verbs, checks, derivatives, registration.
"""

from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from moeroute import check, dispatch
from moeroute.dispatch import Backend
from moeroute.dtypes import FLOATS, INTEGERS, wide
from moeroute.ops import layout
from moeroute.ops.register import register

Score = Literal["softmax", "sigmoid", "sqrtsoftplus", "topk_softmax", "topk_sigmoid", "none"]
GroupScore = Literal["max", "top2_sum"]
BEST: Literal["max"] = "max"
GROUP_SCORES: dict[GroupScore, int] = {BEST: 1, "top2_sum": 2}  # how many of a group's best values are added up
STRIDED = check.STRIDED
RENORMALIZED: dict[Score, bool] = {
    "softmax": False,
    "sigmoid": True,
    "sqrtsoftplus": True,
    "topk_softmax": False,
    "topk_sigmoid": False,
    "none": False,
}
SCORES: tuple[Score, ...] = get_args(Score)
FLOAT32_MAX = check.LARGEST_FLOAT32


class Gating(NamedTuple):
    """What `gating_topk` returns.

    weights: [T, K], what the experts' outputs are multiplied by.
    expert_ids: int32 [T, K], best first; -1 only where a given id was out of range.
    scores: float32 [T, E] (float64 for float64 logits), before the bias; the logits for "topk_softmax".
    """

    weights: Tensor
    expert_ids: Tensor
    scores: Tensor


_as_gating = Gating._make
torch.serialization.add_safe_globals([Gating])  # for torch.load(weights_only=True)
_module = partial(dispatch.implementation, "gating")


def gating_topk(
    logits: Tensor,
    k: int,
    *,
    score: Score = "softmax",
    bias: Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int | None = None,
    group_score: GroupScore | int = "max",
    renormalize: bool | None = None,
    scaling_factor: float = 1.0,
    eps: float = 1e-20,
    expert_ids: Tensor | None = None,
    weights_dtype: torch.dtype | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    backend: Backend | None = None,
) -> Gating:
    """Choose k experts for every token and weigh them.

    Order: the larger value first, equal values by smaller expert id, +0 equals -0, a NaN larger than every
    number. The ids of a row are valid and distinct whatever the logits. Row t of the result depends on row t
    of the logits alone. Differentiable to any order in the logits, through weights and scores.

    Args:
        logits: [T, E], float16, bfloat16, float32 (all computed in float32) or float64 (reference backend).
        k: experts per token.
        score: how logits become scores s. "softmax"; "sigmoid"; "sqrtsoftplus", the square root of log(1 + exp(x)).
            For the others the scores are the logits themselves, and the weights are the softmax over the chosen ones
            ("topk_softmax"), the sigmoid of each of them ("topk_sigmoid": Llama 4), or they themselves ("none"). To
            select on the logits differs where scores tie: logits [0, -200, -150] with k = 2 choose {0, 2} by
            "topk_softmax", and logits [20, 25, 30, 1] choose [2, 1] by "topk_sigmoid"; by "softmax" and "sigmoid"
            these are equal scores, and the smaller id wins.
        bias: [E], any of the four dtypes; added to the scores for the selection only, in float32 (float64 with
            float64 logits); gets no gradient, and its `requires_grad` never makes that of a result.
        num_groups: the experts form so many equal groups of neighbours.
        topk_groups: groups that stay in (None: all). The experts of the others count as -inf.
        group_score: what a group is worth: its best value ("max" or 1), the sum of its two best ("top2_sum" or 2),
            or the sum of its n best for an int n, at most the size of a group; Megatron-Core's
            ``num_groups, group_topk`` is ``n = k // topk_groups``.
        renormalize: divide the weights by (their sum + eps). None: True for sigmoid and sqrtsoftplus, False for
            the others. With k = 1 a renormalised weight is the constant 1, whatever the logits (Megatron-Core's is
            ``renormalize=k > 1``); with eps = 0 the weights of a token whose sum is 0 are NaN.
        scaling_factor: multiplies the weights, renormalised or not.
        eps: see `renormalize`.
        expert_ids: [T, k], any integer dtype: no selection, these experts are used (router replay), gradients
            still flow. An id outside [0, E) has weight 0, is left out of sums and comes back as -1; repeats are
            slots like any others, and k may exceed E.
        weights_dtype: None is float32 (float64 for float64 logits). Rounded once, from float32.
        out: the three tensors to write into, outside autograd; their rows may be strided. A None weights_dtype
            is then that of the first.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        `Gating`: weights [T, k], expert_ids int32 [T, k] best first, scores [T, E].

    Raises:
        ValueError: a wrong shape, size, number or device.
        TypeError: a wrong type or dtype.

    Equivalent torch, for sigmoid without groups: ``s = logits.float().sigmoid(); ids = (s + bias).topk(k)[1];
    w = s.gather(1, ids); w = w / (w.sum(1, keepdim=True) + eps) * scaling_factor``.

    >>> import torch, moeroute
    >>> gating = moeroute.gating_topk(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), k=2)
    >>> gating.weights, gating.expert_ids
    (tensor([[0.6439, 0.2369]]), tensor([[3, 2]], dtype=torch.int32))
    >>> moeroute.gating_topk(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), k=2, renormalize=True).weights
    tensor([[0.7311, 0.2689]])
    >>> bias = torch.tensor([9.0, 0.0, 0.0, 0.0])
    >>> moeroute.gating_topk(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), k=2, score="sigmoid", bias=bias).expert_ids
    tensor([[0, 3]], dtype=torch.int32)
    """
    operator = "gating_topk"
    _check_matrix(operator, "logits", logits, "[T, E]")
    tokens, num_experts = logits.shape
    renormalize = _check_renormalize(operator, renormalize, score)
    if topk_groups is None:
        topk_groups = num_groups
    group_best = 1 if group_score is BEST else _group_best(operator, group_score)
    _check_choice(operator, logits, bias, expert_ids, k, num_groups, topk_groups, group_best)
    if bias is not None and bias.requires_grad:
        bias = bias.detach()
    scaling_factor = _check_scalar(operator, "scaling_factor", scaling_factor, logits.dtype)
    eps = _check_scalar(operator, "eps", eps, logits.dtype)
    if weights_dtype is None:
        weights_dtype = wide(logits)
        if out is not None and isinstance(out, tuple | list) and len(out) == 3 and isinstance(out[0], Tensor):
            weights_dtype = out[0].dtype
    if weights_dtype is not torch.float32:
        check.float_dtype(operator, "weights_dtype", weights_dtype, _result_dtypes(logits))
    if out is not None:
        if not isinstance(out, tuple | list) or len(out) != 3:
            raise check.wrong_type(operator, "out", "a tuple of three tensors", out)
        names = ("out[0]", "out[1]", "out[2]")
        shapes = ((tokens, k), (tokens, k), (tokens, num_experts))
        dtypes = (weights_dtype, torch.int32, wide(logits))
        for i in range(3):
            others = (logits, bias, expert_ids, *(x for x in out[:i]))
            _check_out(operator, names[i], out[i], shapes[i], dtypes[i], *others)
        logits, bias, expert_ids = layout.resolved(logits), layout.resolved(bias), layout.resolved(expert_ids)
    tensors = logits, bias, expert_ids
    options = k, score, num_groups, topk_groups, group_best, renormalize, scaling_factor, eps, weights_dtype
    if out is not None or dispatch.plain(*tensors):
        found = _module(operator, backend, logits).gating_topk(*tensors, *options, out=out)
        if out is not None:
            for written in out:
                increment_version(written)  # by address, of which autograd knows nothing
    else:
        found = _gating_topk(*tensors, *options, backend)
    return _as_gating(found)


def gating_topk_backward(
    scores: Tensor,
    grad_weights: Tensor,
    expert_ids: Tensor,
    *,
    score: Score,
    renormalize: bool | None,
    scaling_factor: float = 1.0,
    eps: float = 1e-20,
    grad_scores: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """The gradient of `gating_topk` in the logits, [T, E], for callers with an autograd of their own.

    With score="sigmoid" and renormalize=True it has the meaning of aclnnMoeGatingTopKBackward. Differentiable.

    Args:
        scores: [T, E], float32 or float64, as `gating_topk` returned them.
        grad_weights: [T, K], any float dtype.
        expert_ids: [T, K], any integer dtype. Repeated ids of a row add up in slot order, ids outside [0, E) add
            nothing.
        score: see `gating_topk`.
        renormalize: see `gating_topk`.
        scaling_factor: see `gating_topk`.
        eps: see `gating_topk`.
        grad_scores: [T, E] in the dtype of scores; the gradient of the scores, where they were used too.
        out_dtype: of the result, rounded once. None: that of grad_weights.
        out: [T, E], of out_dtype; rows may be strided. The result is written into it, outside autograd.
        backend: "reference", "cpu" or "triton"; None chooses by the device of the tensors.

    Returns:
        The gradient [T, E]; `out` if it was given.

    Raises:
        ValueError: a wrong shape, size, number or device.
        TypeError: a wrong type or dtype.

    Equivalent torch, sigmoid and renormalised: ``g = scaling_factor * grad_weights; w = scores.gather(1, ids);
    D = w.sum(1, keepdim=True) + eps; g = (g - (w / D * g).sum(1, keepdim=True)) / D;
    scores * (1 - scores) * torch.zeros_like(scores).scatter_add(1, ids, g)``.

    >>> import torch, moeroute
    >>> scores = torch.tensor([[0.5, 0.25, 0.75]])
    >>> ids = torch.tensor([[2, 0]])
    >>> moeroute.gating_topk_backward(scores, torch.tensor([[1.0, 0.0]]), ids, score="sigmoid", renormalize=False)
    tensor([[0.0000, 0.0000, 0.1875]])
    """
    operator = "gating_topk_backward"
    _check_backward(operator, scores, grad_weights, expert_ids, grad_scores)
    renormalize = _check_renormalize(operator, renormalize, score)
    scaling_factor = _check_scalar(operator, "scaling_factor", scaling_factor, scores.dtype)
    eps = _check_scalar(operator, "eps", eps, scores.dtype)
    if out_dtype is None:
        out_dtype = grad_weights.dtype if out is None or not isinstance(out, Tensor) else out.dtype
    check.float_dtype(operator, "out_dtype", out_dtype, _result_dtypes(scores))
    if out is not None:
        _check_out(operator, "out", out, tuple(scores.shape), out_dtype, scores, grad_weights, expert_ids, grad_scores)
        scores, grad_weights = layout.resolved(scores), layout.resolved(grad_weights)
        expert_ids, grad_scores = layout.resolved(expert_ids), layout.resolved(grad_scores)
    tensors = scores, grad_weights, expert_ids, grad_scores
    options = score, renormalize, scaling_factor, eps, out_dtype
    if out is not None or dispatch.plain(*tensors):
        gradient: Tensor = _module(operator, backend, scores).gating_topk_backward(*tensors, *options, out=out)
        if out is not None:
            increment_version(out)
    else:
        gradient = _gating_topk_backward(*tensors, *options, backend)
    return gradient


# ---------------------------------------------------------------------------- checks


def _check_matrix(operator: str, argument: str, tensor: Any, letters: str) -> None:
    """A dense floating matrix with at least one column."""
    if type(tensor) is not Tensor:
        check.tensor(operator, argument, tensor)
    try:
        shape = tensor.shape
    except RuntimeError:  # a nested tensor has none
        raise check.not_dense(operator, argument, tensor) from None
    if len(shape) != 2 or shape[1] < 1 or tensor.layout is not STRIDED:
        raise check.wrong_shape(operator, argument, f"{letters} with {letters[-2]} >= 1", tensor)
    if tensor.dtype not in FLOATS:
        raise check.wrong_dtype(operator, argument, "float16, bfloat16, float32 or float64", tensor)


def _check_ids(operator: str, expert_ids: Any, tokens: int, k: int, name: str, other: Tensor) -> None:
    check.tensor(operator, "expert_ids", expert_ids)
    if expert_ids.dtype not in INTEGERS:
        raise check.wrong_dtype(operator, "expert_ids", "of an integer dtype", expert_ids)
    if expert_ids.ndim != 2 or expert_ids.shape[0] != tokens or expert_ids.shape[1] != k:
        raise check.wrong_shape(operator, "expert_ids", f"[T, K] with T = {tokens} and K = {k}", expert_ids)
    if expert_ids.device != other.device:
        check.same_device(operator, name, other, "expert_ids", expert_ids)


def _check_bias(operator: str, bias: Any, num_experts: int, logits: Tensor) -> None:
    check.tensor(operator, "bias", bias)
    if bias.ndim != 1 or bias.shape[0] != num_experts:
        raise check.wrong_shape(operator, "bias", f"[E] with E = {num_experts}, as logits", bias)
    if bias.dtype not in FLOATS:
        raise check.wrong_dtype(operator, "bias", "float16, bfloat16, float32 or float64", bias)
    if bias.device != logits.device:
        check.same_device(operator, "logits", logits, "bias", bias)


def _group_best(operator: str, group_score: Any) -> int:
    """How many of a group's best values are added up; whether it has as many is seen later."""
    if isinstance(group_score, int) and not isinstance(group_score, bool):
        return check.integer(operator, "group_score", group_score, 1)
    check.one_of(operator, "group_score", group_score, tuple(GROUP_SCORES))
    return GROUP_SCORES[group_score]


def _check_groups(operator: str, num_experts: int, num_groups: int, topk_groups: int, group_best: int) -> None:
    if type(num_groups) is not int or num_groups < 1 or num_groups > num_experts:
        check.integer(operator, "num_groups", num_groups, 1, num_experts)
    if num_experts % num_groups != 0:
        raise check.wrong_value(operator, "num_groups", f"a divisor of E = {num_experts}", num_groups)
    if type(topk_groups) is not int or topk_groups < 1 or topk_groups > num_groups:
        check.integer(operator, "topk_groups", topk_groups, 1, num_groups)
    size = num_experts // num_groups
    if group_best == 2 and size < 2:
        wanted = "'max' where groups have one expert"
        raise check.wrong_value(operator, "group_score", wanted, f"'top2_sum' with num_groups = {num_groups}")
    if not 1 <= group_best <= size:
        check.integer(operator, "group_score", group_best, 1, size)


def _check_choice(
    operator: str,
    logits: Tensor,
    bias: Any,
    expert_ids: Any,
    k: Any,
    num_groups: Any,
    topk_groups: Any,
    group_best: Any,
) -> None:
    tokens, num_experts = logits.shape
    _check_groups(operator, num_experts, num_groups, topk_groups, group_best)
    if expert_ids is None:
        most = num_experts // num_groups * topk_groups
        if type(k) is not int or k < 1 or k > most:
            check.integer(operator, "k", k, 1, most)
    else:
        check.integer(operator, "k", k, 1)
        _check_ids(operator, expert_ids, tokens, k, "logits", logits)
    if bias is not None:
        _check_bias(operator, bias, num_experts, logits)


def _check_backward(operator: str, scores: Any, grad_weights: Any, expert_ids: Any, grad_scores: Any) -> None:
    _check_matrix(operator, "scores", scores, "[T, E]")
    if scores.dtype is not torch.float32 and scores.dtype is not torch.float64:
        raise check.wrong_dtype(operator, "scores", "float32 or float64", scores)
    tokens = scores.shape[0]
    _check_matrix(operator, "grad_weights", grad_weights, "[T, K]")
    if grad_weights.shape[0] != tokens:
        raise check.wrong_shape(operator, "grad_weights", f"[T, K] with T = {tokens}, as scores", grad_weights)
    if grad_weights.device != scores.device:
        check.same_device(operator, "scores", scores, "grad_weights", grad_weights)
    if grad_weights.dtype is torch.float64 and scores.dtype is not torch.float64:
        raise check.wrong_dtype(operator, "grad_weights", "float64 with float64 scores only", grad_weights)
    _check_ids(operator, expert_ids, tokens, grad_weights.shape[1], "scores", scores)
    if grad_scores is not None:
        _check_matrix(operator, "grad_scores", grad_scores, "[T, E]")
        if grad_scores.shape != scores.shape:
            raise check.wrong_shape(operator, "grad_scores", f"{list(scores.shape)}, as scores", grad_scores)
        if grad_scores.dtype is not scores.dtype:
            raise check.wrong_dtype(operator, "grad_scores", f"{scores.dtype}, as scores", grad_scores)
        if grad_scores.device != scores.device:
            check.same_device(operator, "scores", scores, "grad_scores", grad_scores)


def _result_dtypes(given: Tensor) -> tuple[torch.dtype, ...]:
    return FLOATS if given.dtype is torch.float64 else FLOATS[:3]


def _check_scalar(operator: str, argument: str, value: Any, dtype: torch.dtype) -> float:
    """A finite float, in float32 too where that is what it meets."""
    if type(value) is float and abs(value) <= FLOAT32_MAX:
        return value
    return check.finite_in(operator, argument, value, dtype)


def _check_renormalize(operator: str, renormalize: Any, score: Any) -> bool:
    try:
        usual = RENORMALIZED[score]
    except (KeyError, TypeError):  # unknown, unhashable
        check.one_of(operator, "score", score, SCORES)
        raise
    if renormalize is None:
        return usual
    if not isinstance(renormalize, bool):
        raise check.wrong_type(operator, "renormalize", "a bool or None", renormalize)
    return renormalize


def _check_out(
    operator: str, argument: str, out: Any, shape: tuple[int, ...], dtype: torch.dtype, *inputs: Tensor | None
) -> None:
    """A buffer of the caller's: whole rows, anywhere, that share no memory with an input."""
    check.buffer(operator, argument, out, shape, dtype)
    if shape[1] > 1 and out.stride(1) != 1:
        raise check.wrong_value(operator, argument, "a tensor with contiguous rows", f"strides {out.stride()}")
    dispatch.direct(operator, argument, out, *inputs)
    check.writable(operator, argument, out, *inputs)


# ---------------------------------------------------------------------------- derivatives


def _gating_topk_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, _, _, _, score, _, _, _, renormalize, scaling_factor, eps, weights_dtype, backend = inputs
    _, expert_ids, scores = output
    ctx.save_for_backward(scores, expert_ids)
    ctx.options = score, renormalize, scaling_factor, eps
    ctx.logits_dtype, ctx.weights_dtype, ctx.backend = logits.dtype, weights_dtype, backend
    ctx.set_materialize_grads(False)


def _gating_topk_derivative(
    ctx: Any, grad_weights: Tensor | None, _: Tensor | None, grad_scores: Tensor | None
) -> tuple[Any, ...]:
    scores, expert_ids = ctx.saved_tensors
    grad_logits = None
    if grad_weights is not None or grad_scores is not None:
        if grad_weights is None:
            grad_weights = scores.new_zeros(expert_ids.shape, dtype=ctx.weights_dtype)
        grad_logits = _gating_topk_backward(
            scores, grad_weights, expert_ids, grad_scores, *ctx.options, ctx.logits_dtype, ctx.backend
        )
    return (grad_logits, *(None,) * 12)


def _gating_topk_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    scores, grad_weights, expert_ids, grad_scores, score, renormalize, scaling_factor, eps, out_dtype, _ = inputs
    ctx.save_for_backward(scores, grad_weights, expert_ids, grad_scores)
    ctx.options = score, renormalize, scaling_factor, eps
    ctx.out_dtype = out_dtype


def _gating_topk_backward_derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    scores, grad_weights, expert_ids, grad_scores = ctx.saved_tensors
    inputs = (scores, grad_weights) if grad_scores is None else (scores, grad_weights, grad_scores)
    pullback = torch.func.vjp(_float64_backward(expert_ids, ctx.options), *inputs)[1]
    to_scores, to_grad_weights, *to_grad_scores = pullback(grad.double())
    return to_scores, to_grad_weights, None, to_grad_scores[0] if to_grad_scores else None, *(None,) * 6


def _float64_backward(expert_ids: Tensor, options: tuple[Any, ...]) -> Any:
    """The backward as a function of scores, grad_weights and perhaps grad_scores.

    In float64 the reference is differentiable torch: what is not a first derivative in reverse mode
    comes from these lines.
    """
    reference = dispatch.module("gating", "reference")

    def backward(scores: Tensor, grad_weights: Tensor, grad_scores: Tensor | None = None) -> Any:
        return reference.gating_topk_backward(
            scores.double(),
            grad_weights.double(),
            expert_ids,
            None if grad_scores is None else grad_scores.double(),
            *options,
            torch.float64,
        )

    return backward


def _gating_topk_tangent(ctx: Any, inputs: list[Any], outputs: tuple[Tensor, ...], tangents: tuple[Any, ...]) -> Any:
    _, expert_ids, scores = outputs
    if tangents[0] is None:
        return None, None, None
    # The backward is linear in the gradients; its transpose maps tangents of logits to tangents of results.
    zeros = scores.new_zeros(expert_ids.shape, dtype=ctx.weights_dtype), torch.zeros_like(scores)
    backward = _float64_backward(expert_ids, ctx.options)
    pullback = torch.func.vjp(lambda *grads: backward(scores, *grads), *zeros)[1]
    weights_tangent, scores_tangent = pullback(tangents[0].double())
    return weights_tangent, None, scores_tangent


def _gating_topk_backward_tangent(
    ctx: Any, inputs: list[Any], outputs: tuple[Tensor, ...], tangents: tuple[Any, ...]
) -> Any:
    pairs = [(inputs[i], tangents[i]) for i in (0, 1, 3) if inputs[i] is not None]  # all but the expert ids
    primals = tuple(x for x, _ in pairs)
    moves = tuple(torch.zeros_like(x) if move is None else move for x, move in pairs)
    backward = _float64_backward(inputs[2], ctx.options)
    # Dual levels do not nest, so no torch.func.jvp here: the transpose of the transpose.
    zero = torch.zeros_like(inputs[0], dtype=torch.float64)
    pushforward = torch.func.vjp(lambda grad: torch.func.vjp(backward, *primals)[1](grad), zero)[1]
    return pushforward(moves)[0].to(ctx.out_dtype)


# ---------------------------------------------------------------------------- registration
#
# A registered operator may be called by anybody, and stands in exported graphs: it looks at all that a kernel indexes
# with. A verb has looked already, and calls the kernel itself where it may.


def _gating_topk_operator(
    logits: Tensor,
    bias: Tensor | None,
    expert_ids: Tensor | None,
    k: int,
    score: str,
    num_groups: int,
    topk_groups: int,
    group_best: int,
    renormalize: bool,
    scaling_factor: float,
    eps: float,
    weights_dtype: torch.dtype,
    backend: Backend | None,
) -> tuple[Tensor, Tensor, Tensor]:
    operator = "gating_topk"
    _check_matrix(operator, "logits", logits, "[T, E]")
    check.one_of(operator, "score", score, SCORES)
    _check_choice(operator, logits, bias, expert_ids, k, num_groups, topk_groups, group_best)
    check.float_dtype(operator, "weights_dtype", weights_dtype, _result_dtypes(logits))
    _check_scalar(operator, "scaling_factor", scaling_factor, logits.dtype)
    _check_scalar(operator, "eps", eps, logits.dtype)
    found: tuple[Tensor, Tensor, Tensor] = _module(operator, backend, logits).gating_topk(
        logits,
        bias,
        expert_ids,
        k,
        score,
        num_groups,
        topk_groups,
        group_best,
        renormalize,
        scaling_factor,
        eps,
        weights_dtype,
    )
    return found


def _gating_topk_backward_operator(
    scores: Tensor,
    grad_weights: Tensor,
    expert_ids: Tensor,
    grad_scores: Tensor | None,
    score: str,
    renormalize: bool,
    scaling_factor: float,
    eps: float,
    out_dtype: torch.dtype,
    backend: Backend | None,
) -> Tensor:
    operator = "gating_topk_backward"
    _check_backward(operator, scores, grad_weights, expert_ids, grad_scores)
    check.one_of(operator, "score", score, SCORES)
    check.float_dtype(operator, "out_dtype", out_dtype, _result_dtypes(scores))
    _check_scalar(operator, "scaling_factor", scaling_factor, scores.dtype)
    _check_scalar(operator, "eps", eps, scores.dtype)
    gradient: Tensor = _module(operator, backend, scores).gating_topk_backward(
        scores, grad_weights, expert_ids, grad_scores, score, renormalize, scaling_factor, eps, out_dtype
    )
    return gradient


_gating_topk = register(
    "gating_topk(Tensor logits, Tensor? bias, Tensor? expert_ids, SymInt k, str score, SymInt num_groups, "
    "SymInt topk_groups, SymInt group_best, bool renormalize, float scaling_factor, float eps, "
    "ScalarType weights_dtype, str? backend) -> (Tensor, Tensor, Tensor)",
    _gating_topk_operator,
    lambda logits, bias, expert_ids, k, *rest: (
        logits.new_empty((logits.shape[0], k), dtype=rest[-2]),
        logits.new_empty((logits.shape[0], k), dtype=torch.int32),
        logits.new_empty(logits.shape, dtype=wide(logits)),
    ),
    derivative=_gating_topk_derivative,
    setup=_gating_topk_setup,
    tangent=_gating_topk_tangent,
)
_gating_topk_backward = register(
    "gating_topk_backward(Tensor scores, Tensor grad_weights, Tensor expert_ids, Tensor? grad_scores, str score, "
    "bool renormalize, float scaling_factor, float eps, ScalarType out_dtype, str? backend) -> Tensor",
    _gating_topk_backward_operator,
    lambda scores, *rest: scores.new_empty(scores.shape, dtype=rest[-2]),
    derivative=_gating_topk_backward_derivative,
    setup=_gating_topk_backward_setup,
    tangent=_gating_topk_backward_tangent,
)
