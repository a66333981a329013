"""A module from a description: how a model that was saved is made again without its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import nn

from tessera.errors import ConfigError
from tessera.learning.models.classifiers import CNN, TextCNN
from tessera.learning.models.din import DIN
from tessera.learning.models.factorization import Factorization
from tessera.learning.models.features import FeatureModel
from tessera.learning.models.lags import LagModel
from tessera.learning.models.next_word import NextWord
from tessera.learning.models.noisy_pairs import NoisyPairTable
from tessera.learning.models.pairs import PairTable
from tessera.learning.models.refitted import Refitted

KINDS: Final[Mapping[str, Callable[..., nn.Module]]] = {
    "din": DIN,
    "factorization": Factorization,
    "features": FeatureModel,
    "refitted": Refitted,
    "cnn": CNN,
    "textcnn": TextCNN,
    "next-word": NextWord,
    "lags": LagModel,
    "pairs": PairTable,
    "noisy-pairs": NoisyPairTable,
}


def build(architecture: Mapping[str, Any]) -> nn.Module:
    """The module of this description: `name`, and what its class takes."""
    settings = dict(architecture)
    name = settings.pop("name", None)
    if name not in KINDS:
        raise ConfigError(
            f"model: no architecture {name!r}",
            hint=f"there are {', '.join(KINDS)}; for a module of your own, hand it over",
        )
    try:
        return KINDS[name](**settings)
    except TypeError as error:
        raise ConfigError(f"model: {name}: {error}", hint="is it of another version?") from error
