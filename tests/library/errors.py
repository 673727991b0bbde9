"""What an error message has to say."""

from __future__ import annotations

import re

ERRORS = (ValueError, TypeError, RuntimeError)


def assert_named(raised: BaseException, needed: tuple[str, ...]) -> None:
    message = str(raised).splitlines()
    text = "\n".join(message)
    assert re.search(rf"\b{needed[0]}", text), f"does not name {needed[0]}: {text}"
    for part in needed[1:]:
        assert part in text, f"does not say {part!r}: {text}"
    assert "INTERNAL ASSERT" not in text
