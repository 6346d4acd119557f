//! Turns buffers into slices: the checks that every operation makes of its arguments, and the only access to their
//! memory.

use std::cell::RefCell;
use std::ops::Range;

use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Tensor};

#[cfg(test)]
use crate::cuda::recording;
use crate::cuda::{self, Cuda, Launch};
use crate::element::{BUFFER_TYPES, Scalar};
use crate::{Buffer, Device, DeviceKind, Error, Result, timing};

/// The arguments of one call. Each is checked as it is added; the first problem is reported by [`Arguments::run`].
pub(crate) struct Arguments {
    operation: &'static str,
    list: Vec<Argument>,
    problem: Option<Error>,
}

struct Argument {
    name: &'static str,
    is_written: bool,
    tensor: Tensor,
    storage: usize,
    device: Device,
    /// Address range of the argument's bytes on its device.
    bytes: Range<usize>,
}

/// Access to the arguments' elements, given to the CPU body of [`Arguments::run`]: the arguments' storages are locked,
/// and no output overlaps another argument.
pub(crate) struct Access<'a> {
    list: &'a [Argument],
}

impl Arguments {
    pub(crate) fn new(operation: &'static str) -> Self {
        Self { operation, list: Vec::with_capacity(10), problem: None }
    }

    /// Adds an argument that is only read.
    pub(crate) fn input(self, name: &'static str, buffer: &Buffer, dtype: DType, shape: &[usize]) -> Self {
        self.checked(name, buffer, dtype, shape).add(name, buffer, false)
    }

    /// Adds an argument that is only read, if it is given.
    pub(crate) fn optional_input(
        self,
        name: &'static str,
        buffer: Option<&Buffer>,
        dtype: DType,
        shape: &[usize],
    ) -> Self {
        match buffer {
            Some(buffer) => self.input(name, buffer, dtype, shape),
            None => self,
        }
    }

    /// Adds an argument that is written, or read and written in place.
    pub(crate) fn output(self, name: &'static str, buffer: &Buffer, dtype: DType, shape: &[usize]) -> Self {
        self.checked(name, buffer, dtype, shape).add(name, buffer, true)
    }

    /// Adds an argument that is written, if it is given.
    pub(crate) fn optional_output(
        self,
        name: &'static str,
        buffer: Option<&Buffer>,
        dtype: DType,
        shape: &[usize],
    ) -> Self {
        match buffer {
            Some(buffer) => self.output(name, buffer, dtype, shape),
            None => self,
        }
    }

    /// Adds an F32 scratch buffer of any shape with at least `needed` elements.
    pub(crate) fn workspace(mut self, buffer: &Buffer, needed: usize) -> Self {
        if buffer.elements() < needed {
            let (operation, actual) = (self.operation, buffer.elements());
            self.problem.get_or_insert(Error::Workspace { operation, needed, actual });
        }
        self.checked("workspace", buffer, DType::F32, buffer.shape()).add("workspace", buffer, true)
    }

    /// Requires that a result which a CPU may keep in F32 has the operands' element type on a GPU: its kernels are
    /// compiled for one.
    pub(crate) fn same_on_a_gpu(self, name: &'static str, result: &Buffer, dtype: DType) -> Self {
        let actual = result.dtype();
        self.require(actual == dtype || result.device().kind() == DeviceKind::Cpu, || {
            format!("on a GPU `{name}` must be {}, it is {}", dtype_name(dtype), dtype_name(actual))
        })
    }

    /// Adds any other condition on the arguments; `problem` is the message if it is not met.
    pub(crate) fn require(mut self, condition: bool, problem: impl FnOnce() -> String) -> Self {
        if !condition && self.problem.is_none() {
            self.problem = Some(Error::Invalid { operation: self.operation, problem: problem() });
        }
        self
    }

    fn checked(mut self, name: &'static str, buffer: &Buffer, dtype: DType, shape: &[usize]) -> Self {
        let (operation, argument) = (self.operation, name);
        if self.problem.is_some() {
        } else if buffer.shape() != shape {
            let (expected, actual) = (shape.to_vec(), buffer.shape().to_vec());
            self.problem = Some(Error::Shape { operation, argument, expected, actual });
        } else if buffer.dtype() != dtype {
            let (expected, actual) = (dtype_name(dtype), buffer.dtype());
            self.problem = Some(Error::DType { operation, argument, expected, actual });
        }
        self
    }

    fn add(mut self, name: &'static str, buffer: &Buffer, is_written: bool) -> Self {
        let size = buffer.elements() * buffer.dtype().size_in_bytes();
        let bytes = buffer.address()..buffer.address() + size;
        let (storage, device) = (buffer.storage_key(), buffer.device().clone());
        match buffer.tensor() {
            Ok(tensor) => self.list.push(Argument { name, is_written, tensor: tensor.clone(), storage, device, bytes }),
            Err(error) => self.problem = self.problem.or(Some(error)),
        }
        self
    }

