//! NVIDIA cards: kernels compiled ahead of time from `kernels/triton/`, products by cuBLASLt, one stream.
//!
//! The files named after operations say what is launched with which arguments; they are compiled in every build. What talks to the
//! driver is there with the feature `cuda` only; without it a [`Cuda`] cannot be made.

// Without a card nobody reads what is asked of one.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

mod card;
mod launch;
pub mod limits;
pub(crate) mod linear;
#[cfg(any(test, feature = "cuda"))]
mod manifest;
mod product;
#[cfg(any(test, feature = "cuda"))]
mod product_choice;
#[cfg(any(test, feature = "cuda"))]
mod product_shape;

#[cfg(not(feature = "cuda"))]
#[path = "absent.rs"]
mod runtime;
#[cfg(feature = "cuda")]
mod runtime;

pub use card::{Card, Memory};
pub(crate) use launch::Value;
#[cfg(feature = "cuda")]
pub(crate) use product::WORKSPACE_BYTES;
pub(crate) use product::{Operand, Product, WORKSPACE_ELEMENTS, Workspace};
pub use runtime::Cuda;
pub(crate) use runtime::Kernel;
