//! A contiguous, dense view of memory that was allocated once.

mod contents;

use std::array;

use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Storage, Tensor};
use half::vec::HalfBitsVecExt;

use crate::element::{BUFFER_TYPES, Scalar};
use crate::huge_pages;
use crate::{Device, Error, Result, bf16};

/// A contiguous view of a Candle tensor's storage. Views and clones share memory.
///
/// An operation takes its outputs as `&mut Buffer` and refuses an output that overlaps another argument. While it runs
/// it holds Candle's locks of the storages involved, so that buffers may be shared between threads: operations on the
/// same storage wait for one another. Two threads that share buffers need a rayon pool each: a worker that waits inside
/// of one operation may otherwise pick up the other, which waits for the first.
#[derive(Clone, Debug)]
pub struct Buffer {
    elements: Elements,
    device: Device,
    /// Address of the first element on the device.
    address: usize,
    /// Identifies the storage: equal for two buffers exactly if they share one.
    storage: usize,
}

/// Where the elements of a buffer are.
#[derive(Clone, Debug)]
enum Elements {
    /// In the storage of a contiguous tensor.
    InTensor(Tensor),
    /// Nowhere: a buffer on PyTorch's meta device has a type and a shape, and no operation takes it.
    Meta { dtype: DType, shape: Vec<usize> },
}

impl Buffer {
    /// A buffer without memory, as an arena that counts hands it out: a meta tensor in PyTorch.
    pub(crate) fn meta(shape: &[usize], dtype: DType) -> Self {
        let elements = Elements::Meta { dtype, shape: shape.to_vec() };
        Self { elements, device: Device::Cpu, address: 0, storage: 0 }
    }

    /// A buffer of its own memory, all zero. On a CPU it begins at a cache line.
    pub fn zeros(shape: &[usize], dtype: DType, device: &Device) -> Result<Self> {
        match device {
            Device::Cpu => {
                let buffer = Self::from_tensor(untouched_zeros(shape, dtype)?, device)?;
                huge_pages::advise(buffer.address, buffer.bytes());
                Ok(buffer)
            }
            Device::Cuda(cuda) => Self::from_tensor(cuda.tensor(shape, dtype)?, device),
        }
    }

    /// A buffer over the memory of a contiguous tensor on this device, shared with it.
    pub fn from_tensor(tensor: Tensor, device: &Device) -> Result<Self> {
        if !tensor.is_contiguous() {
            return Err(Error::NotContiguous { shape: tensor.dims().to_vec(), strides: tensor.stride().to_vec() });
        }
        let address = match device {
            Device::Cpu => cpu_address(&tensor)?,
            Device::Cuda(cuda) => cuda.address_of(&tensor)?,
        };
        let storage = std::ptr::from_ref::<Storage>(&tensor.storage_and_layout().0).addr();
        Ok(Self { elements: Elements::InTensor(tensor), device: device.clone(), address, storage })
    }

    /// The Candle tensor of this view, which shares its memory.
    ///
    /// # Errors
    /// If the buffer has no memory.
    pub fn tensor(&self) -> Result<&Tensor> {
        match &self.elements {
            Elements::InTensor(tensor) => Ok(tensor),
            Elements::Meta { .. } => {
                let problem = "the buffer was counted, not allocated".to_owned();
                Err(Error::Invalid { operation: "Buffer::tensor", problem })
            }
        }
    }

    /// Whether the buffer has no memory.
    pub fn is_meta(&self) -> bool {
        matches!(self.elements, Elements::Meta { .. })
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match &self.elements {
            Elements::InTensor(tensor) => tensor.dtype(),
            Elements::Meta { dtype, .. } => *dtype,
        }
    }

    /// The sizes of the axes.
    pub fn shape(&self) -> &[usize] {
        match &self.elements {
            Elements::InTensor(tensor) => tensor.dims(),
            Elements::Meta { shape, .. } => shape,
        }
    }

    /// The size of an axis; 0 if there is no such axis, which an operation's checks then refuse.
    pub(crate) fn size(&self, axis: usize) -> usize {
        self.shape().get(axis).copied().unwrap_or(0)
    }

    /// The sizes of the first N axes; 0 for one that there is not.
    pub fn sizes<const N: usize>(&self) -> [usize; N] {
        array::from_fn(|axis| self.size(axis))
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        elements_of(self.shape())
    }

    /// The device that the buffer is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns a view of the `shape.product()` elements from `offset_elements` on, which shares their memory.
    pub fn view(&self, offset_elements: usize, shape: &[usize]) -> Result<Self> {
        let count = elements_of(shape);
        if offset_elements.checked_add(count).is_none_or(|end| end > self.elements()) {
            let problem = format!("{count} elements from {offset_elements} on are not within {:?}", self.shape());
            return Err(Error::Invalid { operation: "Buffer::view", problem });
        }
        let elements = match &self.elements {
            Elements::InTensor(tensor) => {
                Elements::InTensor(tensor.flatten_all()?.narrow(0, offset_elements, count)?.reshape(shape)?)
            }
            Elements::Meta { dtype, .. } => Elements::Meta { dtype: *dtype, shape: shape.to_vec() },
        };
        let address = self.address + offset_elements * self.dtype().size_in_bytes();
        Ok(Self { elements, device: self.device.clone(), address, storage: self.storage })
    }

