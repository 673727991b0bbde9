"""Finds installed fonts that can draw a text. matplotlib's default font has no Chinese, Japanese or Korean glyphs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

from ._warn import warn

__all__ = ["families_for"]

# Sans-serif fonts with many glyphs, tried before all other installed fonts.
_PREFERRED = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Source Han Sans SC",
    "Source Han Sans CN",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "Droid Sans Fallback",
    "PingFang SC",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "SimHei",
    "Arial Unicode MS",
    "Noto Sans",
    "Noto Emoji",
)


def families_for(texts: Iterable[str]) -> list[str]:
    """Font families that together have a glyph for every character of the texts.

    If no installed font has some character, one warning says what to install. matplotlib's own warnings about these
    characters are then silenced. Needs matplotlib.

    Args:
        texts: the texts to draw.

    Returns:
        Families for matplotlib's `fontfamily`, in order of use: first matplotlib's configured font, then fonts for the
        characters that it lacks.
    """
    characters = frozenset(c for text in texts for c in text if c.isprintable() and not c.isspace())
    families, missing = _choose(characters)
    if missing:
        shown = "".join(sorted(missing)[:8])
        warn(
            f"no installed font has {len(missing)} of the characters ({shown}): they will be drawn as empty boxes. "
            f"Install a font that has them, for example by `apt-get install fonts-noto-cjk` (Debian, Ubuntu) or from "
            f"https://fonts.google.com/noto",
        )
        # matplotlib would repeat this for each character, later, when the figure is drawn.
        for character in missing:
            warnings.filterwarnings("ignore", message=rf"Glyph {ord(character)} .*missing from", category=UserWarning)
    return list(families)


def _choose(characters: frozenset[str]) -> tuple[tuple[str, ...], frozenset[str]]:
    """(families, the characters that no family has)."""
    from matplotlib import font_manager

    default = font_manager.findfont(font_manager.FontProperties())
    families = [font_manager.FontProperties(fname=default).get_name()]
    missing = characters - _glyphs(default, characters)
    for name, path in _fallbacks() if missing else ():
        found = _glyphs(path, missing)
        if found:
            families.append(name)
            missing -= found
        if not missing:
            break
    return tuple(families), missing


def _fallbacks() -> list[tuple[str, str]]:
    """(family, file) of each installed upright font of regular weight, the preferred fonts first."""
    from matplotlib import font_manager

    manager = font_manager.fontManager
    known = {Path(entry.fname) for entry in manager.ttflist}
    for path in font_manager.findSystemFonts():
        # matplotlib caches its list of the system's fonts in a file, which misses fonts installed later.
        if Path(path) not in known:
            try:
                manager.addfont(path)
            except (OSError, RuntimeError, ValueError):
                continue  # FreeType cannot read the file
    upright = {
        entry.name: entry.fname
        for entry in manager.ttflist
        if entry.style == "normal"
        and entry.weight in (400, "normal", "regular")
        and "lastresort" not in entry.name.lower().replace(" ", "")  # has a placeholder for every character
    }
    rank = {name: k for k, name in enumerate(_PREFERRED)}
    return sorted(upright.items(), key=lambda item: (rank.get(item[0], len(rank)), item[0]))


def _glyphs(path: str, characters: frozenset[str]) -> frozenset[str]:
    """The characters for which the font file has a glyph."""
    from matplotlib.ft2font import FT2Font

    try:
        font = FT2Font(path)
    except (OSError, RuntimeError, ValueError):
        return frozenset()
    return frozenset(c for c in characters if font.get_char_index(ord(c)))
