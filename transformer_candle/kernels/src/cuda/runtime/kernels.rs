//! Kernels: loaded at first use, launched after their arguments were checked against the manifest.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, OnceLock};

use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute as Attribute;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, result};

use super::Cuda;
use super::failure::Context as _;
use super::module::{Function, Module};
use crate::cuda::KernelArg;
use crate::cuda::launch::KernelLaunch;
use crate::cuda::manifest::{Entry, Manifest};
use crate::{Error, Result};

/// The text of the manifest and of every PTX file that it lists, by name.
mod embedded {
    include!(concat!(env!("OUT_DIR"), "/ptx.rs"));
}

mod variants;

/// Shared memory of a block that needs no attribute.
const USUAL_SHARED_BYTES: u32 = 48 * 1024;

/// The kernels for this GPU, by name, with their variants; the first is used without timing.
pub(super) struct Kernels {
    slots: HashMap<String, Vec<Slot>>,
    choices: variants::Choices,
}

struct Slot {
    entry: Entry,
    function: OnceLock<Function>,
}

/// A loaded kernel.
pub(crate) struct Kernel<'a> {
    cuda: &'a Cuda,
    entry: &'a Entry,
    function: &'a Function,
}

impl Kernels {
    pub(super) fn for_gpu(compute_capability: (u32, u32)) -> Result<Self, String> {
        let entries = Manifest::for_gpu(embedded::MANIFEST, compute_capability)?;
        let slots = |variants: Vec<Entry>| {
            variants.into_iter().map(|entry| Slot { entry, function: OnceLock::new() }).collect()
        };
        let slots = entries.into_iter().map(|(name, variants)| (name, slots(variants))).collect();
        Ok(Self { slots, choices: variants::Choices::default() })
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

impl Cuda {
    /// The kernel of a launch. If it has several variants, the first launch of a shape times them and waits for the
    /// GPU.
    pub(crate) fn kernel(&self, launch: &KernelLaunch) -> Result<Kernel<'_>> {
        let name = &launch.kernel;
        let Some(variants) = self.0.kernels.slots.get(name) else {
            let call = format!("looking up the kernel `{name}`");
            return Err(Error::Cuda { ordinal: self.ordinal(), call, reason: "it was not compiled".to_owned() });
        };
        let variant = if variants.len() == 1 { 0 } else { self.variant(launch, variants)? };
        self.load(&variants[variant])
    }

    fn load<'a>(&'a self, slot: &'a Slot) -> Result<Kernel<'a>> {
        let function = if let Some(function) = slot.function.get() {
            function
        } else {
            let _guard = self.lock_stream();
            self.enter()?;
            let loaded = slot.load(&self.0.context)?;
            slot.function.get_or_init(|| loaded)
        };
        Ok(Kernel { cuda: self, entry: &slot.entry, function })
    }
}

impl Kernel<'_> {
    /// A constant that the kernel was compiled with, such as the rows of a tile.
    ///
    /// # Panics
    /// If it has no integer of that name: the manifest is checked in beside the callers.
    pub(crate) fn constant(&self, name: &str) -> usize {
        let constant = self.entry.constant(name);
        constant.unwrap_or_else(|| panic!("the kernel `{}` has no constant `{name}`", self.entry.name))
    }

    /// Launches `grid` blocks; none if one of the three is 0.
    ///
    /// # Errors
    /// If the values do not match the manifest, or the driver refuses. Nothing was launched then.
    pub(crate) fn launch(&self, grid: [usize; 3], values: &[KernelArg]) -> Result<()> {
        let (ordinal, name) = (self.cuda.ordinal(), &self.entry.name);
        let call = format_args!("cuLaunchKernel of `{name}`");
        let checked = self.entry.check(grid, values);
        let Some(mut launch) = checked.map_err(|reason| Error::Cuda { ordinal, call: call.to_string(), reason })?
        else {
            return Ok(());
        };
        let words = launch.words.iter_mut();
        let mut arguments: Vec<*mut c_void> = words.map(|word| std::ptr::from_mut(word).cast()).collect();
        let [x, y, z] = launch.grid;
        self.cuda.enter()?;
        // SAFETY: the context is the thread's and the function was loaded into it. There are as many arguments as the
        // kernel has, each of its type and followed by at least that type's bytes, which the driver copies before it
        // returns. The addresses are of buffers that the operation checked (`access.rs`) for shape, type and overlap,
        // and that are freed on this stream, so later.
        unsafe {
            let stream = self.cuda.stream().cu_stream();
            let shared = self.entry.shared_bytes;
            let block = (launch.threads, 1, 1);
            result::launch_kernel(self.function.handle(), (x, y, z), block, shared, stream, &mut arguments)
        }
        .during(ordinal, call)
    }
}
