"""What a plan derives from its fields: computed once, kept where that is safe."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import moeroute
from moeroute.dispatch import Backend
from moeroute.plan import RoutingPlan
from small_cases import present

DERIVED = ("token_of_slot", "token_of_row", "expert_of_row", "expert_ends")
IDS = torch.tensor([[2, 0], [-1, 2], [0, 2]])


def plan_of(ids: Tensor = IDS) -> RoutingPlan:
    return moeroute.plan_from_expert_ids(ids, 4, align=4)


def test_expert_ends(backend: Backend) -> None:
    """Experts 0 and 2 have four rows each with padding; an empty expert ends where the one before it does."""
    plan = moeroute.plan_from_expert_ids(IDS, 4, align=4, backend=backend)
    assert present(plan.expert_ends).tolist() == [4, 4, 8, 8]
    cut = moeroute.plan_from_expert_ids(IDS, 4, align=4, num_rows=6, backend=backend)
    assert present(cut.expert_ends).tolist() == [4, 4, 6, 6]
    local = moeroute.plan_from_expert_ids(IDS, 4, expert_range=(1, 3), backend=backend)
    assert present(local.expert_ends).tolist() == [0, 3]
    assert present(moeroute.plan_from_expert_ids(IDS[:0], 4, backend=backend).expert_ends).tolist() == [0] * 4
    assert moeroute.plan_from_expert_ids(IDS, None, backend=backend).expert_ends is None


def test_expert_ends_are_offsets_of_grouped_mm() -> None:
    plan = moeroute.plan_from_expert_ids(IDS, 4, align=8)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(-3, 4, (plan.num_rows, 16), generator=generator).bfloat16()
    weight = torch.randint(-3, 4, (4, 16, 16), generator=generator).bfloat16()
    ends = present(plan.expert_ends)
    product = torch.nn.functional.grouped_mm(rows, weight, offs=ends)
    for row, expert in enumerate(present(plan.expert_of_row).tolist()):
        assert product[row].double().tolist() == (rows[row].double() @ weight[expert].double()).tolist()


def test_pad_offsets(backend: Backend) -> None:
    """Expert 0 has two rows and two of padding, expert 2 three and one; added to the rows without padding."""
    padded = moeroute.plan_from_expert_ids(IDS, 4, align=4, backend=backend)
    offsets = present(padded.pad_offsets)
    assert offsets.dtype == torch.int64
    assert offsets.tolist() == [0, 2, 2, 3]
    plain = moeroute.plan_from_expert_ids(IDS, 4, backend=backend)
    slots = IDS.flatten() >= 0
    moved = plain.row_of_slot[slots] + offsets[IDS.flatten()[slots]]
    assert moved.tolist() == padded.row_of_slot[slots].tolist()
    assert present(plain.pad_offsets).tolist() == [0] * 4
    assert moeroute.plan_from_expert_ids(IDS, None, backend=backend).pad_offsets is None


@pytest.mark.parametrize("name", DERIVED)
def test_computed_once(name: str) -> None:
    plan = plan_of()
    assert getattr(plan, name) is getattr(plan, name)
    moved = plan.to("meta")
    assert getattr(moved, name).is_meta


@pytest.mark.parametrize("name", DERIVED)
def test_first_use_in_inference_mode(name: str) -> None:
    """What is kept can be saved for a later backward."""
    plan = plan_of()
    with torch.inference_mode():
        getattr(plan, name)
    assert not getattr(plan, name).is_inference()


@pytest.mark.parametrize("name", DERIVED)
def test_a_fake_tensor_is_not_kept(name: str) -> None:
    plan = plan_of()
    with FakeTensorMode(allow_non_fake_inputs=True):
        getattr(plan, name)
    assert type(getattr(plan, name)) is Tensor


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_a_plan_that_was_used_is_saved_like_a_fresh_one(used: bool) -> None:
    plan = plan_of()
    if used:
        moeroute.permute(torch.ones(3, 2), plan)
        for name in DERIVED:
            getattr(plan, name)
    file = io.BytesIO()
    torch.save(plan, file)
    file.seek(0)
    for twin in (torch.load(file), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan)), copy.copy(plan)):
        assert twin.slot_of_row.tolist() == plan.slot_of_row.tolist()
        assert twin.token_of_row.tolist() == [1 // 2, 4 // 2, -1, -1, 0, 3 // 2, 5 // 2, -1]


def test_a_resized_plan_forgets() -> None:
    """A verb that finds an index tensor of another size checks the plan again, and what was derived goes."""
    plan = plan_of()
    kept = {name: getattr(plan, name) for name in DERIVED}
    plan.slot_of_row.resize_(4)
    with pytest.raises(ValueError, match="slot_of_row must be"):
        moeroute.permute(torch.ones(3, 2), plan)
    assert all(getattr(plan, name) is not tensor for name, tensor in kept.items())


def test_not_kept_while_compiling() -> None:
    torch._dynamo.reset()

    def derived(plan: RoutingPlan) -> list[Tensor | None]:
        return [getattr(plan, name) for name in DERIVED]

    compiled = torch.compile(derived, fullgraph=True, backend="aot_eager")
    for ids in (IDS, torch.cat([IDS, IDS])):
        plan = plan_of(ids)
        first = compiled(plan)
        assert not any(name.startswith("_") for name in vars(plan))
        for found, expected in zip(first, derived(plan), strict=True):
            assert present(found).tolist() == present(expected).tolist()
        assert [present(t).tolist() for t in compiled(plan)] == [present(t).tolist() for t in first]
