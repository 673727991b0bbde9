"""scaledot.compare: warnings about noisy timings and a loaded machine. All timings here are made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import SMALL, only_case, picture_size
from scaledot.__main__ import main
from scaledot.compare import figure, noise
from scaledot.compare.check import Verdict
from scaledot.compare.machine import describe
from scaledot.compare.noise import Load
from scaledot.compare.report import Paint, Table, summary_lines
from scaledot.compare.run import Pair, Row
from scaledot.compare.timing import Timing

STEADY = Timing((1.00e-3, 1.01e-3, 1.02e-3, 1.03e-3, 1.04e-3), 7)  # IQR / median = 2%
NOISY = Timing((1.0e-3, 1.5e-3, 2.0e-3, 2.5e-3, 3.0e-3), 7)  # IQR / median = 50%


def row(ours: Timing, peer: Timing | None, feature: str = "plain") -> Row:
    kernels = {"forward": "some_kernel", "backward": "some_kernel"}
    return Row(only_case(feature), "F.sdpa flash", kernels, Verdict({}, 1.0), None, {"forward": Pair(ours, peer)})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the timings of both sides, and the load averages before and after the run on 4 cores."""

    def set_to(ours: Timing = STEADY, peer: Timing = STEADY, loads: Sequence[float | None] = (0.5, 4.2)) -> None:
        remaining = list(loads)
        monkeypatch.setattr("scaledot.compare.run.alternate", lambda calls, effort: (ours, peer)[: len(calls)])
        monkeypatch.setattr("scaledot.compare.session.load_average", lambda: remaining.pop(0))
        monkeypatch.setattr("os.cpu_count", lambda: 4)

    return set_to


@pytest.mark.parametrize(
    ("ours", "peer", "noisy"),
    [
        (STEADY, STEADY, False),
        (STEADY, None, False),
        (NOISY, STEADY, True),
        (STEADY, NOISY, True),
        (NOISY, None, True),
        (Timing((2.0,), 1), Timing((1.0,), 1), False),  # one reading has no spread
    ],
)
def test_a_pair_is_noisy_if_either_side_is(ours: Timing, peer: Timing | None, noisy: bool) -> None:
    assert noise.is_noisy(Pair(ours, peer)) is noisy


def test_spread_is_the_interquartile_range_over_the_median() -> None:
    assert noise.spread(NOISY) == pytest.approx(0.5)
    at_limit = Timing((0.75e-3, 0.875e-3, 1.0e-3, 1.125e-3, 1.25e-3), 1)
    assert noise.spread(at_limit) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("start", "end", "at_start", "too_high"),
    [
        (0.1, 4.0, False, False),
        (3.9, 4.4, False, False),  # our own threads fill the four cores
        (4.1, 4.0, True, True),
        (0.1, 5.0, False, True),
        (None, None, False, False),  # a system without load averages
        (None, 5.0, False, True),
    ],
)
def test_load_is_compared_with_the_cores(
    start: float | None, end: float | None, at_start: bool, too_high: bool
) -> None:
    load = Load(start, end, cores=4)
    assert (load.too_high_at_start, load.too_high) == (at_start, too_high)


def test_load_average_is_none_where_the_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError

    monkeypatch.setattr("os.getloadavg", fail, raising=False)
    assert noise.load_average() is None
    monkeypatch.setattr("os.getloadavg", lambda: (1.5, 2.0, 3.0), raising=False)
    assert noise.load_average() == 1.5


