"""Networks: reference weight counts, shapes, names, and that no weight comes from a network
connection."""

from __future__ import annotations

import socket
from collections.abc import Callable
from copy import deepcopy
from functools import partial, wraps

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear, max_pool2d, relu

from fl_lightning.errors import InputError
from fl_lightning.models import NETWORKS, ResNet20, SmallCNN, build_network
from fl_lightning.models.recipe import recipe_of
from fl_lightning.rng import torch_stream


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a network connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def test_reference_weight_counts() -> None:
    assert count(build_network("resnet20", 10, (3, 32, 32))) == 272_474
    assert count(ResNet20(10, "A")) == 269_722
    assert count(build_network("mobilenetv2", 100, (3, 32, 32))) == 2_351_972
    assert 30_000 < count(build_network("small_cnn", 10, (3, 32, 32))) < 60_000
    for network, grey, colour in (
        ("niid_bench_cnn", 44_426, 62_006),
        ("fedavg_cnn", 582_026, 878_538),
    ):  # those of the published code on Fashion-MNIST and CIFAR-10
        assert count(build_network(network, 10, (1, 28, 28))) == grey
        assert count(build_network(network, 10, (3, 32, 32))) == colour


@pytest.mark.parametrize("network", ["niid_bench_cnn", "fedavg_cnn"])
def test_networks_of_benchmarks_are_lenets(network: str) -> None:
    """The same function, written out: convolution, ReLU, pooling, twice; then linear layers."""
    model = build_network(network, 10, (1, 28, 28))
    images = x = torch.rand(3, 1, 28, 28)
    weights = list(model.parameters())
    for weight, bias in zip(weights[0:4:2], weights[1:4:2], strict=True):
        x = max_pool2d(relu(conv2d(x, weight, bias)), 2)
    x = x.flatten(1)
    for weight, bias in zip(weights[4:-2:2], weights[5:-2:2], strict=True):
        x = relu(linear(x, weight, bias))
    assert torch.allclose(model(images), linear(x, *weights[-2:]), atol=1e-6)


@pytest.mark.parametrize(
    ("network", "side"),
    [
        *((name, 28) for name in NETWORKS),
        ("torchvision.models.shufflenet_v2_x0_5", 32),
        ("mixer_s16_224", 32),
        (SmallCNN, 32),
    ],
)
def test_every_kind_of_name_makes_logits_and_trains(network: str, side: int) -> None:
    model = build_network(network, 7, (3, side, side))
    logits = model(torch.rand(2, 3, side, side))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    "network", ["small_cnn", "resnet20", "residual_mlp", "mobilenetv2", SmallCNN]
)
def test_networks_take_images_of_any_number_of_channels(network: str) -> None:
    """One channel instead of three saves two thirds of the first layer's weights and nothing
    else."""
    grey, colour = (build_network(network, 10, (channels, 28, 28)) for channels in (1, 3))
    assert grey(torch.rand(2, 1, 28, 28)).shape == (2, 10)
    first = next(iter(colour.parameters()))
    assert count(colour) - count(grey) == first.numel() * 2 // 3


@pytest.mark.parametrize("norm", ["group", "batch", "none"])
@pytest.mark.parametrize("size", [(16, 16), (28, 28), (33, 47), (64, 64)])
def test_small_cnn_takes_any_size(norm: str, size: tuple[int, int]) -> None:
    assert SmallCNN(5, norm)(torch.rand(2, 3, *size)).shape == (2, 5)  # type: ignore[arg-type]


def test_option_a_shortcut_subsamples_and_pads_with_zeros() -> None:
    block = ResNet20(10, "A").blocks[3]
    for parameter in block.parameters():
        nn.init.zeros_(parameter)  # what is left is the shortcut
    x = torch.rand(2, 16, 8, 8)
    expected = torch.zeros(2, 32, 4, 4)
    expected[:, 8:24] = x[:, :, ::2, ::2]
    assert torch.equal(block(x), expected)


