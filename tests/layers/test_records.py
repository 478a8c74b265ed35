"""What a forward pass leaves behind as values: summaries, and records that are replayed."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moeroute.nn import MoE, RoutingRecord
from moeroute.testing import assert_same_bits
from small_layers import EXPERTS, HIDDEN, INTERMEDIATE, K, make_input, make_layer


def test_summary() -> None:
    layer = MoE(HIDDEN, INTERMEDIATE, num_experts=4, k=2, capacity_factor=1.0)
    ids = torch.tensor([[0, 1], [0, 1], [0, 2], [0, -1]])
    mask = torch.tensor([False, False, False, True])
    _, routing = layer(make_input(4), expert_ids=ids, padding_mask=mask, return_routing=True)
    summary = routing.summary()  # of 6 slots; capacity 2: one of expert 0 is dropped
    assert (summary.tokens, summary.largest_load, summary.mean_load) == (3, 3, 1.5)
    assert (summary.imbalance, summary.dead_experts) == (2.0, 1)
    assert summary.dropped_share == pytest.approx(1 / 6)
    _, routing = layer(make_input(0), return_routing=True)
    assert routing.summary() == (0, 0, 0.0, 0.0, 0.0, 4)


def test_the_layer_counts_nothing() -> None:
    """Recomputation under a checkpoint runs the layer twice; what it knows afterwards is what it knew before."""
    layer = make_layer(expert_bias=True)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    attributes = set(vars(layer)) | set(vars(layer.router)) | set(vars(layer.experts))
    x = make_input(5).requires_grad_()
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert_same_bits(list(layer.state_dict().values()), list(before.values()), "state")
    assert set(vars(layer)) | set(vars(layer.router)) | set(vars(layer.experts)) == attributes


def record_of(*layers: MoE) -> tuple[RoutingRecord, list[torch.Tensor]]:
    record, outputs = RoutingRecord(), []
    for call in range(2):
        for number, layer in enumerate(layers):
            x = make_input(2, 3, seed=10 * call + number)
            output, routing = layer(x, return_routing=True)
            record.append(f"layers.{number}", routing, x.shape[:-1])
            outputs.append(output)
    return record, outputs


def test_a_record_is_saved_loaded_and_replayed(tmp_path: Path) -> None:
    layers = make_layer(), make_layer(seed=1)
    record, outputs = record_of(*layers)
    record.save(tmp_path / "routing.pt")
    loaded = RoutingRecord.load(tmp_path / "routing.pt")
    assert loaded == record
    assert loaded != RoutingRecord()
    assert loaded.layers == ["layers.0", "layers.1"]
    assert [loaded.num_calls(name) for name in ("layers.0", "another")] == [2, 0]
    assert repr(loaded) == "RoutingRecord({'layers.0': 2, 'layers.1': 2})"
    others = make_layer(), make_layer(seed=1)  # whose routers have learned something else since
    for layer in others:
        torch.nn.init.normal_(layer.router.weight)
    position = 0
    for call in range(2):
        for number, layer in enumerate(layers):
            x = make_input(2, 3, seed=10 * call + number)
            ids = loaded.expert_ids(f"layers.{number}", call, x.shape[:-1])
            assert_same_bits(layer(x, expert_ids=ids), outputs[position], "replay")
            _, routing = others[number](x, expert_ids=ids, return_routing=True)
            assert_same_bits(routing.gating.expert_ids, ids.reshape(6, K), "ids")
            position += 1


def test_a_file_is_plain_data() -> None:
    """Tensors, strings and integers; what a caller does with what it got changes nothing of the record."""
    record, _ = record_of(make_layer())
    file = io.BytesIO()
    record.save(file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert set(found) == {"format", "calls"}
    record.expert_ids("layers.0", 0, (2, 3)).fill_(-1)
    assert (record.expert_ids("layers.0", 0, (2, 3)) >= 0).all()


def test_padding_is_recorded_as_empty_slots() -> None:
    layer, x = make_layer(), make_input(4)
    mask = torch.tensor([False, True, False, True])
    output, routing = layer(x, padding_mask=mask, return_routing=True)
    record = RoutingRecord()
    record.append("one", routing)
    ids = record.expert_ids("one", 0, (4,))
    assert (ids[mask] == -1).all()
    torch.testing.assert_close(layer(x, expert_ids=ids), output)


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


RECORD, _ = record_of(make_layer())
ROUTING = make_layer()(make_input(6), return_routing=True)[1]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: RECORD.expert_ids("layers.0", 0, (3, 2)), ValueError, "nn.RoutingRecord.expert_ids: batch must be [2, 3], as call 0 of 'layers.0'; got [3, 2]"),
        (lambda: RECORD.expert_ids("layers.0", 0, (6,)), ValueError, "batch must be [2, 3], as call 0 of 'layers.0'; got [6]"),
        (lambda: RECORD.expert_ids("layers.0", 2, (2, 3)), ValueError, "call must be below 2, the recorded calls of 'layers.0'; got 2"),
        (lambda: RECORD.expert_ids("layers.0", -1, (2, 3)), ValueError, "call must be below 2"),
        (lambda: RECORD.expert_ids("layers.9", 0, (2, 3)), ValueError, "layer must be one of 'layers.0'; got 'layers.9'"),
        (lambda: RECORD.expert_ids(0, 0, (2, 3)), TypeError, "layer must be a str; got int"),  # type: ignore[arg-type]
        (lambda: RECORD.expert_ids("layers.0", "0", (2, 3)), TypeError, "call must be an int; got str"),  # type: ignore[arg-type]
        (lambda: RECORD.expert_ids("layers.0", 0, 6), TypeError, "batch must be a shape; got int"),  # type: ignore[arg-type]
        (lambda: RECORD.append("x", None), TypeError, "nn.RoutingRecord.append: routing must be a moeroute.nn.Routing; got NoneType"),  # type: ignore[arg-type]
        (lambda: RECORD.append("x", ROUTING, (4,)), ValueError, "batch must be a shape of 6 tokens, as routing; got [4]"),
        (lambda: RoutingRecord.load(saved({"format": "another"})), ValueError, "file must be one that RoutingRecord.save wrote"),
        (lambda: RoutingRecord.load(saved([1])), ValueError, "file must be one that RoutingRecord.save wrote"),
        (lambda: RoutingRecord.load(saved({"format": "moeroute.RoutingRecord 1", "calls": {"a": [torch.zeros(2)]}})), ValueError, "file must be int32 expert ids by layer and call; got another at 'a'"),
    ],
)  # fmt: skip
def test_bad_input(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_a_batch_of_another_layer_is_refused_by_the_layer() -> None:
    ids = RECORD.expert_ids("layers.0", 0, (2, 3))
    with pytest.raises(ValueError, match=re.escape("expert_ids must be [4, K] with K >= 1, as x; got shape [2, 3, 2]")):
        make_layer()(make_input(4), expert_ids=ids)
    assert ids.max() < EXPERTS
