import builtins
import itertools
import pickle
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file as save_tensors
from torch import nn

from critical_neurons.errors import InvalidFileError, InvalidInputError, InvalidSettingError, MissingExtraError
from critical_neurons.io.data import Look, choose_balanced, load_batch, load_example
from critical_neurons.io.models import load_model

COUNTER = itertools.count()

FACTORIES = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))

ready = net().train()
number = 3

def broken():
    raise ValueError("no such width")

def words():
    return "a model"
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    """The name of a module in the current directory, another one for every test."""
    name = f"factories_{next(COUNTER)}"
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    return name


def other_weights(factories):
    """Weights that no initialisation gives, another value in every place."""
    state = load_model(f"{factories}:net").state_dict()
    return {
        name: torch.arange(1, values.numel() + 1).reshape(values.shape).to(values.dtype)
        for name, values in state.items()
    }


class TestModels:
    def test_built_in_by_name(self):
        model = load_model("lenet5")
        assert [type(layer) for layer in model][:3] == [nn.Conv2d, nn.ReLU, nn.AvgPool2d]
        assert not model.training

    def test_factory_in_the_current_directory(self, factories):
        assert load_model(f"{factories}:net")[0].weight.shape == (3, 4)

    def test_a_module_instead_of_a_factory(self, factories):
        assert not load_model(f"{factories}:ready").training

    def test_the_search_path_is_as_before(self, factories):
        before = list(sys.path)
        load_model(f"{factories}:net")
        assert sys.path == before

    @pytest.mark.parametrize("spec", ["resnet99", "package.", ":net", "package:"])
    def test_unknown_name(self, spec):
        with pytest.raises(
            InvalidSettingError, match=r"fc3, fc4, lenet5, vgg16, resnet20, or package\.module:factory"
        ):
            load_model(spec)

    @pytest.mark.parametrize("module", ["no_such_module", "no_such_module.inner"])
    def test_no_such_module(self, module):
        with pytest.raises(InvalidSettingError, match=r"no module is called no_such_module\. Looked in "):
            load_model(f"{module}:net")

    def test_no_such_attribute_lists_what_there_is(self, factories):
        with pytest.raises(InvalidSettingError, match=r"has no nett\. It has net, broken, words\."):
            load_model(f"{factories}:nett")

    def test_not_callable(self, factories):
        with pytest.raises(InvalidSettingError, match="is a int, not a function"):
            load_model(f"{factories}:number")

    def test_factory_that_raises_is_quoted_with_its_line(self, factories):
        with pytest.raises(
            InvalidSettingError, match=r"raised ValueError: no such width \(factories_\d+\.py, line 11\)"
        ):
            load_model(f"{factories}:broken")

    def test_factory_that_returns_something_else(self, factories):
        with pytest.raises(InvalidSettingError, match=r"returned a str, expected a torch\.nn\.Module"):
            load_model(f"{factories}:words")

    @pytest.mark.parametrize("body", ["import no_such_dependency", "raise SystemExit(3)", "1 / 0", "def ("])
    def test_module_that_cannot_be_imported(self, tmp_path, monkeypatch, body):
        (tmp_path / "broken_module.py").write_text(body)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(
            InvalidSettingError, match=r"importing broken_module raised .*\(broken_module\.py, line 1\)$"
        ):
            load_model("broken_module:net")


