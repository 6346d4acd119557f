//! The training loop, from a resolved configuration to checkpoints that the ecosystem loads.
//!
//! A run reads top to bottom: [`memory_plan`] says whether it fits, [`trainer`] allocates exactly that plan and takes
//! optimizer steps, [`run`] adds evaluation, checkpoints, progress and an orderly stop.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod address_space;
mod advice;
mod atomic_file;
pub mod chat;
pub mod checkpoint;
pub mod commands;
pub mod completion;
pub mod config_fingerprint;
pub mod device;
pub mod divergence_guard;
mod early_stopping;
pub mod engine;
pub mod environment;
pub mod error;
pub mod evaluation;
pub mod gpu_state;
pub mod launcher;
pub mod lock;
pub mod memory_plan;
pub mod metrics;
pub mod model_tokens;
pub mod pool;
pub mod profile;
pub mod progress;
pub mod ranks;
pub mod report;
pub mod run;
mod run_folder;
pub mod run_options;
pub mod schedule;
mod speed_advice;
pub mod stability;
mod statistics;
pub mod stop;
mod stop_reason;
pub mod terminal;
mod time_limit;
pub mod trained_model;
pub mod trainer;
pub mod units;
mod utilization;
mod workers;

pub use error::{Result, TrainerError};
pub use model::SamplingSettings;
