"""Cells: every run of every table and figure, with all its settings: the paper's, unless a comment says why not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeAlias

from critical_neurons.errors import InvalidSettingError
from critical_neurons_reproduction.datasets import PICTURES
from critical_neurons_reproduction.published_values import TABLES as PUBLISHED
from critical_neurons_reproduction.recipes import RECIPES, Recipe
from critical_neurons_reproduction.store import Cell, Profile

Settings: TypeAlias = Mapping[str, Any]

DATA: Mapping[str, str] = {"mnist": "MNIST", "fashion": "Fashion-MNIST", "cifar10": "CIFAR-10"}
"""Names of data sets in cells, and in printed tables."""

NETWORKS: Mapping[str, str] = {"fc3": "FC-3", "fc4": "FC-4", "lenet5": "LeNet-5", "vgg16": "VGG-16"}

FOLDERS: Mapping[str, str] = {"mnist": "mnist", "fashion": "fashion_mnist", "cifar10": "cifar10"}
"""Names of data sets in cells, and those of their folders, which are also the keys of `HUB_IDS` and `RECIPES`."""

AUTHORS: Settings = {
    "input_radius": 1e-5,
    "integer": False,
    "objective": "balanced",
    "gap": 1e-4,
    "time_limit": 3600,
}
"""How the authors' code solves the program: a box of 1e-5 around the images, gates relaxed. The limits and the
objective are ours. Cells of convolutional networks are also run with the objective of the authors' code."""

FINE_TUNING = Recipe(
    "sgd", 1e-2, epochs=1, momentum=0.9, nesterov=True, weight_decay=5e-4, augmented=True, annealing="linear"
)
"""Fine-tuning of VGG-16 as a whole. The learning rate of its parts, ten times this one, would be too high here."""

PART_LIMIT = 60
"""Seconds for the program of one part of VGG-16."""

DEEP: Settings = {
    "score": {
        **AUTHORS,
        "formulation": "paper",
        "objective": "authors",
        "loss_weight": 5,
        "time_limit": PART_LIMIT,
    },
    "parts": {"box": "image", "score_heads": True},
}
"""VGG-16 as in the authors' code: their objective, the image's box propagated through all earlier parts, and units of
the heads scored as well."""

GIVEN: dict[str, Any] = {"digest": "125efa0826c655c3", "shift": -0.5}
"""Weights of a VGG-16 trained end to end on CIFAR-10, by the sha256 of their file. Its inputs are pixels in [0, 1],
plus `shift`."""

HEADS: Settings = Recipe(
    "sgd", 0.05, epochs=5, batch_size=256, momentum=0.9, nesterov=True, weight_decay=5e-4, annealing="one_cycle"
).to_dict()
"""Training of the auxiliary heads alone, with the bodies frozen."""

SHARE = 0.36
"""Share of VGG-16's parameters that the paper removes."""

NARROW = 4
"""Divides the number of maps of VGG-16 in tables of our own that take many trainings."""

OWN_RECIPES = ("given", "replay")
"""Kinds of cells with a recipe that has no name. They start from no reference network."""

BUFFER_SIZES = (1, 10, 50)
"""Batches in the replay buffer of each part; with one, every batch passes through all parts in turn."""

RANDOM_DRAWS = 10
"""Number of random removals that are averaged: a single draw varies too much."""

LINEARISED: Settings = {"formulation": "linearised", "input_radius": 0}
"""The linearised program has no box around the images."""

SEVERAL = 10
"""Largest number of images of a class in IMIDP, as in the authors' code; the paper gives no number."""

SHARE_SLACK = 5.0
"""How many points less than the paper may be removed where thresholds are chosen on validation images."""

STEPS = 20
"""Candidate thresholds per layer: quantiles of its scores, at this number of equal steps."""

BATCHES = 25
FOLLOWED = (("fashion", "lenet5"), ("mnist", "lenet5"), ("fashion", "fc3"), ("mnist", "fc3"))
"""Data and networks of the figures over batches and epochs."""

LOSS_WEIGHTS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25)
FIGURE_THRESHOLDS: Mapping[str, float] = {"lenet5": 0.2, "fc3": 0.1}
"""Thresholds of Table 2; the paper gives none for its figures."""

SNIP_KEPT, SNIP_IMAGES = 0.45, 128
INITIAL_THRESHOLD = 0.2


