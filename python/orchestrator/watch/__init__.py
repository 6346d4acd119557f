"""`orchestrate watch`: shows a run from its files, which it only reads.

`run_directory` finds the run and follows it when it moves, `metrics_file` reads metrics.jsonl as it grows,
`trainer_lock` asks whether a trainer is at work, `status` puts these together. `wording` and `panel` show a status as
text and on a terminal; `live` is the loop.
"""
