//! The Llama-style decoder: parameters as one table, layers with a hand-written backward, loss, generation.
//!
//! A model is a [`ModelShape`] and one flat buffer of weights, cut by its [`ParameterLayout`], which follows from the
//! table in [`parameters`]. The layers ([`attention`], [`mlp`], [`norm`], [`linear`]) make up a [`block`] and blocks
//! the [`backbone`]. A [`Decoder`] adds the loss and the buffers of a training step, all of them counted before they are
//! allocated ([`kernels::memory`]); a [`Generator`] runs the same backbone with a key/value cache.
//!
//! ```
//! use kernels::memory::allocate;
//! use kernels::{Buffer, DType, Device, DeviceKind};
//! use model::{ActivationRecompute, Decoder, DecoderSettings, ModelShape, Precision, initialization};
//! use run_config::ModelConfig;
//!
//! let shape = ModelShape::new(&ModelConfig::default(), 1000);
//! let settings = DecoderSettings {
//!     batch: 1,
//!     sequence_length: 4,
//!     precision: Precision::Fp32,
//!     fp8: None,
//!     recompute: ActivationRecompute::None,
//!     training: true,
//!     z_loss: 0.0,
//!     device: DeviceKind::Cpu,
//! };
//! let mut decoder = allocate(&Device::Cpu, |arena| Decoder::new(&shape, &settings, arena))?;
//! initialization::fill(&shape, 1, decoder.weights_mut(), None)?;
//!
//! let mut inputs = Buffer::zeros(&[4], DType::U32, &Device::Cpu)?;
//! let mut targets = Buffer::zeros(&[4], DType::I32, &Device::Cpu)?;
//! inputs.write(&[5u32, 6, 7, 8])?;
//! targets.write(&[6i32, 7, 8, -100])?; // nothing to predict behind the last token
//! decoder.forward_backward(&inputs, None, &targets, 1.0 / 3.0)?;
//! let loss = decoder.loss().read::<f32>()?[0];
//! assert!((loss - 1000f32.ln()).abs() < 0.5, "before training every token is as likely as another");
//! # Ok::<(), model::Error>(())
//! ```
//!
//! Legend of the shape suffixes: N tokens (= B * T), B sequences, T positions, D hidden, H query heads, K key/value
//! heads, E head size, A width of all heads together (= H * E), P packed QKV width (H + 2K) * E, I intermediate, V
//! padded vocabulary, C rows of a chunk (or tokens that a cache holds), S tokens of one generation pass.

// Names such as x_ND carry their shape.
#![allow(non_snake_case)]
// In tests a value is compared where it must be exact.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::float_cmp))]

pub mod activations;
pub mod attention;
pub mod backbone;
pub mod block;
mod decoder;
mod error;
mod fp8;
pub mod generation;
pub mod hugging_face;
pub mod initialization;
pub mod layout;
pub mod linear;
mod lora;
pub mod mlp;
pub mod norm;
pub mod parameters;
pub mod pass;
mod qk_norm;
pub mod sampling;
mod shape;
pub mod tensor_file;
pub mod weight;
mod weights;

pub use decoder::{Decoder, DecoderSettings, dtype_of, head_chunk_rows};
pub use error::{Error, Result};
pub use fp8::Fp8Fusion;
pub use generation::Generator;
pub use layout::{Parameter, ParameterLayout};
pub use lora::AdapterParameters;
pub use parameters::{ParameterKind, ParameterSpec, Parameters};
pub use run_config::{ActivationRecompute, Precision};
pub use sampling::{SamplingSettings, sample};
pub use shape::{LinearMap, LoraShape, ModelShape};
pub use weights::Weights;