@pytest.mark.parametrize("network", ["small_cnn", "resnet20", "mobilenetv2"])
def test_weights_follow_the_stream(network: str) -> None:
    def weights(seed: int) -> torch.Tensor:
        with torch_stream(seed, "weights"):
            return torch.cat(
                [p.flatten() for p in build_network(network, 10, (3, 32, 32)).parameters()]
            )

    one = weights(1)
    torch.manual_seed(99)
    assert torch.equal(one, weights(1))
    assert not torch.equal(one, weights(2))


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ("smal_cnn", "write small_cnn"),
        ("resnet_20", "write resnet20"),
        ("efficientnet_b00", "write efficientnet_b0"),
        ("torchvision.models.resnet1", "must be importable"),
        ("no_such_package.Net", "must be importable"),
        (SmallCNN(10), "already built"),
        (lambda num_classes: num_classes, "returns a torch.nn.Module"),
    ],
)
def test_bad_names_say_what_to_write(network: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        build_network(network, 10, (3, 32, 32))
    assert "\n" not in str(error.value)


def test_networks_that_cannot_see_the_image_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        build_network("vit_small", 10, (3, 30, 30))
    for network in ("small_cnn", "niid_bench_cnn", "fedavg_cnn"):
        assert build_network(network, 10, (3, 16, 16))(torch.rand(2, 3, 16, 16)).shape == (2, 10)
        with pytest.raises(ValueError, match="16x16"):
            build_network(network, 10, (3, 15, 15))
    with pytest.raises(ValueError, match="write group"):
        SmallCNN(10, "layer")  # type: ignore[arg-type]


def test_torchvision_makers_get_the_number_of_classes_and_no_weights():
    import torchvision

    for network in ("torchvision.models.resnet18", torchvision.models.resnet18):
        assert build_network(network, 7, (3, 32, 32)).fc.out_features == 7


class Head(nn.Module):
    def __init__(self, num_classes: int, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(5, num_classes)

    def forward(self, x):
        return self.head(self.body(x))


class Holds(nn.Module):
    """A new module each time, with tensors that exist."""

    def __init__(self, num_classes: int, **tensors: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(12, num_classes)
        if "state" in tensors:
            self.layer.load_state_dict(
                {"weight": tensors["state"], "bias": torch.zeros(5)}, assign=True
            )
        if "parameter" in tensors:
            self.layer.weight = tensors["parameter"]
        self.table = nn.Embedding.from_pretrained(tensors["table"]) if "table" in tensors else None
        self.register_buffer("mean", tensors.get("buffer"))

    def forward(self, x):
        return self.layer(x.flatten(1))


BODY = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.BatchNorm1d(5))


@pytest.mark.parametrize(
    "make",
    [
        lambda num_classes: BODY,
        lambda num_classes: Head(num_classes, BODY),
        lambda num_classes: Head(num_classes, BODY.requires_grad_(False)),
        partial(Holds, state=torch.rand(5, 12)),
        partial(Holds, parameter=nn.Parameter(torch.rand(5, 12))),
        partial(Holds, table=torch.rand(5, 12)),
        partial(Holds, buffer=torch.rand(5)),
    ],
    ids=["module", "part", "frozen part", "state", "parameter", "table", "buffer"],
)
def test_every_run_has_tensors_of_its_own(make: Callable[[int], nn.Module]) -> None:
    """What is written into the first network is not in the second, whatever the function
    returns."""
    torch.manual_seed(1)
    first = build_network(make, 5, (3, 2, 2))
    drawn = torch.rand(1)
    before = deepcopy(first.state_dict())
    for value in first.state_dict().values():
        value.zero_()
    torch.manual_seed(1)
    second = build_network(make, 5, (3, 2, 2))
    assert torch.equal(torch.rand(1), drawn)
    assert all(torch.equal(value, before[name]) for name, value in second.state_dict().items())
    assert recipe_of(first) is not None


def test_a_class_that_a_partial_gives_to_a_function_is_its_argument() -> None:
    def build(
        activation: type[nn.Module], num_classes: int, example_shape: tuple[int, ...]
    ) -> nn.Module:
        return nn.Sequential(nn.Flatten(), activation(), nn.Linear(12, num_classes))

    made = build_network(partial(build, nn.Tanh), 5, (3, 2, 2))
    assert isinstance(made[1], nn.Tanh)
    recipe = recipe_of(made)
    assert recipe is not None
    assert (recipe.function, recipe.arguments) == (build, (nn.Tanh,))


def test_what_needs_no_copy_is_taken_as_it_is() -> None:
    made: list[nn.Module] = []

    def new(num_classes: int) -> nn.Module:
        made.append(Holds(num_classes))
        return made[-1]

    assert build_network(new, 5, (3, 2, 2)) is made[-1]
    once = iter(BODY.children())
    assert isinstance(
        build_network(lambda num_classes: nn.Sequential(next(once), next(once)), 5, (3, 2, 2))[1],
        nn.Linear,
    )
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(5))
    assert len(build_network(lambda num_classes: deepcopy(lazy), 5, (3, 2, 2))) == 2


def test_a_lazy_module_that_exists_is_copied() -> None:
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(5))
    made = build_network(lambda num_classes: lazy, 5, (3, 2, 2))
    assert made[1].weight.shape == (5, 12)
    assert nn.parameter.is_lazy(lazy[1].weight)


