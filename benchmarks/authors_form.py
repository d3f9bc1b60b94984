"""The program in the authors' form: the h of every layer, including the input h_0, and every z are CVXPY variables.

`encode_literal` folds the input into constants, which the authors' code does not do; this form is the baseline for
timings. Fully connected networks only, relaxed gates, the authors' objective (here equal to the balanced one).
"""

from __future__ import annotations

import time
from typing import Any

import cvxpy as cp
import numpy as np
from torch import nn


def solve_authors_form(
    model: nn.Sequential, inputs: Any, labels: Any, *, loss_weight: float = 5.0, input_radius: float = 1e-5
) -> dict[str, Any]:
    started = time.perf_counter()
    layers = [module for module in model if isinstance(module, nn.Linear)]
    x = np.asarray(inputs, dtype=np.float64).reshape(len(inputs), -1)
    lower, upper = x - input_radius, x + input_radius
    before = cp.Variable(x.shape)
    constraints = [before == x]
    averages = []
    for layer in layers[:-1]:
        weight, bias = layer.weight.detach().double().numpy(), layer.bias.detach().double().numpy()
        positive, negative = np.maximum(weight, 0).T, np.minimum(weight, 0).T
        lower, upper = lower @ positive + upper @ negative + bias, upper @ positive + lower @ negative + bias
        shape = (len(x), layer.out_features)
        h, z, s = cp.Variable(shape), cp.Variable(shape), cp.Variable((1, layer.out_features))
        shrink = np.maximum(upper, 0)
        q = before @ weight.T + bias - cp.multiply(np.ones((len(x), 1)) @ (1 - s), shrink)
        constraints += [h >= 0, h + cp.multiply(1 - z, lower) <= q, h >= q, h <= cp.multiply(z, upper)]
        constraints += [z >= 0, z <= 1, s >= 0, s <= 1]
        averages.append(cp.sum(s - 2) / layer.out_features)
        before, lower, upper = h, np.maximum(lower, 0), shrink
    weight, bias = layers[-1].weight.detach().double().numpy(), layers[-1].bias.detach().double().numpy()
    logits = before @ weight.T + bias
    chosen = np.eye(layers[-1].out_features)[np.asarray(labels)]
    softmax = cp.sum(cp.log_sum_exp(logits, axis=1) - cp.sum(cp.multiply(logits, chosen), axis=1))
    sparsity = cp.sum_largest(cp.hstack(averages), max(1, len(averages) - 1))
    problem = cp.Problem(cp.Minimize(sparsity + loss_weight / len(x) * softmax), constraints)
    problem.solve(solver="CLARABEL")
    return {
        "seconds": round(time.perf_counter() - started, 1),
        "objective": float(problem.value),
        "status": problem.status,
        "columns": sum(variable.size for variable in problem.variables()),
    }
