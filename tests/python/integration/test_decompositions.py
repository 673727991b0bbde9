"""run_decompositions(): core ATen operators with the numbers of the ops."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export.experimental import _export_forward_backward
from torch.utils._python_dispatch import TorchDispatchMode

import eager
import scaledot
from case_list import CASES
from cases import Case
from exported import Layer, exported, inputs
from kernels_under_test import sdpa
from oracle import solve
from scaledot import scaled_dot_product_attention as attend
from scaledot import varlen_attention
from scaledot._torch.decompositions import DECOMPOSITIONS
from varlen_cases import FEATURES, Packed, call

SDPA = torch.ops.scaledot.sdpa.default
WITHOUT_DROPOUT = [case for case in CASES if case.dropout_p == 0.0]


class Decomposed(TorchDispatchMode):
    """Runs the decompositions in place of the ops, which is below autograd, as in the trace of a program."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return DECOMPOSITIONS.get(func, func)(*args, **(kwargs or {}))


class Call(nn.Module):
    """One call of the op, with the tensors of a case as its inputs."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.options = {**case.options(), "return_weights": case.return_weights}

    def forward(self, *tensors: Tensor | None) -> Any:
        return SDPA(*tensors, **self.options)


def not_core(program: Any) -> list[str]:
    """The calls that are no core ATen operators, except sizes and the assertions that export adds to a model."""
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    operators = [target for target in targets if isinstance(target, torch._ops.OpOverload)]
    assertion = torch.ops.aten._assert_tensor_metadata.default
    return [str(target) for target in operators if torch.Tag.core not in target.tags and target is not assertion]


def strides(tensors: Any) -> list[list[int]]:
    """Of dimensions that have more than one element."""
    return [[stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1] for t in tensors]


@pytest.mark.parametrize("case", WITHOUT_DROPOUT[::4], ids=lambda case: case.name)
def test_the_formulas_have_the_numbers_of_the_op(case: Case) -> None:
    attention, given = Call(case), case.make()
    found = DECOMPOSITIONS[SDPA](*given.tensors().values(), **attention.options)
    solve(case).check_results(found, case.return_weights)
    for ours, wanted in zip(found, attention(*given.tensors().values()), strict=True):
        assert (ours.shape, ours.dtype) == (wanted.shape, wanted.dtype)


@pytest.mark.parametrize("case", WITHOUT_DROPOUT[1::8], ids=lambda case: case.name)
def test_gradients_of_the_formulas_are_those_of_the_op(case: Case) -> None:
    given, solution = case.make().requiring_grad(), solve(case)
    with Decomposed():
        gradients = eager.gradients(sdpa(case, given), case.cotangents(), given.differentiable())
    assert gradients.keys() == solution.gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == getattr(given, name).dtype
        solution.check(name, gradient)


@pytest.mark.parametrize("case", WITHOUT_DROPOUT[::40], ids=lambda case: case.name)
def test_a_decomposed_program_is_core_aten(case: Case) -> None:
    attention, given = Call(case), tuple(case.make().tensors().values())
    program = torch.export.export(attention, given).run_decompositions()
    assert not not_core(program)
    found, wanted = program.module()(*given), attention(*given)
    solve(case).check_results(found, case.return_weights)
    assert strides(found) == strides(wanted)


@pytest.mark.parametrize("shared", ["a list a head", "one list"])
def test_lists_of_keys_decompose(shared: str) -> None:
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 6)
    lists = torch.randint(-1, 9, (2, 2 if shared == "a list a head" else 1, 5, 4))
    lists[..., 0, :] = -1
    options = {"enable_gqa": True, "is_causal": True, "causal_alignment": "lower_right", "return_weights": True}
    tensors = (query, key, value, *[None] * 9, lists)
    found, wanted = DECOMPOSITIONS[SDPA](*tensors, **options), SDPA(*tensors, **options)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("feature", sorted(set(FEATURES) - {"dropout", "everything"}))
def test_packed_sequences_decompose(feature: str) -> None:
    made = call(Packed(f"decomposed {feature}", (37, 5, 0, 1), (53, 90, 7, 33), FEATURES[feature]), requires_grad=False)
    names = ("query", "key", "value", "alibi_slopes", "relative_bias", "attn_mask")
    tensors = [getattr(made, name) for name in names]

    class Packs(nn.Module):
        def forward(self, *given: Tensor | None) -> Any:
            return made.run(**dict(zip(names, given, strict=True)))

    program = torch.export.export(Packs(), tuple(tensors)).run_decompositions()
    assert not not_core(program)
    torch.testing.assert_close(program.module()(*tensors), made.run())


@pytest.mark.parametrize("feature", sorted(set(FEATURES) - {"dropout", "everything"}))
def test_gradients_of_packed_sequences_decompose(feature: str) -> None:
    made = call(Packed(f"decomposed {feature}", (37, 5, 0, 1), (53, 90, 7, 33), FEATURES[feature]))
    wanted = made.gradients(made.run())
    with Decomposed():
        found = made.gradients(made.run())
    torch.testing.assert_close(found, wanted)


def test_sizes_may_change_and_scaledot_may_be_absent(tmp_path: Path) -> None:
    model = Layer().eval()
    program = exported(model).run_decompositions()
    assert not not_core(program)
    torch.export.save(program, tmp_path / "model.pt2")
    arguments = inputs(4, 30)
    torch.save((arguments, model(*arguments)), tmp_path / "results.pt")
    script = """if True:
        import sys, torch
        program = torch.export.load(sys.argv[1]).module()
        arguments, wanted = torch.load(sys.argv[2])
        assert "scaledot" not in sys.modules
        torch.testing.assert_close(program(*arguments), wanted)
    """
    command = [sys.executable, "-c", script, str(tmp_path / "model.pt2"), str(tmp_path / "results.pt")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_an_empty_row_is_zero_and_keys_may_be_absent() -> None:
    mask = torch.rand(3, 5) < 0.5
    mask[1] = False
    for keys in (5, 0):
        query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, keys, 4)
        output, lse, _ = DECOMPOSITIONS[SDPA](query, key, key, mask[:, :keys])
        wanted = SDPA(query, key, key, mask[:, :keys])
        torch.testing.assert_close((output, lse), wanted[:2])
        assert (output[..., 1, :] == 0).all()
        assert (lse[..., 1] == float("-inf")).all()


class Scored(nn.Module):
    """A call with one of its score functions."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.bias, self.documents = nn.Buffer(torch.randn(2, 31)), nn.Buffer(torch.arange(16) // 6)

    def forward(self, query: Tensor, key: Tensor) -> Any:
        score_mod = {"table": self.table, "documents": self.of_one_document, "distance": self.distance}[self.name]
        return scaledot.scaled_dot_product_attention(
            query, key, key, score_mod=score_mod, window=(9, 4), return_lse=True
        )

    def table(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * 0.5 + self.bias[h, q_idx - kv_idx + 15]

    def of_one_document(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.where(self.documents[q_idx] == self.documents[kv_idx], score, -float("inf"))

    def distance(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.tanh(score) - (q_idx - kv_idx).abs() * torch.exp(-0.5 * (h + b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["table", "documents", "distance"])
def test_score_functions_decompose(name: str, dtype: torch.dtype) -> None:
    model = Scored(name).to(dtype)
    query, key = torch.randn(2, 3, 2, 16, 8).to(dtype).unbind()
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (query, key)), file)
    file.seek(0)
    program = torch.export.load(file).run_decompositions()
    assert not not_core(program)
    results, exact = program.module()(query, key), model.double()(query.double(), key.double())
    for found, wanted in zip(results, exact, strict=True):
        rounding = 4 * torch.finfo(found.dtype).eps
        torch.testing.assert_close(found.double(), wanted, rtol=rounding, atol=rounding)


NO_DROPOUT = (
    "dropout_p: got a number above 0, which has no decomposition to core ATen operators; needs 0: export the model in "
    "eval mode"
)


def first_line(error: BaseException) -> str:
    """Torch adds lines to it that say which call it is."""
    return str(error).partition("\n")[0]


def test_dropout_is_refused_by_name() -> None:
    class Drops(nn.Module):
        def forward(self, query: Tensor) -> Tensor:
            return scaledot.scaled_dot_product_attention(query, query, query, dropout_p=0.5)

    program = torch.export.export(Drops(), (torch.randn(1, 2, 4, 8),))
    with pytest.raises(NotImplementedError) as raised:
        program.run_decompositions()
    assert first_line(raised.value) == NO_DROPOUT


class Loss(nn.Module):
    """A loss of dense and packed calls, whose parameters have gradients in each of the ways that the ops know."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        sizes = {"query": (9, 4, 8), "key": (12, 2, 8), "value": (12, 2, 6), "mask": (4, 9, 3), "bias": (4, 5)}
        self.tensors = nn.ParameterDict({name: torch.randn(size) for name, size in sizes.items()})
        self.factors = nn.Parameter(torch.randn(4))

    def score(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.tanh(score * self.factors[h])

    def forward(self, weight: Tensor) -> Tensor:
        query, key, value, mask, bias = (self.tensors[name] for name in ("query", "key", "value", "mask", "bias"))
        packed, packed_lse = varlen_attention(
            query, key, value, torch.tensor([0, 4, 9]), torch.tensor([0, 5, 12]), 5, 7,
            attn_mask=mask, relative_bias=bias, softcap=3.0, enable_gqa=True, return_lse=True,
        )  # fmt: skip
        dense = [t.transpose(0, 1)[None] for t in (query, key, value)]
        output, weights = attend(*dense, is_causal=True, enable_gqa=True, return_weights=True, **self.options)
        scored = attend(*dense, enable_gqa=True, score_mod=self.score)
        results = (packed, packed_lse, output, weights, scored)
        return weight * torch.stack([(t * torch.linspace(-1, 1, t.size(-1))).square().sum() for t in results]).sum()


def test_a_program_with_a_loss_is_core_aten() -> None:
    model, weight = Loss(), torch.tensor(0.5)
    program = _export_forward_backward(torch.export.export(model, (weight,)))
    assert not not_core(program)
    signature = program.graph_signature
    known = {**program.state_dict, **program.constants}
    inputs = [weight if spec.target is None else known[spec.target] for spec in signature.input_specs]
    loss, *gradients = program.graph_module(*inputs)
    wanted = model(weight)
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    by_name = dict(model.named_parameters())
    assert len(gradients) == len(by_name)
    for spec, gradient in zip(signature.output_specs[1:], gradients, strict=True):
        torch.testing.assert_close(gradient, by_name[spec.target].grad)


def test_dropout_is_refused_in_a_program_with_a_loss() -> None:
    program = torch.export.export(Loss(dropout_p=0.5), (torch.tensor(1.0),))
    with pytest.raises(NotImplementedError) as raised:
        _export_forward_backward(program)
    assert first_line(raised.value) == NO_DROPOUT


class Into(nn.Module):
    """Calls with `out`: memory of the caller, and a part of memory of its own."""

    def forward(self, x: Tensor, out: Tensor, tokens: Tensor) -> Any:
        output, lse = attend(x, x, x, is_causal=True, out=out, return_lse=True)
        whole = torch.zeros(2, 9, 2, 8)
        ends = torch.tensor([0, 4, 9])
        varlen_attention(tokens, tokens, tokens, ends, ends, 5, 5, softcap=2.0, out=whole[1])
        return output * 2, lse, whole, out + 1


def test_calls_with_out_decompose() -> None:
    model, x, tokens = Into(), torch.randn(2, 3, 5, 8), torch.randn(9, 2, 8)
    program = torch.export.export(model, (x, torch.empty(2, 3, 5, 8), tokens))
    decomposed = program.run_decompositions()
    assert not not_core(decomposed)
    outs = [torch.zeros(2, 5, 3, 8).transpose(1, 2) for _ in range(2)]
    found, wanted = (call(x, out, tokens) for call, out in zip((decomposed.module(), model), outs, strict=True))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*outs)
    assert outs[0].any()

    table = torch.export.default_decompositions()
    del table[SDPA], table[torch.ops.scaledot.varlen.default]
    kept = program.run_decompositions(table)
    assert "sdpa_out" in str(kept.graph)
    assert "varlen_out" in str(kept.graph)
    torch.testing.assert_close(kept.module()(x, outs[0], tokens), wanted)


def test_pages_are_refused_with_out() -> None:
    class Paged(nn.Module):
        def forward(self, query: Tensor, pool: Tensor, out: Tensor) -> Tensor:
            ends, table, used = torch.tensor([0, 2]), torch.tensor([[0, 1]]), torch.tensor([7])
            result: Tensor = varlen_attention(
                query, pool, pool, ends, None, 2, 7, block_table=table, seqused_k=used, out=out
            )
            return result

    given = (torch.randn(2, 4, 8), torch.randn(2, 4, 4, 8), torch.empty(2, 4, 8))
    program = torch.export.export(Paged(), given)
    with pytest.raises(NotImplementedError) as raised:
        program.run_decompositions()
    assert first_line(raised.value) == (
        "block_table: got a tensor, which has no decomposition to core ATen operators; needs None: gather the pages in "
        "the model"
    )


def test_a_quantised_cache() -> None:
    """It decomposes, but for its scales."""

    class Quantised(nn.Module):
        def forward(self, query: Tensor, cache: Tensor, scale: Tensor | None) -> Tensor:
            ends = torch.tensor([0, 3, 7])
            result: Tensor = varlen_attention(query, cache, cache, ends, ends, 4, 4, v_scale=scale)
            return result

    query = torch.randn(7, 2, 8)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        cache = (torch.randn(7, 2, 8) * 3).to(dtype)
        program = torch.export.export(Quantised(), (query, cache, None))
        decomposed = program.run_decompositions()
        assert not not_core(decomposed)
        torch.testing.assert_close(decomposed.module()(query, cache, None), Quantised()(query, cache, None))
    program = torch.export.export(Quantised(), (query, cache, torch.ones(2)))
    with pytest.raises(NotImplementedError) as raised:
        program.run_decompositions()
    assert first_line(raised.value) == (
        "v_scale: got a tensor, which has no decomposition to core ATen operators; needs None: widen the cache in the "
        "model"
    )


def test_torch_compile_keeps_the_ops_whole() -> None:
    import torch._inductor.decomposition as inductor

    assert not DECOMPOSITIONS.keys() & inductor.decompositions.keys()
    assert DECOMPOSITIONS.keys() <= torch.export.default_decompositions().keys()


def test_the_ops_can_be_kept() -> None:
    program = exported(Layer().eval())
    table = torch.export.default_decompositions()
    del table[SDPA]
    assert not_core(program.run_decompositions(table)) == ["scaledot.sdpa.default"] * 2
