"""Tests on GPUs: `make gpu-test`. One GPU is enough (several ranks share it); more are used where they are."""
