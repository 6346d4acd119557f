//! The Llama-style decoder: parameters by name, blocks with a hand-written backward, loss, generation.
//!
//! A model is a [`ModelShape`] and one flat buffer of weights, cut by its [`ParameterLayout`]. A [`Decoder`] adds the
//! buffers of a training step, all of them listed beforehand in a memory plan; a [`Generator`] adds a key/value cache.
//!
//! Legend of the shape suffixes: N tokens (= B * T), B sequences, T positions, D hidden, H query heads, K key/value heads,
//! E head size, A width of all heads together (= H * E), P packed QKV width (H + 2K) * E, I intermediate, V padded
//! vocabulary, C rows of a chunk (or tokens that a cache holds), S tokens of one generation pass.

// Names such as x_ND carry their shape.
#![allow(non_snake_case)]
// In tests a value is compared where it must be exact.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::float_cmp))]

pub mod activations;
pub mod block;
mod decoder;
mod error;
pub mod generation;
pub mod hugging_face;
pub mod initialization;
pub mod parameters;
pub mod sampling;
mod shape;

pub use decoder::{Decoder, DecoderPlan, DecoderSettings};
pub use error::{Error, Result};
pub use generation::Generator;
pub use parameters::{ParameterLayout, Parameters};
pub use run_config::{ActivationRecompute, Precision};
pub use sampling::{SamplingSettings, sample};
pub use shape::ModelShape;
