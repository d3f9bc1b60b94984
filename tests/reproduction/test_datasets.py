import os

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from critical_neurons.errors import InvalidFileError, InvalidInputError, OutputError
from critical_neurons.io.data import Look, load_batch
from critical_neurons_reproduction import datasets as data_module
from critical_neurons_reproduction.datasets import HUB_IDS, LabelledImages, load_dataset, load_stored

ROUNDING = 1e-6
"""float32 pixels in [0, 1], resized in batches or one by one."""

PER_CLASS, CLASSES = 20, 3


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hugging_face")


def pictures(count, seed=0, size=(28, 28)):
    generator = np.random.default_rng(seed)
    return [Image.fromarray(generator.integers(0, 256, size, dtype=np.uint8)) for _ in range(count)]


def write(folder, images, labels, *, test=6, column="image"):
    """The layout of the real ones; the first `test` images are the test split too."""
    import datasets

    folder.mkdir(exist_ok=True)
    features = datasets.Features({column: datasets.Image(), "label": datasets.Value("int64")})
    data = datasets.Dataset.from_dict({column: images, "label": labels}, features=features)
    data.to_parquet(folder / "train-00000-of-00001.parquet")
    if test:
        data.select(range(test)).to_parquet(folder / "test-00000-of-00001.parquet")
    return folder


@pytest.fixture
def source(tmp_path):
    labels = np.tile(np.arange(CLASSES), PER_CLASS)
    return write(tmp_path / "digits", pictures(len(labels)), labels)


def load(source, tmp_path):
    return load_dataset(source, cache=tmp_path / "cache")


def only_file(folder):
    (path,) = folder.iterdir()
    return path


def same(part, other):
    return torch.equal(part.inputs, other.inputs) and torch.equal(part.labels, other.labels)


@pytest.mark.parametrize("size", [(28, 28), (32, 32), (32, 32, 3), (40, 36, 3)])
def test_inputs_are_those_of_load_batch(tmp_path, size):
    folder = write(tmp_path / "data", pictures(12, size=size), [0, 1] * 6)
    found = load(folder, tmp_path)
    expected, labels = load_batch(str(folder), split="test", look=Look(channels=3, resize=32))
    assert found.test.inputs.shape == (6, 3, 32, 32)
    assert found.test.inputs.dtype == torch.float32
    assert 0 <= found.test.inputs.min() < found.test.inputs.max() <= 1
    torch.testing.assert_close(found.test.inputs, expected, rtol=0, atol=ROUNDING)
    assert found.test.labels.tolist() == labels.tolist()
    assert found.classes == 2


def test_more_images_than_are_decoded_at_once(source, tmp_path, monkeypatch):
    whole = load(source, tmp_path)
    monkeypatch.setattr(data_module, "CHUNK", 7)
    assert same(load_dataset(source, cache=tmp_path / "other").training, whole.training)


