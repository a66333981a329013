"""DIN: counted as in the papers, equal to a plain rewriting of it, one example at a time."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, vmap

from tessera.errors import ConfigError
from tessera.learning.models.din import DIN

TABLES = ("items.weight", "categories.weight", "users.weight", "biases.weight")


def small() -> DIN:
    """Every part of the model, few of each."""
    model = DIN(
        11, 4, 7, width=3, attention=(5, 4), layers=(6, 4), bias=True, product=True, rate=True
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # away from the ones and zeros that would hide a missing parameter
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.7, generator=generator)
    return model


def batch(n: int = 6, length: int = 5, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    item, history = draw(0, 11, n), draw(-3, 11, n, length).clamp(min=-1)
    history[0] = -1  # one example without any history
    return {
        "user": draw(0, 7, n),
        "item": item,
        "target": item,
        "history": history,
        "category": item % 4,
        "history_category": torch.where(history < 0, -1, history % 4),
        "rate": torch.rand(n, generator=generator),
        "label": draw(0, 2, n).float(),
    }


def by_hand(model: DIN, fields: dict[str, Tensor], n: int) -> float:
    """Example `n` in plain Python numbers, straight from the formulas."""
    p = {name: value.tolist() for name, value in model.state_dict().items()}

    def linear(name: str, x: list[float]) -> list[float]:
        return [
            sum(w * v for w, v in zip(row, x, strict=True)) + b
            for row, b in zip(p[f"{name}.weight"], p[f"{name}.bias"], strict=True)
        ]

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    def dice(name: str, x: list[float]) -> list[float]:
        mean = sum(x) / len(x)
        deviation = math.sqrt(sum((v - mean) ** 2 for v in x) / len(x) + 1e-5)
        side = [sigmoid((v - mean) / deviation) for v in x]
        return [v * (s + (1 - s) * a) for v, s, a in zip(x, side, p[f"{name}.slope"], strict=True)]

    def embedded(item: int, category: int) -> list[float]:
        return [*p["items.weight"][item], *p["categories.weight"][category]]

    f = {name: value[n].tolist() for name, value in fields.items()}
    q = embedded(f["item"], f["category"])
    past = [
        embedded(i, c) for i, c in zip(f["history"], f["history_category"], strict=True) if i >= 0
    ]
    mean = [sum(h[k] for h in past) / max(len(past), 1) for k in range(len(q))]
    scores = []
    for h in past:
        pairs = list(zip(q, h, strict=True))
        x = [*q, *h, *(a - b for a, b in pairs), *(a * b for a, b in pairs)]
        x = [sigmoid(v) for v in linear("attention.score.0", x)]
        x = [sigmoid(v) for v in linear("attention.score.2", x)]
        scores.append(math.exp(linear("attention.score.4", x)[0]))
    interest = [
        sum(s * h[k] for s, h in zip(scores, past, strict=True)) / (sum(scores) or 1.0)
        for k in range(len(q))
    ]
    *user, user_bias = p["users.weight"][f["user"]]
    x = [*user, *q, *mean, *(a * b for a, b in zip(q, mean, strict=True)), *interest]
    x = [v * a + b for v, a, b in zip(x, p["affine.scale"], p["affine.shift"], strict=True)]
    x = dice("layers.1", linear("layers.0", x))
    x = dice("layers.3", linear("layers.2", x))
    no, yes = linear("layers.4", x)
    product = sum(a * b for a, b in zip([*user, *user], q, strict=True))
    known = p["trust"][0] * math.log(f["rate"] / (1 - f["rate"]))
    return yes - no + product + user_bias + p["biases.weight"][f["item"]][0] + known


def test_the_papers_parameters_are_all_there_and_no_others() -> None:
    model = DIN(143_534, 4_815, 49_023)
    sizes = {name: value.numel() for name, value in model.named_parameters()}
    parts = Counter[str]()
    for name, size in sizes.items():
        parts[name.removesuffix(".weight").removesuffix(".bias")] += size
    assert [parts[f"attention.score.{k}"] for k in (0, 2, 4)] == [11_600, 3_240, 41]
    assert parts["affine.scale"] + parts["affine.shift"] == 324
    assert [parts[f"layers.{k}"] for k in (0, 2, 4)] == [32_600, 16_080, 162]
    assert [parts[f"layers.{k}.slope"] for k in (1, 3)] == [200, 80]
    assert sum(size for name, size in sizes.items() if name not in TABLES) == 64_327
    assert sum(sizes.values()) == 3_617_023
    assert not list(model.buffers())  # no running statistics


def test_a_score_is_what_the_formulas_say() -> None:
    model, fields = small(), batch()
    scores = model(fields)
    assert scores.shape == (6,)
    expected = [by_hand(model, fields, n) for n in range(6)]
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_an_example_is_scored_by_itself() -> None:
    model, fields = small(), batch()
    together = model(fields)
    alone = [model({name: value[n : n + 1] for name, value in fields.items()}) for n in range(6)]
    torch.testing.assert_close(together, torch.cat(alone))


def test_padding_changes_nothing_and_gets_no_gradient() -> None:
    model, fields = small(), batch()
    longer = dict(fields)
    for name in ("history", "history_category"):
        padding = torch.full((6, 3), -1)
        longer[name] = torch.cat([padding, fields[name]], 1)
    torch.testing.assert_close(model(fields), model(longer))
    # Padding is looked up as row 0 and masked; row 0 itself is nowhere in this batch.
    for name in ("item", "target", "history"):
        fields[name] = torch.where(fields[name] == 0, 1, fields[name])
    model(fields).sum().backward()
    assert model.items.weight.grad is not None
    assert not model.items.weight.grad[0].any()
    assert model.items.weight.grad.any()


def test_rates_of_zero_and_one_stay_finite() -> None:
    model, fields = small(), batch(2)
    fields["rate"] = torch.tensor([0.0, 1.0])
    assert model(fields).isfinite().all()


@pytest.mark.parametrize("categories", [0, 4])
@pytest.mark.parametrize("users", [0, 7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rate", [False, True])
def test_only_the_fields_of_what_is_switched_on_are_read(
    categories: int, users: int, bias: bool, rate: bool
) -> None:
    model = DIN(11, categories, users, width=3, attention=(4,), layers=(5,), bias=bias, rate=rate)
    fields = batch()
    read = {"item", "history"}
    read |= {"category", "history_category"} if categories else set()
    read |= ({"user"} if users else set()) | ({"target"} if bias else set())
    read |= {"rate"} if rate else set()
    model({name: fields[name] for name in read})
    for name in read:
        with pytest.raises(KeyError):
            model({other: fields[other] for other in read - {name}})


def test_a_submodel_scores_as_the_whole_does() -> None:
    model, fields = small(), batch()
    held = torch.unique(torch.cat([fields["item"], fields["history"].clamp(min=0).flatten()]))
    cut = dict(fields)
    for name in ("item", "target", "history"):
        positions = torch.searchsorted(held, fields[name].clamp(min=0))
        cut[name] = torch.where(fields[name] < 0, -1, positions)
    rows = {"items.weight": model.items.weight[held]}
    assert model.biases is not None
    rows["biases.weight"] = model.biases.weight[held]
    torch.testing.assert_close(functional_call(model, rows, (cut,)), model(fields))


def test_clients_can_be_vectorised_with_their_gradients() -> None:
    models = [small(), small()]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(0.5)
    batches = [batch(seed=2), batch(seed=3)]
    names = [name for name, _ in models[0].named_parameters()]
    stacked = {
        name: torch.stack([dict(m.named_parameters())[name] for m in models]) for name in names
    }
    fields = {name: torch.stack([b[name] for b in batches]) for name in batches[0]}

    def loss(parameters: dict[str, Tensor], fields: dict[str, Tensor]) -> Tensor:
        return functional_call(models[0], parameters, (fields,)).square().mean()

    gradients = vmap(torch.func.grad(loss))(stacked, fields)
    for k in range(2):
        models[k](batches[k]).square().mean().backward()
        for name, parameter in models[k].named_parameters():
            torch.testing.assert_close(gradients[name][k], parameter.grad, rtol=1e-4, atol=1e-5)


def test_the_seed_decides_and_the_global_generator_is_left_alone() -> None:
    state = torch.random.get_rng_state()
    first, again, other = (DIN(11, 4, 7, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(state, torch.random.get_rng_state())
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert not torch.equal(first.items.weight, other.items.weight)
    assert not torch.equal(first.layers[0].weight, other.layers[0].weight)


def test_an_untrained_model_with_rate_ranks_by_the_rate() -> None:
    model = DIN(11, users=7, bias=True, rate=True)
    fields = batch(2)
    fields = {name: value[:1].repeat(3, *[1] * (value.dim() - 1)) for name, value in fields.items()}
    fields["rate"] = torch.tensor([0.2, 0.5, 0.9])
    low, middle, high = model(fields).tolist()
    assert middle - low == pytest.approx(math.log(0.8 / 0.2), rel=1e-4)
    assert high - middle == pytest.approx(math.log(0.9 / 0.1), rel=1e-4)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError):
        DIN(0)
    with pytest.raises(ConfigError):
        DIN(5, users=-1)
    with pytest.raises(ConfigError, match="product without users"):
        DIN(5, product=True)
