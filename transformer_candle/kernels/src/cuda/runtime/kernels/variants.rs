//! Which of a kernel's variants a launch takes: timed on the launch's own operands, kept and recalled as the algorithms
//! of GEMMs are (`matmul.rs`), for variants add in different orders too.

use std::collections::BTreeMap;

use super::super::Cuda;
use super::Slot;
use crate::cuda::launch::KernelLaunch;
use crate::{Error, Result};

impl Cuda {
    /// The index of the variant that a launch takes.
    pub(super) fn variant(&self, launch: &KernelLaunch, variants: &[Slot]) -> Result<usize> {
        let shape = launch.shape();
        if let Some(&variant) = self.0.kernels.choices.locked().get(&shape) {
            return Ok(variant);
        }
        let refuse = |call: &str, reason: &str| Error::Cuda {
            ordinal: self.ordinal(),
            call: format!("{call} {shape}"),
            reason: reason.to_owned(),
        };
        if self.is_capturing() {
            return Err(refuse(
                "stream capture",
                "no variant has been chosen for it, and none can be timed during capture: run it once before",
            ));
        }
        let run = |variant: usize| {
            let kernel = self.load(&variants[variant])?;
            kernel.launch(launch.blocks(|name| kernel.constant(name)), &launch.values)
        };
        let Some(variant) = self.fastest(variants.len(), run)? else {
            // Runs the declared one again, to return the driver's error.
            run(0)?;
            return Err(refuse("choosing a variant of", "none of them could be launched"));
        };
        self.0.kernels.choices.locked().insert(shape, variant);
        Ok(variant)
    }

    /// The variants chosen so far, by launch shape: the variant's name and the GPU.
    pub(in super::super) fn variant_choices(&self) -> BTreeMap<String, String> {
        let text = |(shape, variant): (&String, &usize)| {
            let entry = &self.variants_of(shape)?.get(*variant)?.entry;
            Some((shape.clone(), format!("{} {}", entry.variant(), self.name())))
        };
        self.0.kernels.choices.locked().iter().filter_map(text).collect()
    }

    /// Restores a variant that another run chose; returns false unless it was on such a GPU and is among those
    /// compiled.
    pub(in super::super) fn recall_variant(&self, shape: &str, text: &str) -> bool {
        let recalled = text
            .split_once(' ')
            .filter(|(_, gpu)| *gpu == self.name())
            .and_then(|(name, _)| self.variants_of(shape)?.iter().position(|slot| slot.entry.variant() == name));
        if let Some(variant) = recalled {
            self.0.kernels.choices.locked().insert(shape.to_owned(), variant);
        }
        recalled.is_some()
    }

    /// The variants of the kernel that a launch's shape begins with.
    fn variants_of(&self, shape: &str) -> Option<&[Slot]> {
        let (kernel, _) = shape.split_once(' ')?;
        self.0.kernels.slots.get(kernel).map(Vec::as_slice)
    }
}
