"""The commands of `orchestrate`: what trains, what reads runs, and what uses a trained model."""
