"""Builds the optional mask kernel; everything else about the package is in pyproject.toml.

Without a C compiler the build goes on without it, and the NumPy twin is used
(`tessera doctor` says so).
"""

from setuptools import Extension, setup

KERNEL = Extension(
    "tessera.crypto.kernel._native",
    sources=["src/tessera/crypto/kernel/kernel.c"],
    # Measured: -O3 makes nothing faster here, and with debug symbols it compiles ten times as long.
    extra_compile_args=["-O2", "-g0"],
    py_limited_api=True,  # one build serves every Python from 3.11 on
    optional=True,
)

setup(ext_modules=[KERNEL], options={"bdist_wheel": {"py_limited_api": "cp311"}})