@dataclass(frozen=True)
class Schedule:
    """Shortened training: at most `epochs` epochs, on the first `images` training images.

    `measured` is the number of validation images and of test images used. The widths of VGG-16 are divided by
    `narrow`.
    """

    epochs: int | None = None
    images: int | None = None
    measured: int | None = None
    narrow: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise InvalidSettingError(f"--{name}: found {value}. Accepted: at least one.")

    def shorten(self, recipe: Recipe) -> Recipe:
        return recipe if self.epochs is None else recipe.shortened(min(recipe.epochs, self.epochs))

    def cuts(self, recipe: Recipe) -> bool:
        return self.shorten(recipe) != recipe

    def describe(self, recipes: Collection[Recipe]) -> str | None:
        """How trainings by these recipes are shortened; None if they are not."""
        parts = []
        if any(map(self.cuts, recipes)):
            parts.append(f"{self.epochs} of {max(recipe.epochs for recipe in recipes)} epochs")
        if self.images is not None and recipes:
            parts.append(f"{self.images} training images")
        if self.measured is not None:
            parts.append(f"{self.measured} images measured")
        if self.narrow > 1:
            parts.append(f"VGG-16 with 1/{self.narrow} of its maps")
        return ", ".join(parts) or None


BEST_RECIPES = "short"
"""The recipes that results are made with: their references are better for the same training time."""

WHOLE = Schedule()
QUICK = Schedule(epochs=1, images=1000, measured=500, narrow=8)
"""The schedule of the quick profile: to check that everything runs, not for results."""


def list_cells(
    table: str,
    *,
    seeds: Collection[int],
    profile: Profile = "full",
    schedule: Schedule = WHOLE,
    recipes: str = BEST_RECIPES,
) -> list[Cell]:
    """All cells of a table or figure, with networks trained by the recipes of that name."""
    if table not in TABLES:
        raise InvalidSettingError(f"{table}: no such table or figure. Accepted: {', '.join(TABLES)}, all.")
    for seed in seeds:
        if seed < 0:
            raise InvalidSettingError(f"seeds: found {seed}. Accepted: zero or above.")
    cells = []
    for seed, (name, paper) in product(seeds, TABLES[table]()):
        settings = {**paper, **_find_recipes(paper, recipes), "seed": seed, "pictures": _digest_pictures(paper)}
        if profile == "quick" and "batch" in paper:  # hardly trained networks may have no correct image of a class
            settings["batch"] = {**paper["batch"], "correct": False}
        cells.append(Cell(table, f"{name}/seed-{seed}", settings, profile, describe_schedule(settings, schedule)))
    return cells


def find_data_sets(settings: Settings) -> list[str]:
    """The data sets that a cell is run on."""
    return [settings[each] for each in ("data", "target") if each in settings]


def _digest_pictures(settings: Settings) -> Settings:
    return {data: PICTURES[FOLDERS[data]] for data in find_data_sets(settings)}


def describe_schedule(settings: Settings, schedule: Schedule) -> str | None:
    """How the training of a cell with these settings is shortened; None if it is not."""
    return schedule.describe([Recipe(**settings[each]) for each in ("recipe", "retraining") if each in settings])


def find_recipe(network: str, data: str, recipes: str = BEST_RECIPES) -> Recipe:
    """How a network is trained on a data set."""
    if recipes not in RECIPES:
        raise InvalidSettingError(f"--recipes: found {recipes!r}. Accepted: {', '.join(RECIPES)}.")
    return RECIPES[recipes][network, FOLDERS[data]]


def _find_recipes(settings: Settings, recipes: str) -> Settings:
    """All trainings of a cell, by the recipes of that name. Fine-tuning of VGG-16 has its own recipe."""
    found = {
        key: find_recipe(settings["network"], settings[of], recipes)
        for key, of in (("recipe", "data"), ("retraining", "target"), ("fine_tuning", "data"))
        if key in settings
        and settings["kind"] not in OWN_RECIPES
        and not (key == "fine_tuning" and settings["network"] == "vgg16")
    }
    if "fine_tuning" in found:
        found["fine_tuning"] = found["fine_tuning"].shortened(1)
    return {key: recipe.to_dict() for key, recipe in found.items()}


def _start(kind: str, data: str, network: str, **further: Any) -> dict[str, Any]:
    """The first settings of every cell."""
    recipe = find_recipe(network, data).to_dict()
    return {"kind": kind, "data": data, "network": network, "recipe": recipe, **further}


