"""python -m scaledot compare --models: the models, the check, the table, the JSON file, the plot and the options."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import picture_size, refused
from scaledot.__main__ import main
from scaledot.compare.check import Verdict
from scaledot.compare.features import DTYPES
from scaledot.compare.models import catalogue, command, run
from scaledot.compare.models.catalogue import INSTALL, MODELS, PEERS, SIDES, Results
from scaledot.compare.models.check import check
from scaledot.compare.models.report import ModelTable, rate_of
from scaledot.compare.models.run import ModelRow
from scaledot.compare.models.subject import Subject, sharing
from scaledot.compare.report import Paint
from scaledot.compare.timing import Effort, Timing, alternate_parts

pytest.importorskip("matplotlib")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("registered_in_transformers"),
]

QUICK = ["compare", "--quick", "--seconds", "0.001"]
HERE = [name for name, model in MODELS.items() if model.package == "transformers"]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_parts_of_a_side_are_called_in_order_and_timed_apart() -> None:
    order: list[str] = []
    sides = tuple({part: lambda text=side + part: order.append(text) for part in "12"} for side in "ab")
    timings = alternate_parts(sides, Effort(0.0, 2))
    assert order[:8] == ["a1", "a2", "b1", "b2"] * 2  # a warm-up call and a trial reading of each come first
    counts = [timing["1"].calls for timing in timings]
    assert order[8:] == (["a1", "a2"] * counts[0] + ["b1", "b2"] * counts[1]) * 2
    assert [list(timing) for timing in timings] == [["1", "2"]] * 2
    assert all(len(timing.readings) == 2 for side in timings for timing in side.values())


def test_the_sides_share_the_parameters() -> None:
    subject = Subject(MODELS["t5"], "float32", quick=True)
    mine = subject.built.module
    for side in SIDES:
        other = subject.modules[side]
        assert other is not mine
        assert [id(p) for p in other.parameters()] == [id(p) for p in mine.parameters()]
    assert sharing(mine).shared is not mine.shared


def test_each_side_has_its_own_attention() -> None:
    subject = Subject(MODELS["bert"], "float32", quick=True)
    assert [subject.modules[side].config._attn_implementation for side in SIDES] == list(SIDES)


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in HERE for dtype in MODELS[name].dtypes])
def test_every_model_is_right(name: str, dtype: str) -> None:
    subject = Subject(MODELS[name], dtype, quick=True)
    verdict = check(subject)
    assert verdict.problems() == []
    gradients = [label for label, finding in verdict.findings.items() if finding.gradient]
    assert bool(gradients) == MODELS[name].trains
    assert len(gradients) == (len(list(subject.built.module.parameters())) if MODELS[name].trains else 0)


@pytest.mark.parametrize("name", HERE)
def test_one_sample_is_the_first_of_the_batch(name: str) -> None:
    built = MODELS[name].make(True)
    one, several = built.inputs(1), built.inputs(3)
    for key in one:
        if key not in ("key", "value"):
            assert torch.equal(one[key], several[key][:1])


@pytest.mark.parametrize(("name", "kind"), [("bert", "gradient of"), ("gpt2", "last_hidden_state")])
def test_the_check_finds_wrong_attention(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import scaledot.dropin.transformers as dropin

    right = dropin.scaled_dot_product_attention

    def spoiled(query: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if name == "bert":  # equal values, but 1.1 times the gradient
            query = 1.1 * query - 0.1 * query.detach()
            return right(query, *rest, **options)
        return 1.001 * right(query, *rest, **options)

    monkeypatch.setattr(dropin, "scaled_dot_product_attention", spoiled)
    verdict = check(Subject(MODELS[name], "float32", quick=True))
    assert not verdict.passed
    assert any(problem.startswith(kind) for problem in verdict.problems())


def test_a_result_that_eager_has_right_by_chance_is_judged_by_its_errors_for_other_samples() -> None:
    class Lucky(Subject):
        """Eager's results for the first sample are exact."""

        def solved(self, side: str, sample: int = 0) -> tuple[Results, Results]:
            if side == "eager" and sample == 0:
                results, gradients = self.oracle()
                return tuple({n: t.float() for n, t in kind.items()} for kind in (results, gradients))  # type: ignore
            return super().solved(side, sample)

    subject = Lucky(MODELS["gpt2"], "float32", quick=True)
    verdict = check(subject)
    assert verdict.problems() == []
    assert verdict.findings["last_hidden_state"].eager > 1e-7


