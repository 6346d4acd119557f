#!/bin/sh
# Everything there is to check and measure on a GPU, in one command of at most eight minutes: session.py says what.
exec "${PYTHON:-python3}" "$(dirname "$0")/session.py" "$@"