class TestWeights:
    def check(self, factories, path):
        loaded = load_model(f"{factories}:net", path).state_dict()
        for name, values in other_weights(factories).items():
            assert torch.equal(loaded[name], values), name

    @pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "model."])
    @pytest.mark.parametrize("inside", [None, "state_dict", "model_state_dict", "model"])
    def test_checkpoints_as_people_have_them(self, factories, tmp_path, prefix, inside):
        state = {prefix + name: values for name, values in other_weights(factories).items()}
        torch.save({"epoch": 3, inside: state, "optimizer": {"lr": 0.1}} if inside else state, tmp_path / "w.pt")
        self.check(factories, tmp_path / "w.pt")

    def test_safetensors(self, factories, tmp_path):
        save_tensors(other_weights(factories), tmp_path / "w.safetensors")
        self.check(factories, tmp_path / "w.safetensors")

    def test_weights_of_a_model_with_a_part_called_module(self, tmp_path, monkeypatch):
        (tmp_path / "wrapping.py").write_text(
            "from torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n"
            "        super().__init__()\n        self.module = nn.Linear(2, 2)\n"
        )
        monkeypatch.chdir(tmp_path)
        torch.save({"module.module.weight": torch.ones(2, 2), "module.module.bias": torch.ones(2)}, "w.pt")
        assert load_model("wrapping:Net", "w.pt").module.bias.tolist() == [1, 1]

    def test_checkpoint_from_before_batch_norm_counted(self, factories, tmp_path):
        state = other_weights(factories)
        del state["1.num_batches_tracked"]
        torch.save(state, tmp_path / "w.pt")
        loaded = load_model(f"{factories}:net", tmp_path / "w.pt")
        assert loaded[1].running_var.tolist() == [1, 2, 3]

    def test_mismatches_are_listed(self, factories, tmp_path):
        state = other_weights(factories)
        del state["3.bias"]
        state["0.weight"] = torch.zeros(3, 5)
        state |= {f"head.{i}": torch.zeros(1) for i in range(20)}
        torch.save(state, tmp_path / "w.pt")
        with pytest.raises(InvalidFileError) as caught:
            load_model(f"{factories}:net", tmp_path / "w.pt")
        message = str(caught.value)
        assert "does not fit the model. Missing: 3.bias. Unexpected: head.0, head.1" in message
        assert "head.5 and 14 more." in message
        assert "Of another shape: 0.weight is (3, 5) in the file and (3, 4) in the model." in message

    @pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.complex64])
    def test_weights_of_another_kind_of_number(self, factories, tmp_path, dtype):
        """Copied as they are, quantised weights would be a network of other outputs."""
        state = other_weights(factories)
        torch.save({**state, "0.weight": state["0.weight"].to(dtype)}, tmp_path / "w.pt")
        with pytest.raises(InvalidFileError, match=f"does not fit the model. No floating point: 0.weight is {dtype}"):
            load_model(f"{factories}:net", tmp_path / "w.pt")

    def test_no_such_file(self, factories, tmp_path):
        with pytest.raises(InvalidFileError, match=r"gone\.pt: no such file"):
            load_model(f"{factories}:net", "gone.pt")
        with pytest.raises(InvalidFileError, match=r"is a folder\. Give the file"):
            load_model(f"{factories}:net", tmp_path)

    def test_a_whole_model_is_refused_and_runs_nothing(self, factories, tmp_path):
        torch.save(nn.Sequential(nn.Linear(4, 3)), tmp_path / "whole.pt")
        with pytest.raises(
            InvalidFileError, match=r"refused.*torch\.nn\.modules\.\S+ that can run code.*state_dict\(\)"
        ):
            load_model(f"{factories}:net", tmp_path / "whole.pt")

    @pytest.mark.filterwarnings("ignore:Detected pickle protocol")
    @pytest.mark.parametrize("protocol", [2, 4])
    def test_a_malicious_pickle_is_refused_and_runs_nothing(self, factories, tmp_path, protocol):
        class Evil:
            def __reduce__(self):
                return (open, (str(tmp_path / "written"), "w"))

        (tmp_path / "evil.pt").write_bytes(pickle.dumps({"state_dict": Evil()}, protocol=protocol))
        torch.save({"state_dict": Evil()}, tmp_path / "evil2.pt")
        for name in ("evil.pt", "evil2.pt"):
            with pytest.raises(InvalidFileError, match="evil"):
                load_model(f"{factories}:net", tmp_path / name)
        assert not (tmp_path / "written").exists()

    @pytest.mark.parametrize("suffix", ["pt", "safetensors"])
    @pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
    def test_truncated_files(self, factories, tmp_path, suffix, share):
        path = tmp_path / f"w.{suffix}"
        (save_tensors if suffix == "safetensors" else torch.save)(other_weights(factories), path)
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])
        with pytest.raises(InvalidFileError, match=r"w\.\w+: (is no torch checkpoint|cannot be read as safetensors)"):
            load_model(f"{factories}:net", path)

    @pytest.mark.parametrize("content", [b"hello world, these are no weights", b"\x80\x02garbage", b"PK\x03\x04zip"])
    def test_other_files(self, factories, tmp_path, content):
        (tmp_path / "w.pt").write_bytes(content)
        with pytest.raises(InvalidFileError, match="is no torch checkpoint, or a damaged one"):
            load_model(f"{factories}:net", tmp_path / "w.pt")

    def test_checkpoint_without_weights(self, factories, tmp_path):
        torch.save({"epoch": 3, "weights": {"0.bias": torch.zeros(3)}}, tmp_path / "w.pt")
        with pytest.raises(InvalidFileError, match=r"Found the keys epoch, weights; expected a state dict"):
            load_model(f"{factories}:net", tmp_path / "w.pt")

    def test_a_single_tensor(self, factories, tmp_path):
        torch.save(torch.zeros(3), tmp_path / "w.pt")
        with pytest.raises(InvalidFileError, match="holds a Tensor; expected a dict"):
            load_model(f"{factories}:net", tmp_path / "w.pt")


