//! The CPU as the device under examination, sound and tampered with.

use kernels::Device;

use super::*;

fn failures(subject: &Subject) -> Vec<String> {
    let report = check(subject, Size::Small, 1, &mut |row| println!("{row}")).unwrap();
    let failed = report.rows.iter().filter(|row| row.failure.is_some());
    let failed: Vec<String> = failed.map(|row| row.check.clone()).collect();
    assert_eq!(report.passed, failed.is_empty());
    failed
}

/// The checks that fail when the last bits of an element of what is so named are changed in a run.
fn failures_of(what: &'static str, run: usize, flip: u32) -> Vec<String> {
    failures(&Subject::tampered(Device::Cpu, move |name, of_run, memory| {
        if name == what && of_run == run {
            let middle = memory.len() / 2;
            memory[middle] ^= flip;
        }
    }))
}

#[test]
fn a_cpu_passes_every_check_against_itself() {
    assert_eq!(failures(&Subject::new(Device::Cpu)), Vec::<String>::new());
}

#[test]
fn a_wrong_gradient_of_one_layer_fails_that_parameter_and_the_comparisons_of_bits() {
    let failed = failures_of("layers.1.down", 1, 0x4000_0000);
    for check in ["model fp32: down", "model fp32, twice", "model bf16: down", "model bf16, recompute block"] {
        assert!(failed.iter().any(|failed| failed == check), "{check}: {failed:?}");
    }
    assert!(!failed.iter().any(|failed| failed.contains("qkv")), "{failed:?}");
}

#[test]
fn one_bit_of_a_second_run_fails_what_is_run_twice() {
    assert_eq!(failures_of("input_gradient", 2, 1), ["block fp32, twice", "block bf16, twice"]);
}

#[test]
fn one_bit_of_a_recomputed_gradient_fails_both_ways_to_recompute() {
    let recomputed = |precision: &str, what: &str| format!("model {precision}, recompute {what}");
    let expected = ["fp32", "bf16"].map(|precision| ["selective", "block"].map(|what| recomputed(precision, what)));
    assert_eq!(failures_of("embed_tokens", 3, 1), expected.concat());
}
