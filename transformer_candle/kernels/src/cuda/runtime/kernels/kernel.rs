//! A kernel of an open GPU, launched after its arguments were checked against the manifest.

use std::ffi::c_void;

use candle_core::cuda_backend::cudarc::driver::result;

use super::super::Cuda;
use super::super::failure::Context as _;
use super::super::module::Function;
use super::Slot;
use crate::cuda::KernelArg;
use crate::cuda::launch::KernelLaunch;
use crate::cuda::manifest::Entry;
use crate::{Error, Result};

/// A loaded kernel.
pub(crate) struct Kernel<'a> {
    cuda: &'a Cuda,
    entry: &'a Entry,
    function: &'a Function,
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

    pub(super) fn load<'a>(&'a self, slot: &'a Slot) -> Result<Kernel<'a>> {
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
