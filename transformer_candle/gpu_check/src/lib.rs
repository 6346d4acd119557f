//! `gpu-check`: whether a GPU computes what the CPU computes. Everything is compared with the CPU trainer, which is
//! itself tested against PyTorch: training, gradients, operations, memory. Needs neither data nor a tokenizer.
//!
//! [`run`] makes the checks of each [`Part`]. The operations are those of [`kernels::cases`]: each is checked for its
//! values, for writes outside of its outputs and for equal bits in a second run.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod case;
mod check;
mod device_under_test;
mod gradients;
mod memory;
mod part;
mod report;
mod speed;
mod steps;
#[cfg(test)]
mod tests;

pub use check::{CheckProgress, run};
pub use part::{Part, Size};
pub use report::{CheckReport, CheckRow, SpeedRow, heading, verdict};