def _batch(per_class: int = 1, *, varying: bool = False, correct: bool = True, seed: int | None = None) -> Settings:
    """Arguments of `draw_batch`. Without a `seed` that of the cell is used."""
    return {"per_class": per_class, "varying": varying, "correct": correct, "seed": seed}


def _both_objectives(cells: Iterator[tuple[str, Settings]]) -> Iterator[tuple[str, Settings]]:
    """Cells that score LeNet-5 by a program, once with our objective and once with the authors'. For networks without
    convolutions the objectives are equal."""
    for name, settings in cells:
        if settings["network"] == "lenet5" and settings.get("method", "scores") == "scores":
            for objective in ("balanced", "authors"):
                yield f"{name}/{objective}", {**settings, "score": {**settings["score"], "objective": objective}}
        else:
            yield name, settings


def _table_1(thresholds: tuple[float, ...], methods: tuple[str, ...]) -> Iterator[tuple[str, Settings]]:
    for data, method in product(("mnist", "fashion"), methods):
        yield (
            f"{data}/lenet5/{method.lower()}",
            _start(
                "removal",
                data,
                "lenet5",
                batch=_batch(SEVERAL, varying=True) if method == "IMIDP" else _batch(),
                score={**AUTHORS, "loss_weight": 1, "by_class": method != "SIM"},
                thresholds=list(thresholds),
            ),
        )


def _table_2() -> Iterator[tuple[str, Settings]]:
    for (title, network_title, threshold), figures in PUBLISHED["table-2"].figures.items():
        data, network = _name_of(DATA, title), _name_of(NETWORKS, network_title)
        ours, prune = figures["Ours"], figures["prune"]
        if not ours or not prune:  # VGG-16, which has its own tables
            continue
        goal = {"share": (prune.mean - SHARE_SLACK) / 100, "accuracy": ours.mean / 100, "steps": STEPS}
        yield (
            f"{data}/{network}",
            _start(
                "comparison",
                data,
                network,
                batch=_batch(),
                score={**AUTHORS, "loss_weight": 5},
                thresholds=[float(threshold)],
                fine_tuning=find_recipe(network, data).shortened(1).to_dict(),
                draws=RANDOM_DRAWS,
                goal=goal,
            ),
        )


def _table_2_deep() -> Iterator[tuple[str, Settings]]:
    """VGG-16 trained in parts."""
    # in mixed precision, like the training
    return _deep_cells(_start("decoupled", "cifar10", "vgg16"), replace(FINE_TUNING, mixed_precision=True))


def _table_2_given() -> Iterator[tuple[str, Settings]]:
    """VGG-16 from given weights."""
    return _deep_cells({**_start("given", "cifar10", "vgg16"), "recipe": HEADS, "weights": GIVEN}, FINE_TUNING)


def _deep_cells(settings: Settings, fine_tuning: Recipe) -> Iterator[tuple[str, Settings]]:
    """Every cell fine-tunes one network, the most informative first. The threshold is the paper's, or the one that
    removes the paper's share."""
    ways = (
        ("paper", SHARE, ("ours", "nothing", "random", "critical")),
        ("linearised", SHARE, ("ours", "random", "critical")),
        ("paper", None, ("ours", "random", "critical")),
        ("linearised", None, ("ours", "random", "critical")),
    )
    for program, share, choices in ways:
        score = {**DEEP["score"], **(LINEARISED if program == "linearised" else {})}
        for removed in choices:
            yield (
                f"cifar10/vgg16/{program}/{'threshold' if share is None else 'share'}/{removed}",
                {
                    **settings,
                    **DEEP,
                    "batch": _batch(),
                    "thresholds": [0.3],
                    "score": score,
                    "fine_tuning": fine_tuning.to_dict(),
                    "share": share,
                    "removed": removed,
                },
            )


def _hyphenate(title: str) -> str:
    return title.replace("'s", "").replace(" ", "-")


PART_CHANGES: Mapping[str, Settings] = {
    "as in table 2": {},
    "box around the part's input": {"parts": {**DEEP["parts"], "box": "part"}},
    "heads not scored": {"parts": {**DEEP["parts"], "score_heads": False}},
    "heads four times as wide as their input": {"heads": HEADS},
    "linearised": {"score": {**DEEP["score"], **LINEARISED}},
}
"""What can be chosen for parts, one change at a time. The authors' code has the image's box, scores the heads, and
makes their hidden layer four times as wide as their input; ours has 128 units."""


