"""Hypothesis draws shapes, strides, masks and options. Each example runs on every kernel that takes it."""

from __future__ import annotations

import math

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, note, settings

import eager
from case_strategies import cases
from cases import Case
from kernels_under_test import KERNELS, explain, forced, sdpa
from oracle import solve

BOUNDED = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@BOUNDED
@given(case=cases(), seed=st.integers(0, 3))
def test_any_case_obeys_the_numerics_rule(case: Case, seed: int) -> None:
    solution = solve.__wrapped__(case, seed)
    for kernel in KERNELS:
        with forced(kernel):
            inputs = case.make(seed).requiring_grad()
            plan = explain(case, inputs)
            if kernel not in (plan["forward"]["kernel"], plan["backward"]["kernel"]):
                continue
            note(f"kernel {kernel}")
            results = sdpa(case, inputs)
            solution.check_results(results, case.return_weights)
            assert math.prod(results[0].shape) == math.prod(case.output_shape)
            gradients = eager.gradients(results, case.cotangents(seed), inputs.differentiable())
            for name, gradient in gradients.items():
                solution.check(name, gradient)
