import platform
from importlib.metadata import version

from critical_neurons.core.environment import describe_machine, describe_versions


def test_versions_of_what_is_installed():
    found = describe_versions("torch", "no-such-package")
    assert found == {
        "python": platform.python_version(),
        "critical_neurons": version("critical_neurons"),
        "torch": version("torch"),
    }


def test_machine():
    machine = describe_machine()
    assert machine["processor"]
    assert machine["cores"] >= 1
