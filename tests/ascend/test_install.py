"""torch_npu installed: its modules, devices and operators, what is put back, and programs that run under it."""

import csv
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moeroute import memory_stats
from moeroute.interop.torch_npu import install, uninstall
from moeroute.interop.torch_npu.arguments import FUNCTIONS
from moeroute.interop.torch_npu.schemas import schemas_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed() -> Iterator[Any]:
    install()
    yield sys.modules["torch_npu"]
    uninstall()


def test_import(installed: Any) -> None:
    import torch_npu
    import torch_npu.npu
    from torch_npu.contrib import transfer_to_npu

    assert torch_npu is installed
    assert torch_npu.npu is torch.npu  # type: ignore[attr-defined]
    assert torch_npu.__version__.startswith(torch.__version__)
    assert torch_npu.__spec__ is not None
    assert transfer_to_npu.__name__ == "torch_npu.contrib.transfer_to_npu"
    for name, function in FUNCTIONS.items():
        assert getattr(torch_npu, name) is function


def test_a_name_that_is_not_built(installed: Any) -> None:
    assert hasattr(installed, "npu_moe_distribute_dispatch_v2")
    assert not hasattr(installed, "npu_fusion_attention")
    with pytest.raises(
        AttributeError, match=r"no 'npu_moe_token_permut'; the nearest that it has: npu_moe_token_permute"
    ):
        installed.npu_moe_token_permut  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'torch_npu\._C' of moeroute has no '_npu_getDeviceCount'"):
        installed._C._npu_getDeviceCount  # noqa: B018


def device_is_there() -> bool:
    """A process that has heard of devices named "npu" keeps the name, and a module that says that there are none."""
    return bool(hasattr(torch, "npu") and torch.npu.is_available())


def test_a_second_call_and_undoing() -> None:
    before = {name: vars(torch.Tensor).get(name) for name in ("npu", "is_npu", "histc")}
    histc = torch.histc
    enabled = memory_stats()["enabled"]
    install()
    install()
    assert not memory_stats()["enabled"]
    uninstall()
    uninstall()
    assert {name: vars(torch.Tensor).get(name) for name in before} == before
    assert torch.histc is histc
    assert memory_stats()["enabled"] == enabled
    assert not device_is_there()
    assert not [name for name in sys.modules if name.split(".")[0] == "torch_npu"]


def test_another_torch_npu_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_npu.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match=rf"torch_npu must be no other than moeroute's; got the one of {tmp_path}"):
        install()
    assert not device_is_there()


# ---------------------------------------------------------------------------- operators of torch


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_an_operator(installed: Any, name: str) -> None:
    operator = getattr(torch.ops.npu, name)
    assert set(operator.overloads()) == {overload or "default" for overload in schemas_of(FUNCTIONS[name])}


def test_operators_are_differentiable(installed: Any) -> None:
    tokens = torch.randn(3, 2, requires_grad=True)
    ids = torch.tensor([[1, 0], [1, 2], [0, 2]])
    rows, index = torch.ops.npu.npu_moe_token_permute(tokens, ids)
    out = torch.ops.npu.npu_moe_token_unpermute(rows, index, torch.full((3, 2), 0.5))
    torch.testing.assert_close(out, tokens)
    out.sum().backward()
    assert torch.equal(tokens.grad, torch.ones(3, 2))  # type: ignore[arg-type]
    grads = torch.ops.npu.npu_moe_token_unpermute_grad_v2(torch.ones(6, 2), index, 6, torch.float32)
    assert grads[1] is None


def test_numbers_and_types_in_operators(installed: Any) -> None:
    grad, index = torch.ones(4, 2), torch.arange(4)
    by_type = torch.ops.npu.npu_moe_token_permute_grad_v2(grad, index, 2, torch.bfloat16, 2)
    by_number = torch.ops.npu.npu_moe_token_permute_grad_v2(grad, index, 2, 15, 2)
    assert by_type.dtype is by_number.dtype is torch.bfloat16
    assert torch.equal(by_type, by_number)


