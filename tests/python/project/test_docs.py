"""README.md and docs/: every Python block runs as it stands and prints what the page says; commands and names exist."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import api_pages
import scaledot
from scaledot.__main__ import main
from snippets import (
    ROOT,
    Fence,
    commands,
    comparable,
    contained,
    fences,
    pages,
    public_modules,
    run_python,
    unbound_names,
)

README = ROOT / "README.md"
PYPROJECT = ROOT / "pyproject.toml"
SNIPPETS = fences("python")
COMMANDS = list(commands())
PUBLIC = public_modules()


@pytest.mark.filterwarnings("ignore:no installed font")
@pytest.mark.parametrize("fence", SNIPPETS, ids=lambda fence: fence.name)
def test_snippet_runs_and_prints_what_the_page_says(fence: Fence, tmp_path: Path) -> None:
    with contained(tmp_path):
        printed = run_python(fence)
    if fence.output is not None:
        assert comparable(printed) == comparable(fence.output)


def test_snippets_are_found() -> None:
    with_output = [fence for fence in SNIPPETS if fence.output is not None]
    assert len(SNIPPETS) >= 25
    assert len(with_output) >= 15
    assert any(fence.page == README and fence.output for fence in SNIPPETS)


def test_what_depends_on_the_machine_is_left_out_of_a_comparison() -> None:
    one = "scaledot on cpu (avx512)\n  forward   avx512_decode, 21.2 KiB of workspace\n            not x: y"
    other = "scaledot on cpu (avx2)\n  forward   avx2, 512 bytes of workspace"
    assert comparable(one) == comparable(other)
    assert comparable(one) != comparable(other.replace("forward", "backward"))
    assert comparable("avx2") != comparable("avx512")


def test_lines_of_the_readme_table_run(tmp_path: Path) -> None:
    """Its code cells that call something, with the names that a reader has."""
    table = README.read_text().split("## I have this, do that")[1].split("##")[0]
    lines = re.findall(r"`(scaledot\.[^`]+\))`", table)
    assert len(lines) >= 5
    query = torch.randn(1, 2, 8, 16)
    q = torch.randn(8, 2, 16)
    names = {
        **{"scaledot": scaledot, "query": query, "key": query, "value": query, "q": q, "k": q, "v": q},
        "cu_seq": torch.tensor([0, 4, 8]),
        "model": torch.nn.TransformerEncoderLayer(16, 2, batch_first=True),
    }
    with contained(tmp_path):
        for line in lines:
            exec(line, dict(names))


def _flags(words: list[str]) -> list[str]:
    return [word.split("=")[0] for word in words if word.startswith("--")]


@pytest.mark.parametrize(("place", "command"), COMMANDS, ids=[f"{place} {text}"[:60] for place, text in COMMANDS])
def test_command_names_what_exists(place: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command, comments=True)
    for word in words:
        if re.fullmatch(r"[\w./-]+/[\w.-]+", word) and not word.startswith((".venv/", "./build/", "/")):
            assert (ROOT / word).exists(), f"{place}: there is no {word}"
        if extras := re.fullmatch(r"(?:\.|scaledot)\[([\w,]+)\]", word):
            for extra in extras[1].split(","):
                assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE), extra
    if "-m" in words and words[words.index("-m") + 1] == "scaledot":
        name, *options = words[words.index("-m") + 2 :]
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        known = text + (ROOT / "python/scaledot/compare/command.py").read_text() if name == "compare" else text
        for flag in _flags(options):
            assert flag in known, f"{place}: {name} has no {flag}"
    for script, *options in (words[k:] for k, word in enumerate(words) if word.endswith(".py")):
        for flag in _flags(options):
            assert f'"{flag}"' in (ROOT / script).read_text(), f"{place}: {script} has no {flag}"


# What a reader of the pages has: the requirements of a build, and what torch brings.
PROGRAMS = {".", "bash", "git", "pip", "python", "python3", "torchrun"}


@pytest.mark.parametrize("fence", fences("bash"), ids=lambda fence: fence.name)
def test_commands_run_in_their_order_and_folder(fence: Fence) -> None:
    """A command changes no folder, except into a new clone; an earlier line installs the program; its input exists."""
    before = fence.page.read_text().split(fence.text)[0]
    for line in fence.text.splitlines():
        for command in re.sub(r"\$\(.*?\)", "", line).split("&&"):
            words = [word for word in shlex.split(command, comments=True) if not re.match(r"\w+=", word)]
            program = words[0] if words else "python"
            if program == "cd":
                assert re.match(rf"git clone \S+/{words[1]} && ", line)
            elif not program.startswith("./build/"):
                installed = re.search(rf'^pip install .*(?<!\S)"?{re.escape(program)}\b', before, re.MULTILINE)
                assert program in PROGRAMS or installed, f"{fence.name}: {program} comes from nowhere"
            for name in (word for word, option in zip(words[1:], words, strict=False) if option == "--weights"):
                assert f'"{name}"' in before, f"{fence.name}: no program of the page writes {name}"
        before += f"{line}\n"


def test_a_wheel_is_built_before_it_is_installed() -> None:
    for fence in fences("bash"):
        for wheel in re.finditer(r"^pip install dist/", fence.text, re.MULTILINE):
            assert "tests/wheel --build-only" in fence.text[: wheel.start()], fence.name


@pytest.mark.parametrize("fence", [*fences("py"), *SNIPPETS], ids=lambda fence: fence.name)
def test_every_name_of_a_snippet_is_bound(fence: Fence) -> None:
    """Also in the blocks that are not run."""
    assert not unbound_names(fence.text)


def test_unbound_names_are_found() -> None:
    assert unbound_names("f = lambda x: x + y\nprint(f(z), [k for k in f])") == {"y", "z"}


MODULES = re.compile(r"(?:PYTHONPATH=(\S+) )?python -m ((?:external|gpu|scaledot_build)\b[\w.]*)")


def test_modules_run_from_the_top_of_the_repository() -> None:
    """A page names the path that the module needs; `--help` is printed after the module's imports."""
    named = {match for page in WRITTEN for match in MODULES.findall(page.read_text())}
    assert len(named) >= 4
    for path, module in sorted(named):
        environment = {**os.environ, "PYTHONPATH": path}
        ran = subprocess.run(
            [sys.executable, "-m", module, "--help"],
            capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, f"PYTHONPATH={path} python -m {module}: {ran.stderr}"


def test_an_environment_that_is_made_is_active_after_it() -> None:
    """So that the `python` and `pip` of later commands are its own."""
    written = [fence.text for fence in fences("bash")] + [(ROOT / ".github" / "CONTRIBUTING.md").read_text()]
    made = [(text, folder) for text in written for folder in re.findall(r"-m venv (\S+)", text)]
    assert len(made) >= 3
    assert all(f"venv {folder} && . {folder}/bin/activate\n" in text for text, folder in made)


def test_commands_are_found() -> None:
    texts = [command for _, command in COMMANDS]
    assert any(text.endswith("-m scaledot compare --quick") for text in texts)
    assert "bash tests/run" in texts


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_public_names_are_on_an_api_page(module: ModuleType) -> None:
    api = "\n".join(page.read_text() for page in api_pages.PAGES)
    documented = set(re.findall(r"^\.\. (?:auto\w+|py:\w+):: (\S+)", api, re.MULTILINE))
    names = {f"{module.__name__}.{name}" for name in module.__all__}
    missing = names - documented - {module.__name__ for module in PUBLIC}
    assert not missing, f"on no page of docs/api: {sorted(missing)}"


def test_the_range_of_torch_is_that_of_the_package() -> None:
    stated = re.search(r'^\[tool\.scaledot\]\ntorch = \["([\d.]+)".*"([\d.]+)"\]', PYPROJECT.read_text(), re.MULTILINE)
    assert stated is not None
    supported = f"{stated[1]} to {stated[2]}"
    found = set(re.findall(r"\b2\.\d+ to 2\.\d+\b", "\n".join(page.read_text() for page in pages())))
    assert found == {supported}


@pytest.mark.parametrize(
    ("function", "header", "options"),
    [
        (scaledot.scaled_dot_product_attention, "sdpa/sdpa.h", "SdpaOptions"),
        (scaledot.varlen_attention, "varlen/varlen.h", "VarlenOptions"),
    ],
)
def test_the_page_of_cpp_has_the_names_that_differ(function: Any, header: str, options: str) -> None:
    members = set()
    for file, name in (("common/options.h", "UserOptions"), (header, options)):
        text = re.sub(r"//.*|\(.*?\)|\{.*\}", "", (ROOT / "csrc/ops" / file).read_text())
        (body,) = re.findall(rf"^struct {name}\b[^{{]*\{{\n(.*?)^\}};", text, re.MULTILINE | re.DOTALL)
        members |= set(re.findall(r"(\w+)(?:, \w+)*(?: = [^;]*)?;", body)) | set(re.findall(r", (\w+);", body))
    declared = rf"^C10_EXPORT \w+ {function.__name__}\((.*?)\);"
    (prototype,) = re.findall(declared, (ROOT / "csrc/ops" / header).read_text(), re.MULTILINE | re.DOTALL)
    cpp = members | set(re.findall(r"(\w+)(?: = \S+)?(?:,|$)", prototype)) - {"options"}
    differ = set(inspect.signature(function).parameters) ^ cpp
    assert len(differ) > 3
    table = (ROOT / "docs/api/cpp.md").read_text().split("| Python | C++ |")[1].split("\n\n")[0]
    assert {name for name in differ if not re.search(rf"`{name}\b", table)} == set()


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and the site give to a page's headings."""
    text = re.sub(r"^(`{3,})[^`]*\n.*?^\1$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", title)) for title in titles)
    return {title.strip().lower().replace(" ", "-") for title in plain}


