"""python -m external.transformers_sweep [WORD ...]: model classes of transformers, small, against eager in float32.

With words, only the classes whose name contains one of them run. Every class of the auto mappings in `MAPPINGS` is
built from its shrunken config and runs in a process of its own, so that a crash or a hang is one row. It exits with 1
on any failure. With `--results FILE` each result is a line of the file, and a class that it has does not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import json
import os
import re
import resource
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

import scaledot.dropin.transformers

# In the order in which they run. The kind of a base class is that of its inputs.
MAPPINGS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "causal",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "seq2seq",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "encoder",
    "MODEL_FOR_IMAGE_MAPPING_NAMES": "vision",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES": "audio",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": "multimodal",
    "MODEL_MAPPING_NAMES": "base",
}
KINDS = ("causal", "seq2seq", "encoder", "vision", "audio", "time series", "multimodal")
STATUSES = ("passed", "refused", "not built", "eager does not run", "failed")
_MODALITIES = {"text": "encoder", "image": "vision", "video": "vision", "audio": "audio", "time": "time series"}
LENGTH, LIMIT_S = 12, 60
TOLERANCE = 1e-3  # of the largest logit; a wrong mask is off by more than a tenth

# What a field of a config becomes. The first pattern that its name matches counts; other fields keep their default.
_SIZES: Sequence[tuple[str, int]] = (
    (r"^qk_head_dim$|mamba_(d_head|head_dim)$", 16),
    (r"mamba_(n|num)_heads$", 4),
    (r"num_(key_value|kv)_heads|num_key_value_groups|multi_query_group_num|n_head_kv", 2),
    (r"(num|n)_(hidden_)?layers?$|layers$|num_blocks$|num_hidden_layers|^depth$|n_layers?$", 2),
    (r"attention_heads$|^n_heads?$|^num_heads$|^num_head$|attn_heads$", 4),
    (r"(n|num)(_routed|_local)?_experts$|^num_experts|moe_num_experts", 4),
    (r"experts_per_tok|moe_topk|moe_k$|num_selected_experts", 2),
    (r"^attn_layer_period$", 2),
    (r"^attn_layer_offset$", 1),
    (r"upsample_groups$", 32),
    (r"^window_size$", 2),
    (r"^(n|topk)_group$|shared_experts$", 1),
    (r"vocab_size", 128),
    (r"kv_lora_rank|q_lora_rank", 16),
    (r"head_dim$|_head_size$|^d_kv$|^kv_channels$|rotary_dim$", 8),
    (r"intermediate_size|ffn_dim|^d_ff$|^d_inner$|ffn_hidden_size|^n_inner$|feed_forward_size", 48),
    (r"hidden_size|hidden_dim|d_model|^n_embd$|embed_dim$|embedding_size|projection_dim|^dim$|d_embed|^width$", 32),
    (r"bottleneck_size$", 32),
    (
        r"max_position_embeddings|^n_positions$|^n_ctx$|max_(source|target)_positions|max_seq_len|max_sequence_length",
        64,
    ),
    (r"sliding_window$|local_attention$", 8),
    (r"image_size$", 32),
    (r"patch_size$", 8),
)
# Fields that some models need and whose default is None.
_MISSING = {"prediction_length": 4, "head_dim": 8, "num_key_value_heads": 2}
_ROW = re.compile("|".join(f"(?P<r{k}>{pattern})" for k, (pattern, _) in enumerate(_SIZES)))


def shrunken(kind: type) -> Any:
    """A small config of the class `kind`."""
    default = kind()
    fields: dict[str, Any] = {}
    known = default.to_dict()
    for name, value in known.items():
        match = _ROW.search(name)
        if name == "embed_dim" and isinstance(known.get("num_heads"), list):
            continue  # a stage has a multiple of it, and its own number of heads
        if name == "num_feat_extract_layers":  # the length of lists
            continue
        if match and type(value) is int and value > 0:
            fields[name] = min(value, next(s for k, (_, s) in enumerate(_SIZES) if match[f"r{k}"] is not None))
        elif name in _MISSING and value is None:
            fields[name] = _MISSING[name]
        elif name == "attention_types":  # a global and a local layer
            fields[name] = [[["global", "local"], 1]]
        elif name.endswith("token_id") and type(value) is int:
            fields[name] = value % 100 if value >= 100 else value
    kinds = known.get("layer_types")
    if kinds and "num_hidden_layers" in fields:  # a layer of each kind, at least
        layers = max(2, 1 + max(kinds.index(one) for one in kinds))
        fields |= {"num_hidden_layers": layers, "layer_types": kinds[:layers]}
    if "window_size" in fields and "image_size" in fields:  # every stage halves the image
        fields["image_size"] = 64
    rope = known.get("rope_parameters", "none")
    if re.search("vl|glm|ocr|omni", kind.model_type) and (rope is None or "rope_type" in rope):
        rotated = int(8 * (rope or {}).get("partial_rotary_factor", 1.0))  # time and both places share half of it
        sections = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, rotated // 2 - 2]}
        fields["rope_parameters"] = {**sections, **(rope or {})}
    if "qk_rope_head_dim" in known and "num_key_value_heads" in fields:  # latent attention has no groups of heads
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    for name, sub in (getattr(kind, "sub_configs", None) or {}).items():
        now = getattr(default, name, None)
        sub_kind = type(now) if now is not None else sub
        if hasattr(sub_kind, "model_type") and sub_kind.model_type:
            fields[name] = shrunken(sub_kind).to_dict()
    return kind(**fields)


def inputs_of(model: nn.Module, config: Any) -> dict[str, Tensor]:
    """Inputs for the model's main input."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    main = model.main_input_name
    if main == "input_ids":
        inputs = {"input_ids": torch.randint(3, min(90, text.vocab_size), (2, LENGTH))}
        if takes(model, "decoder_input_ids"):
            inputs["decoder_input_ids"] = torch.randint(3, min(90, text.vocab_size), (2, LENGTH))
        return inputs
    vision = getattr(config, "vision_config", config)
    if main == "pixel_values":
        size = getattr(vision, "image_size", 32)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return {main: torch.randn(2, getattr(vision, "num_channels", 3), height, width)}
    if main == "input_values":
        return {main: torch.randn(2, 4000)}
    if main == "input_features":
        sizes = [getattr(config, size, None) for size in ("num_mel_bins", "feature_size", "input_dim")]
        bins, frames = next(filter(None, sizes), 80), 2 * getattr(config, "max_source_positions", 32)
        inputs = {main: torch.randn(2, bins, frames) if sizes[0] else torch.randn(2, frames, bins)}
        if takes(model, "decoder_input_ids"):
            inputs["decoder_input_ids"] = torch.randint(3, min(90, text.vocab_size), (2, LENGTH))
        return inputs
    if main == "past_values":
        past = config.context_length + max(getattr(config, "lags_sequence", None) or [0])
        steps, known = config.prediction_length, getattr(config, "num_time_features", 0)
        return {
            main: torch.randn(2, past),
            "past_time_features": torch.randn(2, past, known),
            "past_observed_mask": torch.ones(2, past),
            "future_values": torch.randn(2, steps),
            "future_time_features": torch.randn(2, steps, known),
        }
    raise NotImplementedError(f"no inputs are made for {main}")