    pub(crate) fn storage_key(&self) -> usize {
        self.storage
    }

    /// The address of its first element on its device. Buffers of one device that are alive together share memory if
    /// they share it.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Whether a byte of it is also one of the other's.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.address < other.address + other.bytes() && other.address < self.address + self.bytes()
    }

    fn bytes(&self) -> usize {
        self.elements() * self.dtype().size_in_bytes()
    }
}

/// The number of elements of a shape; one without memory may have more than any machine.
fn elements_of(shape: &[usize]) -> usize {
    shape.iter().fold(1, |elements, &size| elements.saturating_mul(size))
}

impl Drop for Buffer {
    /// Any thread may be the one that drops the last of a storage's buffers, and so frees its memory.
    fn drop(&mut self) {
        if let Device::Cuda(cuda) = &self.device {
            cuda.enter_to_free();
        }
    }
}

/// Elements handled by one task of an element-wise loop; fixed, so that nothing depends on the number of threads.
pub(crate) const PIECE: usize = 1 << 15;

pub(crate) fn as_bytes<T: Scalar>(values: &[T]) -> &[u8] {
    // SAFETY: every scalar is plain numbers without padding, and bytes have no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

fn as_bytes_mut<T: Scalar>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `as_bytes`; and any bytes are a valid scalar.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// Reinterprets bytes as scalars.
///
/// # Panics
/// If the bytes are not aligned for the scalar, or not a whole number of them.
pub(crate) fn as_scalars<T: Scalar>(bytes: &[u8]) -> &[T] {
    assert!(bytes.as_ptr().cast::<T>().is_aligned() && bytes.len().is_multiple_of(size_of::<T>()));
    // SAFETY: aligned and whole, as checked; any bytes are a valid scalar.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<T>()) }
}

/// Like [`as_scalars`], to be written.
pub(crate) fn as_scalars_mut<T: Scalar>(bytes: &mut [u8]) -> &mut [T] {
    assert!(bytes.as_ptr().cast::<T>().is_aligned() && bytes.len().is_multiple_of(size_of::<T>()));
    // SAFETY: as in `as_scalars`; and any scalar is valid bytes.
    unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len() / size_of::<T>()) }
}

/// Bytes of a line of a processor's caches: 64 on x86 and most of ARM, half a line on Apple's.
pub(crate) const CACHE_LINE: usize = 64;

/// Zeroed CPU memory whose pages the system has not yet allocated; Candle would write zeros of bf16. It begins at a
/// cache line, so that no vector crosses one.
fn untouched_zeros(shape: &[usize], dtype: DType) -> Result<Tensor> {
    let device = &candle_core::Device::Cpu;
    let elements: usize = shape.iter().product();
    let all = elements + CACHE_LINE; // of any size: more than are skipped
    require_memory(all.saturating_mul(dtype.size_in_bytes()))?;
    let tensor = match dtype {
        DType::BF16 => Tensor::from_vec(vec![0u16; all].reinterpret_into::<bf16>(), all, device)?,
        _ => Tensor::zeros(all, dtype, device)?,
    };
    let address = cpu_address(&tensor)?;
    let skipped = (address.next_multiple_of(CACHE_LINE) - address) / dtype.size_in_bytes();
    Ok(tensor.narrow(0, skipped, elements)?.reshape(shape)?)
}

/// Reserves memory and frees it untouched: a `Vec` that fills itself would abort the process if the allocation failed.
fn require_memory(bytes: usize) -> Result<()> {
    Vec::<u8>::new().try_reserve_exact(bytes).map_err(|_| Error::HostMemory { needed: bytes as u64 })
}

