//! Runs the checks, one part after another.

use std::time::Instant;

use clap::ValueEnum;
use kernels::DType;
use kernels::cases::{self, Inputs, Random};
use training::{Result, TrainerError, device};

use crate::{
    case,
    device_under_test::DeviceUnderTest,
    gradients, memory,
    part::{Part, Size},
    report::{CheckReport, CheckRow, Findings},
    steps,
};

/// Progress of a check.
#[derive(Debug, Clone, Copy)]
pub enum CheckProgress<'a> {
    /// A check is complete.
    Row(&'a CheckRow),
    /// A part is complete.
    Part(&'a CheckReport),
}

/// Checks a GPU, and calls `on_progress` with each row and each part once it is complete. An empty list means all
/// parts; without a seed the random inputs differ each time. An error of the GPU fails the part in which it occurs, and
/// ends it.
///
/// # Errors
/// [`TrainerError::Request`] if there is no such GPU.
pub fn run(
    requested_device: run_config::Device,
    size: Size,
    only: &[Part],
    seed: Option<u64>,
    on_progress: &mut dyn FnMut(CheckProgress<'_>),
) -> Result<Vec<CheckReport>> {
    if !matches!(requested_device, run_config::Device::Cuda(_)) {
        let message =
            format!("gpu-check compares a GPU with the CPU, and was given `--device {requested_device}`: take cuda:N");
        return Err(TrainerError::Request(message));
    }
    let device = DeviceUnderTest::new(device::open(requested_device)?);
    Ok(check(&device, size, only, seed.unwrap_or_else(Random::seed_from_now), on_progress))
}

/// Checks a device; an empty list means all parts.
pub(crate) fn check(
    device: &DeviceUnderTest,
    size: Size,
    only: &[Part],
    seed: u64,
    on_progress: &mut dyn FnMut(CheckProgress<'_>),
) -> Vec<CheckReport> {
    let parts = Part::value_variants().iter().filter(|part| only.is_empty() || only.contains(part));
    let check = |&part: &Part| {
        let report = check_part(device, size, part, seed, &mut |row| on_progress(CheckProgress::Row(row)));
        on_progress(CheckProgress::Part(&report));
        report
    };
    parts.map(check).collect()
}

fn check_part(
    device: &DeviceUnderTest,
    size: Size,
    part: Part,
    seed: u64,
    on_row: &mut dyn FnMut(&CheckRow),
) -> CheckReport {
    let start = Instant::now();
    let mut findings = Findings::new(on_row);
    let outcome = match part {
        Part::Training => steps::check(device, size, seed, &mut findings).map(|()| Vec::new()),
        Part::Gradients => gradients::check(device, size, seed, &mut findings).map(|()| Vec::new()),
        Part::Operations => check_operations(device, size, seed, &mut findings).map(|()| Vec::new()),
        Part::Memory => memory::check(&device.device, size, seed, &mut findings),
    };
    let speed = outcome.unwrap_or_else(|error| {
        findings.add(CheckRow::new(format!("{part}: runs to its end"), "").require(false, || error.to_string()));
        Vec::new()
    });
    let rows = findings.rows;
    CheckReport {
        part,
        device: device::describe(&device.device),
        seed,
        passed: rows.iter().all(|row| row.failure.is_none()),
        rows,
        speed,
        seconds: start.elapsed().as_secs_f64(),
    }
}

/// Checks every operation of crate `kernels`: forward and backward, F32 and BF16, at odd sizes and those of real models.
fn check_operations(device: &DeviceUnderTest, size: Size, seed: u64, findings: &mut Findings<'_>) -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let mut inputs = Inputs { random: Random::new(seed ^ dtype.size_in_bytes() as u64), dtype };
        for make in cases::list(size.of_cases(), dtype) {
            let case = make(&mut inputs)?;
            if !device.computes(&case) {
                findings.add(CheckRow::skipped(&case.name, &case.sizes, "no fp8 matmuls with such scales"));
                continue;
            }
            let outcome = case::check(&case, device);
            findings.add(outcome.as_ref().map_or_else(|error| case::failed(&case, error), Clone::clone));
            outcome?;
        }
    }
    Ok(())
}
