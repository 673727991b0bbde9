"""Builds the wheel, checks it, and tries it in clean environments. `bash tests/wheel` runs it."""
