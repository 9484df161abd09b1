"""Benchmarks. Each prints what it measured, side by side with what it is compared with."""
