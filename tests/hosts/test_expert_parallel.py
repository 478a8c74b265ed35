"""The host's own expert parallelism over our experts: two processes, each with half of them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = r"""
import copy
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from hosts import models
from moeroute.interop import huggingface
from transformers.distributed.expert_parallel import AllReduceEP, AllToAllEP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
huggingface.register()
ranks = init_device_mesh("cpu", (2,))
alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ranks", "one"))["one"]
generator = torch.Generator().manual_seed(0)

def check(architecture, kind, mine):
    model = models.tiny(architecture, torch.float64)
    model.set_experts_implementation("eager")
    whole = next(m for m in model.modules() if hasattr(m, "is_concatenated"))
    hidden = torch.randn(12, whole.down_proj.shape[2 if whole.is_transposed else 1], generator=generator, dtype=torch.float64)
    weights, ids = torch.rand(12, 8, generator=generator, dtype=torch.float64).topk(3)
    ids[:4] = ids[:4] % 4  # nothing for rank 1
    leaves = [t.clone().requires_grad_() for t in (hidden, weights)]
    expected = whole(leaves[0], ids, leaves[1])  # on one rank, by the host's loop
    expected.square().sum().backward()

    part = copy.deepcopy(whole)
    part.config._experts_implementation_internal = "moeroute"
    half = slice(4 * rank, 4 * rank + 4)
    for name, parameter in whole.named_parameters():
        setattr(part, name, nn.Parameter(parameter.detach()[half].clone()))
    part.num_experts, part._is_expert_parallel = 4, True
    assert huggingface.check(nn.ModuleDict({"experts": part})) == {"experts": "moeroute"}
    inputs = [t[mine].clone().requires_grad_() for t in (hidden, weights)]
    output = kind(part, ranks, ranks if kind is AllReduceEP else alone)(inputs[0], ids[mine], inputs[1])
    output.square().sum().backward()
    torch.testing.assert_close(output, expected[mine])
    for got, leaf in zip(inputs, leaves):
        torch.testing.assert_close(got.grad, leaf.grad[mine])
    for name, parameter in part.named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad[half])

for architecture in ("qwen3_moe", "gpt_oss", "aria"):
    check(architecture, AllReduceEP, slice(None))
    check(architecture, AllToAllEP, slice(6 * rank, 6 * rank + 6))
    check(architecture, AllToAllEP, slice(12 * rank, 12))  # rank 1 has no tokens
dist.destroy_process_group()
print("same")
"""


def test_two_ranks() -> None:
    """Outputs and every gradient of each rank, against all experts on one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            printed, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors[-3000:]
            assert printed.strip() == "same"
    finally:
        for process in ranks:
            process.kill()
