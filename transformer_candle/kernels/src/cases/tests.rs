//! Every case on the CPU.

use super::*;
use crate::testing::*;
use crate::{Buffer, Device};

/// Passes the cases of both element types to `check`.
fn each(mut check: impl FnMut(&Case)) {
    for dtype in [DType::F32, DType::BF16] {
        let mut inputs = Inputs { random: Random::new(1), dtype };
        for make in list(Size::Medium, dtype) {
            check(&make(&mut inputs).unwrap());
        }
    }
}

/// The elements of an argument, without its guards.
fn numbers(memory: &Buffer) -> Vec<f32> {
    let contents = BufferContents::read(memory).unwrap();
    let inside = contents.bits[GUARD..contents.bits.len() - GUARD].to_vec();
    BufferContents { bits: inside, ..contents }.numbers()
}

#[test]
fn operations_write_their_outputs_and_nothing_else() {
    each(|case| {
        let memory = case.results(&Device::Cpu, false).unwrap();
        for (argument, memory) in case.arguments.iter().zip(&memory) {
            let problems = argument.memory_problems(&BufferContents::read(memory).unwrap());
            assert!(problems.is_empty(), "{} {}: {problems:?}", case.name, case.sizes);
        }
    });
}

#[test]
fn bf16_results_are_within_their_bounds_of_f32() {
    each(|case| {
        let [ours, exact] = [false, case.widened].map(|widened| case.results(&Device::Cpu, widened).unwrap());
        for ((argument, ours), exact) in case.arguments.iter().zip(&ours).zip(&exact) {
            let (Role::Output(bound) | Role::Updated(bound)) = argument.role else { continue };
            let error = super::relative_error(&numbers(ours), &numbers(exact));
            assert!(error <= bound, "{} {}: {} is off by {error:e}", case.name, case.sizes, argument.name);
        }
    });
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    each(|case| {
        assert_same_at_any_thread_count(|| {
            let memory = case.results(&Device::Cpu, false).unwrap().into_iter();
            let compared = memory.zip(&case.arguments).filter(|(_, argument)| !argument.is_scratch());
            compared.map(|(memory, _)| memory).collect()
        });
    });
}
