"""Where experts lie among the ranks, and the checks of the arguments that dispatch and combine share.

The first S = shared_expert_rank_num ranks hold shared experts, S / J ranks each of the J = shared_expert_num; the
others hold El = moe_expert_num / (world - S) experts each. A token goes to its K experts and to one rank of each
shared expert: source rank r uses the (r mod S / J)-th of them. A "place" is a shared rank or an expert, in this order;
places lie in the order of the ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moeroute import check
from moeroute.interop.torch_npu.arguments import refused, unavailable
from moeroute.interop.torch_npu.process_groups import Ranks


@dataclass(frozen=True)
class Layout:
    """Which place lies on which rank, as seen from one of them."""

    world: int
    rank: int
    experts: int
    shared: int
    shared_ranks: int

    @property
    def replicas(self) -> int:
        """Ranks of one shared expert."""
        return self.shared_ranks // self.shared if self.shared_ranks else 1

    @property
    def columns(self) -> int:
        """How many shared experts a token goes to."""
        return self.shared if self.shared_ranks else 0

    @property
    def per_rank(self) -> int:
        """Experts of a rank without shared ones."""
        return self.experts // (self.world - self.shared_ranks)

    @property
    def places(self) -> int:
        """Of all ranks."""
        return self.shared_ranks + self.experts

    def local(self, rank: int) -> int:
        """Places of a rank."""
        return 1 if rank < self.shared_ranks else self.per_rank

    def by_rank(self, counts: Tensor) -> list[int]:
        """Numbers of places added up by rank."""
        return [int(part.sum()) for part in counts.split([self.local(rank) for rank in range(self.world)])]

    def mine(self) -> slice:
        """The places of this rank."""
        first = min(self.rank, self.shared_ranks) + max(self.rank - self.shared_ranks, 0) * self.per_rank
        return slice(first, first + self.local(self.rank))

    def shared_places(self) -> list[int]:
        """Where this rank's tokens find each shared expert."""
        return [self.rank % self.replicas + number * self.replicas for number in range(self.columns)]

    def of_places(self, of_experts: Tensor) -> Tensor:
        """What is given for each expert, the shared ones first, for each place."""
        shared = of_experts[: self.columns].repeat_interleave(self.replicas, 0)
        return torch.cat([shared, of_experts[self.columns :]])

    def room(self, tokens: int, topk: int) -> int:
        """A: most rows that this rank can get from `tokens` tokens on each rank."""
        if self.rank < self.shared_ranks:
            return tokens * -(-self.world // self.replicas)
        return tokens * self.world * min(self.per_rank, topk)


def _layout(ranks: Ranks, experts: int, shared: int, shared_ranks: int) -> Layout:
    function = ranks.function
    if not 0 <= shared_ranks < ranks.size:
        raise refused(function, "shared_expert_rank_num", f"in 0..{ranks.size - 1}, below the world size", shared_ranks)
    if shared < (shared_ranks > 0) or (shared_ranks and shared_ranks % shared):
        wanted = f"a divisor of shared_expert_rank_num = {shared_ranks}" if shared_ranks else "at least 0"
        raise refused(function, "shared_expert_num", wanted, shared)
    holders = ranks.size - shared_ranks
    if experts < 1 or experts % holders:
        wanted = f"a positive multiple of {holders}, the ranks without shared experts"
        raise refused(function, "moe_expert_num", wanted, experts)
    return Layout(ranks.size, ranks.rank, experts, shared, shared_ranks)


@dataclass(frozen=True)
class Experts:
    """What both directions are told about ranks and experts."""

    world_size: int
    rank: int
    experts: int
    shared: int
    shared_ranks: int
    zero: int = 0
    copy: int = 0
    const: int = 0

    def layout(self, ranks: Ranks) -> Layout:
        """On these ranks; refuses numbers that do not go into each other."""
        ranks.expect(self.world_size, self.rank)
        for name in ("zero", "copy", "const"):
            if (number := getattr(self, name)) < 0:
                raise refused(ranks.function, f"{name}_expert_num", "at least 0", number)
        return _layout(ranks, self.experts, self.shared, self.shared_ranks)

    @property
    def special(self) -> int:
        """How many experts lie on no rank."""
        return self.zero + self.copy + self.const

    def numbers(self) -> dict[str, int]:
        """What must be the same on every rank."""
        return {
            "moe_expert_num": self.experts,
            "shared_expert_num": self.shared,
            "shared_expert_rank_num": self.shared_ranks,
        }


def check_plain(function: str, tp_world_size: int, tp_rank_id: int, expert_shard_type: int, comm_alg: str = "") -> None:
    """Refuse tensor parallelism, and ways of communication with other results."""
    if tp_world_size not in (0, 1):
        raise unavailable(function, "tp_world_size", tp_world_size)
    if tp_rank_id != 0:
        raise refused(function, "tp_rank_id", "0", tp_rank_id)
    if expert_shard_type != 0:
        raise refused(function, "expert_shard_type", "0", expert_shard_type)
    if comm_alg == "hierarchy":
        raise unavailable(function, "comm_alg", "'hierarchy'")
    if comm_alg not in ("", "fullmesh", "fullmesh_v1", "fullmesh_v2"):
        raise refused(function, "comm_alg", "'', 'fullmesh', 'fullmesh_v1' or 'fullmesh_v2'", repr(comm_alg))


def check_absent(function: str, **tensors: Tensor | None) -> None:
    """Refuse what is not built."""
    for name, tensor in tensors.items():
        if tensor is not None:
            raise unavailable(function, name, "a tensor")


def check_rows(
    function: str, argument: str, tensor: Tensor, rows: int | None = None, like: Tensor | None = None
) -> None:
    """[rows, H] of the width and dtype of `like`."""
    check.tensor(function, argument, tensor)
    if (
        tensor.ndim != 2
        or rows not in (None, tensor.shape[0])
        or (like is not None and tensor.shape[1] != like.shape[1])
    ):
        wanted = f"[{'N' if rows is None else rows}, {'H' if like is None else like.shape[1]}]"
        raise refused(function, argument, f"of shape {wanted}", list(tensor.shape))
    if like is not None and tensor.dtype is not like.dtype:
        raise refused(function, argument, f"{like.dtype}", tensor.dtype)


def check_ids(function: str, expert_ids: Tensor, rows: int | None = None) -> None:
    """[N, K] of int32 or int64."""
    check.tensor(function, "expert_ids", expert_ids)
    if expert_ids.ndim != 2 or rows not in (None, expert_ids.shape[0]):
        raise refused(function, "expert_ids", f"of shape [{'N' if rows is None else rows}, K]", list(expert_ids.shape))
    if expert_ids.dtype not in (torch.int32, torch.int64):
        raise refused(function, "expert_ids", "int32 or int64", expert_ids.dtype)


def check_like_ids(function: str, argument: str, tensor: Tensor, expert_ids: Tensor) -> None:
    """Floats, one a slot."""
    check.tensor(function, argument, tensor)
    if tensor.shape != expert_ids.shape or not tensor.is_floating_point():
        got = f"{tensor.dtype} {list(tensor.shape)}"
        raise refused(function, argument, f"float32 of shape {list(expert_ids.shape)}, as expert_ids", got)


def active_slots(function: str, mask: Tensor | None, expert_ids: Tensor) -> Tensor:
    """bool [N, K]: the slots that take part."""
    if mask is None:
        return torch.ones_like(expert_ids, dtype=torch.bool)
    check.tensor(function, "x_active_mask", mask)
    if mask.dtype is not torch.bool:
        raise refused(function, "x_active_mask", "bool", mask.dtype)
    num_tokens, topk = expert_ids.shape
    if tuple(mask.shape) not in ((num_tokens,), (num_tokens, topk)):
        raise refused(function, "x_active_mask", f"of shape [{num_tokens}] or [{num_tokens}, {topk}]", list(mask.shape))
    return mask if mask.ndim == 2 else mask[:, None].expand(num_tokens, topk)


def check_known(function: str, expert_ids: Tensor, active: Tensor, experts: int, special: int) -> None:
    """Refuse ids of no expert, and two slots of a token with one expert."""
    wrong = active & ((expert_ids < 0) | (expert_ids >= experts + special))
    if wrong.any():
        raise refused(function, "expert_ids", f"in 0..{experts + special - 1}", expert_ids[wrong][0].item())
    sent = torch.where(active & (expert_ids < experts), expert_ids, -1).sort(1).values
    twice = (sent[:, 1:] == sent[:, :-1]) & (sent[:, 1:] >= 0)
    if twice.any():
        wanted = "different experts for each token"
        raise refused(function, "expert_ids", wanted, f"expert {sent[:, 1:][twice][0].item()} twice")


def slot_places(layout: Layout, expert_ids: Tensor, active: Tensor) -> Tensor:
    """int64 [N, K + J]: the place that each slot goes to, -1 for none; the shared experts come last."""
    own = torch.where(active & (expert_ids < layout.experts), expert_ids.long() + layout.shared_ranks, -1)
    if not layout.columns:
        return own
    shared = torch.tensor(layout.shared_places(), device=own.device).expand(len(own), -1)
    return torch.cat([own, torch.where(active.any(1, keepdim=True), shared, -1)], 1)