/// The address of the tensor's first element in CPU memory, which stays while the storage lives: Candle never resizes
/// it.
fn cpu_address(tensor: &Tensor) -> Result<usize> {
    struct Address(std::cell::Cell<usize>);
    impl InplaceOp1 for Address {
        fn name(&self) -> &'static str {
            "address"
        }
        fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
            // `as_mut_ptr` does not make a reference to the elements, so that the pointer stays valid for writing.
            let (first, size) = match storage {
                CpuStorage::F32(values) => (values.as_mut_ptr().expose_provenance(), 4),
                CpuStorage::BF16(values) => (values.as_mut_ptr().expose_provenance(), 2),
                CpuStorage::U32(values) => (values.as_mut_ptr().expose_provenance(), 4),
                CpuStorage::I32(values) => (values.as_mut_ptr().expose_provenance(), 4),
                CpuStorage::I16(values) => (values.as_mut_ptr().expose_provenance(), 2),
                CpuStorage::U8(values) => (values.as_mut_ptr().expose_provenance(), 1),
                _ => candle_core::bail!("a buffer holds {BUFFER_TYPES}"),
            };
            self.0.set(first + layout.start_offset() * size);
            Ok(())
        }
    }
    let address = Address(std::cell::Cell::new(0));
    tensor.inplace_op1(&address)?;
    Ok(address.0.get())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::*;

    #[test]
    fn buffers_may_go_to_other_threads() {
        fn is_send_and_sync<T: Send + Sync>() {}
        is_send_and_sync::<Buffer>();
        is_send_and_sync::<crate::memory::Arena>();
    }

    #[test]
    fn views_and_the_tensor_share_memory() {
        let mut whole = buffer(&numbers(1, 12), &[3, 4], DType::F32);
        let mut row = whole.view(4, &[2, 2]).unwrap();
        row.write(&[1f32, 2.0, 3.0, 4.0]).unwrap();
        assert_eq!(whole.read::<f32>().unwrap()[4..8], [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(whole.tensor().unwrap().to_vec2::<f32>().unwrap()[1], [1.0, 2.0, 3.0, 4.0]);
        whole.zero().unwrap();
        assert_eq!(row.read::<f32>().unwrap(), [0.0; 4]);
        assert_eq!(row.view(0, &[4]).unwrap().shape(), [4]);
        assert_eq!(row.view(3, &[1]).unwrap().address(), whole.view(7, &[1]).unwrap().address());
    }

    #[test]
    fn zeros_begin_at_a_cache_line() {
        for dtype in [DType::F32, DType::BF16, DType::U32, DType::I32, DType::I16, DType::U8] {
            for elements in [0, 1, 3, 17, 1000, 1 << 20] {
                assert_eq!(zeros(&[elements], dtype).address() % CACHE_LINE, 0, "{elements} of {dtype:?}");
            }
        }
    }

    #[test]
    fn memory_the_system_does_not_give_is_an_error() {
        for dtype in [DType::F32, DType::BF16] {
            let refused = Buffer::zeros(&[1 << 60], dtype, &Device::Cpu).unwrap_err();
            assert!(matches!(refused, Error::HostMemory { .. }), "{refused}");
        }
    }

    #[test]
    fn every_element_type_is_written_read_copied_and_zeroed() {
        fn round_trip<T: Scalar>(values: &[T], zero: T) {
            let source = integers(values);
            let mut copy = zeros(&[values.len()], T::DTYPE);
            copy.copy_from(&source).unwrap();
            assert!(copy.read::<T>().unwrap() == values);
            copy.zero().unwrap();
            assert!(copy.read::<T>().unwrap() == vec![zero; values.len()]);
            assert!(source.read::<T>().unwrap() == values);
        }
        round_trip(&[1.5f32, -2.0], 0.0);
        round_trip(&[bf16::ONE, bf16::MAX], bf16::ZERO);
        round_trip(&[7u32, u32::MAX], 0);
        round_trip(&[-7i32, i32::MIN], 0);
        round_trip(&[-7i16, i16::MIN], 0);
        round_trip(&[7u8, u8::MAX], 0);
        round_trip::<f32>(&[], 0.0);
    }

    #[test]
    fn bf16_is_read_widened() {
        assert_eq!(integers(&[bf16::ONE, bf16::NEG_ONE]).read_f32().unwrap(), [1.0, -1.0]);
        assert!(matches!(integers(&[1u32]).read_f32(), Err(Error::DType { .. })));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut buffer = zeros(&[2, 3], DType::F32);
        assert!(matches!(buffer.write(&[1f32; 5]), Err(Error::Shape { .. })));
        assert!(matches!(buffer.write(&[1i32; 6]), Err(Error::DType { .. })));
        assert!(matches!(buffer.read::<bf16>(), Err(Error::DType { .. })));
        assert!(matches!(buffer.copy_from(&zeros(&[3, 2], DType::F32)), Err(Error::Shape { .. })));
        assert!(buffer.view(3, &[4]).is_err());
        assert!(buffer.view(usize::MAX, &[2]).is_err());
        assert!(buffer.view(0, &[7]).is_err());
        let transposed = buffer.tensor().unwrap().t().unwrap();
        assert!(matches!(Buffer::from_tensor(transposed, &Device::Cpu), Err(Error::NotContiguous { .. })));
        assert!([DType::F64, DType::F4].iter().all(|&dtype| Buffer::zeros(&[2], dtype, &Device::Cpu).is_err()));
    }

    #[test]
    fn copying_onto_an_overlapping_view_is_refused() {
        let whole = zeros(&[6], DType::F32);
        let mut overlapping = whole.view(2, &[4]).unwrap();
        let error = overlapping.copy_from(&whole.view(0, &[4]).unwrap()).unwrap_err();
        assert!(matches!(error, Error::Aliased { output: "buffer", other: "source", .. }), "{error}");
        let mut tail = whole.view(3, &[3]).unwrap();
        tail.copy_from(&whole.view(0, &[3]).unwrap()).unwrap();
    }
}
