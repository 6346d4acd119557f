//! Asynchronous copies from the host to a device.

use std::fmt;
use std::marker::PhantomData;

use crate::buffer::as_scalars_mut;
use crate::cuda::HostToDevice;
use crate::{Buffer, Device, Error, Result, Scalar};

/// Host memory to fill, and the buffer that it is copied to: [`Upload::stage`], [`Upload::send`],
/// [`Upload::receive`], in turn.
///
/// On a GPU the memory is pinned and `send` returns at once: a second stream copies to the staging buffer, beside
/// whatever the GPU computes, and `receive` makes the computation wait for it. Of two uploads to one target, one
/// travels while the other's values are computed with.
///
/// ```
/// use kernels::{Buffer, DType, Device, Upload};
///
/// let tokens = Buffer::zeros(&[2, 3], DType::U32, &Device::Cpu)?;
/// let mut upload = Upload::<u32>::new(tokens.clone(), None)?;
/// upload.stage()?.copy_from_slice(&[1, 2, 3, 4, 5, 6]);
/// upload.send()?;
/// upload.receive()?;
/// assert_eq!(tokens.read::<u32>()?, [1, 2, 3, 4, 5, 6]);
/// # Ok::<(), kernels::Error>(())
/// ```
pub struct Upload<T: Scalar> {
    // Dropped before the buffers: it waits for its copies.
    from: Source<T>,
    target: Buffer,
    under_way: bool,
}

enum Source<T> {
    Host(Vec<T>),
    Pinned { transfer: HostToDevice, staging: Buffer, elements: PhantomData<T> },
}

impl<T: Scalar> fmt::Debug for Upload<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Upload").field("target", &self.target).finish_non_exhaustive()
    }
}

impl<T: Scalar> Upload<T> {
    /// Prepares copies to a buffer of `T`; on a GPU by way of a staging buffer of the same shape that nothing else
    /// uses. On a CPU `staging` has no use.
    pub fn new(target: Buffer, staging: Option<Buffer>) -> Result<Self> {
        check::<T>("target", &target, target.shape())?;
        let from = match target.device() {
            Device::Cpu if target.is_meta() => Source::Host(Vec::new()),
            Device::Cpu => Source::Host(vec![T::zero(); target.elements()]),
            Device::Cuda(cuda) => {
                let Some(staging) = staging else {
                    return Err(out_of_order("a GPU needs a staging buffer"));
                };
                check::<T>("staging", &staging, target.shape())?;
                if !staging.device().is_same(target.device()) || staging.overlaps(&target) {
                    return Err(out_of_order("the staging buffer needs memory of its own on the target's GPU"));
                }
                let transfer = HostToDevice::new(cuda, target.elements() * size_of::<T>())?;
                Source::Pinned { transfer, staging, elements: PhantomData }
            }
        };
        Ok(Self { from, target, under_way: false })
    }

    /// Returns the host memory, all of it to be filled, after waiting until the last copy has left it.
    pub fn stage(&mut self) -> Result<&mut [T]> {
        if self.under_way {
            return Err(out_of_order("what was sent has not been received"));
        }
        match &mut self.from {
            Source::Host(values) => Ok(values),
            Source::Pinned { transfer, .. } => transfer.stage().map(as_scalars_mut),
        }
    }

    /// Starts the copy; on a GPU to the staging buffer.
    pub fn send(&mut self) -> Result<()> {
        if self.under_way {
            return Err(out_of_order("what was sent has not been received"));
        }
        if let Source::Pinned { transfer, staging, .. } = &mut self.from {
            transfer.send(staging.address())?;
        }
        self.under_way = true;
        Ok(())
    }

    /// Copies what was sent to the target, before anything asked of the device after this.
    pub fn receive(&mut self) -> Result<()> {
        if !self.under_way {
            return Err(out_of_order("nothing was sent"));
        }
        match &mut self.from {
            Source::Host(values) => self.target.write(values)?,
            Source::Pinned { transfer, staging, .. } => transfer.receive(staging.address(), self.target.address())?,
        }
        self.under_way = false;
        Ok(())
    }
}

fn check<T: Scalar>(argument: &'static str, buffer: &Buffer, shape: &[usize]) -> Result<()> {
    let operation = "Upload::new";
    if buffer.dtype() != T::DTYPE {
        return Err(Error::DType { operation, argument, expected: "the upload's type", actual: buffer.dtype() });
    }
    if buffer.shape() != shape {
        return Err(Error::Shape { operation, argument, expected: shape.to_vec(), actual: buffer.shape().to_vec() });
    }
    Ok(())
}

fn out_of_order(problem: &str) -> Error {
    Error::Invalid { operation: "Upload", problem: problem.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::testing::*;

    #[test]
    fn receive_writes_the_staged_values_to_the_target() {
        let target = integers(&[0i32; 3]);
        let mut uploads = [(); 2].map(|()| Upload::<i32>::new(target.clone(), None).unwrap());
        uploads[0].stage().unwrap().copy_from_slice(&[1, 2, 3]);
        uploads[0].send().unwrap();
        uploads[1].stage().unwrap().copy_from_slice(&[4, 5, 6]);
        uploads[1].send().unwrap();
        assert_eq!(target.read::<i32>().unwrap(), [0; 3]);
        uploads[0].receive().unwrap();
        assert_eq!(target.read::<i32>().unwrap(), [1, 2, 3]);
        uploads[1].receive().unwrap();
        assert_eq!(target.read::<i32>().unwrap(), [4, 5, 6]);
    }

    #[test]
    fn stage_send_and_receive_must_alternate() {
        let mut upload = Upload::<f32>::new(zeros(&[2], DType::F32), None).unwrap();
        assert!(upload.receive().is_err());
        upload.send().unwrap();
        assert!(upload.stage().is_err());
        assert!(upload.send().is_err());
        upload.receive().unwrap();
        assert!(upload.receive().is_err());
        assert_eq!(upload.stage().unwrap(), [0.0, 0.0]);
    }

    #[test]
    fn a_target_of_another_type_is_refused() {
        assert!(matches!(Upload::<u32>::new(zeros(&[2], DType::I32), None), Err(Error::DType { .. })));
    }
}
