//! The CPU as the device under test, intact and tampered with.

use kernels::Device;

use crate::check::{CheckProgress, check, run};
use crate::device_under_test::DeviceUnderTest;
use crate::report::{self, CheckReport};
use crate::{Part, Size};

fn print_row(progress: CheckProgress<'_>) {
    if let CheckProgress::Row(row) = progress {
        println!("{row}");
    }
}

fn failures(device: &DeviceUnderTest) -> Vec<String> {
    let reports = check(device, Size::Small, &[], 1, &mut print_row);
    let failed = |report: &CheckReport| -> Vec<String> {
        let failed = report.rows.iter().filter(|row| row.failure.is_some());
        let failed: Vec<String> = failed.map(|row| row.check.clone()).collect();
        assert_eq!(report.passed, failed.is_empty());
        failed
    };
    reports.iter().flat_map(failed).collect()
}

/// Returns the checks that fail if the bits `flip` of an element of the named result are flipped in a run.
fn failures_of(what: &'static str, run: usize, flip: u32) -> Vec<String> {
    failures(&DeviceUnderTest::tampered(Device::Cpu, move |name, of_run, memory| {
        if name == what && of_run == run {
            let middle = memory.len() / 2;
            memory[middle] ^= flip;
        }
    }))
}

#[test]
fn a_cpu_passes_every_check_against_itself() {
    assert_eq!(failures(&DeviceUnderTest::new(Device::Cpu)), Vec::<String>::new());
}

#[test]
fn a_wrong_gradient_fails_that_parameter() {
    let failed = failures_of("layers.1.down", 1, 0x4000_0000);
    for check in ["model fp32: down", "model fp32, twice", "model bf16: down", "model bf16, recompute block"] {
        assert!(failed.iter().any(|failed| failed == check), "{check}: {failed:?}");
    }
    assert!(!failed.iter().any(|failed| failed.contains("qkv")), "{failed:?}");
}

#[test]
fn one_flipped_bit_in_a_second_run_fails() {
    assert_eq!(failures_of("input_gradient", 2, 1), ["block fp32, twice", "block bf16, twice"]);
}

#[test]
fn one_flipped_bit_in_recomputed_gradients_fails() {
    let recomputed = |precision: &str, what: &str| format!("model {precision}, recompute {what}");
    let expected = ["fp32", "bf16"].map(|precision| ["selective", "block"].map(|what| recomputed(precision, what)));
    assert_eq!(failures_of("embed_tokens", 3, 1), expected.concat());
}

#[test]
fn one_flipped_bit_in_final_weights_fails() {
    assert_eq!(failures_of("weights", 2, 1), ["training bf16, twice"]);
    assert_eq!(failures_of("second_moment", 3, 1), ["training bf16, without graphs"]);
    assert_eq!(failures_of("master_remainder", 4, 1), ["training bf16, saved after 1 steps"]);
}

#[test]
fn a_wrong_loss_fails_the_curve_comparison() {
    let failed = failures_of("losses", 1, 0x0010_0000);
    for check in ["training fp32: losses", "training bf16: losses", "training bf16, micro-batches of 1"] {
        assert!(failed.iter().any(|failed| failed == check), "{check}: {failed:?}");
    }
    assert_eq!(failures_of("losses", 5, 0x0010_0000), ["training bf16, micro-batches of 1"]);
}

#[test]
fn a_wrong_element_fails_its_case_only() {
    assert_eq!(failures_of("swiglu::backward bf16: gate_up", 1, 0x4000), ["swiglu::backward bf16"]);
    assert_eq!(failures_of("adamw::step bf16: master", 2, 0x4000), ["adamw::step bf16", "adamw::step bf16"]);
}

#[test]
fn only_requested_parts_are_checked() {
    let reports = check(&DeviceUnderTest::new(Device::Cpu), Size::Small, &[Part::Training], 1, &mut |_| ());
    let [CheckReport { part: Part::Training, rows, .. }] = &reports[..] else { panic!("{reports:?}") };
    assert!(!rows.is_empty() && rows.iter().all(|row| row.check.starts_with("training")));
}

#[test]
fn parts_are_reported_in_order_of_importance() {
    let mut events = Vec::new();
    // Whatever order they are asked for in.
    let only = [Part::Memory, Part::Gradients, Part::Training];
    let reports = check(&DeviceUnderTest::new(Device::Cpu), Size::Small, &only, 1, &mut |progress| {
        events.push(match progress {
            CheckProgress::Row(row) => row.check.split([' ', ':']).next().unwrap_or_default().to_owned(),
            CheckProgress::Part(report) => format!("end of {}", report.part),
        });
    });
    assert_eq!(
        reports.iter().map(|report| report.part).collect::<Vec<_>>(),
        [Part::Training, Part::Gradients, Part::Memory]
    );
    events.dedup();
    let end = |part| events.iter().position(|event| *event == format!("end of {part}")).unwrap();
    assert!(end(Part::Training) < end(Part::Gradients) && end(Part::Gradients) < end(Part::Memory), "{events:?}");
    assert!(events[..end(Part::Training)].iter().all(|event| event == "training"), "{events:?}");
}

#[test]
fn one_part_can_be_repeated_with_its_seed() {
    let rows = |only: &[Part]| {
        let reports = check(&DeviceUnderTest::new(Device::Cpu), Size::Small, only, 7, &mut |_| ());
        let rows = reports.into_iter().filter(|report| report.part == Part::Training).flat_map(|report| report.rows);
        rows.map(|row| (row.check, row.error)).collect::<Vec<_>>()
    };
    assert_eq!(rows(&[Part::Training]), rows(&[Part::Gradients, Part::Training]));
}

#[test]
fn only_a_gpu_is_checked() {
    for device in [run_config::Device::Cpu, run_config::Device::Auto] {
        let error = run(device, Size::Small, &[], Some(1), &mut |_| ()).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("take cuda:N"), "{error}");
    }
}

#[test]
#[ignore = "minutes: the sizes of a model of a billion parameters, on a CPU"]
fn a_cpu_passes_every_check_at_full_size() {
    let reports = check(&DeviceUnderTest::new(Device::Cpu), Size::Full, &[], 1, &mut print_row);
    assert!(reports.iter().all(|report| report.passed), "{}", report::verdict(&reports));
}