WRITTEN = [ROOT / name for name in ("README.md", "CHANGELOG.md", "csrc/README.md", "examples/README.md")]
WRITTEN += [*pages()[1:], *(ROOT / ".github").glob("*.md"), *(ROOT / "tests").glob("*/README.md")]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link, image in re.findall(r'\]\(([^)\s]+)\)|src="([^"]+)"', page.read_text()):
        target, _, anchor = (link or image).partition("#")
        if re.match("https?:|mailto:", target):
            continue
        path = (page.parent / target) if target else page
        assert path.exists(), f"{page.name}: {link or image}"
        assert not anchor or anchor in anchors(path), f"{page.name}: {link}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_a_directive_in_place_of_its_text(page: Path) -> None:
    """GitHub and editors show a page as it stands in the file, where a directive is no text.

    One kind may stand: on the API pages what Sphinx fills from docstrings, below a table of the same names and their
    signatures.
    """
    source = page.read_text()
    assert not re.search(r"\{[\w-]+\}`|^\{\{|^:{3,}|^\([\w-]+\)=$", source, re.MULTILINE)
    kinds = re.findall(r"^ *`{3,}\{([\w-]+)\}", source, re.MULTILINE)
    assert set(kinds) <= {"eval-rst"}
    if "eval-rst" in kinds:
        assert page in api_pages.PAGES
        assert api_pages.with_tables(source) == source, "run python tests/api_pages.py"


