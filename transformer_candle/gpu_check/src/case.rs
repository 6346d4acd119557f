//! Compares one call of an operation on two devices: memory, repeatability, and the tolerance of its results.
//!
//! The call is made twice, so that results which differ from run to run are found.

use kernels::cases::{Argument, BufferContents, Case, GUARD, Role, relative_error};
use kernels::{Buffer, Device};

use super::device_under_test::DeviceUnderTest;
use super::report::CheckRow;
use training::{Result, TrainerError};

/// The tolerance of one element as a multiple of the tolerance of the whole tensor, relative to the element and to the
/// RMS of its row and tensor: rounding errors are normally distributed, so no correct result comes near, and one wrong
/// element among millions is still found.
const ELEMENT_FACTOR: f64 = 16.0;

/// Runs a case on the device and on the CPU. One that does not fit in the device's memory fails; the next may fit.
pub(super) fn check(case: &Case, device: &DeviceUnderTest) -> Result<CheckRow> {
    match compare(case, device) {
        Err(error @ TrainerError::Kernel(kernels::Error::OutOfMemory { .. })) => Ok(failed(case, &error)),
        compared => compared,
    }
}

/// Returns the row of a case that failed with an error.
pub(super) fn failed(case: &Case, error: &TrainerError) -> CheckRow {
    CheckRow::new(&case.name, &case.sizes).require(false, || error.to_string())
}

fn compare(case: &Case, device: &DeviceUnderTest) -> Result<CheckRow> {
    let reference = contents(&case.results(&Device::Cpu, case.widened)?)?;
    let first = observe(case, device, 1)?;
    let second = observe(case, device, 2)?;
    let mut row = CheckRow::new(&case.name, &case.sizes);
    let mut worst: Option<(f64, f64)> = None;
    for (((argument, reference), first), second) in case.arguments.iter().zip(&reference).zip(&first).zip(&second) {
        let same = argument.is_scratch() || first.bits == second.bits;
        for problem in argument.memory_problems(first) {
            row = row.require(false, || problem);
        }
        row = row.require(same, || format!("{} differs from run to run", argument.name));
        let (Role::Output(bound) | Role::Updated(bound)) = argument.role else { continue };
        let (ours, exact) = (inner(first).numbers(), inner(reference).numbers());
        let error = relative_error(&ours, &exact);
        if worst.is_none_or(|(largest, of)| fraction_of_bound(error, bound) >= fraction_of_bound(largest, of)) {
            worst = Some((error, bound));
        }
        row = check_elements(argument, row, &ours, &exact, bound);
    }
    Ok(match worst {
        Some((error, bound)) => row.within(error, bound),
        None => row,
    })
}

fn observe(case: &Case, device: &DeviceUnderTest, run: usize) -> Result<Vec<BufferContents>> {
    let memory = case.results(&device.device, false)?;
    let arguments = case.arguments.iter().zip(&memory);
    arguments.map(|(argument, memory)| device.read(&format!("{}: {}", case.name, argument.name), run, memory)).collect()
}

fn contents(memory: &[Buffer]) -> Result<Vec<BufferContents>> {
    Ok(memory.iter().map(BufferContents::read).collect::<kernels::Result<_>>()?)
}

/// Checks every element against [`ELEMENT_FACTOR`].
fn check_elements(argument: &Argument, row: CheckRow, ours: &[f32], exact: &[f32], bound: f64) -> CheckRow {
    let rms = |values: &[f32]| {
        let squares: f64 = values.iter().map(|&value| f64::from(value) * f64::from(value)).sum();
        (squares / values.len().max(1) as f64).sqrt()
    };
    let (all, width) = (rms(exact), argument.shape.last().copied().unwrap_or(1).max(1));
    let rows = ours.chunks(width).zip(exact.chunks(width)).enumerate();
    let wrong = rows.flat_map(|(at, (ours, exact))| {
        let around = all + rms(exact);
        let pairs = ours.iter().zip(exact).enumerate();
        pairs.filter_map(move |(column, (&ours, &exact))| {
            let allowed = ELEMENT_FACTOR * bound * (f64::from(exact).abs() + around);
            let near = (f64::from(ours) - f64::from(exact)).abs() <= allowed;
            (!near).then_some((at * width + column, ours, exact))
        })
    });
    let name = argument.name;
    match wrong.into_iter().next() {
        None => row,
        Some((at, ours, exact)) => row.require(false, || format!("{name}[{at}] is {ours}, not {exact}")),
    }
}

