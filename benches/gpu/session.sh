#!/bin/sh
# Measures and checks a GPU in under ten minutes: see session.py.
exec "${PYTHON:-python3}" "$(dirname "$0")/session.py" "$@"
