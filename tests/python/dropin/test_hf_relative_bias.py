"""scaledot.dropin.transformers.convert_relative_bias: T5 with a small table in place of a matrix of biases."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import tolerances
from hf_models import T5_SIZES, make, run, solved
from op_calls import Calls
from scaledot.dropin.transformers import convert_relative_bias

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("registered_in_transformers"),
]

NAMES = ["t5 encoder, bias", "t5, bias"]
SMALL = {**T5_SIZES, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6}


def t5(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(**{**SMALL, "decoder_start_token_id": 0, **changes})
    return transformers.T5ForConditionalGeneration(config).eval()


def biases(model: Any) -> list[nn.Embedding]:
    return [module for name, module in model.named_modules() if name.endswith("relative_attention_bias")]


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("name", NAMES)
def test_output_and_gradients(name: str, padding: str) -> None:
    exact, eager = solved(name, padding)
    output, gradients, _ = run(convert_relative_bias(make(name)), "scaledot", name, padding)
    tolerances.check("output", output, exact[0], tolerances.error(eager[0], exact[0]))
    assert gradients.keys() == eager[1].keys()
    assert any("relative_attention_bias" in key for key in gradients)
    whole = max(tolerances.largest(g) for g in exact[1].values())
    for key, gradient in gradients.items():
        error = max(tolerances.error(eager[1][key], exact[1][key]), torch.finfo(torch.float32).eps * whole)
        tolerances.check(key, gradient, exact[1][key], error, gradient=True)


@pytest.mark.parametrize("length", [3, 40])
def test_distances_beyond_the_last_bucket(length: int) -> None:
    """In float64, where eager and the kernels agree to the last digits."""
    ids, labels = torch.randint(2, 99, (2, length)), torch.randint(2, 99, (2, length + 5))
    found = {}
    for kind in ("eager", "scaledot"):
        model = convert_relative_bias(t5().double())
        model.set_attn_implementation(kind)
        result = model(input_ids=ids, labels=labels)
        grads = torch.autograd.grad(result.loss, [bias.weight for bias in biases(model)])
        found[kind] = [result.logits, *grads]
    for mine, right in zip(found["scaledot"], found["eager"], strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)


def recorded(model: Any, ids: Tensor) -> list[tuple[int, ...]]:
    """The shapes of relative_bias in the calls of the op, and of attn_mask where there is none."""
    shapes = []
    original = torch.ops.scaledot.sdpa.default

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is original:
                bias = args[6] if len(args) > 6 else (kwargs or {}).get("relative_bias")
                shapes.append(() if bias is None else tuple(bias.shape))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Recorder():
        model(input_ids=ids, decoder_input_ids=ids)
    return shapes


def test_every_layer_gets_the_table() -> None:
    model = t5()
    model.set_attn_implementation("scaledot")
    ids = torch.randint(2, 99, (1, 30))
    assert set(recorded(model, ids)) == {()}
    shapes = recorded(convert_relative_bias(model), ids)
    # Two layers of the encoder and two of the decoder; its cross attention has no positions.
    assert shapes.count((1, 4, 2 * 6 + 1)) == 4
    assert shapes.count(()) == 2


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
def test_generate(cache: str | None) -> None:
    ids = torch.randint(2, 99, (2, 17))
    attention_mask = torch.ones_like(ids)
    attention_mask[1, 11:] = 0
    options: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    options |= {"use_cache": cache is not None, "attention_mask": attention_mask}
    if cache is not None:
        options["cache_implementation"] = cache
    found = {}
    for kind in ("eager", "scaledot"):
        model = convert_relative_bias(t5())
        model.set_attn_implementation(kind)
        found[kind] = model.generate(ids, **options)
    assert torch.equal(found["eager"], found["scaledot"])


def test_beams_and_a_prompt_for_the_decoder() -> None:
    """The decoder's first call has several queries, and with a cache later ones too."""
    ids, prompt = torch.randint(2, 99, (2, 9)), torch.randint(2, 99, (2, 5))
    found = {}
    for kind in ("eager", "scaledot"):
        model = convert_relative_bias(t5())
        model.set_attn_implementation(kind)
        found[kind] = model.generate(ids, decoder_input_ids=prompt, max_new_tokens=8, num_beams=3, do_sample=False)
    assert torch.equal(found["eager"], found["scaledot"])


