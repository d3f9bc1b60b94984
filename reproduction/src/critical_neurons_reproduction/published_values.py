"""Published values: the paper's tables as printed. Percent, mean ± standard deviation over three seeds."""

from __future__ import annotations

from critical_neurons_reproduction.result_tables import NOT_APPLICABLE, Figure, Published


def _read_figure(text: str) -> Figure | None:
    """Such as 95.9±0.87, 55 or n/a."""
    if text == NOT_APPLICABLE:
        return None
    mean, _, deviation = text.partition("±")
    return Figure(float(mean), float(deviation) if deviation else None)


def _read_table(title: str, headings: tuple[str, ...], columns: tuple[str, ...], text: str, *notes: str) -> Published:
    """One row per line, labels and values separated by bars; empty where the paper has no value."""
    figures = {}
    for line in text.strip().splitlines():
        parts = [part.strip() for part in line.split("|")]
        labels, printed = tuple(parts[: len(headings)]), parts[len(headings) :]
        figures[labels] = {column: _read_figure(part) for column, part in zip(columns, printed, strict=True) if part}
    return Published(title, headings, columns, figures, notes)


TABLES: dict[str, Published] = {
    "table-1": _read_table(
        "All classes at once or class by class: LeNet-5, λ = 1, threshold 0.01",
        ("data", "method"),
        ("accuracy", "prune"),
        """
        MNIST         | Ref   | 98.8±0.09 |
        MNIST         | IDP   | 98.6±0.15 | 19.8±0.18
        MNIST         | IMIDP | 98.6±0.1  | 15±0.1
        MNIST         | SIM   | 98.4±0.3  | 13.2±0.42
        Fashion-MNIST | Ref   | 89.5±0.3  |
        Fashion-MNIST | IDP   | 87.3±0.3  | 21.8±0.5
        Fashion-MNIST | IMIDP | 88±0.1    | 18.1±0.3
        Fashion-MNIST | SIM   | 87.9±0.1  | 18.8±1.3
        """,
        "IDP: one image per class, a program per class, scores averaged. IMIDP: a random number of images per class. "
        "SIM: one program for all.",
    ),
    "table-1-appendix": _read_table(
        "All classes at once or class by class, by threshold: LeNet-5, λ = 1",
        ("data", "method", "threshold"),
        ("accuracy", "prune"),
        """
        MNIST         | Ref |      | 98.8±0.09 |
        MNIST         | IDP | 0.1  | 96.6±2.4  | 28.4±1.5
        MNIST         | SIM | 0.1  | 98.5±0.28 | 16.5±0.5
        MNIST         | IDP | 0.01 | 98.6±0.15 | 19.8±0.18
        MNIST         | SIM | 0.01 | 98.4±0.3  | 13.2±0.42
        Fashion-MNIST | Ref |      | 89.5±0.3  |
        Fashion-MNIST | IDP | 0.1  | 86.81±1.2 | 29.6±1.8
        Fashion-MNIST | SIM | 0.1  | 88.7±0.4  | 18.9±1.4
        Fashion-MNIST | IDP | 0.01 | 87.3±0.3  | 21.8±0.5
        Fashion-MNIST | SIM | 0.01 | 87.9±0.1  | 18.8±1.3
        """,
    ),
    "table-2": _read_table(
        "Removal by score, at random and of the critical units: 10 images, one per class, λ = 5",
        ("data", "network", "threshold"),
        ("Ref", "RP", "CP", "Ours", "Ours + FT", "prune"),
        """
        MNIST         | FC-3    | 0.1 | 98.1±0.1 | 83.6±4.6  | 44.5±7.2  | 95.9±0.87 | 97.8±0.2  | 44.5±7.2
        MNIST         | FC-4    | 0.1 | 97.9±0.1 | 77.1±4.8  | 50±15.8   | 96.6±0.4  | 97.6±0.01 | 42.9±4.5
        MNIST         | LeNet-5 | 0.2 | 98.9±0.1 | 56.9±36.2 | 38.6±40.8 | 98.7±0.1  | 98.9±0.04 | 17.2±2.4
        Fashion-MNIST | FC-3    | 0.1 | 87.7±0.6 | 35.3±6.9  | 11.7±1.2  | 80±2.7    | 88.1±0.2  | 68±1.4
        Fashion-MNIST | FC-4    | 0.1 | 88.9±0.1 | 38.3±4.7  | 16.6±4.1  | 86.9±0.7  | 88±0.03   | 60.8±3.2
        Fashion-MNIST | LeNet-5 | 0.2 | 89.7±0.2 | 33±24.3   | 28.6±26.3 | 87.7±2.2  | 89.8±0.4  | 17.8±2.1
        CIFAR-10      | LeNet-5 | 0.3 | 72.2±0.2 | 50.1±5.6  | 27.5±1.7  | 67.7±2.2  | 68.6±1.4  | 9.9±1.4
        CIFAR-10      | VGG-16  | 0.3 | 83.9±0.4 | 85±0.4    | 83.3±0.3  | n/a       | 85.3±0.2  | 36±1.1
        """,
        "RP: the same number of units per layer removed at random. CP: the same number of the highest-scored units. "
        "FT: one epoch of fine-tuning; for VGG-16 all columns but Ref have it, in our results all but Ref and Ours.",
        "The paper prints 44.5±7.2 twice in its first row, as CP and as prune; one of them is suspect.",
    ),
    "table-3": _read_table(
        "Masks that transfer: scored on one data set, retrained from the same initial weights on another",
        ("network", "source", "target"),
        ("Ref", "masked", "prune"),
        """
        LeNet-5 | MNIST    | Fashion-MNIST | 89.7±0.3 | 89.2±0.5 | 16.2±0.2
        LeNet-5 | MNIST    | CIFAR-10      | 72.2±0.2 | 68.1±2.5 | 16.2±0.2
        VGG-16  | CIFAR-10 | MNIST         | 99.1±0.1 | 99.4±0.1 | 36±1.1
        VGG-16  | CIFAR-10 | Fashion-MNIST | 92.3±0.4 | 92.1±0.6 | 36±1.1
        """,
    ),
    "snip": _read_table(
        "Removal at initialisation: LeNet-5 trained on Fashion-MNIST afterwards",
        ("method",),
        ("accuracy", "prune"),
        """
        SNIP | 88.8±0.6 | 55
        Ours | 88.7±0.5 | 58.4
        """,
        "SNIP: 45 % of the connections kept, 128 images. Ours: λ = 1, threshold 0.2, 10 images.",
    ),
    "snip-transfer": _read_table(
        "Removal at initialisation on MNIST, trained on another data set: LeNet-5",
        ("target", "method"),
        ("Ref", "masked", "prune"),
        """
        Fashion-MNIST | SNIP | 89.7±0.3 | 85.8±1.1 | 53.5±1.8
        Fashion-MNIST | Ours | 89.7±0.3 | 88.5±0.3 | 59.1±0.8
        CIFAR-10      | SNIP | 72.2±0.2 | 53.5±3.3 | 53.5±1.8
        CIFAR-10      | Ours | 72.2±0.2 | 63.6±1.4 | 59.1±0.8
        """,
        "SNIP adapted to units: those with the smallest summed connection sensitivity go. Ours: λ = 1.",
    ),
    "rescale": _read_table(
        "Rescaling of the sparsity term: LeNet-5, threshold 0.05",
        ("data", "objective"),
        ("Ref", "masked", "prune"),
        """
        MNIST         | s - 2 | 98.9±0.1 | 98.7±0.1 | 13.2±2.9
        MNIST         | s - 1 | 98.9±0.1 | 98.8±0.1 | 9.6±1.1
        MNIST         | s     | 98.9±0.1 | 98.9±0.2 | 8±1.6
        Fashion-MNIST | s - 2 | 89.9±0.2 | 89.1±0.3 | 17.1±1.2
        Fashion-MNIST | s - 1 | 89.9±0.2 | 89.2±0.1 | 17±3.4
        Fashion-MNIST | s     | 89.9±0.2 | 89±0.4   | 10.8±2.1
        """,
    ),
}