fn inner(memory: &BufferContents) -> BufferContents {
    BufferContents { dtype: memory.dtype, bits: memory.bits[GUARD..memory.bits.len() - GUARD].to_vec() }
}

/// Returns the error as a fraction of its bound; infinite if it is NaN.
fn fraction_of_bound(error: f64, bound: f64) -> f64 {
    match error / bound {
        // Exact results pass a bound of zero.
        _ if error == 0.0 => 0.0,
        fraction if fraction.is_nan() => f64::INFINITY,
        fraction => fraction,
    }
}

#[cfg(test)]
mod tests {
    use kernels::cases::Random;
    use kernels::{DType, swiglu};

    use super::*;

    const OUTPUT: &str = "swiglu: out";

    fn case() -> Case {
        let gate_up = BufferContents::from_numbers(Random::new(1).numbers(5 * 6), DType::BF16);
        Case::new("swiglu", "5 x 3")
            .input("gate_up", &[5, 6], gate_up)
            .output("out", &[5, 3], DType::BF16, 4e-3)
            .call(|[gate_up, out]| swiglu::forward(gate_up, out))
    }

    /// The failure of the case when its results are tampered with.
    fn failure(tamper: impl Fn(&str, usize, &mut [u32]) + Send + Sync + 'static) -> Option<String> {
        check(&case(), &DeviceUnderTest::tampered(Device::Cpu, tamper)).unwrap().failure
    }

    #[test]
    fn a_correct_operation_passes_with_its_error() {
        let row = check(&case(), &DeviceUnderTest::new(Device::Cpu)).unwrap();
        assert_eq!(row.failure, None);
        assert!(row.error.unwrap() > 0.0, "bf16 rounds");
    }

    #[test]
    fn every_memory_error_is_reported() {
        let at = |what: &'static str, index: usize, bits: u32| {
            failure(move |name, _, memory| {
                if name == what {
                    memory[index] = bits;
                }
            })
        };
        assert_eq!(at(OUTPUT, 3, 0).unwrap(), "1 elements written outside of out");
        assert_eq!(at(OUTPUT, GUARD + 15, 0).unwrap(), "1 elements written outside of out");
        assert_eq!(at("swiglu: gate_up", GUARD + 2, 0).unwrap(), "gate_up is written");
        assert_eq!(at(OUTPUT, GUARD + 4, 0x7fad).unwrap(), "out[4] is not written");
    }

    #[test]
    fn a_differing_second_run_is_reported() {
        let flipped = failure(|name, run, memory| {
            if name == OUTPUT && run == 2 {
                memory[GUARD] ^= 1;
            }
        });
        assert_eq!(flipped.unwrap(), "out differs from run to run");
    }

    #[test]
    fn one_wrong_element_or_a_large_mean_error_fails() {
        let one = failure(|name, _, memory| {
            if name == OUTPUT {
                memory[GUARD + 7] = 0x4000;
            }
        });
        assert!(one.unwrap().starts_with("out[7] is 2, not"));
        let all = failure(|name, _, memory| {
            if name == OUTPUT {
                memory[GUARD..GUARD + 15].iter_mut().for_each(|bits| *bits += 4);
            }
        });
        assert!(all.unwrap().contains("is more than 4.0e-3"));
    }

    #[test]
    fn an_operation_that_computes_from_its_workspace_yields_nan() {
        let case = Case::new("copy", "4")
            .workspace(|_| 4)
            .output("out", &[4], DType::F32, 1.0)
            .call(|[workspace, out]| out.copy_from(workspace));
        assert!(check(&case, &DeviceUnderTest::new(Device::Cpu)).unwrap().failure.is_some());
    }
}