    /// Runs an operation on the device of its arguments: its CPU version, or its launches on a GPU.
    pub(crate) fn run<L: AsRef<[Launch]>>(
        self,
        cpu: impl FnOnce(&Access<'_>) -> Result<()>,
        launches: impl FnOnce() -> L,
    ) -> Result<()> {
        #[cfg(test)]
        if recording::is_active() {
            return self.checked_all().map(|_| recording::add(launches().as_ref()));
        }
        self.dispatch(cpu, |gpu| cuda::run(gpu, launches().as_ref()))
    }

    /// Runs the body for the device of the arguments: the CPU's with every storage involved locked, or CUDA's, which
    /// takes addresses: a GPU's operations run in stream order and are launched by one thread at a time.
    pub(crate) fn dispatch<R>(
        self,
        cpu: impl FnOnce(&Access<'_>) -> Result<R>,
        cuda: impl FnOnce(&Cuda) -> Result<R>,
    ) -> Result<R> {
        let arguments = self.checked_all()?;
        let device = arguments.list.first().map_or(Device::Cpu, |first| first.device.clone());
        match &device {
            Device::Cpu => timing::operation(arguments.operation, &device, || arguments.locked(cpu)),
            Device::Cuda(gpu) => {
                let _guard = gpu.lock_stream();
                gpu.hold(arguments.list.iter().map(|argument| (argument.storage, &argument.tensor)));
                timing::operation(arguments.operation, &device, || cuda(gpu))
            }
        }
    }

    /// The arguments, if nothing is wrong with them.
    fn checked_all(mut self) -> Result<Self> {
        match self.problem.take() {
            Some(problem) => Err(problem),
            None => self.check_memory().map(|()| self),
        }
    }

    /// Runs a body that only a CPU has.
    #[cfg(test)]
    pub(crate) fn cpu<R>(self, body: impl FnOnce(&Access<'_>) -> Result<R>) -> Result<R> {
        let (operation, argument) = (self.operation, self.list.first().map_or("", |first| first.name));
        self.dispatch(body, |gpu| {
            let device = Device::Cuda(gpu.clone()).to_string();
            Err(Error::Unsupported { operation, argument, device })
        })
    }

    fn locked<R>(self, body: impl FnOnce(&Access<'_>) -> Result<R>) -> Result<R> {
        let mut locks: Vec<Lock<'_>> = Vec::with_capacity(self.list.len());
        for Argument { storage, tensor, is_written, .. } in &self.list {
            match locks.iter_mut().find(|lock| lock.storage == *storage) {
                Some(lock) => lock.is_written |= is_written,
                None => locks.push(Lock { storage: *storage, tensor, is_written: *is_written }),
            }
        }
        // Always in the same order, so that two threads cannot wait for each other.
        locks.sort_unstable_by_key(|lock| lock.storage);
        let (mut body, mut result) = (Some(body), None);
        with_locks(&locks, &mut || {
            result = body.take().map(|body| body(&Access { list: &self.list }));
        })?;
        result.expect("with_locks runs its body exactly once unless it fails")
    }

    /// Checks that all arguments are on one device, and that no output overlaps another argument.
    fn check_memory(&self) -> Result<()> {
        let operation = self.operation;
        for (index, one) in self.list.iter().enumerate() {
            if !one.device.is_same(&self.list[0].device) {
                return Err(Error::Unsupported { operation, argument: one.name, device: one.device.to_string() });
            }
            for other in &self.list[..index] {
                if (one.is_written || other.is_written) && one.overlaps(other) {
                    let (output, other) = if one.is_written { (one, other) } else { (other, one) };
                    return Err(Error::Aliased { operation, output: output.name, other: other.name });
                }
            }
        }
        Ok(())
    }
}

impl Argument {
    fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (&self.bytes, &other.bytes);
        !a.is_empty() && !b.is_empty() && a.start < b.end && b.start < a.end
    }
}

impl Buffer {
    /// Returns the elements of an input of the call.
    pub(crate) fn slice<'a, T: Scalar>(&'a self, access: &'a Access<'_>) -> &'a [T] {
        let address = access.address_of::<T>(self, false);
        // SAFETY: the address comes from `Vec::as_mut_ptr` of the storage, is aligned for T (the storage's element
        // type, as T::DTYPE == dtype) and is followed by `elements` initialised elements that the view's construction
        // found inside of the storage. The storage lives as long as `self`; `access` holds its lock, and no output of
        // the call overlaps this argument, so it is not written while the slice lives.
        unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), self.elements()) }
    }

    /// Returns the elements of an output of the call.
    pub(crate) fn slice_mut<'a, T: Scalar>(&'a mut self, access: &'a Access<'_>) -> &'a mut [T] {
        let address = access.address_of::<T>(self, true);
        // SAFETY: as in `slice`; and as an output of the call it overlaps no other argument, its storage's lock is held
        // for writing, and `&mut self` keeps a second slice of it from being made.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address), self.elements()) }
    }
}

