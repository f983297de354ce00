"""Measures lgroup against a bare training loop: `python -m tools.bench --help`."""
