#!/usr/bin/env bash
# cargo's RUSTC_WRAPPER for builds with the feature `cuda`: called as `load_at_run_time.sh rustc ARGUMENTS`.
#
# candle-core fixes cudarc's feature `dynamic-linking`: a program that names libcuda, libcublas and libcurand as needed and
# does not start without them. cudarc's other way, opening them when they are first called, is its feature
# `dynamic-loading`, which its build script refuses beside the first. As a --cfg for the crate alone it is taken: nothing
# then refers to the libraries on the link line, and the linker leaves them out (--as-needed, as rustc always asks).
#
# In bash, since plain shells drop variables whose names have a dash, such as cargo's CARGO_BIN_EXE_transformer-candle.
case " $* " in
  *" --crate-name cudarc "*) exec "$@" --cfg 'feature="dynamic-loading"' ;;
  *) exec "$@" ;;
esac