impl Access<'_> {
    /// The address of an argument, checked to be one of this call's with the right element type and direction.
    fn address_of<T: Scalar>(&self, buffer: &Buffer, is_written: bool) -> usize {
        let address = buffer.address();
        let end = address + buffer.elements() * buffer.dtype().size_in_bytes();
        let bytes = address..end;
        let is_declared =
            |one: &Argument| one.storage == buffer.storage_key() && one.bytes == bytes && one.is_written == is_written;
        assert!(self.list.iter().any(is_declared), "an operation touches a buffer it did not declare");
        assert!(T::DTYPE == buffer.dtype(), "{:?} taken for {:?}", buffer.dtype(), T::DTYPE);
        address
    }
}

struct Lock<'a> {
    storage: usize,
    tensor: &'a Tensor,
    is_written: bool,
}

/// Runs `body` once while Candle's locks of these storages are held.
fn with_locks(locks: &[Lock<'_>], body: &mut dyn FnMut()) -> Result<()> {
    let Some((first, rest)) = locks.split_first() else {
        body();
        return Ok(());
    };
    if first.is_written {
        // An in-place operation is Candle's public way to a storage's write lock.
        let mut failure = None;
        let mut inside = || failure = with_locks(rest, body).err();
        first.tensor.inplace_op1(&Locked(RefCell::new(&mut inside)))?;
        failure.map_or(Ok(()), Err)
    } else {
        let _guard = first.tensor.storage_and_layout();
        with_locks(rest, body)
    }
}

struct Locked<'a>(RefCell<&'a mut dyn FnMut()>);

impl InplaceOp1 for Locked<'_> {
    fn name(&self) -> &'static str {
        "locked"
    }

    fn cpu_fwd(&self, _storage: &mut CpuStorage, _layout: &Layout) -> candle_core::Result<()> {
        (self.0.borrow_mut())();
        Ok(())
    }
}

fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "F32",
        DType::BF16 => "BF16",
        DType::U32 => "U32",
        DType::I32 => "I32",
        DType::I16 => "I16",
        DType::U8 => "U8",
        _ => BUFFER_TYPES,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::*;

    #[test]
    fn the_first_problem_is_the_one_reported() {
        let buffer = zeros(&[2], DType::F32);
        let arguments = Arguments::new("test")
            .input("a", &buffer, DType::F32, &[2])
            .input("b", &buffer, DType::F32, &[3])
            .output("c", &buffer, DType::I16, &[2])
            .require(false, || unreachable!("there is a problem already"));
        let error = arguments.cpu(|_| Ok(())).unwrap_err();
        assert_eq!(error.to_string(), "test: `b` has shape [2], expected [3]");
    }

    #[test]
    fn inputs_may_share_memory_and_empty_outputs_overlap_nothing() {
        let buffer = zeros(&[4], DType::F32);
        let empty = buffer.view(2, &[0]).unwrap();
        let arguments = Arguments::new("test")
            .input("a", &buffer, DType::F32, &[4])
            .input("b", &buffer, DType::F32, &[4])
            .output("c", &empty, DType::F32, &[0]);
        arguments.cpu(|_| Ok(())).unwrap();
    }

    #[test]
    #[should_panic(expected = "did not declare")]
    fn an_operation_cannot_write_an_input() {
        let mut buffer = zeros(&[4], DType::F32);
        let arguments = Arguments::new("test").input("a", &buffer, DType::F32, &[4]);
        let _ = arguments.cpu(|access| Ok(buffer.slice_mut::<f32>(access).len()));
    }

    #[test]
    fn an_error_of_the_body_comes_out() {
        let mut buffer = zeros(&[4], DType::F32);
        let arguments = Arguments::new("test").output("a", &buffer, DType::F32, &[4]);
        let error =
            arguments.cpu(|_| -> Result<()> { Err(Error::Invalid { operation: "test", problem: "no".into() }) });
        assert_eq!(error.unwrap_err().to_string(), "test: no");
        buffer.zero().unwrap();
    }

    #[test]
    fn threads_that_write_the_same_storages_take_turns() {
        let (first, second) = (zeros(&[1000], DType::F32), zeros(&[1000], DType::F32));
        let work = |a: &Buffer, b: &Buffer| {
            let (mut a, mut b) = (a.clone(), b.clone());
            for _ in 0..200 {
                let arguments =
                    Arguments::new("test").output("a", &a, DType::F32, &[1000]).output("b", &b, DType::F32, &[1000]);
                arguments
                    .cpu(|access| {
                        let (a, b) = (a.slice_mut::<f32>(access), b.slice_mut::<f32>(access));
                        a.iter_mut().chain(b).for_each(|value| *value += 1.0);
                        Ok(())
                    })
                    .unwrap();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| work(&first, &second));
            scope.spawn(|| work(&second, &first));
        });
        assert!(first.read::<f32>().unwrap().iter().all(|&value| value == 400.0));
    }
}
