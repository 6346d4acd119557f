//! `gpu-check`: whether a GPU computes what the CPU computes. Everything is compared with the CPU trainer, which is itself
//! tested against PyTorch: training, gradients, operations, memory. Needs neither data nor a tokenizer.

mod case;
mod gradients;
mod memory;
mod operations;
mod output;
mod report;
mod speed;
mod steps;
mod subject;
#[cfg(test)]
mod tests;

use std::fmt;
use std::time::Instant;

use clap::{Args, ValueEnum};
use serde::Serialize;

use self::output::Output;
use self::report::Findings;
pub use self::report::{CheckReport, CheckRow, SpeedRow};
use self::subject::{Random, Subject};
use crate::{Result, TrainerError, device};

/// What `gpu-check` takes.
#[derive(Debug, Clone, Args)]
pub struct GpuCheckOptions {
    /// The GPU to check: cuda or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value = "cuda")]
    pub device: run_config::Device,
    /// How large the checks are.
    #[arg(long, value_enum, default_value_t = Size::Full)]
    pub size: Size,
    /// Make only these checks. Repeatable. [default: all, in this order]
    #[arg(long, value_enum, value_name = "PART")]
    pub only: Vec<Part>,
    /// Of the random inputs, as a run printed it. [default: another one each time]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Print one JSON object per part as soon as it ends, and the rows to stderr.
    #[arg(long)]
    pub json: bool,
}

/// How large the checks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Size {
    /// Sizes of a few dozens, for a driver that emulates a GPU and for compute-sanitizer.
    Small,
    /// The sizes of a model of a billion parameters beside odd ones: minutes, and 31 GB of the GPU.
    Full,
}

/// What can be checked by itself, in the order in which it is: what training is worth comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// Optimizer steps.
    Training,
    /// A block, and the gradients of the whole model.
    Gradients,
    /// Every operation by itself.
    Operations,
    /// What the plan says against what is taken; at full size also the speed of each operation.
    Memory,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Training => "training",
            Self::Gradients => "gradients",
            Self::Operations => "operations",
            Self::Memory => "memory",
        })
    }
}

/// What is told while a GPU is checked.
#[derive(Debug, Clone, Copy)]
pub enum Progress<'a> {
    /// A check was made.
    Row(&'a CheckRow),
    /// A part has ended.
    Part(&'a CheckReport),
}

/// Checks a GPU, and calls `on_progress` with each row and each part as it is there. An error of the GPU fails the part that it
/// occurs in, and ends it.
///
/// # Errors
/// [`TrainerError::Request`] if there is no such GPU.
pub fn run(options: &GpuCheckOptions, on_progress: &mut dyn FnMut(Progress<'_>)) -> Result<Vec<CheckReport>> {
    if !matches!(options.device, run_config::Device::Cuda(_)) {
        let asked = options.device;
        let message = format!("gpu-check compares a GPU with the CPU, and was given `--device {asked}`: take cuda:N");
        return Err(TrainerError::Request(message));
    }
    let subject = Subject::new(device::open(options.device)?);
    let seed = options.seed.unwrap_or_else(Random::of_now);
    Ok(check(&subject, options.size, &options.only, seed, on_progress))
}

pub(super) fn main(options: &GpuCheckOptions) -> Result<u8> {
    let mut output = Output::new(options.json);
    let reports = run(options, &mut |progress| output.show(progress))?;
    output.end(&reports)?;
    Ok(u8::from(!reports.iter().all(|report| report.passed)))
}

/// Checks a device; no parts are all parts.
fn check(
    subject: &Subject,
    size: Size,
    only: &[Part],
    seed: u64,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Vec<CheckReport> {
    let parts = Part::value_variants().iter().filter(|part| only.is_empty() || only.contains(part));
    let check = |&part: &Part| {
        let report = check_part(subject, size, part, seed, &mut |row| on_progress(Progress::Row(row)));
        on_progress(Progress::Part(&report));
        report
    };
    parts.map(check).collect()
}

fn check_part(subject: &Subject, size: Size, part: Part, seed: u64, on_row: &mut dyn FnMut(&CheckRow)) -> CheckReport {
    let started = Instant::now();
    let mut findings = Findings::new(on_row);
    let done = match part {
        Part::Training => steps::check(subject, size, seed, &mut findings).map(|()| Vec::new()),
        Part::Gradients => gradients::check(subject, size, seed, &mut findings).map(|()| Vec::new()),
        Part::Operations => operations::visit(size, seed, &mut |case| {
            let checked = case.check(subject);
            findings.add(checked.as_ref().map_or_else(|error| case.failed(error), Clone::clone));
            checked.map(drop)
        })
        .map(|()| Vec::new()),
        Part::Memory => memory::check(&subject.device, size, seed, &mut findings),
    };
    let speed = done.unwrap_or_else(|error| {
        findings.add(CheckRow::new(format!("{part}: runs to its end"), "").require(false, || error.to_string()));
        Vec::new()
    });
    let rows = findings.rows;
    CheckReport {
        part,
        device: device::describe(&subject.device),
        seed,
        passed: rows.iter().all(|row| row.failure.is_none()),
        rows,
        speed,
        seconds: started.elapsed().as_secs_f64(),
    }
}
