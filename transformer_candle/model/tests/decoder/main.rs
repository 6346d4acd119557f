//! The decoder against its oracles (`PyTorch`'s numbers, Candle's autograd) and against itself: other recompute modes,
//! other micro-batches, other numbers of threads, a cache.

#![allow(non_snake_case, clippy::unwrap_used)]

mod accumulation;
mod autograd;
mod cached_generation;
mod determinism;
mod documents;
mod fp8_base;
mod golden;
mod hugging_face_files;
mod lora;
mod models;
mod pretrained_weights;