def _parts() -> Iterator[tuple[str, Settings]]:
    """Scores of the VGG-16 of table-2-deep, not fine-tuned. Wider heads are trained behind the bodies, which stay."""
    for title, change in PART_CHANGES.items():
        settings = {**DEEP, "batch": _batch(), "thresholds": [0.3], "share": SHARE, **change}
        yield f"cifar10/vgg16/{_hyphenate(title)}", {**_start("parts", "cifar10", "vgg16"), **settings}


def _parts_narrow() -> Iterator[tuple[str, Settings]]:
    """Every choice for parts by both rules, fine-tuned, of a VGG-16 with a quarter of its maps."""
    start = {
        **_start("decoupled", "cifar10", "vgg16"),
        **DEEP,
        "narrow": NARROW,
        "batch": _batch(),
        "thresholds": [0.3],
    }
    start["fine_tuning"] = replace(FINE_TUNING, mixed_precision=True).to_dict()
    yield "cifar10/vgg16/whole/share/nothing", {**start, "share": None, "removed": "nothing"}
    for (title, change), share in product(PART_CHANGES.items(), (SHARE, None)):
        for removed in ("ours", "random", "critical"):
            name = f"cifar10/vgg16/{_hyphenate(title)}/{'threshold' if share is None else 'share'}/{removed}"
            yield name, {**start, **change, "share": share, "removed": removed}


def _replay() -> Iterator[tuple[str, Settings]]:
    """Training in parts that read from replay buffers, of a narrow VGG-16, for a few epochs."""
    for size in BUFFER_SIZES:
        recipe = find_recipe("vgg16", "cifar10").shortened(6).to_dict()
        settings = {"recipe": recipe, "narrow": NARROW, "buffer_size": size}
        yield f"cifar10/vgg16/buffer-{size}", {**_start("replay", "cifar10", "vgg16"), **settings}


def _table_3() -> Iterator[tuple[str, Settings]]:
    for title, *titles in PUBLISHED["table-3"].figures:
        network = _name_of(NETWORKS, title)
        source, target = (_name_of(DATA, each) for each in titles)
        deep = {**DEEP, "share": SHARE} if network == "vgg16" else {"score": {**AUTHORS, "loss_weight": 5}}
        # The paper gives neither λ nor threshold here. We use those of Table 2, for LeNet-5 those of MNIST, and for
        # VGG-16 the threshold that removes the paper's share.
        yield (
            f"{source}/{target}/{network}",
            _start(
                "transfer",
                source,
                network,
                target=target,
                retraining=find_recipe(network, target).to_dict(),
                method="scores",
                initial=False,
                batch=_batch(),
                threshold=None if network == "vgg16" else 0.2,
                **deep,
            ),
        )


def _initial(source: str, target: str, method: str) -> Settings:
    """Units are chosen at initialisation, so nothing is trained on the source."""
    return {
        "kind": "transfer",
        "data": source,
        "network": "lenet5",
        "target": target,
        "retraining": find_recipe("lenet5", target).to_dict(),
        "method": method,
        "initial": True,
        # an untrained network classifies hardly anything correctly
        "batch": _batch(correct=False),
        "score": {**AUTHORS, "loss_weight": 1},
        "threshold": INITIAL_THRESHOLD,
        "snip": {"kept": SNIP_KEPT, "images": SNIP_IMAGES},
    }


def _snip() -> Iterator[tuple[str, Settings]]:
    for method, title in (("connections", "SNIP"), ("scores", "Ours")):
        yield f"fashion/lenet5/{title.lower()}", _initial("fashion", "fashion", method)


def _snip_transfer() -> Iterator[tuple[str, Settings]]:
    for target, (method, title) in product(("fashion", "cifar10"), (("units", "SNIP"), ("scores", "Ours"))):
        yield (
            f"mnist/{target}/lenet5/{title.lower()}",
            _initial("mnist", target, method),
        )


def _rescale() -> Iterator[tuple[str, Settings]]:
    for data, objective, rescale in product(("mnist", "fashion"), ("balanced", "authors", "paper"), (2, 1, 0)):
        yield (
            f"{data}/lenet5/{objective}/rescale-{rescale}",
            _start(
                "removal",
                data,
                "lenet5",
                batch=_batch(),
                score={**AUTHORS, "loss_weight": 5, "objective": objective, "rescale": rescale},
                thresholds=[0.05],
            ),
        )


