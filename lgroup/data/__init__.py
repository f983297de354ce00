"""Training data and how it is split: batches, episodes, plans. No sockets, no processes, no clocks."""
