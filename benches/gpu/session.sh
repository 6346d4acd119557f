#!/bin/sh
# Checks and benchmarks a GPU in at most eight minutes: see session.py.
exec "${PYTHON:-python3}" "$(dirname "$0")/session.py" "$@"
