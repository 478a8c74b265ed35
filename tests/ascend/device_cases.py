"""Devices named "npu"; `test_install.py` runs these tests in a process of their own."""

import sys
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from moeroute.interop.torch_npu import install, uninstall


@pytest.fixture
def with_devices() -> Iterator[Any]:
    install(device_strings=True)
    yield sys.modules["torch_npu"]
    uninstall()


def test_torch_works_after_devices_were_named(recwarn: pytest.WarningsRecorder) -> None:
    """torch keeps the name, and asks torch.npu about it."""
    install(device_strings=True)
    uninstall()
    assert not torch.accelerator.is_available()
    assert torch._C._get_accelerator().type == "cpu"  # as fully_shard asks
    assert torch.npu.device_count() == 0  # type: ignore[attr-defined]
    torch.manual_seed(3)
    doubled = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)
    assert doubled(torch.ones(2)).tolist() == [2, 2]
    assert not recwarn.list
    install()
    assert torch.npu.device_count() == 1  # type: ignore[attr-defined]
    uninstall()
    assert torch.npu.device_count() == 0  # type: ignore[attr-defined]


def test_functions_compute_outside_of_the_mode_of_device_names(with_devices: Any) -> None:
    rows, first, second = torch.randn(3, 6, 4).unbind()
    odd = rows[:, :3]
    ids = torch.tensor([[0, 1], [1, 0], [1, 1]], dtype=torch.int32)
    found = with_devices.npu_moe_finalize_routing(
        rows, first[:3], second[:3], first[3:5], torch.ones(3, 2), torch.arange(6), ids, drop_pad_mode=2
    )
    wanted = first[:3] + second[:3] + (rows.view(3, 2, 4) + first[3:5][ids.long()]).sum(1)
    torch.testing.assert_close(found, wanted)

    class Watch(torch.overrides.TorchFunctionMode):
        seen: ClassVar[list[Any]] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    with torch.device("npu"), Watch():
        with_devices.npu_swiglu(rows)
        with pytest.raises(RuntimeError, match="npu_swiglu: self must be even"):
            with_devices.npu_swiglu(odd)
        assert not Watch.seen
        torch.ones(2)
    assert Watch.seen == [torch.ones]


def test_devices_named_npu_are_the_cpu(with_devices: Any) -> None:
    x = torch.ones(2, device="npu:0")
    assert x.device.type == "cpu"
    assert torch.zeros_like(x, device="npu").device.type == "cpu"
    assert x.to("npu").device.type == x.to(device=torch.device("npu:0")).device.type == "cpu"
    assert torch.nn.Linear(2, 2, device="npu").to("npu").weight.device.type == "cpu"
    assert torch.tensor([1], device=torch.device("npu", 0)).device.type == "cpu"
    number = with_devices.npu.current_device()
    assert torch.tensor([1], device=number).device.type == x.new_ones(2, device=number).device.type == "cpu"
    assert (
        x.to(number).device.type == x.to(number, torch.float64).device.type == x.to(device=number).device.type == "cpu"
    )
    assert torch.nn.Linear(2, 2, device=number).to(number).weight.device.type == "cpu"
    assert x.to(torch.device(number)).device.type == "cpu"
    generator = torch.Generator(device="npu").manual_seed(3)
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.rand(2, generator=generator, device="npu").shape == (2,)
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert torch.nn.Linear(2, 2)(x).dtype is torch.bfloat16
    with torch.autocast(device_type="npu", dtype=torch.bfloat16):
        assert torch.nn.Linear(2, 2)(x).dtype is torch.bfloat16
    with torch.device("npu"):
        assert torch.ones(1).device.type == "cpu"
    cube = torch.ones(2, 2, 2)
    assert torch.einsum("npu", cube).shape == cube.shape  # three letters that are no device


def test_devices_are_put_back_and_the_mode_is_of_one_thread(with_devices: Any) -> None:
    found: list[str] = []

    def elsewhere() -> None:
        found.append(torch.device("npu").type)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == ["npu"]  # the name parses everywhere, the CPU stands behind it here
    uninstall()
    torch.manual_seed(0)
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).tolist() == [2]
    assert torch.npu.device_count() == 0  # type: ignore[attr-defined]
    assert torch.Generator is torch._C.Generator
    with pytest.raises((RuntimeError, ModuleNotFoundError)):
        torch.ones(2, device="npu")