def test_validation_is_a_tenth_of_every_class_and_no_part_of_training(source, tmp_path):
    found = load(source, tmp_path)
    assert found.validation.labels.bincount().tolist() == [PER_CLASS // 10] * CLASSES
    assert found.training.labels.bincount().tolist() == [PER_CLASS - PER_CLASS // 10] * CLASSES
    images = torch.cat([found.training.inputs, found.validation.inputs])
    assert len(images.flatten(1).unique(dim=0)) == PER_CLASS * CLASSES
    assert same(load_dataset(source, cache=tmp_path / "other").validation, found.validation)


def test_every_class_is_in_both_parts_however_rare(tmp_path):
    found = load(write(tmp_path / "data", pictures(6), [0, 0, 0, 0, 1, 1]), tmp_path)
    assert found.training.labels.bincount().tolist() == [3, 1]
    assert found.validation.labels.bincount().tolist() == [1, 1]


class TestCache:
    def test_a_second_time_nothing_is_decoded(self, source, tmp_path, monkeypatch):
        first = load(source, tmp_path)
        kept = load_file(only_file(tmp_path / "cache"))
        assert kept["train_images"].dtype == torch.uint8
        assert kept["train_images"].shape == (PER_CLASS * CLASSES, 1, 28, 28)

        def decode(*_args):
            raise AssertionError("decoded")

        monkeypatch.setattr(data_module, "_decode", decode)
        again = load(source, tmp_path)
        for part in ("training", "validation", "test"):
            assert same(getattr(first, part), getattr(again, part))

    def test_the_default_is_in_the_home_directory(self, source, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        load_dataset(source)
        assert only_file(tmp_path / "home" / ".cache" / "critical_neurons").name.startswith("digits-")

    def test_the_hub_is_asked_once(self, source, tmp_path, monkeypatch):
        """A folder stands for the hub, from which no test may download."""
        asked = []

        def open_data_set(name, split):
            asked.append((name, split))
            return data_module_open(str(source), split)

        data_module_open = data_module.open_data_set
        monkeypatch.setattr(data_module, "open_data_set", open_data_set)
        monkeypatch.chdir(tmp_path)
        for name in ("mnist", "mnist", "ylecun/mnist"):
            assert same(load(name, tmp_path).training, load(source, tmp_path).training)
        assert asked[:2] == [("ylecun/mnist", "train"), ("ylecun/mnist", "test")]
        assert len([name for name, _ in asked if name == "ylecun/mnist"]) == 2

    def test_the_same_files_elsewhere_are_the_same_data(self, source, tmp_path):
        load(source, tmp_path)
        before = only_file(tmp_path / "cache")
        stamp = before.stat().st_mtime_ns
        (tmp_path / "elsewhere").mkdir()
        moved = source.rename(tmp_path / "elsewhere" / source.name)
        load(moved, tmp_path)
        assert only_file(tmp_path / "cache") == before
        assert before.stat().st_mtime_ns == stamp

    def test_other_images_in_the_same_folder_are_other_data(self, source, tmp_path):
        before = load(source, tmp_path)
        labels = np.tile(np.arange(CLASSES), PER_CLASS)
        write(source, pictures(len(labels), seed=1), labels)
        assert not same(load(source, tmp_path).training, before.training)

    def test_what_a_download_leaves_behind_is_no_data(self, source, tmp_path):
        load(source, tmp_path)
        (source / ".cache").mkdir()
        (source / ".cache" / "lock").write_text("")
        load(source, tmp_path)
        only_file(tmp_path / "cache")

    @pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "foreign"])
    def test_a_damaged_one_is_decoded_anew(self, source, tmp_path, damage):
        first = load(source, tmp_path)
        path = only_file(tmp_path / "cache")
        whole = path.read_bytes()
        at = len(whole) // 2
        if damage == "foreign":
            save_file({"weights": torch.zeros(2)}, path)
        else:
            flipped = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
            path.write_bytes({"cut": whole[:at], "empty": b"", "flipped": flipped}[damage])
        assert same(load(source, tmp_path).training, first.training)
        assert path.read_bytes() == whole

    def test_one_that_cannot_be_made(self, source, tmp_path):
        (tmp_path / "cache").write_text("")
        with pytest.raises(OutputError, match="cache: cannot be written"):
            load(source, tmp_path)

    def test_no_space_leaves_nothing_half_written(self, source, tmp_path, monkeypatch):
        def fail(_descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OutputError, match="No space left on device"):
            load(source, tmp_path)
        assert not list((tmp_path / "cache").iterdir())


class TestRefusals:
    def test_no_such_folder_says_how_to_get_one(self, tmp_path):
        with pytest.raises(InvalidFileError, match=r"no such file or folder.*hf download ylecun/mnist") as caught:
            load(tmp_path / "missing", tmp_path)
        assert all(name in str(caught.value) for name in HUB_IDS.values())

    def test_a_folder_without_data(self, tmp_path):
        (tmp_path / "data").mkdir()
        with pytest.raises(InvalidInputError, match=r"cannot be loaded as a data set.*Accepted: a folder"):
            load(tmp_path / "data", tmp_path)

    def test_other_columns(self, tmp_path):
        folder = write(tmp_path / "data", pictures(6), [0, 1] * 3, column="photo")
        with pytest.raises(InvalidInputError, match=r"found photo, label.*Accepted: a folder"):
            load(folder, tmp_path)

    def test_no_test_split(self, tmp_path):
        folder = write(tmp_path / "data", pictures(6), [0, 1] * 3, test=0)
        with pytest.raises(InvalidInputError, match=r"split 'test'.*splits train and test"):
            load(folder, tmp_path)

    def test_a_single_split_saved_to_disk(self, tmp_path):
        import datasets

        datasets.Dataset.from_dict({"image": [0], "label": [0]}).save_to_disk(tmp_path / "data")
        with pytest.raises(InvalidInputError, match="a single split"):
            load(tmp_path / "data", tmp_path)

    def test_images_of_several_sizes(self, tmp_path):
        images = [*pictures(3), *pictures(3, size=(20, 20))]
        folder = write(tmp_path / "data", images, [0, 1] * 3)
        with pytest.raises(InvalidInputError, match=r"\(1, 20, 20\) and \(1, 28, 28\) among them"):
            load(folder, tmp_path)

    def test_a_damaged_picture(self, tmp_path):
        folder = write(tmp_path / "data", [*pictures(5), {"bytes": b"no picture", "path": None}], [0, 1] * 3)
        with pytest.raises(InvalidInputError, match="holds a damaged picture"):
            load(folder, tmp_path)

    def test_a_class_of_one_image(self, tmp_path):
        folder = write(tmp_path / "data", pictures(6), [0, 0, 0, 0, 0, 1])
        with pytest.raises(InvalidInputError, match="class 1 has one image"):
            load(folder, tmp_path)

    def test_a_class_that_is_only_tested(self, tmp_path):
        folder = write(tmp_path / "data", pictures(6), [0, 0, 0, 1, 1, 1])
        write(tmp_path / "other", pictures(2), [0, 2], test=2)
        (tmp_path / "other" / "test-00000-of-00001.parquet").replace(folder / "test-00000-of-00001.parquet")
        with pytest.raises(InvalidInputError, match="label 2 is in the split test"):
            load(folder, tmp_path)


def test_the_digest_tells_images_and_labels_apart():
    inputs, labels = torch.rand(4, 3, 32, 32), torch.tensor([0, 1, 0, 1])
    digest = LabelledImages(inputs, labels).digest
    assert digest == LabelledImages(inputs.clone(), labels.clone()).digest
    assert digest != LabelledImages(inputs.flip(0), labels).digest
    assert digest != LabelledImages(inputs, labels.flip(0)).digest


def test_stored_images_keep_their_order_and_size(source, tmp_path):
    training, test = load_stored(source, cache=tmp_path / "cache")
    for part, split in ((training, "train"), (test, "test")):
        inputs, labels = load_batch(str(source), split=split)
        assert part.inputs.shape[1:] == (1, 28, 28)
        assert torch.equal(part.labels, labels)
        torch.testing.assert_close(part.inputs, inputs, atol=ROUNDING, rtol=0)
    kept = only_file(tmp_path / "cache").stat().st_mtime_ns
    load(source, tmp_path)
    assert only_file(tmp_path / "cache").stat().st_mtime_ns == kept  # one cache for both
