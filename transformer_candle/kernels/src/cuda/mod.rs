//! NVIDIA GPUs: kernels compiled ahead of time from `kernels/triton/`, GEMMs by cuBLASLt, one stream.
//!
//! The files named after operations define which launches an operation consists of; they are compiled in every build.
//! Code that calls the driver is compiled with the feature `cuda` only; without it a [`Cuda`] cannot be constructed.

// Unused without the feature `cuda`.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

pub(crate) mod accumulate;
pub(crate) mod adamw;
pub(crate) mod add_rms_norm;
mod argument;
pub(crate) mod attention;
pub(crate) mod bias;
pub(crate) mod cast;
pub(crate) mod dropout;
pub(crate) mod embedding;
#[cfg(any(test, feature = "cuda"))]
mod fastest_candidate;
pub(crate) mod fp8;
mod from_buffer;
mod gpu;
pub(crate) mod grad_norm;
pub(crate) mod head_cross_entropy;
mod launch;
pub mod limits;
#[cfg(any(test, feature = "cuda"))]
mod manifest;
mod matmul;
#[cfg(any(test, feature = "cuda"))]
mod matmul_algorithm;
#[cfg(any(test, feature = "cuda"))]
mod matmul_shape;
pub(crate) mod muon;
pub(crate) mod qk_norm;
#[cfg(test)]
pub(crate) mod recording;
pub(crate) mod rope;
#[cfg(any(test, feature = "cuda"))]
mod search_path;
pub(crate) mod swiglu;
pub(crate) mod swiglu_fp8;

#[cfg(not(feature = "cuda"))]
#[path = "absent.rs"]
mod runtime;
#[cfg(feature = "cuda")]
mod runtime;

pub(crate) use argument::KernelArg;
pub use gpu::{Gpu, Memory, PoolMemory, nominal_bf16_flops};
pub(crate) use launch::{Launch, run};
pub(crate) use matmul::{Matmul, Operand, Scales, WORKSPACE_BYTES, WORKSPACE_ELEMENTS, Workspace};
pub use runtime::{Cuda, probe};
pub(crate) use runtime::{DeviceToHost, Event, Graph, HostToDevice};

#[cfg(test)]
mod launch_tests;
