"""What was kept comes back: into the same objects, bit for bit, as often as one likes."""

import array
import collections
import copy
import dataclasses
import random

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanSquaredError, MetricCollection, PearsonCorrCoef

from compile_profiler import sandbox
from compile_profiler.cells import same_bits
from compile_profiler.sandbox import RandomState, Snapshot, StateTooLargeError


class Plain:
    """A plain Python object with whatever attributes a test gives it."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("__private", "a", "b")

    def __init__(self):
        self.a, self.__private = 1, 2

    def change(self):
        self.a, self.b, self.__private = 5, 6, 7

    def values(self):
        return self.a, getattr(self, "b", None), self.__private


@dataclasses.dataclass(frozen=True)
class Frozen:
    items: list


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    items: list


class ListWithAttribute(list):
    num = 0


def restored(item, change):
    """Change ``item`` between a snapshot and its restore, twice; the snapshot must see each change."""
    snapshot = Snapshot([item])
    assert snapshot.changed() == []
    for _ in range(2):
        change()
        assert snapshot.changed() != []
        snapshot.restore()
        assert snapshot.changed() == []
    return item


# -- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0),
        lambda: torch.tensor(3.0),
        lambda: torch.tensor([float("nan"), float("inf"), -0.0]),
        lambda: torch.arange(1, 7).reshape(2, 3).t(),
        lambda: torch.arange(12.0)[::2],
        lambda: torch.ones(1, 3).expand(4, 3),
        lambda: torch.ones(3, 2, dtype=torch.complex64).conj(),
        lambda: torch.zeros(4, dtype=torch.bool),
        lambda: torch.ones(3, dtype=torch.bfloat16),
        lambda: torch.ones(3).to(torch.float8_e4m3fn),
        lambda: nn.Parameter(torch.ones(3)),
    ],
)
def test_a_tensor_written_in_place_gets_its_bits_back(make):
    tensor = make()
    before = tensor.data.clone()
    root = tensor.data[:1] if 0 in tensor.stride() else tensor.data

    restored([tensor], lambda: root.fill_(1 if root.dtype is torch.bool else 0.25))

    assert same_bits(tensor.data, before)


def test_infinity_and_the_largest_number_are_told_apart():
    largest = torch.finfo(torch.float32).max

    assert restored(tensor := torch.tensor([largest]), lambda: tensor.fill_(float("inf"))).item() == largest


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.zeros(3, 0)])
def test_a_tensor_without_elements_is_no_trouble(tensor):
    snapshot = Snapshot([[tensor]])
    snapshot.restore()

    assert snapshot.changed() == []


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_tensor_gets_its_values_back(layout):
    tensor = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    tensor = tensor.to_sparse() if layout == "coo" else tensor.to_sparse_csr()

    restored([tensor], lambda: tensor._values().mul_(2) if layout == "coo" else tensor.values().mul_(2))

    assert torch.equal(tensor.to_dense(), torch.tensor([[0.0, 2.0], [3.0, 0.0]]))


@pytest.mark.parametrize("new", [torch.ones(3), torch.ones(5), torch.ones(3, dtype=torch.float64)])
def test_a_replaced_storage_is_the_old_one_again_for_everybody_who_shares_it(new):
    tensor = torch.zeros(3)
    view = tensor[1:]

    def change():
        tensor.data = new.clone()

    restored([tensor], change)
    tensor[1] = 7

    assert view[0] == 7


def test_an_inference_tensor_that_was_kept_can_be_written_back():
    """Validation keeps outputs on the module; training runs outside inference mode."""
    with torch.inference_mode():
        tensor = torch.ones(3)

    def change():
        with torch.inference_mode():
            tensor.zero_()

    assert torch.equal(restored([tensor], change)[0], torch.ones(3))


def test_requires_grad_flags_come_back():
    parameter = nn.Parameter(torch.ones(2))

    assert restored([parameter], lambda: parameter.requires_grad_(False))[0].requires_grad


def test_the_gradient_of_a_leaf_that_is_no_parameter_comes_back():
    leaf = torch.ones(2, requires_grad=True)
    (leaf * 3).sum().backward()
    gradient = leaf.grad
    snapshot = Snapshot([[leaf]])
    (leaf * 5).sum().backward()
    snapshot.restore()

    assert leaf.grad is gradient
    assert torch.equal(gradient, torch.full((2,), 3.0))


def test_a_graph_that_is_alive_stays_valid_over_a_restore():
    weight = nn.Parameter(torch.full((2,), 3.0))
    loss = (weight * weight).sum()
    Snapshot([[weight]]).restore()
    loss.backward()

    assert torch.equal(weight.grad, torch.full((2,), 6.0))


# -- Python ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "change"),
    [
        ([1, [2]], lambda x: (x[1].append(3), x.append(4))),
        ([3, 1, 2], lambda x: x.sort()),
        ({"a": 1, "b": {"c": 2}}, lambda x: (x.pop("a"), x["b"].update(d=1))),
        (collections.deque([1, 2, 3], maxlen=3), lambda x: x.append(9)),
        ({1, 2, 3}, lambda x: (x.discard(1), x.add(9))),
        (collections.defaultdict(list, a=[1]), lambda x: x["new"].append(1)),
        (collections.Counter("aab"), lambda x: x.update("abc")),
        (bytearray(b"abc"), lambda x: x.extend(b"d")),
        (array.array("d", [1.0]), lambda x: x.append(2.0)),
        (np.arange(4.0), lambda x: x.fill(7)),
        (np.array([np.nan, 1.0]), lambda x: x.fill(0)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_has_its_items_back(item, change):
    before = copy.deepcopy(item)
    restored(item, lambda: change(item))

    np.testing.assert_equal(item, before)


def test_an_ordered_dict_works_on_after_a_restore():
    """Its order is kept beside the dict that it is; both must agree."""
    item = collections.OrderedDict(a=1, b=2, c=3)
    restored(item, lambda: (item.move_to_end("a"), item.pop("b"), item.update(d=4)))

    assert list(item) == ["a", "b", "c"]
    item.move_to_end("a")
    assert item.popitem(last=False) == ("b", 2)


def test_a_dict_has_its_order_back():
    item = {"a": 1, "b": 2}
    restored(item, lambda: item.update(a=item.pop("a")))

    assert list(item) == ["a", "b"]


def test_a_new_attribute_goes_and_a_removed_one_comes_back():
    item = Plain(kept=1, inner=Plain(deep=[1]))

    def change():
        del item.kept
        item.new = 2
        item.inner.deep.append(2)

    restored(item, change)

    assert vars(item).keys() == {"kept", "inner"}
    assert item.inner.deep == [1]


def test_slots_come_back_empty_or_full_as_they_were():
    item = Slotted()
    restored([item], item.change)

    assert item.values() == (1, None, 2)


@pytest.mark.parametrize("kind", [Frozen, FrozenSlots])
def test_what_a_frozen_dataclass_or_a_tuple_holds_comes_back(kind):
    item = ({"a": (kind([1]),)},)
    restored(item, lambda: item[0]["a"][0].items.append(2))

    assert item[0]["a"][0].items == [1]


def test_a_list_with_attributes_has_both_back():
    item = ListWithAttribute([1])

    def change():
        item.num += 1
        item.append(2)

    restored(item, change)

    assert (item.num, item) == (0, [1])


def test_shared_and_cyclic_references_stay_the_same_objects():
    shared = [1]
    item = Plain(first=shared, second={"again": shared})
    item.me = item

    def change():
        shared.append(2)
        item.first, item.me = [3], None

    restored(item, change)

    assert item.first is item.second["again"] is shared
    assert item.me is item
    assert shared == [1]


def test_attributes_of_a_class_come_back():
    class Shared(nn.Module):
        num = 0
        history: list[int] = []  # noqa: RUF012, the hazard itself

    module = Shared()

    def change():
        Shared.num += 1
        Shared.extra = 1
        module.history.append(1)

    restored(module, change)

    assert (Shared.num, Shared.history, hasattr(Shared, "extra")) == (0, [], False)


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(1), lambda g: torch.rand(3, generator=g).tolist()),
        (lambda: np.random.default_rng(1), lambda g: g.random(3).tolist()),
        (lambda: np.random.RandomState(1), lambda g: g.normal(size=3).tolist()),
        (lambda: random.Random(1), lambda g: g.random()),
    ],
)
def test_a_generator_of_the_users_own_draws_the_same_again(make, draw):
    expected, generator = draw(make()), make()
    restored(Plain(generator=generator), lambda: draw(generator))

    assert draw(generator) == expected


def test_a_user_made_data_set_is_left_alone():
    """It may be as large as the disk, and a step does not change it."""

    class Own(torch.utils.data.Dataset):
        def __init__(self):
            self.data = torch.zeros(3)

    item = Plain(data=Own())
    snapshot = Snapshot([item])

    assert snapshot.tensors() == []


# -- modules ---------------------------------------------------------------------------------------------------------


def test_a_module_has_parameters_buffers_modes_and_hooks_back():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before, weight = copy.deepcopy(module.state_dict()), module[0].weight

    def change():
        module.train()(torch.randn(4, 2))
        module.eval()
        module[0].weight = nn.Parameter(torch.zeros(2, 2))
        module.register_forward_hook(print)
        module.add_module("new", nn.ReLU())

    restored(module, change)

    assert module[0].weight is weight
    assert module.training
    assert not module._forward_hooks
    assert list(module.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_metrics_have_their_state_back():
    metrics = MetricCollection([MeanSquaredError(), PearsonCorrCoef()])
    metrics.update(torch.arange(4.0), torch.arange(4.0) ** 2)
    expected = copy.deepcopy(metrics).compute()
    restored(metrics, lambda: (metrics(torch.randn(4), torch.randn(4)), metrics.compute()))

    assert metrics.compute() == expected


def test_without_parameters_submodules_or_tensors_a_snapshot_is_smaller():
    module = nn.Sequential(nn.BatchNorm1d(2))
    module.own = torch.zeros(1)

    assert len(Snapshot([module]).tensors()) == 6
    assert len(Snapshot([module], parameters=False).tensors()) == 4
    assert Snapshot([module], submodules=False).tensors() == [module.own]
    assert Snapshot([module], tensors=False).tensors() == []


def test_a_state_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_CELLS", 50)
    with pytest.raises(StateTooLargeError, match="outside the module"):
        Snapshot([[[n] for n in range(100)]])


# -- the other uses --------------------------------------------------------------------------------------------------


def test_a_duplicate_has_the_values_of_the_snapshot_also_where_the_original_is_spoilt():
    batch = {"x": torch.ones(2) * nn.Parameter(torch.ones(2)), "y": [torch.zeros(1)]}
    snapshot = Snapshot([batch])
    batch.pop("x").data.fill_(9)
    batch["y"].clear()
    copied = snapshot.duplicate(batch)

    assert torch.equal(copied["x"], torch.ones(2))
    assert copied["y"][0].item() == 0
    assert copied["y"] is not batch["y"]


def test_what_has_not_changed_is_forgotten():
    item = Plain(touched=[1], other=[1])
    snapshot = Snapshot([item])
    item.touched.append(2)
    snapshot.forget_unchanged()
    item.touched.append(3)
    item.other.append(2)
    snapshot.restore()

    assert (item.touched, item.other) == ([1], [1, 2])


def test_a_second_try_keeps_what_hooks_have_written_in_between():
    """Forward counts, hooks count too, forward runs again: each has counted once."""
    item = Plain(forward=0, hook=0, calls=[], tags=set(), gone=1, value=torch.zeros(1), hooked=torch.zeros(1))

    def forward():
        item.forward += 1
        item.calls.append("forward")
        item.tags.add("forward")
        item.value += 1

    def hook():
        item.hook += 1
        item.calls.append("hook")
        item.tags.add("hook")
        item.hooked += 1
        item.new = 1
        del item.gone

    snapshot = Snapshot([item])
    forward()
    hook()
    bring_back = snapshot.rewind()
    assert (item.forward, item.hook, item.calls, item.gone) == (0, 0, [], 1)
    forward()
    bring_back()

    assert (item.forward, item.hook, item.calls) == (1, 1, ["forward", "hook"])
    assert item.tags == {"forward", "hook"}
    assert (item.value.item(), item.hooked.item(), item.new) == (1, 1, 1)
    assert not hasattr(item, "gone")


@pytest.mark.parametrize(
    ("name", "draw"),
    [("python", random.random), ("numpy", np.random.rand), ("torch", lambda: torch.rand(1).item())],
)
def test_the_global_generators_draw_the_same_again_and_say_that_they_moved(name, draw):
    numbers = RandomState(torch.device("cpu"))
    assert numbers.moved() == set()
    first = draw()

    assert numbers.moved() == {name}
    numbers.restore()
    assert draw() == first


def test_generators_that_are_not_asked_for_are_left_alone():
    numbers = RandomState(torch.device("cpu"), ["torch"])
    random.random()
    state = random.getstate()
    numbers.restore()

    assert random.getstate() == state
