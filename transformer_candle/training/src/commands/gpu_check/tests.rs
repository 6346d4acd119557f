//! The CPU as the device under examination, sound and tampered with.

use kernels::Device;

use super::*;

fn failures(subject: &Subject) -> Vec<String> {
    let report = check(subject, Size::Small, &[], 1, &mut |row| println!("{row}")).unwrap();
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

#[test]
fn one_bit_of_the_weights_of_any_second_run_fails_the_comparison_with_the_first() {
    assert_eq!(failures_of("weights", 2, 1), ["training bf16, twice"]);
    assert_eq!(failures_of("second_moment", 3, 1), ["training bf16, without graphs"]);
    assert_eq!(failures_of("remainder", 4, 1), ["training bf16, saved after 1 steps"]);
}

#[test]
fn a_loss_that_is_off_fails_the_comparison_of_the_curves() {
    let failed = failures_of("losses", 1, 0x0010_0000);
    for check in ["training fp32: losses", "training bf16: losses", "training bf16, micro-batches of 1"] {
        assert!(failed.iter().any(|failed| failed == check), "{check}: {failed:?}");
    }
    assert_eq!(failures_of("losses", 5, 0x0010_0000), ["training bf16, micro-batches of 1"]);
}

#[test]
fn a_wrong_element_of_one_operation_fails_its_case_alone() {
    assert_eq!(failures_of("swiglu::backward bf16: gate_up", 1, 0x4000), ["swiglu::backward bf16"]);
    assert_eq!(failures_of("adamw::step bf16: master", 2, 0x4000), ["adamw::step bf16", "adamw::step bf16"]);
}

#[test]
fn what_is_asked_for_is_checked_and_no_more() {
    let report = check(&Subject::new(Device::Cpu), Size::Small, &[Part::Training], 1, &mut |_| ()).unwrap();
    assert!(!report.rows.is_empty() && report.rows.iter().all(|row| row.check.starts_with("training")));
}

#[test]
fn only_a_card_is_checked() {
    let options = |device| GpuCheckOptions { device, size: Size::Small, only: Vec::new(), seed: Some(1), json: false };
    for device in [run_config::Device::Cpu, run_config::Device::Auto] {
        let error = run(&options(device), &mut |_| ()).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("take cuda:N"), "{error}");
    }
}

#[test]
#[ignore = "minutes: the sizes of a model of a billion parameters, on a CPU"]
fn a_cpu_passes_every_check_at_full_size() {
    let report = check(&Subject::new(Device::Cpu), Size::Full, &[], 1, &mut |row| println!("{row}")).unwrap();
    assert!(report.passed, "{report}");
}
