"""Networks channels last: same gradients, and none of them is brought from one layout to the other
at full size."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.profiler import profile
from toy import ready, run

from fl_lightning.methods import FedAvg, FedMosaic, FedMPQ
from fl_lightning.models import SmallCNN, build_network, lay_out

POOLS = {
    "max": nn.MaxPool2d(2),
    "average": nn.AvgPool2d(2),
    "adaptive": nn.AdaptiveAvgPool2d(7),
    "overlapping": nn.MaxPool2d(3, stride=2),
}


def with_pool(pool: nn.Module) -> nn.Module:
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), deepcopy(pool), nn.Flatten(), nn.LazyLinear(5)
    )
    network(torch.zeros(1, 3, 30, 30))
    return network


def gradients(network: nn.Module, images: Tensor) -> list[Tensor]:
    network.zero_grad()
    network(images).square().sum().backward()
    return [parameter.grad for parameter in network.parameters()]


def copies(network: nn.Module, images: Tensor, shape: tuple[int, ...]) -> int:
    """Copies of tensors of this shape in a backward pass."""
    loss = network(images).square().sum()
    with profile(record_shapes=True) as seen:
        loss.backward()
    return sum(
        event.name == "aten::copy_" and list(event.input_shapes[0]) == list(shape)
        for event in seen.events()
    )


def per_example(network: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """The gradient of each example's loss, as methods with differential privacy take it."""
    tensors = {name: parameter.detach() for name, parameter in network.named_parameters()}
    loss = torch.func.grad(
        lambda tensors, image: functional_call(network, tensors, (image[None],)).square().sum()
    )
    return torch.func.vmap(loss, (None, 0))(tensors, images)


@pytest.mark.parametrize("pool", [*POOLS, "one"])
def test_pools_give_the_gradients_that_they_gave(pool: str) -> None:
    torch.manual_seed(0)
    images, plain = torch.randn(4, 3, 30, 30), with_pool(POOLS.get(pool, nn.AdaptiveAvgPool2d(1)))
    ours = lay_out(deepcopy(plain))
    for expected, got in zip(gradients(plain, images), gradients(ours, images), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
    for expected, got in zip(
        per_example(plain, images).values(), per_example(ours, images).values(), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("pool", POOLS)
def test_pools_copy_nothing_of_their_inputs_size(pool: str) -> None:
    images, maps = torch.randn(4, 3, 30, 30), (4, 8, 28, 28)
    plain = with_pool(POOLS[pool]).to(memory_format=torch.channels_last)
    assert copies(plain, images, maps)  # else torch does by itself what lay_out is for
    ours = lay_out(lay_out(plain))
    assert sum(len(module._forward_hooks) for module in ours.modules()) == 1
    assert not copies(ours, images, maps)
    assert not copies(deepcopy(ours), images, maps)


def test_the_small_cnn_copies_no_maps() -> None:
    images, maps = torch.randn(4, 3, 32, 32), (4, 64, 8, 8)
    assert not copies(build_network("small_cnn", 10, (3, 32, 32)), images, maps)
    assert not copies(SmallCNN(10), images, maps)  # contiguous from end to end


def test_outputs_that_are_no_maps_pass() -> None:
    layers = nn.ModuleList(
        [nn.Conv2d(3, 8, 3), nn.MaxPool2d(2, return_indices=True), nn.AdaptiveAvgPool2d(4)]
    )
    convolve, pool, average = lay_out(layers)
    maps, _ = pool(convolve(torch.randn(2, 3, 30, 30)))
    average(maps[0]).sum().backward()
    assert convolve.weight.grad is not None


@pytest.mark.parametrize("cls", [FedAvg, FedMPQ])
def test_the_layout_that_was_chosen_is_that_of_the_whole_run(cls: type, tmp_path: Path) -> None:
    """Both train the same up to rounding; FedMPQ codes its weights in the order that they have."""
    weights = []
    for last in (True, False):
        torch.manual_seed(0)
        folder = tmp_path / str(last)
        method = run(cls(channels_last=last), ready(num_clients=3), folder, max_rounds=1).method
        kernels = [each for each in method.network.parameters() if each.ndim == 4]
        assert {each.is_contiguous() for each in kernels} == {not last}
        weights.append(method.server["weights"])
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


def test_fedmosaics_reference_has_the_layout_that_was_chosen() -> None:
    for last in (True, False):
        method = FedMosaic(reference="small_cnn", channels_last=last)
        method.build(ready())
        kernels = [each for each in method.reference.parameters() if each.ndim == 4]
        assert {each.is_contiguous() for each in kernels} == {not last}


class Both(nn.Module):
    """A convolution of images, and weights and a buffer of five dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.volumes = nn.Conv2d(3, 4, 3), nn.Conv3d(4, 2, (1, 3, 3))
        self.register_buffer("scale", torch.rand(1, 2, 1, 1, 1))
        self.register_buffer("maps", torch.rand(1, 4, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.volumes((self.images(x) + self.maps)[:, :, None]) * self.scale


def test_weights_of_five_dimensions_stay_as_they_are() -> None:
    torch.manual_seed(0)
    plain, images = Both(), torch.randn(2, 3, 8, 8)
    kept = deepcopy(plain)
    ours = lay_out(plain)
    assert ours is plain
    assert not any(each.is_contiguous() for each in (ours.images.weight, ours.maps))
    assert all(each.is_contiguous() for each in (ours.volumes.weight, ours.scale))
    assert all(map(torch.equal, ours.state_dict().values(), kept.state_dict().values()))
    for one, other in zip(gradients(ours, images), gradients(kept, images), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_each_tensor_is_laid_out_as_torch_does_it() -> None:
    for make in (
        lambda: with_pool(POOLS["max"]),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.LSTM(4, 5)),
    ):
        torch.manual_seed(0)
        plain = make().half()
        theirs, ours = deepcopy(plain).to(memory_format=torch.channels_last), lay_out(plain)
        of_ours, of_theirs = ours.state_dict(), theirs.state_dict()
        assert of_ours.keys() == of_theirs.keys()
        for name, one in of_ours.items():
            other = of_theirs[name]
            assert torch.equal(one, other)
            assert (one.dtype, one.stride()) == (other.dtype, other.stride())
