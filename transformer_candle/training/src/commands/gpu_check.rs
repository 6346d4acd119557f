//! `gpu-check`: whether a card computes what the CPU computes. Everything is compared with the CPU trainer, which is itself
//! tested against PyTorch: operations, gradients, training, memory. Needs neither data nor a tokenizer.

mod case;
mod gradients;
mod memory;
mod operations;
mod report;
mod speed;
mod steps;
mod subject;
#[cfg(test)]
mod tests;

use std::time::Instant;

use clap::{Args, ValueEnum};

pub use self::report::{CheckReport, CheckRow, SpeedRow};
use self::report::{Findings, heading};
use self::subject::{Random, Subject};
use super::bench::describe;
use crate::{Result, TrainerError, device};

/// What `gpu-check` takes.
#[derive(Debug, Clone, Args)]
pub struct GpuCheckOptions {
    /// The card to check: cuda or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value = "cuda")]
    pub device: run_config::Device,
    /// How large the checks are.
    #[arg(long, value_enum, default_value_t = Size::Full)]
    pub size: Size,
    /// Make only these checks. Repeatable. [default: all]
    #[arg(long, value_enum, value_name = "PART")]
    pub only: Vec<Part>,
    /// Of the random inputs, as a run printed it. [default: another one each time]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Print one JSON object at the end, and the rows to stderr.
    #[arg(long)]
    pub json: bool,
}

/// How large the checks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Size {
    /// Sizes of a few dozens, for a driver that emulates a card.
    Small,
    /// The sizes of a model of a billion parameters beside odd ones: minutes, and 31 GB of the card.
    Full,
}

/// What can be checked by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// What the plan says against what is taken; at full size also the speed of each operation.
    Memory,
    /// Every operation by itself.
    Operations,
    /// A block, and the gradients of the whole model.
    Gradients,
    /// Optimizer steps.
    Training,
}

/// Checks a card. `on_row` is called with each row as it is there.
pub fn run(options: &GpuCheckOptions, on_row: &mut dyn FnMut(&CheckRow)) -> Result<CheckReport> {
    if !matches!(options.device, run_config::Device::Cuda(_)) {
        let asked = options.device;
        let message = format!("gpu-check compares a card with the CPU, and was given `--device {asked}`: take cuda:N");
        return Err(TrainerError::Request(message));
    }
    let subject = Subject::new(device::open(options.device)?);
    check(&subject, options.size, &options.only, options.seed.unwrap_or_else(Random::of_now), on_row)
}

pub(super) fn main(options: &GpuCheckOptions) -> Result<u8> {
    let show = |text: &str| {
        if options.json {
            eprint!("{text}");
            Ok(())
        } else {
            super::print(text)
        }
    };
    let (mut rows, mut unshown) = (0, None);
    let report = run(options, &mut |row| {
        let head = if rows == 0 { format!("{}\n", heading()) } else { String::new() };
        rows += 1;
        unshown = unshown.take().or(show(&format!("{head}{row}\n")).err());
    })?;
    if let Some(error) = unshown {
        return Err(error);
    }
    for row in &report.speed {
        show(&format!("{row}\n"))?;
    }
    if options.json {
        super::print_json(&report)?;
    } else {
        show(&format!("{report}\n"))?;
    }
    Ok(u8::from(!report.passed))
}

/// Checks a device; no parts are all parts.
fn check(
    subject: &Subject,
    size: Size,
    only: &[Part],
    seed: u64,
    on_row: &mut dyn FnMut(&CheckRow),
) -> Result<CheckReport> {
    let started = Instant::now();
    let mut findings = Findings::new(on_row);
    let mut speed = Vec::new();
    // Memory first, while the card is as it was opened.
    for part in Part::value_variants().iter().filter(|part| only.is_empty() || only.contains(part)) {
        match part {
            Part::Memory => speed = memory::check(&subject.device, size, &mut findings)?,
            Part::Operations => operations::visit(size, seed, &mut |case| {
                findings.add(case.check(subject)?);
                Ok(())
            })?,
            Part::Gradients => gradients::check(subject, size, seed, &mut findings)?,
            Part::Training => steps::check(subject, size, seed, &mut findings)?,
        }
    }
    let rows = findings.rows;
    Ok(CheckReport {
        device: describe(&subject.device),
        seed,
        passed: rows.iter().all(|row| row.failure.is_none()),
        rows,
        speed,
        seconds: started.elapsed().as_secs_f64(),
    })
}
