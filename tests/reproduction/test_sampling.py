import pytest
import torch
from torch import nn

from critical_neurons.errors import InvalidInputError, InvalidSettingError
from critical_neurons_reproduction.datasets import LabelledImages
from critical_neurons_reproduction.sampling import draw_batch

CLASSES, PER_CLASS = 4, 30
SEEDS = range(20)


def numbered_part():
    """Every image tells its own number and class: (number, label) as two features."""
    labels = torch.arange(CLASSES * PER_CLASS) % CLASSES
    return LabelledImages(torch.stack([torch.arange(len(labels)), labels], dim=1).float(), labels)


class RightOnSome(nn.Module):
    """Four images correctly, then four as the next class."""

    def forward(self, inputs):
        number, label = inputs.long().unbind(1)
        return nn.functional.one_hot((label + number % 8 // 4) % CLASSES, CLASSES).float()


def numbers(part):
    return part.inputs[:, 0].int().tolist()


@pytest.mark.parametrize("per_class", [1, 3, PER_CLASS])
def test_as_many_of_every_class_and_none_twice(per_class):
    batch = draw_batch(numbered_part(), per_class, seed=0)
    assert batch.labels.tolist() == [label for label in range(CLASSES) for _ in range(per_class)]
    assert batch.inputs[:, 1].tolist() == batch.labels.tolist()
    assert len(set(numbers(batch))) == len(batch)


def test_the_seed_decides():
    batches = {tuple(numbers(draw_batch(numbered_part(), seed=seed))) for seed in SEEDS}
    assert len(batches) > 1
    assert numbers(draw_batch(numbered_part(), 3, seed=7)) == numbers(draw_batch(numbered_part(), 3, seed=7))


def test_a_larger_batch_holds_the_smaller():
    small, large = (set(numbers(draw_batch(numbered_part(), count, seed=3))) for count in (2, 5))
    assert small < large


def test_the_global_random_states_have_no_part():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    draw_batch(numbered_part(), 3, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_number_by_chance_of_every_class():
    counts = torch.stack([draw_batch(numbered_part(), 3, seed=s, varying=True).labels.bincount() for s in SEEDS])
    assert counts.shape == (len(SEEDS), CLASSES)
    assert set(counts.flatten().tolist()) == {1, 2, 3}
    assert any(len(set(row.tolist())) > 1 for row in counts)


def test_only_what_the_network_classifies_correctly():
    part, model = numbered_part(), RightOnSome()
    right = (model(part.inputs).argmax(1) == part.labels).tolist()
    assert 0 < sum(right) < len(right)
    drawn = [numbers(draw_batch(part, 3, seed=seed, correct_by=model)) for seed in SEEDS]
    assert all(right[number] for batch in drawn for number in batch)
    assert not all(right[number] for seed in SEEDS for number in numbers(draw_batch(part, 3, seed=seed)))


class TestRefusals:
    def test_more_than_there_are(self):
        with pytest.raises(InvalidInputError, match=r"31 images of every class requested, but class 0 has 30"):
            draw_batch(numbered_part(), PER_CLASS + 1, seed=0)

    def test_a_class_that_is_never_right(self):
        class NeverLast(nn.Module):
            def forward(self, inputs):
                return nn.functional.one_hot(inputs[:, 1].long() % (CLASSES - 1), CLASSES).float()

        with pytest.raises(InvalidInputError, match=r"correctly classified.*but class 3 has 0\. .*drop correct_by"):
            draw_batch(numbered_part(), seed=0, correct_by=NeverLast())

    @pytest.mark.parametrize(("per_class", "seed"), [(0, 0), (1, -1)])
    def test_settings(self, per_class, seed):
        with pytest.raises(InvalidSettingError, match="Accepted"):
            draw_batch(numbered_part(), per_class, seed=seed)
