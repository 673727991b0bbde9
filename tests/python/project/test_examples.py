"""The programs of examples/: each is run as a user runs it, with small settings, and its printed results are checked.

The sentence model (minilm.py) is checked in more detail. test_distributed_programs.py has the checks of sharded_gpt.py,
test_cpp_package.py that of the C++ program.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import minilm

EXAMPLES = Path(minilm.__file__).parent


def output_of(program: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / program), *arguments]
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def error_of(program: str, *arguments: str) -> str:
    """The last line that a program writes before it fails."""
    command = [sys.executable, str(EXAMPLES / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    return done.stderr.splitlines()[-1]


def losses_in(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", line)]


def test_every_program_says_how_to_run_it() -> None:
    programs = sorted(path.name for path in EXAMPLES.glob("*.py"))
    table = (EXAMPLES / "README.md").read_text()
    for program in programs:
        docstring = ast.get_docstring(ast.parse((EXAMPLES / program).read_text()))
        assert docstring is not None
        assert f"examples/{program}" in docstring
        assert f"[{program}]({program})" in table


# ---------------------------------------------------------------------------------------------------------- programs
def test_gpt() -> None:
    said = output_of("gpt.py", "--steps", "150")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", said)]
    assert losses[0] > 3.5  # log(60) is 4.1
    assert losses[-1] < 2.2
    assert int(said.split("predicted right: ")[1].split("%")[0]) > 30
    assert "BSD 3-Clause License" in said


def test_paged_decode() -> None:
    said = output_of("paged_decode.py", "--steps", "8")
    lengths = [ast.literal_eval(found) for found in re.findall(r"lengths (\[.*?\])", said)]
    assert lengths == [[50, 7, 120], [55, 30, 125], [58, 33, 128]]
    pages = [page for row in ast.literal_eval(said.split("block table: ")[1].splitlines()[0]) for page in row]
    assert len(pages) == len(set(pages)) == 4 + 3 + 8
    assert float(said.split("plain function: ")[1]) == 0  # bit for bit


def test_paged_decode_without_a_free_page() -> None:
    assert error_of("paged_decode.py", "--steps", "1000") == "RuntimeError: sequence 1 needs a page; all 32 are taken"


@pytest.mark.parametrize("program", ["learned_bias.py", "score_function.py"])
def test_a_program_without_steps(program: str) -> None:
    assert error_of(program, "--steps", "0") == f"{program}: error: --steps: got 0; needs at least 1"


def test_learned_bias() -> None:
    said = output_of("learned_bias.py", "--steps", "60")
    ours, torchs = losses_in(said.splitlines()[0]), losses_in(said.splitlines()[1])
    assert ours[-1] < 0.05 < 0.9 < ours[0]
    assert ours == pytest.approx(torchs, rel=1e-2, abs=1e-4)
    assert "distances to learn [-3, -1, 0, 2], learned [-3, -1, 0, 2]" in said
    assert float(said.split("between the tables: ")[1]) < 1e-4


def test_score_function() -> None:
    losses, *learned = output_of("score_function.py", "--steps", "150").splitlines()
    assert float(losses.split()[-1]) < 1e-6 < 0.1 < float(losses.split()[1])
    for line in learned:
        wanted, found = (losses_in(part) for part in line.split("learned"))
        assert found == pytest.approx(wanted, abs=0.02)


def test_sharded_gpt_on_one_process() -> None:
    said = output_of("sharded_gpt.py", "--steps", "30")
    losses = losses_in(said.splitlines()[1])
    assert losses[-1] < losses[0]


def test_minilm(tmp_path: Path) -> None:
    file = tmp_path / "heatmap.png"
    said = output_of("minilm.py", "--query", "Which animal is asleep?", "--steps", "0", "--plot", str(file))
    best = said.splitlines()[1]
    assert minilm.SENTENCES[-1] in best
    assert float(said.split("eager's embeddings: ")[1].splitlines()[0]) < 1e-6
    assert f"layer 4, head 2: {file}" in said
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["naive", "online_softmax", "tiled"])
def test_kernels(tmp_path: Path, name: str) -> None:
    source, program = EXAMPLES / "kernels" / f"{name}.cpp", tmp_path / name
    assert len(source.read_text().splitlines()) < 80
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None
    flags = ["-O3", "-march=native", "-std=c++20", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True, timeout=300)
    said = subprocess.run([program], capture_output=True, text=True, check=True, timeout=300).stdout
    found = re.fullmatch(rf"{name}: largest error (\S+), \S+ ms, \S+ of the time of naive\n", said)
    assert found is not None, said
    assert 0 < float(found[1]) < 1e-6


# -------------------------------------------------------------------------------------------------- the sentence model
@functools.cache
def encoder(implementation: str) -> minilm.Encoder:
    return minilm.Encoder(implementation)


@torch.no_grad()
def test_embeddings_are_those_of_eager_attention() -> None:
    expected, found = encoder("eager")(minilm.SENTENCES), encoder("scaledot")(minilm.SENTENCES)
    assert found.shape == (len(minilm.SENTENCES), 384)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_padding_changes_nothing() -> None:
    together = encoder("scaledot")(minilm.SENTENCES)
    alone = torch.cat([encoder("scaledot")([sentence]) for sentence in minilm.SENTENCES])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


@torch.no_grad()
def test_similar_sentences_are_similar() -> None:
    music, audience, market, shares, cat = encoder("scaledot")(minilm.SENTENCES)
    assert min(music @ audience, market @ shares) > 0.5
    assert max(music @ market, music @ shares, audience @ market, cat @ music, cat @ market) < 0.1


def test_search_finds_the_sentences_on_the_subject() -> None:
    found = minilm.search(encoder("scaledot"), minilm.QUERY, minilm.SENTENCES)
    assert {sentence for _, sentence in found[:2]} == set(minilm.SENTENCES[2:4])
    similarities = [similarity for similarity, _ in found]
    assert similarities == sorted(similarities, reverse=True)
    assert similarities[1] > 0.3 > similarities[2]


def test_weights_are_those_of_eager_attention() -> None:
    tokens, expected = encoder("eager").attention(minilm.TO_PLOT)
    tokens_again, found = encoder("scaledot").attention(minilm.TO_PLOT)
    assert tokens == tokens_again == ["[CLS]", *minilm.TO_PLOT[:-1].lower().split(), ".", "[SEP]"]
    assert found.shape == (6, 12, len(tokens), len(tokens))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:-1]))
    # The head that is drawn by default resolves the pronoun.
    assert tokens[found[3, 1, tokens.index("it")].argmax()] == "animal"


def test_the_title_of_the_heat_map_counts_from_one(tmp_path: Path) -> None:
    from matplotlib import pyplot

    file = tmp_path / "heatmap.png"
    minilm.plot(encoder("scaledot"), minilm.TO_PLOT, str(file), layer=4, head=2)
    assert file.read_bytes().startswith(b"\x89PNG")
    axes = pyplot.gcf().axes[0]
    assert axes.get_title() == "all-MiniLM-L6-v2, layer 4 of 6, head 2 of 12"
    drawn = torch.tensor(axes.images[0].get_array().tolist())
    torch.testing.assert_close(drawn, encoder("scaledot").attention(minilm.TO_PLOT)[1][3, 1])
    pyplot.close("all")


def test_fine_tuning_without_dropout_is_eagers() -> None:
    eager, ours = (minilm.fine_tune(name, steps=8, dropout=0.0) for name in ("eager", "scaledot"))
    assert ours == pytest.approx(eager, rel=1e-3)


def test_fine_tuning_with_dropout() -> None:
    eager, ours = (minilm.fine_tune(name, steps=24, dropout=0.1) for name in ("eager", "scaledot"))
    print("eager   ", " ".join(f"{loss:.3f}" for loss in eager))
    print("scaledot", " ".join(f"{loss:.3f}" for loss in ours))
    for losses in (eager, ours):
        assert sum(losses[-6:]) < 0.5 * sum(losses[:6])
    # Different weights are dropped, so the losses fall alike but are not equal.
    assert sum(ours[-6:]) < 1.5 * sum(eager[-6:])
    assert sum(ours) == pytest.approx(sum(eager), rel=0.2)
