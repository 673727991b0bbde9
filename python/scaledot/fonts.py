"""Which installed fonts can draw a text: matplotlib's default has no Chinese, Japanese or Korean glyphs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

__all__ = ["families_for"]

# Sans-serif fonts with wide cover, tried before whatever else is installed.
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
    """Font families for matplotlib's `fontfamily`, in order of use, that together have every glyph of the
    texts.

    The first is matplotlib's configured font; fonts that have what it lacks follow. Warns, with what to
    install, if no installed font has some character. Needs matplotlib.
    """
    characters = frozenset(c for text in texts for c in text if c.isprintable() and not c.isspace())
    families, missing = _choose(characters)
    if missing:
        shown = "".join(sorted(missing)[:8])
        warnings.warn(
            f"no installed font has {len(missing)} of the characters ({shown}): they will be "
            f"empty boxes. Install one that does, for example with `apt-get install fonts-noto-cjk` (Debian) "
            f"or from https://fonts.google.com/noto",
            UserWarning,
            stacklevel=3,
        )
    return list(families)


def _choose(characters: frozenset[str]) -> tuple[tuple[str, ...], frozenset[str]]:
    """(families, the characters that none of them has)."""
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
    """(family, file) of the installed upright fonts of regular weight, the preferred ones first."""
    from matplotlib import font_manager

    manager = font_manager.fontManager
    known = {Path(entry.fname) for entry in manager.ttflist}
    for path in font_manager.findSystemFonts():
        # matplotlib lists the system's fonts once and keeps the list in a file: fonts installed later are not
        # in it.
        if Path(path) not in known:
            try:
                manager.addfont(path)
            except (OSError, RuntimeError, ValueError):
                continue  # a file that FreeType cannot read
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
    """Which of the characters the font file has."""
    from matplotlib.ft2font import FT2Font

    try:
        font = FT2Font(path)
    except (OSError, RuntimeError, ValueError):
        return frozenset()
    return frozenset(c for c in characters if font.get_char_index(ord(c)))
