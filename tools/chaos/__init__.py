"""Trains under random faults and checks, after each, that nothing was lost, doubled, leaked or left behind."""
