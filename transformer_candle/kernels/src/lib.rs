//! Arithmetic on planned buffers: every operation of the decoder, its forward beside its backward.
//!
//! An operation takes the values it reads and the buffers it writes; it allocates nothing of its own and keeps no
//! state. Each lives in one file: the public functions, the plain reference that explains them, the tests that both
//! agree, and its calls for checks and benchmarks ([`cases`]). The tuned versions are under `cpu/` and `cuda/`.
//!
//! Legend of the shape suffixes: N tokens (= B * T), B sequences, T positions, D hidden, H query heads, K key/value
//! heads, E head size, P packed QKV width (H + 2K) * E, I intermediate (or inputs of a linear map), O outputs, V padded
//! vocabulary, C rows of a chunk.

// The one crate that may: it turns Candle's storage into slices (`access.rs`) and multiplies with the processor's own
// instructions (`cpu/gemm`).
#![allow(unsafe_code)]
// Names such as x_ND carry their shape.
#![allow(non_snake_case)]
// Loops reach wide vectors only where they are inlined into a function compiled for them (`cpu/simd.rs`).
#![allow(clippy::inline_always)]
// Tests compare bits on purpose.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::float_cmp))]

mod access;
mod buffer;
mod cpu;
pub mod cuda;
mod device;
mod download;
mod dropout_mask;
mod element;
mod error;
mod graph_cache;
mod heads;
mod huge_pages;
mod matmul;
pub mod memory;
mod optimizer_settings;
pub mod timing;
mod upload;

pub mod accumulate;
pub mod adamw;
pub mod add_rms_norm;
pub mod add_rms_norm_fp8;
pub mod arenas;
pub mod attention;
pub mod bias;
pub mod cases;
pub mod cast;
pub mod counter_hash;
pub mod dropout;
pub mod embedding;
pub mod fp8;
pub mod grad_norm;
pub mod head_cross_entropy;
pub mod linear;
pub mod lora;
pub mod muon;
pub mod qk_norm;
pub mod rope;
pub mod swiglu;
pub mod swiglu_fp8;

pub use buffer::Buffer;
pub use candle_core::DType;
pub use cpu::gemm::Bf16Units;
pub use device::{Device, DeviceKind};
pub use download::Download;
pub use element::{Element, Real, Scalar};
pub use error::{Error, Result};
pub use graph_cache::GraphCache;
pub use half::bf16;
pub use heads::HeadLayout;
pub use matmul::{GemmOperand, WriteMode};
pub use upload::Upload;

#[cfg(test)]
mod testing;