def test_a_training_step_updates_the_shared_parameters() -> None:
    subject = Subject(MODELS["bert"], "float32", quick=True)
    parameters = list(subject.built.module.parameters())
    before = copy.deepcopy(parameters)
    parts = subject.parts("scaledot")
    assert list(parts) == ["forward", "backward", "optimizer"]
    for name, part in parts.items():
        part()
        assert any(p.grad is not None for p in parameters) == (name == "backward")
    assert any(not torch.equal(new, old) for new, old in zip(parameters, before, strict=True))


@pytest.mark.parametrize("name", ["llama", "llama_static"])
def test_decoding_steps_are_alike(name: str) -> None:
    """The cache is as long after a step as before it."""
    (step,) = Subject(MODELS[name], "float32", quick=True).parts("scaledot").values()
    first, second = (step()["last_hidden_state"] for _ in range(2))
    assert torch.equal(first, second)
    assert not first.requires_grad


def row(name: str = "bert", verdict: Verdict | None = None, seconds: float = 1.0) -> ModelRow:
    """A made-up row: scaledot takes `seconds` for each pass, sdpa 2, eager 3."""
    sides = dict(zip(SIDES, (Timing((s, s, s), 1) for s in (seconds, 2.0, 3.0)), strict=True))
    timings = dict.fromkeys(MODELS[name].passes, sides)
    return ModelRow(name, MODELS[name].dtypes[0], "8 x 512", 8, verdict or Verdict({}, 1.0), timings)


def test_the_table() -> None:
    table = ModelTable([("bert", "float32")], Paint(False))
    heading = table.heading()
    for word in ("scaledot", "sdpa", "eager", "vs sdpa", "vs eager", "per second", "error", "limit"):
        assert word in heading
    lines = table.lines(row())
    assert [line.split()[3] for line in lines] == ["forward", "backward", "optimizer", "step"]
    assert all("2.00x" in line and "3.00x" in line for line in lines)
    assert [("8.00 samples" in line) for line in lines] == [False, False, False, True]
    wrong = table.lines(row(verdict=Verdict({}, 1.0, "RuntimeError: no such kernel")))
    assert wrong == ["BERT, training  fp32  FAIL  RuntimeError: no such kernel"]


def test_the_step_is_the_sum_of_its_parts() -> None:
    parts = {side: {part: Timing((1.0, 2.0), 1) for part in catalogue.TRAINING} for side in SIDES}
    timings = run._by_pass(MODELS["bert"], parts)
    assert list(timings) == list(MODELS["bert"].passes)
    assert timings["step"]["eager"].readings == (3.0, 6.0)


def test_rates() -> None:
    assert [rate_of(rate) for rate in (0.1234, 1.234, 12.34, 1234.5)] == ["0.123", "1.23", "12.3", "1234"]


def test_quick_models_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    assert main([*QUICK, "--models", "bert,llama", "--threads", "1", *files]) == 0
    out = capsys.readouterr().out
    assert "1 thread of" in out
    assert "All 3 models are right" in out
    width, height = picture_size(tmp_path / "out.png")
    assert width > 1000
    assert height > 300
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["format"] == 1
    assert report["passed"] is True
    assert report["options"]["complete"] is True
    assert report["options"]["models"] == ["bert", "llama"]
    assert report["noise"]["timings"] == 2 * (4 + 1 + 1)
    assert {"cpu", "threads", "torch", "scaledot", "capability"} <= set(report["machine"])
    bert, *llama = report["models"]
    assert [(one["model"], one["dtype"]) for one in llama] == [("llama", "float32"), ("llama", "bfloat16")]
    assert set(bert["passes"]) == {"forward", "backward", "optimizer", "step"}
    assert set(bert["correctness"]["worst"]) == {"result", "gradient"}
    for model in report["models"]:
        assert model["correctness"]["passed"]
        for timed in model["passes"].values():
            for peer in PEERS:
                assert timed["ratio"][peer] == pytest.approx(timed[peer]["median"] / timed["scaledot"]["median"])
            for side in SIDES:
                assert len(timed[side]["readings"]) >= 3
                assert timed["rate"][side] == pytest.approx(model["amount"] / timed[side]["median"])


