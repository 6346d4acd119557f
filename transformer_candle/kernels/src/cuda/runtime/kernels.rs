//! The kernels for a GPU, each loaded at first use.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute as Attribute;

use super::failure::Context as _;
use super::module::{Function, Module};
use crate::Result;
use crate::cuda::manifest::{Entry, Manifest};

/// The text of the manifest and of every PTX file that it lists, by name.
mod embedded {
    include!(concat!(env!("OUT_DIR"), "/ptx.rs"));
}

mod kernel;
mod variants;

/// Shared memory of a block that needs no attribute.
const USUAL_SHARED_BYTES: u32 = 48 * 1024;

/// The kernels for this GPU, by name, with their variants; the first is used without timing.
pub(super) struct Kernels {
    slots: HashMap<String, Vec<Slot>>,
    choices: Choices,
}

struct Slot {
    entry: Entry,
    function: OnceLock<Function>,
}

impl Kernels {
    pub(super) fn for_gpu(compute_capability: (u32, u32)) -> Result<Self, String> {
        let entries = Manifest::for_gpu(embedded::MANIFEST, compute_capability)?;
        let slots = |variants: Vec<Entry>| {
            variants.into_iter().map(|entry| Slot { entry, function: OnceLock::new() }).collect()
        };
        let slots = entries.into_iter().map(|(name, variants)| (name, slots(variants))).collect();
        Ok(Self { slots, choices: Choices::default() })
    }
}

impl Slot {
    /// Loads the kernel into the context, which is the calling thread's.
    fn load(&self, context: &Arc<CudaContext>) -> Result<Function> {
        let (ordinal, Entry { name, file, shared_bytes, .. }) = (context.ordinal(), &self.entry);
        let text = embedded::PTX.iter().find(|(embedded, _)| embedded == file).map(|(_, text)| *text);
        let text = text.expect("every file that the manifest lists is embedded");
        let function = Module::load(context, file, text)?.function(&self.entry.symbol)?;
        if *shared_bytes > USUAL_SHARED_BYTES {
            // The largest shared memory carve-out, so that as many blocks fit on a multiprocessor as the kernel was
            // tuned for.
            let attributes = [
                (Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes.cast_signed()),
                (Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
            ];
            for (attribute, value) in attributes {
                let set = function.set_attribute(attribute, value);
                let asking = format_args!("asking for {shared_bytes} bytes of shared memory for `{name}`");
                set.during(ordinal, format_args!("cuFuncSetAttribute, {asking},"))?;
            }
        }
        Ok(function)
    }
}

/// The variants chosen so far, by the launch's shape (`KernelLaunch::shape`).
#[derive(Default)]
struct Choices(Mutex<HashMap<String, usize>>);

impl Choices {
    /// Locks the choices. A panic elsewhere leaves no choice half made.
    fn locked(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
