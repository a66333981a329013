"""Training a whole cohort at once, for the user's own module.

batches.py  every step of every client as arrays of one shape
step.py     one step of several clients side by side, by `torch.func`, compiled or not
learner.py  slots that clients go through, longest first
check.py    `best`: which path is right for a module, and why
noisy.py    training with noise in every step, with a check of its own
"""

from tessera.learning.training.vectorised.check import best
from tessera.learning.training.vectorised.learner import Vectorised

__all__ = ["Vectorised", "best"]