def _figure_cell(data: str, network: str, batch: Settings, **further: Any) -> dict[str, Any]:
    score = {**AUTHORS, "loss_weight": 5, **further.pop("score", {})}
    return _start(
        "removal", data, network, batch=batch, score=score, thresholds=[FIGURE_THRESHOLDS[network]], **further
    )


def _batches() -> Iterator[tuple[str, Settings]]:
    for (data, network), number in product(FOLLOWED, range(BATCHES)):
        yield (
            f"{data}/{network}/batch-{number:02}",
            _figure_cell(data, network, _batch(correct=False, seed=number)),
        )


def _lambda() -> Iterator[tuple[str, Settings]]:
    for weight in LOSS_WEIGHTS:
        yield (
            f"fashion/lenet5/lambda-{weight:g}",
            _figure_cell("fashion", "lenet5", _batch(), score={"loss_weight": weight}),
        )


def _training() -> Iterator[tuple[str, Settings]]:
    for (data, network), form in product(FOLLOWED, ("plain", "incremental")):
        settings = _figure_cell(data, network, _batch(correct=False))
        yield f"{data}/{network}/{form}", {**settings, "kind": "epochs", "incremental": form == "incremental"}


DIFFERENCES: Mapping[str, Settings] = {
    "as in table 2": {},
    "objective as printed": {"objective": "paper"},
    "objective of the authors": {"objective": "authors"},
    "integer gates": {"integer": True},
    "no box around the images": {"input_radius": 0},
    "linearised": LINEARISED,
    "any images": {"batch": _batch(correct=False)},
}
"""What the paper leaves open, one change at a time. Every cell also measures masks that keep biases."""


TITLES: Mapping[str, str] = {_hyphenate(title): title for title in (*PART_CHANGES, *DIFFERENCES)}
"""Titles of changes, by their part of a cell's name."""


def _differences() -> Iterator[tuple[str, Settings]]:
    for network, (title, change) in product(("fc3", "lenet5"), DIFFERENCES.items()):
        if network == "fc3" and change.get("objective") == "authors":
            continue  # without convolutions it equals ours
        threshold = 0.1 if network == "fc3" else 0.2
        yield (
            f"fashion/{network}/{_hyphenate(title)}",
            _start(
                "removal",
                "fashion",
                network,
                batch=change.get("batch", _batch()),
                score={**AUTHORS, "loss_weight": 5, **{k: v for k, v in change.items() if k != "batch"}},
                thresholds=[threshold],
            ),
        )


TABLES: Mapping[str, Callable[[], Iterator[tuple[str, Settings]]]] = {
    "table-1": lambda: _both_objectives(_table_1((0.01,), ("IDP", "IMIDP", "SIM"))),
    "table-1-appendix": lambda: _both_objectives(_table_1((0.1, 0.01), ("IDP", "SIM"))),
    "table-2": lambda: _both_objectives(_table_2()),
    "table-2-deep": _table_2_deep,
    "table-2-given": _table_2_given,
    "parts": _parts,
    "parts-narrow": _parts_narrow,
    "replay": _replay,
    "table-3": lambda: _both_objectives(_table_3()),
    "snip": lambda: _both_objectives(_snip()),
    "snip-transfer": lambda: _both_objectives(_snip_transfer()),
    "rescale": _rescale,
    "batches": lambda: _both_objectives(_batches()),
    "training": lambda: _both_objectives(_training()),
    "lambda": lambda: _both_objectives(_lambda()),
    "differences": _differences,
}
"""The paper's tables and figures in its order. Parts, replay and differences are our own, of what it leaves open."""


def _name_of(titles: Mapping[str, str], title: str) -> str:
    return next(name for name, printed in titles.items() if printed == title)


def select_cells(cells: Collection[Cell], only: Collection[str]) -> list[Cell]:
    """The cells whose name contains all parts of one of the texts, in that order, such as fashion/lenet5."""
    if not only:
        return list(cells)
    chosen = [cell for cell in cells if any(_matches(cell, text) for text in only)]
    for text in only:
        if not any(_matches(cell, text) for cell in cells):
            names = list(dict.fromkeys(cell.name.rpartition("/")[0] for cell in cells))
            some = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            raise InvalidSettingError(
                f"--only {text}: no such cell. Accepted: parts of a name, with / between them; there are {some}."
            )
    return chosen


def _matches(cell: Cell, text: str) -> bool:
    parts = iter(cell.name.split("/"))
    return all(wanted in parts for wanted in text.strip("/").split("/"))