def _wrapped(body: nn.Module) -> None:
    before = body[1].forward
    body[1].forward = wraps(before)(lambda x: before(x) * 2)


@pytest.mark.parametrize(
    "hold",
    [
        lambda body: body[1].register_forward_pre_hook(
            lambda module, x: (x[0] * body[1].weight.norm(),)
        ),
        lambda body: setattr(body, "twice", lambda x: body[1](x) * 2),
        lambda body: body[1].register_forward_hook(
            lambda module, x, y, first=body[1]: y * first.weight.norm()
        ),
        lambda body: body.register_forward_hook(
            partial(lambda by, module, x, y: by * y * body[1].bias.norm(), 2)
        ),
        lambda body: setattr(body, "later", (lambda held: lambda: held[0])([body[1]])),
        _wrapped,
    ],
    ids=["hook", "attribute", "default", "partial", "list", "wrapped"],
)
def test_functions_of_a_copy_refer_to_the_copy(hold: Callable[[nn.Module], None]) -> None:
    body = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    hold(body)
    made, x = build_network(lambda num_classes: body, 5, (3, 2, 2)), torch.ones(2, 3, 2, 2)
    before = made(x)
    with torch.no_grad():
        body[1].weight.zero_()
    assert torch.equal(made(x), before)
    with torch.no_grad():
        made[1].weight.zero_()
    assert not torch.equal(made(x), before)


OUTSIDE = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))


def test_a_function_that_goes_on_using_the_original_is_refused() -> None:
    """A copy would compute with the weights of the original."""
    OUTSIDE[1].register_forward_hook(lambda module, x, y: y * OUTSIDE[1].weight.norm())
    with pytest.raises(InputError, match=r"a function, such as a hook, that uses parts of it"):
        build_network(lambda num_classes: OUTSIDE, 5, (3, 2, 2))


def test_functions_that_a_copy_takes_over_are_no_reason() -> None:
    class Bound(nn.Linear):
        def twice(self, module, inputs, outputs):
            return outputs * self.weight.norm()

    body = nn.Sequential(nn.Flatten(), Bound(12, 5))
    body[1].register_forward_hook(lambda module, inputs, outputs: outputs * module.weight.norm())
    body[1].register_forward_hook(body[1].twice)
    body.partial = partial(torch.mul, other=body[1].bias)
    body.parts, body.activation = [body[1]], torch.relu
    made = build_network(lambda num_classes: body, 5, (3, 2, 2))
    assert made is not body
    assert made.parts[0] is made[1]


def test_tensors_that_cannot_be_copied_are_refused() -> None:
    body = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    body.derived = body[1].weight * 2  # no leaf of the graph
    with pytest.raises(InputError, match="make new ones in it"):
        build_network(lambda num_classes: body, 5, (3, 2, 2))


def test_a_network_without_logits_is_refused():
    with pytest.raises(
        ValueError, match=r"makes \(2, 3, 32, 32\) of two examples; logits \[2, 7\]"
    ):
        build_network(lambda num_classes: nn.Identity(), 7, (3, 32, 32))
