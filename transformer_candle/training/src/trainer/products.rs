//! How a GPU computes matrix products, carried from a checkpoint to the run that goes on with it.

use kernels::{Device, cuda::Cuda};

use crate::{checkpoint::Products, error::Result};

/// The choices that a device has made so far; none on a CPU, which makes none.
pub(super) fn of(device: &Device) -> Option<Products> {
    let of_gpu = |gpu: &Cuda| Products { fingerprint: gpu.fingerprint(), choices: gpu.choices() };
    device.as_cuda().map(of_gpu)
}

/// Has a device compute as the checkpoint's run did. Returns what a person should know where it cannot, and so the run goes on with
/// other bits than if it had never stopped.
pub(super) fn recall(device: &Device, saved: Option<&Products>) -> Result<Option<String>> {
    let here = device.as_cuda().map(Cuda::fingerprint);
    if let Some(note) = parting(saved.map(|products| products.fingerprint.as_str()), here.as_deref()) {
        return Ok(Some(note));
    }
    let (Some(gpu), Some(products)) = (device.as_cuda(), saved) else {
        return Ok(None);
    };
    let refused = gpu.recall_choices(&products.choices)?;
    Ok((!refused.is_empty()).then(|| {
        format!(
            "{} does not know {} of the checkpoint's algorithms of products and variants of kernels any more: from here on the weights round \
             differently from those of a run that never stopped",
            products.fingerprint,
            refused.len()
        )
    }))
}

/// What to say of a checkpoint that was written on one device and goes on on another. None is a CPU.
fn parting(was: Option<&str>, is: Option<&str>) -> Option<String> {
    (was != is).then(|| {
        let named = |device: Option<&str>| device.unwrap_or("a CPU").to_owned();
        format!(
            "the checkpoint was written on {} and the run goes on on {}: from here on the weights round differently from those of \
             a run that stayed",
            named(was),
            named(is)
        )
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_run_that_stays_where_it_was_needs_no_word() {
        assert_eq!(parting(None, None), None);
        assert_eq!(parting(Some("RTX 5090, cuBLAS 13.0"), Some("RTX 5090, cuBLAS 13.0")), None);
        assert_eq!(of(&Device::Cpu), None);
        assert_eq!(recall(&Device::Cpu, None).unwrap(), None);
    }

    #[test]
    fn a_run_that_moves_is_told_that_its_bits_part() {
        for (was, is) in [
            (None, Some("RTX 5090, cuBLAS 13.0")),
            (Some("RTX 5090, cuBLAS 13.0"), None),
            (Some("RTX 5090, cuBLAS 13.0"), Some("RTX 5090, cuBLAS 13.1")),
        ] {
            let note = parting(was, is).unwrap();
            assert!(note.contains(was.unwrap_or("a CPU")) && note.contains(is.unwrap_or("a CPU")), "{note}");
        }
        let saved = Products { fingerprint: "RTX 5090".to_owned(), choices: BTreeMap::new() };
        assert!(recall(&Device::Cpu, Some(&saved)).unwrap().unwrap().contains("goes on on a CPU"));
    }
}