INPUTS = np.random.default_rng(0).random((12, 1, 6, 6)).astype(np.float32)
LABELS = np.repeat([0, 1, 2], 4)


def save(path, **arrays):
    (np.savez if path.suffix == ".npz" else lambda path, **arrays: save_arrays(arrays, path))(path, **arrays)
    return str(path)


@pytest.fixture(params=["npz", "safetensors"])
def path(request, tmp_path):
    return tmp_path / f"data.{request.param}"


class TestFiles:
    def test_everything_as_stored(self, path):
        inputs, labels = load_batch(save(path, inputs=INPUTS, labels=LABELS))
        assert np.array_equal(inputs, INPUTS)
        assert np.array_equal(labels, LABELS)
        assert inputs.dtype == torch.float32

    def test_double_precision_stays(self, path):
        assert load_batch(save(path, inputs=INPUTS.astype(float), labels=LABELS))[0].dtype == torch.float64

    def test_bytes_are_scaled_floats_are_not(self, path):
        inputs = np.full((3, 1, 2, 2), 51, np.uint8)
        assert load_batch(save(path, inputs=inputs, labels=np.arange(3)))[0].unique() == np.float32(0.2)
        inputs = inputs.astype(np.float32)
        assert load_batch(save(path, inputs=inputs, labels=np.arange(3)))[0].unique() == 51

    def test_per_class_is_balanced_ordered_and_seeded(self, path):
        source = save(path, inputs=INPUTS, labels=LABELS[::-1].copy())
        first, again, other = (load_batch(source, per_class=2, seed=seed) for seed in (0, 0, 1))
        assert first[1].tolist() == [0, 0, 1, 1, 2, 2]
        assert torch.equal(first[0], again[0])
        assert not torch.equal(first[0], other[0])

    def test_missing_arrays(self, path):
        with pytest.raises(InvalidFileError, match=r"no inputs in it\. Found targets, x; expected inputs, or"):
            load_batch(save(path, targets=LABELS, x=INPUTS))

    def test_without_labels(self, path):
        source = save(path, inputs=INPUTS, targets=LABELS)
        inputs, labels = load_batch(source)
        assert np.array_equal(inputs, INPUTS)
        assert labels is None
        with pytest.raises(InvalidSettingError, match="holds no labels"):
            load_batch(source, per_class=1)

    def test_several_inputs(self, path):
        arrays = {"inputs.ids": np.arange(12)[:, None], "inputs.mask": INPUTS > 0, "labels": LABELS}
        inputs, labels = load_batch(save(path, **arrays), per_class=2)
        assert set(inputs) == {"ids", "mask"}
        assert inputs["ids"].dtype == torch.int64
        assert inputs["mask"].dtype == torch.bool
        assert np.array_equal(LABELS[inputs["ids"][:, 0]], labels)

    def test_inputs_by_position(self, path):
        first, second = load_batch(save(path, **{"inputs.1": INPUTS, "inputs.0": LABELS}))[0]
        assert np.array_equal(first, LABELS)
        assert np.array_equal(second, INPUTS)

    @pytest.mark.parametrize("names", [("1", "2"), ("0", "mask"), ("a b", "c")])
    def test_inputs_that_are_no_arguments(self, path, names):
        with pytest.raises(InvalidInputError, match="without a gap, or names of arguments"):
            load_batch(save(path, **{f"inputs.{name}": INPUTS for name in names}))

    def test_several_inputs_are_not_images(self, path):
        with pytest.raises(InvalidSettingError, match="for inputs, but"):
            load_batch(save(path, **{"inputs.a": INPUTS, "inputs.b": INPUTS}), look=Look(mean=[0.5]))

    def test_bytes_of_several_inputs_are_no_images(self, path):
        inputs, _ = load_batch(save(path, **{"inputs.mask": np.ones((2, 3), np.uint8)}))
        assert inputs["mask"].dtype == torch.int64
        assert inputs["mask"].unique() == 1

    @pytest.mark.parametrize("kind", [np.int64, bool])
    @pytest.mark.parametrize("look", [Look(mean=[0.5]), Look(std=[2.0]), Look(channels=3), Look(resize=4)])
    def test_whole_numbers_are_not_normalised(self, path, look, kind):
        with pytest.raises(InvalidInputError, match="are for uint8 or real numbers; found torch"):
            load_batch(save(path, inputs=INPUTS.astype(kind)), look=look)

    def test_a_few_as_an_example(self, path):
        assert np.array_equal(load_example(save(path, inputs=INPUTS)), INPUTS[:10])

    def test_no_such_file(self, path):
        with pytest.raises(InvalidFileError, match="no such file of data"):
            load_batch(str(path))

    def test_empty(self, path):
        with pytest.raises(InvalidInputError, match="holds no data"):
            load_batch(save(path, inputs=INPUTS[:0], labels=LABELS[:0]))

    def test_lengths_differ(self, path):
        with pytest.raises(InvalidInputError, match=r"inputs of shape \(12, 1, 6, 6\) and labels of shape \(11,\)"):
            load_batch(save(path, inputs=INPUTS, labels=LABELS[1:]))

    @pytest.mark.parametrize("labels", [LABELS + 0.5, np.eye(12, dtype=int), LABELS[:, None]])
    def test_labels_that_are_no_class_indices(self, path, labels):
        with pytest.raises(InvalidInputError, match="expected one integer per input"):
            load_batch(save(path, inputs=INPUTS, labels=labels))

    def test_negative_labels(self, path):
        with pytest.raises(InvalidInputError, match="holds the label -1; classes count from 0"):
            load_batch(save(path, inputs=INPUTS, labels=LABELS - 1))

    def test_integer_inputs(self, path):
        tokens = np.arange(24, dtype=np.int32).reshape(12, 2)
        inputs, _ = load_batch(save(path, inputs=tokens, labels=LABELS))
        assert inputs.dtype == torch.int64
        assert np.array_equal(inputs, tokens)

    def test_other_numbers(self, tmp_path):
        with pytest.raises(InvalidInputError, match="inputs of type complex128; whole or real numbers are read"):
            load_batch(save(tmp_path / "data.npz", inputs=INPUTS.astype(complex), labels=LABELS))

    @pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
    def test_truncated(self, path, share):
        save(path, inputs=INPUTS, labels=LABELS)
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])
        with pytest.raises(InvalidFileError, match=r"data\.\w+: (cannot be read|is no)"):
            load_batch(str(path))

    def test_pickled_arrays_are_refused(self, tmp_path):
        np.savez(tmp_path / "data.npz", inputs=np.array([{}, []], dtype=object), labels=LABELS)
        with pytest.raises(InvalidFileError, match="holds Python objects, which can run code"):
            load_batch(str(tmp_path / "data.npz"))

    def test_single_array(self, tmp_path):
        with (tmp_path / "data.npz").open("wb") as file:
            np.save(file, INPUTS)
        with pytest.raises(InvalidFileError, match=r"expected np\.savez"):
            load_batch(str(tmp_path / "data.npz"))

    def test_other_suffix(self, tmp_path):
        (tmp_path / "data.csv").write_text("1,2")
        with pytest.raises(InvalidFileError, match=r"data comes as \.npz or \.safetensors"):
            load_batch(str(tmp_path / "data.csv"))