def inputs_that_run(model: nn.Module, config: Any) -> dict[str, Tensor]:
    """`inputs_of` the model, or if it does not run with them, those and images, or those as a video."""
    given = inputs_of(model, config)
    further: list[dict[str, Tensor]] = []
    if "pixel_values" in given:
        video = given["pixel_values"][:, None].repeat(1, getattr(config, "num_frames", 2), 1, 1, 1)
        further.append({"pixel_values": video})
    elif "input_ids" in given and takes(model, "pixel_values"):
        vision = getattr(config, "vision_config", None) or config
        size = getattr(vision, "image_size", 32)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        if 0 < (getattr(text, "eos_token_id", None) or 0) < text.vocab_size:
            given["input_ids"][:, LENGTH // 2] = text.eos_token_id  # whose row stands for the text
        further.append({**given, "pixel_values": torch.randn(2, getattr(vision, "num_channels", 3), height, width)})
    for inputs in (given, *further):
        with contextlib.suppress(Exception):
            result(model(**inputs))
            return inputs
    return given


def result(outputs: Any) -> Tensor:
    for name in ("logits", "last_hidden_state"):
        found = outputs.get(name)
        if isinstance(found, Tensor):
            return found
    return next(v for v in outputs.to_tuple() if isinstance(v, Tensor) and v.is_floating_point())


def takes(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def conditions(
    example: nn.Module, config: Any, inputs: dict[str, Tensor]
) -> Iterator[tuple[str, Callable[[nn.Module], Tensor]]]:
    """Names, and functions from a model to what is compared. Rows of padding are not."""

    def padded(left: bool) -> Callable[[nn.Module], Tensor]:
        mask = torch.ones_like(inputs["input_ids"])
        mask[1, slice(0, 4) if left else slice(-4, None)] = 0

        def run(model: nn.Module) -> Tensor:
            found = result(model(**inputs, attention_mask=mask))
            whole = "decoder_input_ids" in inputs or found.shape[:2] != mask.shape
            return found if whole else found[mask.bool()]

        return run

    def cached(static: bool) -> Callable[[nn.Module], Tensor]:
        ids, keyword = inputs["input_ids"], "cache" if takes(example, "cache") else "past_key_values"

        def run(model: nn.Module) -> Tensor:
            cache = {keyword: transformers.StaticCache(config=config, max_cache_len=24)} if static else {}
            found = []
            for start, stop in ((0, 8), (8, 11), (11, 12)):
                mask = torch.ones(2, stop, dtype=torch.long)
                outputs = model(input_ids=ids[:, start:stop], attention_mask=mask, use_cache=True, **cache)
                cache = {keyword: outputs.past_key_values}
                found.append(result(outputs))
            return torch.cat(found, 1)

        return run

    yield "no padding", lambda model: result(model(**inputs))
    if "input_ids" in inputs:
        yield "right padding", padded(left=False)
        yield "left padding", padded(left=True)
        if "decoder_input_ids" not in inputs and (takes(example, "cache") or takes(example, "past_key_values")):
            yield "dynamic cache", cached(static=False)
            yield "static cache", cached(static=True)
        if takes(example, "logits_to_keep"):
            yield "logits_to_keep", lambda model: result(model(**inputs, logits_to_keep=3))


def seeded(run: Callable[[nn.Module], Tensor], model: nn.Module) -> Tensor:
    """What `run` gives. Models such as ViT-MAE draw random numbers."""
    torch.manual_seed(0)
    return run(model)


def sees_ahead(model: nn.Module, inputs: dict[str, Tensor]) -> bool:
    """Whether a change of the last token moves an earlier row."""
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    changed = inputs[name].clone()
    changed[:, -1] = (changed[:, -1] + 1) % 80 + 3
    given = ({**inputs, name: ids} for ids in (inputs[name], changed))
    before, after = [seeded(lambda m, one=one: result(m(**one)), model) for one in given]
    if before.shape != after.shape:  # the tokens decide how many rows there are
        return True
    return bool(((after - before)[:, :-1].abs() > 1e-5).any())


def is_refusal(error: Exception) -> bool:
    return any(words in str(error) for words in ("computes its attention itself", "does not support setting"))


def ours(eager: nn.Module, config: Any) -> tuple[dict[str, nn.Module], list[str]]:
    """The model with our attention by both ways to choose it, and the reasons of those that are refused in words."""
    by_way: dict[str, nn.Module] = {}
    refused = []

    def by_config() -> nn.Module:
        model = type(eager)._from_config(copy.deepcopy(config), attn_implementation="scaledot").eval()
        model.load_state_dict(eager.state_dict())
        return model

    def by_method() -> nn.Module:
        model = copy.deepcopy(eager)
        model.set_attn_implementation("scaledot")
        return model

    for way, make in (("config", by_config), ("set_attn_implementation", by_method)):
        try:
            by_way[way] = make()
        except Exception as error:
            if not is_refusal(error):
                raise
            refused.append(short(error))
    return by_way, refused


def check(name: str, eager_ran: Callable[[], object]) -> dict[str, Any]:
    """What the class `name` gives: {"status": ..., "reason": ..., "conditions": how many were compared}.

    It calls `eager_ran` when eager has run once.
    """
    torch.manual_seed(0)
    stage = "not built"
    try:
        kind = getattr(transformers, name)
        config = shrunken(kind.config_class)
        if hasattr(config, "is_decoder") and name in names_of("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"):
            config.is_decoder = True
        eager = kind._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
        for parameter in eager.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.2)
        stage = "eager does not run"
        inputs = inputs_that_run(eager, config)
        assert result(eager(**inputs)).isfinite().all(), "eager's results are not finite"
    except Exception as error:
        return {"status": stage, "reason": short(error)}
    eager_ran()
    try:
        by_way, refused = ours(eager, config)
        count, wrong = 0, []
        for condition, run in conditions(eager, config, inputs):
            try:
                wanted = seeded(run, eager)
            except Exception:  # eager does not run
                continue
            if not wanted.isfinite().all():
                continue
            count += 1
            for way, model in by_way.items():
                try:
                    found = seeded(run, model)
                except Exception as error:
                    if is_refusal(error):
                        raise
                    wrong.append(f"{condition} by {way}: {short(error)}")
                    continue
                error_of = float((found - wanted).abs().max() / wanted.abs().max())
                if not error_of <= TOLERANCE:
                    wrong.append(f"{condition} by {way}: off by {error_of:.2g} of the largest")
        if "input_ids" in inputs:
            ahead = [sees_ahead(model, inputs) for model in (eager, *by_way.values())]
            if len(set(ahead)) > 1:
                wrong.append(f"causality: {', '.join(['eager', *by_way])} see ahead: {ahead}")
    except Exception as error:
        return {"status": "refused" if is_refusal(error) else "failed", "reason": short(error)}
    status = "failed" if wrong else "refused" if refused else "passed"
    return {"status": status, "reason": "; ".join(wrong or refused), "conditions": count}


def short(error: Exception) -> str:
    lines = str(error.__cause__ or error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def check_quietly(name: str, started: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """`check` without output, warnings and gradients."""
    with contextlib.ExitStack() as stack:
        null = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(null))
        stack.enter_context(contextlib.redirect_stderr(null))
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        return check(name, started)


def in_process(name: str) -> dict[str, Any]:
    """`check_quietly` in a process of its own, for at most `LIMIT_S` seconds of processor time.

    A fork has no OpenMP threads, and would wait for them if this process had begun some.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 1))
        found = check_quietly(name, lambda: os.write(write, b"\n"))
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text.strip():
        return dict(json.loads(text))
    hung = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
    reason = f"longer than {LIMIT_S} s" if hung else f"the process ended with status {status}"
    return {"status": "failed" if text else "eager does not run", "reason": reason}


def names_of(mapping: str) -> list[str]:
    """The classes of an auto mapping, some of which this version of transformers may lack."""
    found = getattr(modeling_auto, mapping, {}).values()
    return [name for names in found for name in ((names,) if isinstance(names, str) else names)]


def kind_of(name: str, kind: str) -> str:
    """Among `KINDS`: `kind`, or for a base class that of its inputs."""
    if kind != "base":
        return kind
    try:
        given = getattr(transformers, name).input_modalities
    except Exception:  # it cannot be imported
        return "encoder"
    several = (given,) if isinstance(given, str) else given
    return _MODALITIES.get(several[0], "multimodal") if len(several) == 1 else "multimodal"


def classes(words: Sequence[str]) -> list[tuple[str, str]]:
    """(kind of model, class), each class once, in the order of `KINDS`."""
    found: dict[str, str] = {}
    for mapping, kind in MAPPINGS.items():
        for name in names_of(mapping):
            if hasattr(transformers, name) and (not words or any(word.lower() in name.lower() for word in words)):
                found.setdefault(name, kind)
    return sorted(((kind_of(name, kind), name) for name, kind in found.items()), key=lambda row: KINDS.index(row[0]))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="external.transformers_sweep", description=__doc__, allow_abbrev=False)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--results", type=Path, help="a file with a line for each class that has run")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    scaledot.dropin.transformers.register()
    wanted = classes(options.words)
    known: dict[str, dict[str, Any]] = {}
    if options.results is not None and options.results.exists():
        known = {row["name"]: row for row in map(json.loads, options.results.read_text().splitlines())}
    for kind, name in wanted:
        if name in known:
            continue
        known[name] = {"name": name, "kind": kind, **in_process(name)}
        print(f"{known[name]['status']:18} {name} {known[name]['reason']}", file=sys.stderr, flush=True)
        if options.results is not None:
            with options.results.open("a") as file:
                file.write(json.dumps(known[name]) + "\n")
    rows = [known[name] for _, name in wanted]
    counts = Counter((row["kind"], row["status"]) for row in rows)
    print(f"transformers {transformers.__version__}\n\n| kind | classes | {' | '.join(STATUSES)} |")
    print("|---" * (len(STATUSES) + 2) + "|")
    for kind in (*KINDS, "all"):
        numbers = [sum(n for (k, s), n in counts.items() if s == status and kind in (k, "all")) for status in STATUSES]
        print(f"| {kind} | {' | '.join(map(str, [sum(numbers), *numbers]))} |")
    failures = [f"- {row['name']}: {row['reason']}" for row in rows if row["status"] == "failed"]
    print("\n".join(["", *failures]))
    return 1 if failures or not rows else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