def test_the_names_of_a_serving_framework(installed: Any) -> None:
    x = torch.randn(4, 8)
    names = ("k_group", "group_count", "group_select_mode", "renorm", "norm_type", "out_flag")
    options: dict[str, Any] = dict(zip(names, (1, 1, 1, 0, 1, False), strict=True))
    y, ids, _ = torch.ops._C_ascend.moe_gating_top_k(
        x, k=2, **options, routed_scaling_factor=1.0, eps=1e-20, bias_opt=torch.zeros(8)
    )
    wanted = installed.npu_moe_gating_top_k(x, 2, group_select_mode=1, norm_type=1, bias=torch.zeros(8))
    assert torch.equal(y, wanted[0])
    assert torch.equal(ids, wanted[1])
    options |= {"norm_type": 2, "routed_scaling_factor": 2.5, "bias": None}
    y, ids, _ = torch.ops._C_ascend.moe_gating_top_k_hash(
        x, k=2, **options, eps=1e-20, input_ids=torch.tensor([1, 0, 1, 1]), tid2eid=torch.tensor([[3, 1], [0, 2]])
    )
    assert ids.tolist() == [[0, 2], [3, 1], [0, 2], [0, 2]]
    routed = torch.ops._C_ascend.npu_moe_init_routing_custom(x, ids, expert_num=8, quant_mode=-1)
    assert torch.equal(routed[0], installed.npu_moe_init_routing_v2(x, ids, expert_num=8)[0])


@pytest.mark.parametrize("limit", [None, 0.0, 0.75])
def test_the_fused_products_of_a_serving_framework(installed: Any, limit: float | None) -> None:
    x, weight = (torch.randint(-9, 9, shape, dtype=torch.int8) for shape in ((5, 6), (2, 6, 8)))
    scale, x_scale = torch.rand(2, 8) / 20, torch.rand(5)
    ends = torch.tensor([2, 5])
    operators = torch.ops._C_ascend
    options = {} if limit is None else {"swiglu_limit": limit}
    one = operators.grouped_matmul_swiglu_quant_weight_nz(x, weight, scale, x_scale, ends, **options)
    many = operators.grouped_matmul_swiglu_quant_weight_nz_tensor_list(
        x, list(weight), list(scale), x_scale, ends, **options
    )
    two = operators.grouped_matmul_swiglu_quant_v2(
        x, [weight], [scale], x_scale, ends.diff(prepend=ends.new_zeros(1)), group_list_type=1, **options
    )
    assert (len(one), len(many), len(two)) == (3, 3, 2)
    product = torch.cat([x[:2].float() @ weight[0].float() * scale[0], x[2:].float() @ weight[1].float() * scale[1]])
    gate, linear = (product * x_scale[:, None]).chunk(2, 1)
    if limit:
        gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    wanted = torch.nn.functional.silu(gate) * linear
    for rows, scales, *_ in (one, many, two):
        torch.testing.assert_close(rows * scales[:, None], wanted, rtol=0, atol=wanted.abs().max().item() / 200)
    with pytest.raises(NotImplementedError, match="bias=a tensor is not available"):
        operators.grouped_matmul_swiglu_quant_weight_nz(x, weight, scale, x_scale, ends, bias=scale)


# ---------------------------------------------------------------------------- torch.npu


def test_streams_events_and_the_device(installed: Any) -> None:
    npu = installed.npu
    assert npu.is_available()
    assert (npu.device_count(), npu.current_device()) == (1, 0)
    npu.set_device("npu:0")
    stream = npu.current_stream()
    stream.wait_stream(npu.Stream())
    start, stop = npu.Event(enable_timing=True), npu.Event(enable_timing=True)
    start.record()
    stream.wait_event(start)
    assert stream.record_event() is not None
    stop.record(stream)
    stop.synchronize()
    npu.synchronize()
    assert 0 <= start.elapsed_time(stop) < 10_000
    with npu.stream(stream), npu.device(0):
        npu.empty_cache()
    with pytest.raises(RuntimeError, match="both events must be recorded"):
        start.elapsed_time(npu.Event())
    free, whole = npu.mem_get_info()
    assert 0 < free <= whole
    assert 0 < npu.memory_allocated() <= whole
    assert npu.max_memory_allocated() > 0
    npu.config.allow_internal_format = False
    npu.set_compile_mode(jit_compile=False)


