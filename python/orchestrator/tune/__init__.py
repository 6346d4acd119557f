"""`orchestrate tune`: hyperparameter search with Optuna over the keys of a config."""
