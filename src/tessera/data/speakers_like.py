"""Synthetic speakers: text with a structure that can be learnt, where no data is at hand.

Words follow each other by a Markov chain: every word has a few successors that are likely, the same
for everybody, and the rest of the time a word comes from the speaker's own, which are drawn by a
power law. So successors beat frequencies, and own words make rows that few others have.
"""

from __future__ import annotations

import numpy as np

from tessera.data.classes import TEST
from tessera.data.examples import ClientData
from tessera.data.words import spoken
from tessera.errors import ConfigError

SUCCESSORS = 3
FOLLOWED = 0.6
"""Share of words that follow from the word before."""
SPEECH = 12
"""Words of a speech."""


def speakers_like(
    speakers: int = 60,
    words: int = 2_000,
    *,
    spoken_each: int = 400,
    length: int = 4,
    part: str = TEST,
    seed: int = 0,
) -> ClientData:
    """So many speakers, each with `spoken_each` words of a language of `words`."""
    if speakers < 1 or words < 10 or spoken_each < SPEECH:
        raise ConfigError(
            f"speakers-like: {speakers} speakers, {words} words, {spoken_each} spoken by each",
            hint=f"at least 1, 10 and {SPEECH}",
        )
    rng = np.random.default_rng([seed, 29])
    names = [f"w{at}" for at in range(words)]
    likely = 1.0 / np.arange(1, words + 1)
    likely /= likely.sum()
    follow = rng.choice(words, (words, SUCCESSORS), p=likely)
    texts = {}
    for speaker in range(speakers):
        taste = likely * rng.gamma(0.3, size=words)
        own = rng.choice(words, spoken_each, p=taste / taste.sum())
        which = rng.integers(SUCCESSORS, size=spoken_each)
        follows = rng.random(spoken_each) < FOLLOWED
        said = own.copy()
        for at in range(1, spoken_each):
            if follows[at] and at % SPEECH:
                said[at] = follow[said[at - 1], which[at]]
        text = [names[word] for word in said]
        texts[f"speaker {speaker}"] = [
            text[at : at + SPEECH] for at in range(0, spoken_each, SPEECH)
        ]
    return spoken(
        "speakers-like",
        texts,
        length=length,
        part=part,
        facts={"source": f"synthetic speech (seed {seed})", "speakers": f"{speakers:,}"},
    )
