"""torch.export and torch.jit.trace. test_aotinductor.py tests AOTInductor."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scaledot
from exported import Layer, exported, inputs
from scaledot.dropin import sdpa as dropin_sdpa
from scaledot.dropin import torch_nn

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated"),
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is not supported"),
]


def our_nodes(graph: Any) -> Counter[str]:
    return Counter(str(node.target) for node in graph.nodes if "scaledot" in str(node.target))


def test_export_has_one_node_per_call() -> None:
    model = Layer().eval()
    program = exported(model)
    assert our_nodes(program.graph) == {"scaledot.sdpa.default": 2}
    assert not our_nodes(program.run_decompositions().graph)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    for batch, length in ((2, 5), (4, 30)):
        arguments = inputs(batch, length)
        for call in (program.module(), loaded.module()):
            for found, wanted in zip(call(*arguments), model(*arguments), strict=True):
                assert torch.equal(found, wanted)


def test_an_exported_model_has_the_gradients_of_the_model() -> None:
    model = Layer()
    x, key_mask = inputs(3, 7)
    program = torch.export.export(model, (x, key_mask)).module()
    grads = []
    for call in (model, program):
        leaf = x.clone().requires_grad_()
        call(leaf, key_mask)[0].square().sum().backward()
        grads.append(leaf.grad)
    assert grads[0] is not None
    assert grads[1] is not None
    assert torch.equal(grads[0], grads[1])


def test_exported_drop_ins_run_the_op() -> None:
    class Converted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

        def forward(self, x: Tensor, key_mask: Tensor) -> Tensor:
            result: Tensor = self.encoder(x, src_key_padding_mask=~key_mask)
            return result

    plain = Converted().eval()
    model = torch_nn.convert(plain)
    program = exported(model)
    assert our_nodes(program.graph) == {"scaledot.sdpa.default": 1}
    arguments = inputs(4, 11)
    torch.testing.assert_close(program.module()(*arguments), model(*arguments))

    class Function(nn.Module):
        def forward(self, query: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)

    # torch.export records torch's own operator. scaledot computes it if the drop-in is active when the program runs.
    query = torch.randn(2, 2, 5, 8)
    call = torch.export.export(Function(), (query,)).module()
    with dropin_sdpa.activate() as activation:
        found = call(query)
    assert activation.calls == 1
    assert torch.equal(found, scaledot.scaled_dot_product_attention(query, query, query, is_causal=True))


def test_a_traced_and_loaded_model_gives_the_results_of_the_model() -> None:
    model = Layer().eval()
    with torch.no_grad():
        traced = torch.jit.trace(model, inputs(3, 7))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    assert sum("scaledot::sdpa" in node.kind() for node in traced.inlined_graph.nodes()) == 2
    for batch, length in ((3, 7), (2, 12)):
        arguments = inputs(batch, length)
        for call in (traced, loaded):
            for found, wanted in zip(call(*arguments), model(*arguments), strict=True):
                torch.testing.assert_close(found, wanted)
