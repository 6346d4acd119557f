//! Saves a GPU's GEMM algorithms in checkpoints, restores them on resume, and shares them between ranks.

use std::collections::BTreeMap;

use kernels::{Device, cuda::Cuda};

use crate::{checkpoint::MatmulAlgorithms, error::Result, ranks::Ranks};

/// What a resume on other hardware means for a run.
pub(super) const ROUNDS_DIFFERENTLY: &str =
    "from here on the weights round differently from those of an uninterrupted run";

/// Returns the algorithms that a device has chosen so far; `None` on a CPU, which has only one.
pub(super) fn capture(device: &Device) -> Option<MatmulAlgorithms> {
    let capture = |gpu: &Cuda| MatmulAlgorithms { fingerprint: gpu.fingerprint(), choices: gpu.choices() };
    device.as_cuda().map(capture)
}

/// Makes a device use the checkpoint's algorithms. Returns a note for the user if it cannot, in which case the resumed
/// run is not bitwise equal to an uninterrupted one.
pub(super) fn restore(device: &Device, saved: Option<&MatmulAlgorithms>) -> Result<Option<String>> {
    let current = device.as_cuda().map(Cuda::fingerprint);
    if let Some(note) = device_change_note(saved.map(|saved| saved.fingerprint.as_str()), current.as_deref()) {
        return Ok(Some(note));
    }
    let (Some(gpu), Some(saved)) = (device.as_cuda(), saved) else {
        return Ok(None);
    };
    let refused = gpu.recall_choices(&saved.choices)?;
    Ok((!refused.is_empty()).then(|| {
        format!(
            "{} does not support {} of the checkpoint's GEMM algorithms and kernel variants: {ROUNDS_DIFFERENTLY}",
            saved.fingerprint,
            refused.len()
        )
    }))
}

/// Gives all ranks the same algorithms: for each operation and shape that of the lowest rank that has chosen one. A
/// rank whose GPU does not support it keeps its own.
pub(super) fn share(ranks: &Ranks, device: &Device) -> Result<()> {
    let (Some(exchange), Some(gpu)) = (ranks.exchange(), device.as_cuda()) else { return Ok(()) };
    let own = serde_json::to_string(&gpu.choices()).expect("choices are texts by name");
    let mut shared = BTreeMap::new();
    for of_rank in exchange.gather(&own)?.iter().rev() {
        shared.extend(serde_json::from_str::<BTreeMap<String, String>>(of_rank).unwrap_or_default());
    }
    gpu.recall_choices(&shared)?;
    Ok(())
}

/// Returns the note for a run that resumes on another device than its checkpoint's; None where it is the same. A device
/// of `None` stands for a CPU.
fn device_change_note(former: Option<&str>, current: Option<&str>) -> Option<String> {
    (former != current).then(|| {
        let device_name = |device: Option<&str>| device.unwrap_or("a CPU").to_owned();
        format!(
            "the checkpoint was written on {} and the run resumes on {}: {ROUNDS_DIFFERENTLY}",
            device_name(former),
            device_name(current)
        )
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn resuming_on_the_same_device_needs_no_note() {
        assert_eq!(device_change_note(None, None), None);
        assert_eq!(device_change_note(Some("RTX 5090, cuBLAS 13.0"), Some("RTX 5090, cuBLAS 13.0")), None);
        assert_eq!(capture(&Device::Cpu), None);
        assert_eq!(restore(&Device::Cpu, None).unwrap(), None);
    }

    #[test]
    fn resuming_on_another_device_is_noted() {
        for (was, is) in [
            (None, Some("RTX 5090, cuBLAS 13.0")),
            (Some("RTX 5090, cuBLAS 13.0"), None),
            (Some("RTX 5090, cuBLAS 13.0"), Some("RTX 5090, cuBLAS 13.1")),
        ] {
            let note = device_change_note(was, is).unwrap();
            assert!(note.contains(was.unwrap_or("a CPU")) && note.contains(is.unwrap_or("a CPU")), "{note}");
        }
        let saved = MatmulAlgorithms { fingerprint: "RTX 5090".to_owned(), choices: BTreeMap::new() };
        assert!(restore(&Device::Cpu, Some(&saved)).unwrap().unwrap().contains("resumes on a CPU"));
    }
}