def test_several_queries_after_a_cache() -> None:
    ids, first, rest = (torch.randint(2, 99, (2, n)) for n in (9, 11, 4))
    found = {}
    for kind in ("eager", "scaledot"):
        model = convert_relative_bias(t5().double())
        model.set_attn_implementation(kind)
        start = model(input_ids=ids, decoder_input_ids=first, use_cache=True)
        after = model(
            encoder_outputs=(start.encoder_last_hidden_state,), decoder_input_ids=rest,
            past_key_values=start.past_key_values,
        )  # fmt: skip
        found[kind] = after.logits
    torch.testing.assert_close(found["scaledot"], found["eager"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_other_implementations_run_as_before(kind: str) -> None:
    ids = torch.randint(2, 99, (1, 13))
    model = t5()
    model.set_attn_implementation(kind)
    wanted = model(input_ids=ids, decoder_input_ids=ids).logits
    with Calls() as calls:
        found = convert_relative_bias(model)(input_ids=ids, decoder_input_ids=ids).logits
    assert not calls.names
    assert torch.equal(found, wanted)


def test_a_copy_is_converted_and_converting_twice_changes_nothing() -> None:
    model = convert_relative_bias(convert_relative_bias(t5()))
    model.set_attn_implementation("scaledot")
    again = copy.deepcopy(model)
    for bias in biases(again):
        nn.init.zeros_(bias.weight)
    ids = torch.randint(2, 99, (1, 13))
    assert recorded(again, ids).count((1, 4, 13)) == 4
    wanted = model(input_ids=ids, decoder_input_ids=ids).logits
    assert not torch.allclose(again(input_ids=ids, decoder_input_ids=ids).logits, wanted)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(input_ids=ids, decoder_input_ids=ids).logits, wanted)


RELATIVES = {
    "MT5EncoderModel": "MT5Config",
    "UMT5EncoderModel": "UMT5Config",
    "SwitchTransformersEncoderModel": "SwitchTransformersConfig",
}


@pytest.mark.parametrize("name", RELATIVES)
def test_relatives_of_t5(name: str) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, RELATIVES[name])(**SMALL)
    model = getattr(transformers, name)(config).eval().double()
    ids = torch.randint(2, 99, (2, 30))
    with torch.no_grad():
        model.set_attn_implementation("eager")
        wanted = model(input_ids=ids).last_hidden_state
        model.set_attn_implementation("scaledot")
        found = convert_relative_bias(model)(input_ids=ids).last_hidden_state
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


LONG_STEP = """
import resource, sys, warnings
warnings.simplefilter("ignore")
import torch, transformers
import scaledot.dropin.transformers as dropin
torch.set_num_threads(2)
dropin.register()
config = transformers.T5Config(
    vocab_size=99, d_model=128, d_kv=64, d_ff=128, num_layers=1, num_heads=8, decoder_start_token_id=0
)
model = transformers.T5ForConditionalGeneration(config)
model.set_attn_implementation(sys.argv[1])
dropin.convert_relative_bias(model)
optimizer = torch.optim.AdamW(model.parameters())

def step(length):
    ids = torch.randint(1, 99, (1, length))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()

step(8)  # what is loaded and started once
used = {line.split(":")[0]: int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("Vm")}
resource.setrlimit(resource.RLIMIT_AS, ((used["VmSize"] << 10) + (4 << 30),) * 2)
step(4096)
bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
assert bias.weight.grad.abs().sum() > 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_training_step_that_eager_cannot_fit_in_4_gib() -> None:
    """4096 positions of the encoder and of the decoder. A matrix of biases has 512 MiB, and eager has several."""
    done = {
        kind: subprocess.run([sys.executable, "-c", LONG_STEP, kind], capture_output=True, text=True)
        for kind in ("scaledot", "eager")
    }
    assert done["scaledot"].returncode == 0, done["scaledot"].stderr
    assert "can't allocate memory" in done["eager"].stderr


def test_models_without_such_a_bias() -> None:
    with pytest.raises(ValueError, match="model: got a Linear, none of whose modules") as raised:
        convert_relative_bias(nn.Linear(2, 2))
    assert "\n" not in str(raised.value)
    with pytest.raises(TypeError, match=r"^model: got 't5-small', a str; needs a torch\.nn\.Module$"):
        convert_relative_bias("t5-small")  # type: ignore[type-var]