class TestChoosing:
    def test_no_repetition(self):
        chosen = choose_balanced(LABELS, 4, seed=0)
        assert sorted(chosen) == list(range(12))

    def test_a_class_that_is_too_small_is_named(self):
        with pytest.raises(InvalidInputError, match="3 of every class asked for, but class 7 has 2"):
            choose_balanced(np.array([1, 1, 1, 7, 7]), 3, seed=0)

    def test_a_class_that_is_too_small_comes_whole_where_that_will_do(self):
        chosen = choose_balanced(np.array([1, 1, 1, 1, 7, 7]), 3, seed=0, allow_fewer=True)
        assert len(chosen) == len(set(chosen)) == 5
        assert sorted(chosen[3:]) == [4, 5]

    @pytest.mark.parametrize("per_class", [0, -1])
    def test_fewer_than_one(self, per_class):
        with pytest.raises(InvalidSettingError, match="at least one"):
            choose_balanced(LABELS, per_class, seed=0)


class TestLook:
    def look(self, tmp_path, inputs, **look):
        source = save(tmp_path / "data.npz", inputs=inputs, labels=np.zeros(len(inputs), int))
        return load_batch(source, look=Look(**look))[0]

    def test_grey_to_three_channels(self, tmp_path):
        result = self.look(tmp_path, INPUTS, channels=3)
        assert np.array_equal(result, np.repeat(INPUTS, 3, axis=1))

    def test_colour_to_grey_weighs_the_channels_as_pillow_does(self, tmp_path):
        colours = np.eye(3, dtype=np.float32)[:, :, None, None]
        result = self.look(tmp_path, colours, channels=1)
        assert result.flatten().tolist() == pytest.approx([0.299, 0.587, 0.114])

    def test_images_without_a_channel_axis(self, tmp_path):
        assert self.look(tmp_path, INPUTS[:, 0], channels=1).shape == (12, 1, 6, 6)

    def test_resize_keeps_the_mean_brightness(self, tmp_path):
        result = self.look(tmp_path, INPUTS, resize=3)
        assert result.shape == (12, 1, 3, 3)
        assert float(result.mean()) == pytest.approx(INPUTS.mean(), abs=0.05)

    def test_mean_and_std_per_channel(self, tmp_path):
        result = self.look(tmp_path, np.ones((1, 3, 2, 2), np.float32), mean=(0.0, 0.5, 1.0), std=(1.0, 0.25, 2.0))
        assert result[0, :, 0, 0].tolist() == [1.0, 2.0, 0.0]

    def test_one_mean_for_all_channels_and_plain_vectors(self, tmp_path):
        assert self.look(tmp_path, np.ones((2, 5), np.float32), mean=(0.25,), std=(0.5,)).unique() == 1.5

    def test_wrong_number_of_means(self, tmp_path):
        with pytest.raises(InvalidSettingError, match="mean: 2 values for 1 channels"):
            self.look(tmp_path, INPUTS, mean=(0.1, 0.2))

    @pytest.mark.parametrize("look", [{"channels": 2}, {"resize": 0}, {"std": (0.0,)}, {"mean": (float("nan"),)}])
    def test_settings_outside_their_range(self, look):
        with pytest.raises(InvalidSettingError, match=next(iter(look))):
            Look(**look)

    def test_resizing_what_is_no_image(self, tmp_path):
        with pytest.raises(InvalidInputError, match=r"are for images.*\(2, 5\)"):
            self.look(tmp_path, np.ones((2, 5), np.float32), resize=3)

    def test_channels_that_cannot_be_mixed(self, tmp_path):
        with pytest.raises(InvalidInputError, match="images of 2 channels cannot become 3"):
            self.look(tmp_path, np.ones((2, 2, 5, 5), np.float32), channels=3)


