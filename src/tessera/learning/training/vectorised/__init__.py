"""Training a whole cohort at once, for the user's own module.

batches.py  every step of every client as arrays of one shape
step.py     one step of several clients side by side, by `torch.func`, compiled or not
traced.py   a step as it was recorded once, without the machinery that made it
learner.py  slots that clients go through, longest first
lags.py     one step of a lag model written out, for clients that take one
noisy.py    steps with noise: all groups of a batch at once, some clients side by side
check.py    `best`, `best_noisy`: which way is right for a module, and why
"""