def test_steady_run_has_no_warning(
    fake: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake()
    assert main([*SMALL, "--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    assert "WARNING" not in out
    assert "1.00x!" not in out
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["noise"] == {
        "spread_limit": 0.25,
        "timings": 4,
        "noisy": 0,
        "load_average": {"start": 0.5, "end": 4.2},
        "cores": 4,
        "load_too_high": False,
        "trusted": True,
    }


@pytest.mark.parametrize(("ours", "peer"), [(NOISY, STEADY), (STEADY, NOISY)])
def test_noisy_timings_are_marked_and_counted(
    ours: Timing, peer: Timing, fake: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake(ours, peer)
    assert main([*SMALL, "--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    assert "WARNING: 4 of 4 timings, marked !, are too noisy to trust: an IQR is above 25% of its median." in out
    assert "load average" not in out
    ratio = "0.51x!" if ours is NOISY else "1.96x!"
    assert sum(ratio in line for line in out.splitlines()) == 6  # 4 in the table, 2 in the summary
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["noise"]["noisy"] == 4
    assert report["noise"]["trusted"] is False
    for case in report["cases"]:
        for one in case["passes"].values():
            assert one["noisy"] is True
            noisy, steady = ("scaledot", "torch") if ours is NOISY else ("torch", "scaledot")
            assert one["spread"][noisy] == pytest.approx(0.5)
            assert one["spread"][steady] < 0.05


def test_only_noisy_rows_are_marked() -> None:
    rows = [row(STEADY, STEADY), row(NOISY, STEADY, "causal")]
    lines = [line for one in rows for line in Table([one.case for one in rows], Paint(False)).lines(one)]
    assert ["!" in line for line in lines] == [False, True]
    summary = summary_lines(rows, Paint(False))
    assert [line.split("  ")[0] for line in summary if line.endswith("!")] == ["tiny, causal"]
    coloured = Table([one.case for one in rows], Paint(True)).lines(rows[1])[0]
    assert "  \033[31;1m0.51x!\033[0m" in coloured


@pytest.mark.parametrize(("loads", "warns_first"), [((7.3, 6.1), True), ((0.2, 6.1), False)])
def test_high_load_is_reported(
    loads: tuple[float, float],
    warns_first: bool,
    fake: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    fake(loads=loads)
    assert main([*SMALL, "--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    first = f"WARNING: the load average is {loads[0]} on 4 cores before anything is timed"
    assert (first in out) is warns_first
    last = f"WARNING: the load average was {loads[0]} at the start and 6.1 at the end on 4 cores"
    assert last in out
    assert not warns_first or out.index(first) < out.index("feature ") < out.index(last)
    found = json.loads((tmp_path / "out.json").read_text())["noise"]
    assert (found["noisy"], found["load_too_high"], found["trusted"]) == (0, True, False)


def drawn(monkeypatch: pytest.MonkeyPatch, path: Path, rows: Sequence[Row], load: Load) -> Any:
    """Draws the plot and returns its figure."""
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig

    def remember(self: Any, *arguments: Any) -> None:
        figures.append(self)
        save(self, *arguments)

    monkeypatch.setattr(Figure, "savefig", remember)
    figure.draw(rows, describe(torch.device("cpu")), path, load)
    picture_size(path)
    return figures[0]


def colours_of(drawing: Any) -> list[str]:
    from matplotlib.colors import to_hex

    return [to_hex(bar.get_facecolor()) for bar in drawing.axes[0].patches if bar.get_height() < 0.9]


@pytest.mark.parametrize(
    ("peers", "load", "grey", "legend"),
    [
        ((STEADY, STEADY), Load(0.1, 0.1, 4), [False, False], None),
        ((STEADY, NOISY), Load(0.1, 0.1, 4), [False, True], "noisy: IQR > 25%"),
        ((STEADY, STEADY), Load(9.0, 0.1, 4), [True, True], "load too high"),
    ],
)
def test_plot_greys_what_cannot_be_trusted(
    peers: tuple[Timing, Timing],
    load: Load,
    grey: list[bool],
    legend: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(STEADY, peer, feature) for peer, feature in zip(peers, ("plain", "causal"), strict=True)]
    drawing = drawn(monkeypatch, tmp_path / "out.png", rows, load)
    assert [colour == figure._NOISY for colour in colours_of(drawing)] == grey
    labels = [text.get_text() for each in drawing.legends for text in each.get_texts()]
    assert labels == (["bf16"] if legend is None else ["bf16", legend])


@pytest.mark.parametrize(("device", "title"), [("cpu", "CPU: how many"), ("cuda:1", "GPU: how many")])
def test_plot_title_names_the_device(device: str, title: str) -> None:
    machine = {**describe(torch.device("cpu")), "device": device, "name": "Some Processor"}
    assert figure._title(machine).startswith(title)
    assert figure._subtitle(machine)[0].startswith("Some Processor, ")
