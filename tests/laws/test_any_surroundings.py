"""Whatever the caller has set (devices, types, modes, random numbers, warnings, threads), results are the same to the
bit, and everything is set as before afterwards."""

import copy
import random
import threading
import warnings
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.readers import isolated
from tests.zoo import share_case

SAME = 1e-9
"""Largest difference of outputs in double precision."""


@pytest.fixture(scope="module")
def case():
    return share_case("flatten method")


@pytest.fixture(scope="module")
def inputs(case):
    return np.random.default_rng(0).standard_normal((24, *case.inputs.shape[1:]))


@pytest.fixture(scope="module")
def plan(case, inputs):
    return cn.plan(cn.search(case.model, inputs, units=0.5, effort="quick"))


class Noisy(nn.Module):
    """Draws from every generator of the process, also in evaluation mode."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, values):
        random.random(), np.random.random()  # noqa: NPY002
        return self.model(values) * (1 + torch.rand(1)).to(values.dtype)


def list_weights(model):
    return {name: value.numpy() for name, value in model.state_dict().items()}


def save(case, inputs, plan, folder):
    cn.save(cn.prune(case.model, plan, inputs), folder, plan=plan, overwrite=True)
    return folder


def compress(case, inputs, plan, folder):
    found = cn.compress(Noisy(case.model), inputs, units=0.5, effort="quick", onnx=False)
    return list_weights(found.model) | dict(found.scores)


def solve(case, inputs, plan, folder):
    network = cn.read_network(case.model, torch.from_numpy(case.inputs))
    bounds = cn.bound_network(network, case.inputs)
    program = cn.encode(network, bounds, case.labels, cn.Objective(loss_weight=5.0))
    return {"values": cn.solve(program).point}


ACTIONS = {
    "score": lambda case, inputs, plan, folder: dict(cn.score(case.model, case.inputs, case.labels)),
    "search": lambda case, inputs, plan, folder: dict(cn.search(case.model, inputs, units=0.5, effort="quick")),
    "gates": lambda case, inputs, plan, folder: dict(
        cn.search(case.model, inputs, units=0.5, effort="quick", compensate="none")
    ),
    "prune": lambda case, inputs, plan, folder: list_weights(
        cn.prune(case.model, plan, inputs, compensate="least_squares")
    ),
    "mask": lambda case, inputs, plan, folder: list_weights(cn.mask(case.model, plan)),
    "load": lambda case, inputs, plan, folder: list_weights(cn.load(save(case, inputs, plan, folder), case.model)),
    "masks": lambda case, inputs, plan, folder: {
        name: mask.numpy() for name, mask in cn.as_masks(plan, case.model).items()
    },
    "compress": compress,
    "solve": solve,
}


@contextmanager
def changed(read, write, value):
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


@contextmanager
def strict():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with np.errstate(all="raise"):
            yield


@contextmanager
def seeded():
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(7)
    yield


SURROUNDINGS = {
    "default device": lambda: changed(lambda: None, torch.set_default_device, "meta"),
    "default dtype": lambda: changed(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "warnings and rounding as errors": strict,
    "deterministic algorithms": lambda: changed(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "matrix products in bfloat16": lambda: changed(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "other random numbers": seeded,
}


def look_around():
    """What a call might leave changed."""
    return {
        "device": torch.get_default_device(),
        "dtype": torch.get_default_dtype(),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "flags": (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()),
        "threads": torch.get_num_threads(),
        "random numbers": (
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),  # noqa: NPY002
        ),
        "warnings": list(warnings.filters),
        "rounding": np.geterr(),
    }


@pytest.fixture(scope="module")
def wanted(case, inputs, plan, tmp_path_factory):
    """What the actions give in no particular surroundings."""
    known = {}

    def find(name):
        if name not in known:
            known[name] = ACTIONS[name](case, inputs, plan, tmp_path_factory.mktemp("wanted") / "smaller")
        return known[name]

    return find


def check_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values)


def check(case, inputs, plan, folder, action, expected, surroundings):
    with ExitStack() as stack:
        for each in surroundings:
            stack.enter_context(SURROUNDINGS[each]())
        before = look_around()
        found = ACTIONS[action](case, inputs, plan, folder)
        assert look_around() == before
    check_same(found, expected)


@pytest.mark.parametrize("action", ACTIONS)
def test_all_surroundings_at_once(case, inputs, plan, tmp_path, wanted, action):
    check(case, inputs, plan, tmp_path / "smaller", action, wanted(action), SURROUNDINGS)


@pytest.mark.slow
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_any_surroundings(case, inputs, plan, tmp_path, wanted, action, surroundings):
    check(case, inputs, plan, tmp_path / "smaller", action, wanted(action), [surroundings])


def test_any_thread(case, inputs, plan, tmp_path, wanted):
    """Several calls at once, with another default type for all of them."""
    actions = ("score", "search", "prune", "gates")
    expected = {name: wanted(name) for name in actions}
    found = {}

    def work(name):
        found[name] = ACTIONS[name](case, inputs, plan, tmp_path / name)

    with changed(torch.get_default_dtype, torch.set_default_dtype, torch.float64):
        threads = [threading.Thread(target=work, args=(name,)) for name in actions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.get_default_dtype() == torch.float64
    for name in actions:
        check_same(found[name], expected[name])


def test_model_made_in_inference_mode(case, inputs, wanted):
    """Its weights are tensors that take no part in gradients."""
    with torch.inference_mode():
        model = copy.deepcopy(case.model)
    assert all(weight.is_inference() for weight in model.parameters())
    check_same(dict(cn.search(model, inputs, units=0.5, effort="quick", compensate="none")), wanted("gates"))


def test_default_device_of_exports(case, inputs, plan, tmp_path):
    """An export is run and compared with the model it is made from."""
    with torch.device("meta"):
        assert cn.export(case.model, tmp_path / "model.pt2", example=inputs[:2]).difference < SAME


def test_warnings_that_were_ignored_stay_ignored(capsys):
    """Where others are errors, which in a call they are not."""

    @isolated
    def warn():
        warnings.warn("never mind", UserWarning, stacklevel=1)
        warnings.warn("look here", RuntimeWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("error", RuntimeWarning)
        before = list(warnings.filters)
        with pytest.MonkeyPatch.context() as patch:
            shown = []
            patch.setattr(warnings, "showwarning", lambda message, *rest: shown.append(str(message)))
            warn()
        assert shown == ["look here"]
        assert warnings.filters == before
        with pytest.raises(RuntimeWarning):
            warnings.warn("look here", RuntimeWarning, stacklevel=1)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_surroundings_are_given_back_whatever_is_raised(error):
    @isolated
    def fail():
        torch.manual_seed(5)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(torch.get_num_threads() + 1)
        warnings.simplefilter("ignore")
        raise error

    before = look_around()
    with pytest.raises(error):
        fail()
    assert look_around() == before
