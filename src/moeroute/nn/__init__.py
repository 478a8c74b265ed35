"""A Mixture-of-Experts layer for training: router, routing by this package's operators, experts.

>>> import torch
>>> from moeroute.nn import MoE, SwiGLU
>>> _ = torch.manual_seed(0)
>>> layer = MoE(hidden_size=16, intermediate_size=32, num_experts=8, k=2, shared_expert=SwiGLU(16, 32))
>>> x = torch.randn(4, 5, 16)
>>> output, routing = layer(x, return_routing=True)
>>> output.shape, routing.gating.weights.shape, int(routing.plan.tokens_per_expert.sum())
(torch.Size([4, 5, 16]), torch.Size([20, 2]), 40)
>>> loss = output.square().mean() + 1e-2 * routing.statistics().loss() + 1e-3 * routing.z_loss()
>>> loss.backward()

The layer keeps no counters and no "last" anything: what a step wants to know about its routing comes
back as a value. So recomputation (activation checkpointing) cannot count a token twice, and two
threads cannot mix up their batches.

    router.py       logits and the choice
    experts.py      the products of the experts, and `SwiGLU` for a shared one
    moe.py          the layer: router, permute, experts, unpermute
    routing.py      what a forward pass decided, and `RoutingRecord`, which keeps that for a replay
    huggingface.py  weights under the names of Hugging Face's models
"""

from moeroute.nn.experts import Experts as Experts
from moeroute.nn.experts import SwiGLU as SwiGLU
from moeroute.nn.moe import MoE as MoE
from moeroute.nn.router import Router as Router
from moeroute.nn.routing import Routing as Routing
from moeroute.nn.routing import RoutingRecord as RoutingRecord
from moeroute.nn.routing import RoutingSummary as RoutingSummary
from moeroute.ops.activations.op import activate as activate
from moeroute.ops.experts import grouped_linear as grouped_linear
