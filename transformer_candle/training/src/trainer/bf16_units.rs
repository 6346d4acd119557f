//! Which units of a processor multiply bf16 matrices: in checkpoints, on resume, and among ranks.

use kernels::{Bf16Units, Device};
use run_config::Precision;

use super::matmul_algorithms::ROUNDS_DIFFERENTLY;

/// Returns the units that a run's bits depend on: those of a processor that multiplies bf16 numbers. In fp32, and on a GPU, which
/// records its GEMM algorithms, the processor decides no bit.
pub(super) fn of(device: &Device, precision: Precision) -> Option<String> {
    let decides = device.as_cuda().is_none() && precision != Precision::Fp32;
    decides.then(|| Bf16Units::of_this_processor().name().to_owned())
}

/// Returns the note for a run that resumes on other units than its checkpoint's. Checkpoints of earlier versions name
/// none.
pub(super) fn change_note(saved: Option<&str>, current: Option<&str>) -> Option<String> {
    let (saved, current) = (saved?, current?);
    (saved != current).then(|| {
        format!(
            "the checkpoint's bf16 matmuls were computed with {saved}, this processor's are with {current}: {ROUNDS_DIFFERENTLY}"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bf16_on_a_processor_depends_on_its_units() {
        let units = Bf16Units::of_this_processor().name();
        assert_eq!(of(&Device::Cpu, Precision::Bf16).as_deref(), Some(units));
        assert_eq!(of(&Device::Cpu, Precision::Fp32), None);
    }

    #[test]
    fn other_units_are_noted() {
        for (saved, current) in [(None, None), (None, Some("f32")), (Some("f32"), Some("f32")), (Some("f32"), None)] {
            assert_eq!(change_note(saved, current), None);
        }
        let note = change_note(Some("avx512_bf16"), Some("amx_bf16")).unwrap();
        assert!(note.contains("with avx512_bf16") && note.contains("with amx_bf16"), "{note}");
    }
}