def test_seeds(installed: Any) -> None:
    installed.npu.manual_seed(7)
    state = installed.npu.get_rng_state()
    first = torch.rand(3)
    installed.npu.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_tensors_and_modules_are_there_already(installed: Any) -> None:
    x: Any = torch.ones(2)
    layer: Any = torch.nn.Linear(2, 2)
    assert x.npu() is x
    assert x.npu(0, non_blocking=True) is x
    assert layer.npu() is layer
    assert not x.is_npu


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_histc_counts_integers(installed: Any, dtype: torch.dtype) -> None:
    """Both ways in which frameworks count experts."""
    ids = torch.tensor([0, 3, 3, 1, 3], dtype=dtype)
    counts = torch.histc(ids, bins=4, min=0, max=4)
    assert counts.dtype is dtype
    assert counts.tolist() == [1, 1, 0, 3]
    assert ids.histc(bins=4, min=0, max=4).tolist() == [1, 1, 0, 3]
    assert torch.histc(ids.float(), bins=4, min=0, max=3).tolist() == [1, 1, 0, 3]


# ---------------------------------------------------------------------------- devices


def test_devices() -> None:
    """In a process of its own: torch keeps the name of a device, and the other tests of this one would see it."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "device_cases.py"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


# ---------------------------------------------------------------------------- programs


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_script_is_run_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    (tmp_path / "script.py").write_text(
        "import sys, torch, torch_npu\n"
        "from beside import NAME\n"
        "print(__name__, NAME, sys.argv[1:], torch.ones(1).to('npu').device, torch_npu.npu.is_available())\n"
        "sys.exit(3)\n"
    )
    done = run("-m", "moeroute.interop.torch_npu", "script.py", "--steps", "-m", "5", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "__main__ beside ['--steps', '-m', '5'] cpu True\n"), done.stderr
    done = run("-m", "moeroute.interop.torch_npu", "-m", "script", "--more", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "__main__ beside ['--more'] cpu True\n"), done.stderr
    done = run("-m", "moeroute.interop.torch_npu", cwd=tmp_path)
    assert done.returncode == 2
    assert "usage: python -m moeroute.interop.torch_npu" in done.stderr


def test_a_process_group_named_hccl(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import torch, torch_npu\n"
        "import torch.distributed as dist\n"
        "from pathlib import Path\n"
        "dist.init_process_group('hccl', init_method=Path('store').resolve().as_uri(), rank=0, world_size=1)\n"
        "x = torch.ones(2, device='npu')\n"
        "dist.all_reduce(x)\n"
        "name = dist.group.WORLD._get_backend(torch.device('npu')).get_hccl_comm_name(0)\n"
        "ids = torch.tensor([[0, 1]], dtype=torch.int32)\n"
        "rows = torch_npu.npu_moe_distribute_dispatch_v2(torch.ones(1, 4), ids, name, 1, 0, 2)[0]\n"
        "torch.save({'x': x}, __file__ + '.pt')\n"
        "print(dist.get_backend(), x.tolist(), tuple(rows.shape), torch.load(__file__ + '.pt', map_location='npu:0')['x'].device)\n"
        "dist.destroy_process_group()\n"
    )
    done = run("-m", "moeroute.interop.torch_npu", "script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "hccl [1.0, 1.0] (2, 4) cpu\n"), done.stderr


def test_a_test_session(tmp_path: Path) -> None:
    """The two lines that replace a mock: a test file for Ascend, and the plugin on the command line."""
    (tmp_path / "test_ascend.py").write_text(
        "import torch\nimport torch_npu\n\n"
        "def test_permute():\n"
        "    rows, index = torch_npu.npu_moe_token_permute(torch.ones(2, 3).npu(), torch.tensor([[1, 0], [0, 1]]))\n"
        "    assert index.tolist() == [2, 0, 1, 3]\n\n"
        "def test_device(request):\n"
        "    assert request.config.getoption('npu_devices')\n"
        "    assert torch.ones(2, device='npu').device.type == 'cpu'\n"
    )
    plugin = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "moeroute.interop.torch_npu.plugin")
    done = run(*plugin, "--npu-devices", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_the_example_learns_as_plain_torch_does(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "ascend" / "train.py")
    done = run("-m", "moeroute.interop.torch_npu", script, "--steps", "20", "--out", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "loss.csv") as file:
        rows = [(float(row["ascend"]), float(row["plain"])) for row in csv.DictReader(file)]
    assert len(rows) == 20
    for ascend, plain in rows:
        assert ascend == pytest.approx(plain, rel=1e-4)
    assert rows[-1][0] < 0.8 * rows[0][0]
    assert "largest relative difference of the losses" in done.stdout
