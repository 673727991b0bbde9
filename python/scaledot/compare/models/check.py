"""Correctness of a whole model: the numerics rule for its results and for the gradients of its parameters."""

from __future__ import annotations

from collections import defaultdict

from ..check import Finding, Verdict, judge
from ..numerics import largest
from .catalogue import Results
from .subject import Subject

_DRAWS = 20  # samples for which eager's error is measured, where that of the first one is not enough
_KINDS = ("", "gradient of ")


def check(subject: Subject) -> Verdict:
    """Compares the first sample, without dropout, with torch's sdpa in float64.

    An exception of our side becomes the verdict's problem; any other exception is raised.
    """
    share = 1 / subject.built.batch
    try:
        ours = subject.solved("scaledot")
    except Exception as error:
        return Verdict({}, share, f"{type(error).__name__}: {error}")
    sides = ours, subject.solved("sdpa"), subject.solved("eager"), subject.oracle()
    verdict = Verdict(_findings(subject, sides, {}), share)
    if verdict.passed:
        return verdict
    return Verdict(_findings(subject, sides, _eager_shares(subject)), share)


def _findings(
    subject: Subject, sides: tuple[tuple[Results, Results], ...], eager_shares: dict[str, float]
) -> dict[str, Finding]:
    """`sides`: ours, the peer's, eager's and the oracle's (results, gradients)."""
    findings: dict[str, Finding] = {}
    for kind, label in enumerate(_KINDS):
        ours, peer, eager, oracle = (side[kind] for side in sides)
        for name, exact in oracle.items():
            tensors, share = (ours[name], peer[name], eager[name], exact), eager_shares.get(label + name, 0.0)
            findings[label + name] = judge(*tensors, subject.dtype, gradient=kind == 1, eager_share=share)
    return findings


def _eager_shares(subject: Subject) -> dict[str, float]:
    """Eager's largest error for other samples, as a share of the largest element, by the name of the finding."""
    shares: dict[str, float] = defaultdict(float)
    for sample in range(1, _DRAWS):
        for label, eager, oracle in zip(_KINDS, subject.solved("eager", sample), subject.oracle(sample), strict=True):
            for name, exact in oracle.items():
                share = largest(eager[name].double() - exact) / (largest(exact) or 1.0)
                shares[label + name] = max(shares[label + name], share)
    return shares
