#!/usr/bin/env bash
# Makes FOLDER with an empty shared library for each that cudarc's build script puts on the link line. A program that
# opens the real ones at run time refers to none of them, so the linker drops them again.
set -euo pipefail
[ "$#" -eq 1 ] || { echo "usage: $0 FOLDER" >&2 && exit 2; }

mkdir -p "$1"
for name in cuda cublas cublasLt curand nvrtc; do
  [ -e "$1/lib$name.so" ] || cc -shared -fPIC -nostdlib -Wl,-soname,"lib$name.stub.so" -o "$1/lib$name.so" -x c /dev/null
done
