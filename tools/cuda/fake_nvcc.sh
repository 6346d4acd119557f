#!/usr/bin/env bash
# Stands in for nvcc where Candle's own CUDA kernels are not wanted: every object and PTX file comes out empty.
# `stand_in.sh` says when that is right. It answers what cudaforge asks of nvcc, and nothing else.
set -euo pipefail

output='' folder='' source='' kind=object
while [ "$#" -gt 0 ]; do
  case "$1" in
    --version)
      echo 'Cuda compilation tools, release 13.0, V13.0.88'
      exit 0
      ;;
    --list-gpu-code)
      echo sm_80
      exit 0
      ;;
    -o) output=$2 && shift ;;
    --output-directory) folder=$2 && shift ;;
    --default-stream | -Xcompiler | -ccbin) shift ;;
    --lib) kind=archive ;;
    --ptx) kind=ptx ;;
    *.cu) source=$1 ;;
  esac
  shift
done

case "$kind" in
  object) : > "$output" ;;
  ptx) : > "$folder/$(basename "$source" .cu).ptx" ;;
  archive)
    rm -f "$output"
    ar rc "$output"
    ;;
esac