@pytest.fixture
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write_data_set(folder, images, labels, image_column="image"):
    """The layout of the real ones: parquet files named by split."""
    import datasets

    folder.mkdir()
    features = datasets.Features({image_column: datasets.Image(), "label": datasets.Value("int64")})
    data = datasets.Dataset.from_dict({image_column: images, "label": labels}, features=features)
    data.to_parquet(folder / "train-00000-of-00001.parquet")
    data.select(range(2)).to_parquet(folder / "test-00000-of-00001.parquet")
    return str(folder)


def picture(value, size=(4, 4), mode="L"):
    from PIL import Image

    return Image.new(mode, size, value)


@pytest.mark.usefixtures("_own_cache")
class TestDataSets:
    @pytest.mark.parametrize("column", ["image", "img"])
    def test_folder_of_parquet_files(self, tmp_path, column):
        labels = [0, 1, 0, 1, 0, 1]
        source = write_data_set(tmp_path / "data", [picture(10 * i) for i in range(6)], labels, column)
        inputs, chosen = load_batch(source, per_class=1, seed=0)
        assert inputs.shape == (2, 1, 4, 4)
        assert chosen.tolist() == [0, 1]
        values = (inputs[:, 0, 0, 0] * 255 / 10).round().int().tolist()
        assert [labels[value] for value in values] == [0, 1]
        assert len(load_batch(source, split="test")[0]) == 2

    def test_only_the_chosen_images_are_decoded(self, tmp_path, monkeypatch):
        import datasets

        source = write_data_set(tmp_path / "data", [picture(i) for i in range(40)], [i % 2 for i in range(40)])
        decoded = []
        decode = datasets.Image.decode_example
        monkeypatch.setattr(
            datasets.Image, "decode_example", lambda *args, **kwargs: decoded.append(1) or decode(*args, **kwargs)
        )
        assert len(load_batch(source, per_class=3)[0]) == 6
        assert len(decoded) == 6

    def test_colour_size_and_mode_are_brought_together(self, tmp_path):
        images = [
            picture((255, 0, 0), (6, 4), "RGB"),
            picture(255, (3, 3)),
            picture((0, 255, 0, 255), (5, 5), "RGBA"),
        ]
        source = write_data_set(tmp_path / "data", images, [0, 1, 2])
        inputs, _ = load_batch(source, look=Look(channels=3, resize=4))
        assert inputs.shape == (3, 3, 4, 4)
        expected = [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]]
        torch.testing.assert_close(inputs[:, :, 0, 0], torch.tensor(expected))

    def test_images_of_different_sizes(self, tmp_path):
        source = write_data_set(tmp_path / "data", [picture(0, (4, 4)), picture(0, (5, 4))], [0, 1])
        with pytest.raises(InvalidInputError, match=r"differ in channels or size, \(1, 4, 4\) and \(1, 4, 5\)"):
            load_batch(source)

    def test_saved_to_disk(self, tmp_path):
        import datasets

        data = datasets.Dataset.from_dict(
            {"image": [picture(5)], "label": [0]},
            features=datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")}),
        )
        data.save_to_disk(tmp_path / "one")
        datasets.DatasetDict(train=data).save_to_disk(tmp_path / "dict")
        assert len(load_batch(str(tmp_path / "one"))[0]) == 1
        assert len(load_batch(str(tmp_path / "dict"))[0]) == 1

    def test_missing_columns_are_named(self, tmp_path):
        import datasets

        (tmp_path / "data").mkdir()
        datasets.Dataset.from_dict({"text": ["a"], "label": [0]}).to_parquet(tmp_path / "data" / "train.parquet")
        with pytest.raises(
            InvalidInputError, match="expected the columns image or img, and label; found text, label"
        ):
            load_batch(str(tmp_path / "data"))

    def test_unknown_split(self, tmp_path):
        source = write_data_set(tmp_path / "data", [picture(0)] * 2, [0, 1])
        with pytest.raises(InvalidInputError, match="split 'validation'"):
            load_batch(source, split="validation")

    def test_empty_folder(self, tmp_path):
        (tmp_path / "data").mkdir()
        with pytest.raises(InvalidInputError, match="cannot be loaded as a data set"):
            load_batch(str(tmp_path / "data"))

    @pytest.mark.parametrize("source", ["./missing", "/no/such/folder", "~/no_such_folder"])
    def test_missing_folder_is_not_looked_for_on_the_hub(self, source):
        with pytest.raises(InvalidFileError, match="no such file or folder"):
            load_batch(source)

    def test_missing_extra(self, tmp_path, monkeypatch):
        real = builtins.__import__

        def refuse(name, *args, **kwargs):
            if name == "datasets":
                raise ImportError(name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", refuse)
        with pytest.raises(MissingExtraError, match=r"pip install 'critical_neurons\[datasets\]'"):
            load_batch(str(tmp_path))
