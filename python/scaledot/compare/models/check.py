"""Correctness of a whole model: the numerics rule for its results and for the gradients of its parameters."""

from __future__ import annotations

from ..check import Finding, Verdict, judge
from .subject import Subject


def check(subject: Subject) -> Verdict:
    """Compares the first sample, without dropout, with torch's sdpa in float64.

    An exception of our side becomes the verdict's problem; any other exception is raised.
    """
    share = 1 / subject.built.batch
    try:
        ours = subject.solved("scaledot")
    except Exception as error:
        return Verdict({}, share, f"{type(error).__name__}: {error}")
    peer, eager, oracle = subject.solved("sdpa"), subject.solved("eager"), subject.oracle()
    findings: dict[str, Finding] = {}
    for kind, found in enumerate(ours):
        gradient = kind == 1
        for name, exact in oracle[kind].items():
            label = f"gradient of {name}" if gradient else name
            others = peer[kind][name], eager[kind][name]
            findings[label] = judge(found[name], *others, exact, subject.dtype, gradient=gradient)
    return Verdict(findings, share)
