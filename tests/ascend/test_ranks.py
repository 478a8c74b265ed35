"""Dispatch, combine and grouped products over ranks: W processes against a model, worked numbers, bad input.

`rank_cases` has the model, and what each process runs.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moeroute.interop.torch_npu.arguments import FUNCTIONS
from moeroute.interop.torch_npu.ranks import (
    npu_moe_distribute_dispatch,
    npu_moe_distribute_dispatch_v2,
    register_group,
)
from moeroute.interop.torch_npu.ranks_combine import npu_moe_distribute_combine, npu_moe_distribute_combine_v2
from moeroute.interop.torch_npu.ranks_gmm import npu_alltoallv_gmm, npu_gmm_alltoallv
from moeroute.interop.torch_npu.ranks_layout import Layout


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks(world: int, tmp_path: Path) -> None:
    """Every mode, a serving layer, the products there and back, and what must end in an error on every rank."""
    script = Path(__file__).with_name("rank_cases.py")
    done = subprocess.run(
        [sys.executable, str(script), str(world), str(tmp_path / "meet")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["same"] * world


def test_two_shared_experts_on_two_ranks_each() -> None:
    """Ranks 0 and 1 hold the first, 2 and 3 the second; experts 0 to 5 lie on ranks 4 to 6, two each."""
    layouts = [Layout(world=7, rank=rank, experts=6, shared=2, shared_ranks=4) for rank in range(7)]
    assert [layout.shared_places() for layout in layouts[:3]] == [[0, 2], [1, 3], [0, 2]]
    assert [list(range(10))[layout.mine()] for layout in layouts[3:]] == [[3], [4, 5], [6, 7], [8, 9]]
    assert layouts[0].by_rank(torch.arange(10)) == [0, 1, 2, 3, 9, 13, 17]
    given = torch.tensor([10, 20, 0, 1, 2, 3, 4, 5])  # shared experts first
    assert layouts[0].of_places(given).tolist() == [10, 10, 20, 20, 0, 1, 2, 3, 4, 5]
    # Four of the seven ranks send to rank 0 or 2; an expert rank gets at most two rows of a token.
    assert [layout.room(tokens=5, topk=3) for layout in layouts[3:5]] == [20, 70]


# ---------------------------------------------------------------------------- one rank

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
IDS = torch.tensor([[1, 0], [1, 2]], dtype=torch.int32)
WEIGHTS = torch.tensor([[0.5, 0.25], [1.0, 2.0]])
ONE: dict[str, Any] = {"group_ep": "ep", "ep_world_size": 1, "ep_rank_id": 0, "moe_expert_num": 3}


def test_worked_numbers() -> None:
    rows, scales, assist, numbers, totals, tp, weights = npu_moe_distribute_dispatch_v2(
        X, IDS, expert_scales=WEIGHTS, **ONE
    )
    assert rows.tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert scales is None
    assert assist.view(4, 128)[:, :3].tolist() == [[0, 0, 1], [0, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert not assist.view(4, 128)[:, 3:].any()
    assert (numbers.tolist(), totals.tolist(), tp.tolist()) == ([1, 2, 1], [1, 3, 4], [])
    assert (numbers.dtype, totals.dtype, tp.dtype) == (torch.int64, torch.int32, torch.int32)
    assert weights.tolist() == [0.25, 0.5, 1.0, 2.0]
    made = rows * torch.tensor([1.0, 10.0, 10.0, 100.0])[:, None]
    out = npu_moe_distribute_combine_v2(made, IDS, assist, totals, WEIGHTS, shared_expert_x=X / 2, **ONE)
    assert out.tolist() == [[5 + 0.25 + 0.5, 10 + 0.5 + 1], [30 + 600 + 1.5, 40 + 800 + 2]]


def test_worked_numbers_of_the_first_version() -> None:
    rows, _, index, numbers, totals, _, weights = npu_moe_distribute_dispatch(X, IDS, expert_token_nums_type=0, **ONE)
    assert index.tolist() == [0, 0, 1, 0]  # token 1 is the second that expert 1 gets
    assert (numbers.tolist(), weights.shape) == ([1, 3, 4], (0,))
    out = npu_moe_distribute_combine(rows, IDS, index, totals, WEIGHTS, **ONE)
    assert out.tolist() == [[0.75, 1.5], [9.0, 12.0]]


def test_worked_numbers_of_int8() -> None:
    """scales multiply; the largest magnitude becomes 127; a row of zeros has scale 0."""
    x = torch.tensor([[127.0, 1.5], [0.0, 0.0]])
    factors = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    options = ONE | {"moe_expert_num": 2}
    ids = torch.tensor([[1, 0], [0, 1]])
    rows, scales, *_ = npu_moe_distribute_dispatch_v2(x, ids, scales=factors, quant_mode=2, **options)
    assert rows.dtype is torch.int8
    assert rows.tolist() == [[127, 2], [0, 0], [127, 2], [0, 0]]
    assert scales is not None
    assert scales.tolist() == [1, 0, 2, 0]


def test_worked_numbers_of_static_int8() -> None:
    """scales multiply, ties go to even, and what is too large is cut; no scales come back."""
    x = torch.tensor([[1.25, -100.0], [0.5, 100.0]])
    ids = torch.tensor([[1, 0], [0, 1]])
    options: dict[str, Any] = ONE | {"moe_expert_num": 2, "quant_mode": 1}
    factors = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    rows, scales, *_ = npu_moe_distribute_dispatch_v2(x, ids, scales=factors, **options)
    assert rows.dtype is torch.int8
    assert rows.tolist() == [[1, -100], [0, 100], [2, -128], [1, 127]]
    assert scales is None
    rows, *_ = npu_moe_distribute_dispatch(x, ids, scales=torch.tensor([2.0, 0.1]), **options)
    assert rows.tolist() == [[2, -10], [1, 10], [2, -10], [1, 10]]


def test_special_experts() -> None:
    """Ids from 1 on: one that is zero, one that copies, one that is 3 x + 2 v."""
    options = ONE | {"moe_expert_num": 1, "zero_expert_num": 1, "copy_expert_num": 1, "const_expert_num": 1}
    ids = torch.tensor([[1, 2], [3, 0]])
    rows, _, assist, numbers, totals, *_ = npu_moe_distribute_dispatch_v2(X, ids, **options)
    assert numbers.tolist() == [1]
    out = npu_moe_distribute_combine_v2(
        rows * 10,
        ids,
        assist,
        totals,
        WEIGHTS,
        ori_x=X,
        const_expert_alpha_1=torch.tensor([3.0]),
        const_expert_alpha_2=torch.tensor([2.0]),
        const_expert_v=torch.tensor([[1.0, -1.0]]),
        **options,
    )
    assert out.tolist() == [[0.25, 0.5], [9 + 2 + 60, 12 - 2 + 80]]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int32, torch.float64])
def test_rows_of_any_dtype_keep_their_bits(dtype: torch.dtype) -> None:
    rows, *_ = npu_moe_distribute_dispatch_v2(X.to(dtype), IDS, **ONE)
    assert rows.dtype is dtype
    assert rows.float().tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]


def test_no_gradient_and_strides() -> None:
    x, ids = torch.stack([X, X], 2)[..., 0].requires_grad_(), torch.stack([IDS, IDS], 2)[..., 1]
    rows, _, assist, _, totals, *_ = npu_moe_distribute_dispatch_v2(x, ids, **ONE)
    assert not rows.requires_grad
    rows = torch.stack([rows, rows], 2)[..., 0].requires_grad_()
    out = npu_moe_distribute_combine_v2(rows, ids, assist, totals, WEIGHTS.T.contiguous().T, **ONE)
    assert not out.requires_grad
    assert out.tolist() == [[0.75, 1.5], [9.0, 12.0]]


def test_a_switched_off_token_has_no_shared_row() -> None:
    mask = torch.tensor([True, False])
    rows, _, assist, numbers, totals, *_ = npu_moe_distribute_dispatch_v2(X, IDS, x_active_mask=mask, **ONE)
    assert numbers.tolist() == [1, 1, 0]
    assert rows.tolist() == [[1, 2], [1, 2], [0, 0], [0, 0]]
    rows[2:] = torch.nan  # nobody reads them
    out = npu_moe_distribute_combine_v2(
        rows, IDS, assist, totals, WEIGHTS, x_active_mask=mask, shared_expert_x=X, **ONE
    )
    assert out.tolist() == [[1.75, 3.5], [0, 0]]


def test_products_on_one_rank() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    weight = torch.tensor([[[1.0], [0.0]], [[0.0], [10.0]]])
    y, dense, rows = npu_alltoallv_gmm(x, weight, "ep", 1, [1, 2], [1, 2])
    assert y.tolist() == [[1], [40], [60]]
    assert dense is None
    assert rows is None
    y, dense = npu_gmm_alltoallv(x, weight, "ep", 1, [2, 1], [2, 1], mm_x=x, mm_weight=weight[0])
    assert y.tolist() == [[1], [3], [60]]
    assert dense is not None
    assert dense.tolist() == [[1], [3], [5]]
    y, _, _ = npu_alltoallv_gmm(x[:0], weight, "ep", 1, [0, 0], [0, 0])
    assert y.shape == (0, 1)


# ---------------------------------------------------------------------------- bad input


def dispatch(**options: Any) -> object:
    return npu_moe_distribute_dispatch_v2(**({"x": X, "expert_ids": IDS} | ONE | options))


def dispatch_1(**options: Any) -> object:
    return npu_moe_distribute_dispatch(**({"x": X, "expert_ids": IDS} | ONE | options))


def combine(**options: Any) -> object:
    _, _, assist, _, totals, *_ = npu_moe_distribute_dispatch_v2(X, IDS, **ONE)
    given = {"expand_x": torch.ones(4, 2), "expert_ids": IDS, "assist_info_for_combine": assist}
    return npu_moe_distribute_combine_v2(
        **(given | {"ep_send_counts": totals, "expert_scales": WEIGHTS} | ONE | options)
    )


def combine_1(**options: Any) -> object:
    given = {"expand_x": torch.ones(4, 2), "expert_ids": IDS, "expand_idx": torch.zeros(4, dtype=torch.int32)}
    totals = torch.tensor([1, 3, 4])
    return npu_moe_distribute_combine(**(given | {"ep_send_counts": totals, "expert_scales": WEIGHTS} | ONE | options))


def gmm(**options: Any) -> object:
    given: dict[str, Any] = {"gmm_x": X, "gmm_weight": torch.ones(2, 2, 3), "hcom": "ep", "ep_world_size": 1}
    return npu_alltoallv_gmm(**(given | {"send_counts": [1, 1], "recv_counts": [1, 1]} | options))


def test_counts_are_lists_or_arrays() -> None:
    wanted = gmm(permute_out_flag=True, send_counts=[0, 2], recv_counts=[0, 2])
    for counts in (np.array([0, 2]), list(np.array([0, 2], np.int32))):
        found = gmm(permute_out_flag=True, send_counts=counts, recv_counts=counts, comm_mode=None)
        for one, other in zip(found, wanted, strict=True):  # type: ignore[call-overload]
            assert one is other or torch.equal(one, other)


ANY = torch.ones(1)
NOT_BUILT: list[tuple[Any, dict[str, Any], str]] = [
    (dispatch, {"elastic_info": ANY}, "npu_moe_distribute_dispatch_v2: elastic_info=a tensor is not available"),
    (dispatch, {"performance_info": ANY}, "npu_moe_distribute_dispatch_v2: performance_info=a tensor is not"),
    (dispatch, {"comm_alg": "hierarchy"}, "npu_moe_distribute_dispatch_v2: comm_alg='hierarchy' is not available"),
    (dispatch, {"tp_world_size": 2}, "npu_moe_distribute_dispatch_v2: tp_world_size=2 is not available on a CPU"),
    (dispatch, {"quant_mode": 3}, "npu_moe_distribute_dispatch_v2: quant_mode=3 is not available"),
    (dispatch, {"quant_mode": 4}, "npu_moe_distribute_dispatch_v2: quant_mode=4 is not available"),
    (dispatch, {"y_dtype": 24}, "npu_moe_distribute_dispatch_v2: y_dtype=24 (this has torch.float32) is not"),
    (dispatch, {"y_dtype": 290}, "npu_moe_distribute_dispatch_v2: y_dtype=290 (HiFloat8) is not available"),
    (dispatch_1, {"quant_mode": 3}, "npu_moe_distribute_dispatch: quant_mode=3 is not available"),
    (combine, {"comm_quant_mode": 2}, "npu_moe_distribute_combine_v2: comm_quant_mode=2 is not available on a CPU"),
    (combine, {"comm_alg": "hierarchy"}, "npu_moe_distribute_combine_v2: comm_alg='hierarchy' is not available"),
    (combine, {"elastic_info": ANY}, "npu_moe_distribute_combine_v2: elastic_info=a tensor is not available"),
    (combine_1, {"comm_quant_mode": 1}, "npu_moe_distribute_combine: comm_quant_mode=1 is not available"),
    (combine_1, {"activation_scale": ANY}, "npu_moe_distribute_combine: activation_scale=a tensor is not"),
    (combine_1, {"out_dtype": 5}, "npu_moe_distribute_combine: out_dtype=5 is not available"),
    (gmm, {"send_counts_tensor": ANY}, "npu_alltoallv_gmm: send_counts_tensor=a tensor is not available"),
]
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (dispatch, {"x": X[0]}, "x must be of shape [N, H]; got [2]"),
    (dispatch, {"x": [1.0]}, "x must be a torch.Tensor; got list"),
    (dispatch, {"expert_ids": IDS[0]}, "expert_ids must be of shape [2, K]; got [2]"),
    (dispatch, {"expert_ids": IDS.float()}, "expert_ids must be int32 or int64; got torch.float32"),
    (dispatch, {"expert_ids": IDS + 1}, "expert_ids must be in 0..2; got 3"),
    (dispatch, {"expert_ids": IDS - 2}, "expert_ids must be in 0..2; got -1"),
    (dispatch, {"expert_ids": IDS * 0}, "expert_ids must be different experts for each token; got expert 0 twice"),
    (dispatch, {"ep_world_size": 2}, "ep_world_size must be 1, the size of the group (torch.distributed has no"),
    (dispatch, {"ep_rank_id": 1}, "ep_rank_id must be 0, the rank of this process; got 1"),
    (dispatch, {"group_ep": None}, "group_ep must be a str; got NoneType"),
    (dispatch, {"moe_expert_num": 0}, "moe_expert_num must be a positive multiple of 1"),
    (dispatch, {"shared_expert_rank_num": 1}, "shared_expert_rank_num must be in 0..0, below the world size; got 1"),
    (dispatch, {"shared_expert_num": -1}, "shared_expert_num must be at least 0; got -1"),
    (dispatch, {"zero_expert_num": -1}, "zero_expert_num must be at least 0; got -1"),
    (dispatch, {"quant_mode": 9}, "quant_mode must be 0, 1 or 2; got 9"),
    (dispatch, {"quant_mode": 1}, "scales must be given with quant_mode 1; got None"),
    (dispatch, {"quant_mode": 1, "x": X.int()}, "x must be float16, bfloat16 or float32 with quant_mode 1"),
    (dispatch, {"quant_mode": 1, "scales": torch.ones(3)}, "scales must be of shape [3, H]; got [3]"),
    (dispatch, {"quant_mode": 1, "scales": torch.ones(3, 1)}, "scales must be float32 [.., 2]"),
    (dispatch, {"quant_mode": 2, "scales": torch.ones(2)}, "scales must be of shape [3, H]; got [2]"),
    (dispatch, {"quant_mode": 2, "x": X.int()}, "x must be float16, bfloat16 or float32 with quant_mode 2"),
    (dispatch, {"scales": torch.ones(3, 2)}, "scales must be None with quant_mode 0; got a tensor"),
    (dispatch, {"scales": torch.ones(2, 2), "quant_mode": 2}, "scales must be of shape [3, H]; got [2, 2]"),
    (dispatch, {"scales": torch.ones(3, 1), "quant_mode": 2}, "scales must be float32 [.., 2]"),
    (dispatch, {"expert_scales": WEIGHTS[:1]}, "expert_scales must be float32 of shape [2, 2], as expert_ids"),
    (dispatch, {"x_active_mask": torch.ones(2)}, "x_active_mask must be bool; got torch.float32"),
    (dispatch, {"x_active_mask": torch.ones(3) > 0}, "x_active_mask must be of shape [2] or [2, 2]; got [3]"),
    (dispatch, {"expert_token_nums_type": 2}, "expert_token_nums_type must be 0 or 1; got 2"),
    (dispatch, {"expert_shard_type": 1}, "expert_shard_type must be 0; got 1"),
    (dispatch, {"comm_alg": "mesh"}, "comm_alg must be '', 'fullmesh', 'fullmesh_v1' or 'fullmesh_v2'; got 'mesh'"),
    (dispatch, {"global_bs": 1}, "global_bs must be 0, or a multiple of 1 and at least 2"),
    (combine, {"expand_x": torch.ones(4, 2).int()}, "expand_x must be float16, bfloat16 or float32; got torch.int32"),
    (combine, {"expand_x": torch.ones(3, 2)}, "ep_send_counts must be running totals up to at most 3, the rows of"),
    (combine, {"ep_send_counts": torch.tensor([1, 4])}, "ep_send_counts must be of shape [3]; got [2]"),
    (combine, {"ep_send_counts": torch.tensor([3, 1, 4])}, "ep_send_counts must be running totals up to"),
    (combine, {"expert_scales": WEIGHTS.int()}, "expert_scales must be float32 of shape [2, 2], as expert_ids"),
    (combine, {"shared_expert_x": X.half()}, "shared_expert_x must be torch.float32; got torch.float16"),
    (combine, {"shared_expert_x": X[:1]}, "shared_expert_x must be of shape [2, 2]; got [1, 2]"),
    (combine, {"assist_info_for_combine": IDS[0]}, "assist_info_for_combine must be int32 [A * 128] with A >= 4"),
    (combine, {"assist_info_for_combine": torch.full((512,), 3, dtype=torch.int32)}, "what dispatch returned"),
    (combine, {"copy_expert_num": 1}, "ori_x must be given with copy or constant experts; got None"),
    (combine, {"const_expert_num": 1, "ori_x": X}, "const_expert_alpha_1 must be of shape [1, 2] with constant"),
    (combine_1, {"expand_idx": IDS[0]}, "expand_idx must be of shape [4]; got [2]"),
    (combine_1, {"expand_idx": torch.ones(4)}, "expand_idx must be what dispatch returned"),
    (combine_1, {"expand_idx": torch.full((4,), -2)}, "expand_idx must be what dispatch returned"),
    (gmm, {"send_counts": [1, 1, 1]}, "recv_counts must be as long as send_counts, 3; got 2"),
    (gmm, {"send_counts": [2, 1]}, "send_counts must be such that they add up to the 2 rows of gmm_x; got [2, 1]"),
    (gmm, {"send_counts": []}, "send_counts must be a list of a multiple of 1 ints; got []"),
    (gmm, {"recv_counts": [2, 0]}, "recv_counts of rank 0 must be 1 from rank 0 for expert 0, as its send_counts"),
    (gmm, {"gmm_weight": torch.ones(2, 3, 2)}, "gmm_weight must be of shape [2, 2, O]; got [2, 3, 2]"),
    (gmm, {"gmm_weight": torch.ones(2, 2, 3).half()}, "gmm_weight must be torch.float32, as gmm_x"),
    (gmm, {"mm_x": X}, "mm_weight must be given with mm_x, and only then; got one of them"),
    (gmm, {"mm_x": X, "mm_weight": torch.ones(3, 2)}, "mm_weight must be torch.float32 with 2 in axis 0, as mm_x"),
]


@pytest.mark.parametrize("call, options, words", NOT_BUILT, ids=[f"{c.__name__}-{o}" for c, o, _ in NOT_BUILT])
def test_not_built(call: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(NotImplementedError) as raised:
        call(**options)
    assert str(raised.value).startswith(words)


@pytest.mark.parametrize(
    "call, options, words", WRONG, ids=[f"{c.__name__}-{next(iter(o))}-{n}" for n, (c, o, _) in enumerate(WRONG)]
)
def test_wrong_arguments(call: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        call(**options)
    assert type(raised.value) is RuntimeError
    assert words in str(raised.value)
    assert str(raised.value).startswith("npu_")


def test_assist_info_of_other_tokens() -> None:
    assist = torch.zeros(4, 128, dtype=torch.int32)
    assist[:, 1] = 7
    with pytest.raises(RuntimeError, match="assist_info_for_combine must be that of 2 tokens with 2 rows each"):
        combine(assist_info_for_combine=assist.flatten())


def test_groups_are_groups() -> None:
    with pytest.raises(TypeError, match=r"register_group: group must be a torch\.distributed\.ProcessGroup or None"):
        register_group("ep", "world")
    with pytest.raises(TypeError, match="register_group: name must be a str"):
        register_group(3, None)  # type: ignore[arg-type]
    register_group("nobody", None)


def test_all_are_listed() -> None:
    both = [f"npu_moe_distribute_{way}{version}" for way in ("dispatch", "combine") for version in ("", "_v2")]
    assert {*both, "npu_alltoallv_gmm", "npu_gmm_alltoallv"} <= FUNCTIONS.keys()


def test_what_a_single_rank_is_given_stays_as_it_is() -> None:
    """The exchange with oneself copies nothing, and nothing writes into the arguments."""
    before: list[Tensor] = [X.clone(), IDS.clone(), WEIGHTS.clone()]
    dispatch()
    combine(shared_expert_x=X)
    gmm()
    for given, kept in zip((X, IDS, WEIGHTS), before, strict=True):
        assert torch.equal(given, kept)


def test_autocast_changes_no_product() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, dense, _ = npu_alltoallv_gmm(X, torch.ones(1, 2, 3), "ep", 1, [2], [2], mm_x=X, mm_weight=X)
    assert dense is not None
    assert (y.dtype, dense.dtype) == (torch.float32, torch.float32)


def test_slots_that_the_first_version_did_not_send_have_no_row() -> None:
    """Whether or not the way back is given the mask."""
    mask = torch.tensor([[True, False], [False, False]])
    rows, _, index, _, totals, *_ = npu_moe_distribute_dispatch(X, IDS, x_active_mask=mask, **ONE)
    assert index.tolist() == [0, -1, -1, -1]
    for given in (mask, None):
        out = npu_moe_distribute_combine(rows, IDS, index, totals, WEIGHTS, x_active_mask=given, **ONE)
        assert out.tolist() == [[0.5, 1.0], [0, 0]]