def test_dtypes_replace_those_of_the_models() -> None:
    assert command.plan(["bert", "llama"], ["bfloat16"])[0] == [("bert", "bfloat16"), ("llama", "bfloat16")]
    planned, _ = command.plan(["llama"], None)
    assert planned == [("llama", "float32"), ("llama", "bfloat16")]
    assert all(dtype in DTYPES for model in MODELS.values() for dtype in model.dtypes)


def test_a_wrong_model_is_reported_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "check", lambda subject: Verdict({}, 1.0, "RuntimeError: no such kernel"))
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    assert main([*QUICK, "--models", "gpt2", *files]) == 1
    out = capsys.readouterr().out
    assert "FAIL  RuntimeError: no such kernel" in out
    assert "FAIL: 1 of 1 models are wrong." in out
    assert "no plot: nothing was timed" in out
    (model,) = json.loads((tmp_path / "out.json").read_text())["models"]
    assert model["passes"] == {}
    assert model["correctness"]["problems"] == ["RuntimeError: no such kernel"]


def test_interrupt_keeps_the_finished_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = []

    def interrupted(*arguments: Any) -> ModelRow:
        if made:
            raise KeyboardInterrupt
        made.append(row("gpt2"))
        return made[0]

    monkeypatch.setattr(command, "run_model", interrupted)
    assert main([*QUICK, "--models", "gpt2,vit"]) == 130
    assert "Stopped after 1 of 2 models." in capsys.readouterr().out


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Hides these packages, as if they were not installed."""
    find = catalogue.importlib.util.find_spec
    monkeypatch.setattr(catalogue.importlib.util, "find_spec", lambda name: None if name in packages else find(name))


def test_without_diffusers_the_others_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    without(monkeypatch, "diffusers")
    assert main([*QUICK, "--models", "vit,diffusion"]) == 0
    out = capsys.readouterr().out
    assert "diffusion: not run: needs diffusers: run `pip install diffusers`" in out
    assert "All 1 models are right" in out


def test_the_reason_for_many_models_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "transformers", "diffusers")
    error = refused([*QUICK, "--models"], capsys)
    assert "bert, t5, gpt2, llama, llama_static, mistral, vit: not run: needs transformers" in error
    assert error.count("pip install") == 2  # and diffusers


def test_without_transformers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    without(monkeypatch, "transformers")
    error = refused([*QUICK, "--models", "bert"], capsys)
    assert "--models: no model can run: bert: not run: needs transformers" in error
    assert "pip install 'scaledot[transformers]'" in error


def test_the_diffusion_block_with_diffusers() -> None:
    pytest.importorskip("diffusers")
    assert check(Subject(MODELS["diffusion"], "float32", quick=True)).problems() == []


def test_install_commands_name_extras_that_exist() -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert "\ntransformers = [" in project
    assert set(INSTALL) == {model.package for model in MODELS.values()}


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--models", "bart"], "got 'bart'; needs a model: bert, t5"),
        (["--models", "bert", "--shapes", "1x1x5x64"], "--models: got --shapes too; needs none of --shapes"),
        (["--models", "--features", "plain"], "--models: got --features too"),
        (["--models", "--pass", "forward", "--peer", "eager"], "--models: got --pass, --peer too"),
        (["--models", "--distributed"], "--models: got --distributed too"),
        (["--models", "--latency", "10"], "--models: got --latency too"),
        (["--models", "--dtype", "int8"], "got 'int8'; needs a dtype"),
    ],
)
def test_wrong_options(options: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert what in refused(["compare", *options], capsys)