def test_the_first_page_links_to_the_menu() -> None:
    """The menu stands in docs/conf.py, so that no reader of a file sees it as code."""
    (written,) = re.findall(r"^MENU = (\{.*?^\})", (ROOT / "docs/conf.py").read_text(), re.M | re.S)
    menu = ast.literal_eval(written)
    listed = [name for names in menu.values() for name in names.split()]
    source = (ROOT / "docs/index.md").read_text()
    assert len(listed) >= 40
    assert not [name for name in listed if f"]({name}.md" not in source]


def test_copies_are_equal() -> None:
    """<!-- copy of FILE --> stands above a block that is a part of that file."""
    found = 0
    for page in pages():
        for name, text in re.findall(r"^<!-- copy of (\S+) -->\n```\w+\n(.*?)^```$", page.read_text(), re.M | re.S):
            assert text in (ROOT / name).read_text(), f"{page.name}: the block is not in {name}"
            found += 1
    assert found >= 2


@pytest.mark.parametrize(
    ("page", "name"),
    [("quickstart", "install"), ("compatibility", "platforms"), ("comparison", "features"), ("index", "30 seconds")],
)
def test_text_of_the_readme_stands_in_the_pages_too(page: str, name: str) -> None:
    """A page that is read as a file has the text itself, not a directive."""
    marked = re.compile(f"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", re.DOTALL)
    (in_readme,) = marked.findall((ROOT / "README.md").read_text())
    assert marked.findall((ROOT / "docs" / f"{page}.md").read_text()) == [in_readme]
