"""Builds the optional C libraries; everything else about the package is in pyproject.toml.

Without a C compiler the build goes on without them, and NumPy or PyTorch does the same
(`tessera doctor` says so).
"""

from setuptools import Extension, setup

FOLDER = "src/tessera/crypto/kernel"
KERNEL = Extension(
    "tessera.crypto.kernel._native",
    sources=[
        f"{FOLDER}/{name}.c"
        for name in ("kernel", "dpf", "answer", "verify", "rows", "sets", "digests", "noise")
    ],
    depends=[f"{FOLDER}/{name}.h" for name in ("aes", "width", "two", "words", "packed", "trees")],
    # Measured: -O3 makes nothing faster here, and with debug symbols it compiles ten times as long.
    extra_compile_args=["-O2", "-g0"],
    py_limited_api=True,  # one build serves every Python from 3.11 on
    optional=True,
)

LAGS = Extension(
    "tessera.learning.models._lags",
    sources=["src/tessera/learning/models/lags.c"],
    depends=["src/tessera/learning/models/softmax.h"],
    extra_compile_args=["-O3", "-g0"],
    py_limited_api=True,
    optional=True,
)

setup(ext_modules=[KERNEL, LAGS], options={"bdist_wheel": {"py_limited_api": "cp311"}})
