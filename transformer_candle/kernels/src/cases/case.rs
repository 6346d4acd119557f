//! One call of an operation: its arguments, what it may write, the tolerance of its results, and what it costs.
//!
//! Every argument is allocated between guards; outputs and workspaces are filled with a poison value. So whoever runs a
//! case also finds elements left unwritten, out-of-bounds writes, and writes into an input.

use super::{BufferContents, Inputs};
use crate::cast::reference::split;
use crate::fp8::ScaleBlock;
use crate::{Buffer, DType, Device, DeviceKind, Result};

/// Elements before and behind every argument. A multiple of 256 bytes of any type, so that arguments stay aligned.
pub const GUARD: usize = 128;

/// The role of an argument in the call.
pub enum Role {
    /// Read only.
    Input,
    /// Overwritten; its relative error must not exceed this bound.
    Output(f64),
    /// Read and written; its relative error must not exceed this bound.
    Updated(f64),
    /// Read and written freely; compared through another argument or not at all.
    Scratch,
    /// F32 elements, as many as the operation needs on the device.
    Workspace(Box<dyn Fn(DeviceKind) -> usize + Send + Sync>),
}

/// An argument of a case.
pub struct Argument {
    /// Its name in messages.
    pub name: &'static str,
    /// What the call does with it.
    pub role: Role,
    /// Its shape; empty for a workspace.
    pub shape: Vec<usize>,
    /// Its contents before the call.
    pub contents: BufferContents,
}

/// The arguments of a case on a device.
pub struct Allocated {
    /// The memory of each, guards included.
    pub memory: Vec<Buffer>,
    /// What the call gets: the memory between the guards.
    views: Vec<Buffer>,
}

type Call = dyn Fn(&mut [Buffer]) -> Result<()> + Send + Sync;

/// An operation with its arguments.
pub struct Case {
    /// Operation and element type, such as `swiglu::forward bf16`.
    pub name: String,
    /// The sizes of the call, such as `7 x 48`.
    pub sizes: String,
    /// The arguments in the order of the call.
    pub arguments: Vec<Argument>,
    /// Whether an exact reference has BF16 arguments widened to F32. Not for operations that are defined bit by bit.
    pub widened: bool,
    /// The scales of its fp8 GEMMs, which not every GPU multiplies with; none without such GEMMs.
    pub fp8: Option<ScaleBlock>,
    /// FLOPs of the call's matmuls.
    pub flops: usize,
    /// Bytes that the call must move where those are not all of its arguments.
    bytes: Option<usize>,
    call: Box<Call>,
    observe: Box<Call>,
}

impl Case {
    /// A case whose reference is the CPU in F32, with the same input values.
    pub fn new(name: impl Into<String>, sizes: impl Into<String>) -> Self {
        let nothing = || -> Box<Call> { Box::new(|_: &mut [Buffer]| Ok(())) };
        let (name, sizes, arguments) = (name.into(), sizes.into(), Vec::new());
        let (fp8, flops, bytes) = (None, 0, None);
        Self { name, sizes, arguments, widened: true, fp8, flops, bytes, call: nothing(), observe: nothing() }
    }

    /// Makes the reference compute in the given types, for operations that are defined bit by bit.
    #[must_use]
    pub fn in_given_types(mut self) -> Self {
        self.widened = false;
        self
    }

    /// Says that the call multiplies in fp8.
    #[must_use]
    pub fn multiplies_in_fp8(mut self, block: ScaleBlock) -> Self {
        self.fp8 = Some(block);
        self
    }

    /// Says how many FLOPs the call's matmuls have.
    #[must_use]
    pub fn flops(mut self, flops: usize) -> Self {
        self.flops = flops;
        self
    }

    /// Says how many bytes the call must move, where it does not use all elements of its arguments.
    #[must_use]
    pub fn bytes(mut self, bytes: usize) -> Self {
        self.bytes = Some(bytes);
        self
    }

    fn argument(mut self, name: &'static str, role: Role, shape: &[usize], contents: BufferContents) -> Self {
        self.arguments.push(Argument { name, role, shape: shape.to_vec(), contents });
        self
    }

    /// Adds an argument that is only read.
    #[must_use]
    pub fn input(self, name: &'static str, shape: &[usize], contents: BufferContents) -> Self {
        self.argument(name, Role::Input, shape, contents)
    }

    /// Adds an argument that the call overwrites.
    #[must_use]
    pub fn output(self, name: &'static str, shape: &[usize], dtype: DType, bound: f64) -> Self {
        self.argument(name, Role::Output(bound), shape, poison(dtype, shape))
    }

    /// Adds an argument that the call reads and writes.
    #[must_use]
    pub fn updated(self, name: &'static str, shape: &[usize], contents: BufferContents, bound: f64) -> Self {
        self.argument(name, Role::Updated(bound), shape, contents)
    }

    /// Adds scratch memory filled with a poison value.
    #[must_use]
    pub fn scratch(self, name: &'static str, shape: &[usize], dtype: DType) -> Self {
        self.argument(name, Role::Scratch, shape, poison(dtype, shape))
    }

    /// Adds state that the call updates, and that is compared through another argument.
    #[must_use]
    pub fn state(self, name: &'static str, shape: &[usize], contents: BufferContents) -> Self {
        self.argument(name, Role::Scratch, shape, contents)
    }

    /// Adds random BF16 weights and their I16 low bits, which the call updates, and the F32 master weights that are
    /// joined from them for the comparison.
    #[must_use]
    pub fn master_weight(self, inputs: &mut Inputs, shape: &[usize], bound: f64) -> Self {
        let masters = inputs.random.numbers(shape.iter().product());
        let (weight, low_bits): (Vec<u32>, Vec<u32>) = masters
            .into_iter()
            .map(split)
            .map(|(weight, low_bits)| (u32::from(weight.to_bits()), u32::from(low_bits.cast_unsigned())))
            .unzip();
        self.state("weight", shape, BufferContents { dtype: DType::BF16, bits: weight })
            .state("low_bits", shape, BufferContents { dtype: DType::I16, bits: low_bits })
            .output("master", shape, DType::F32, bound)
    }

    /// Adds the workspace: as many F32 elements as the operation needs on a kind of device.
    #[must_use]
    pub fn workspace(self, elements: impl Fn(DeviceKind) -> usize + Send + Sync + 'static) -> Self {
        self.argument("workspace", Role::Workspace(Box::new(elements)), &[], poison(DType::F32, &[0]))
    }

    /// Sets the call, which gets the arguments in the order they were added.
    #[must_use]
    pub fn call<const N: usize>(
        mut self,
        call: impl Fn([&mut Buffer; N]) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.call = boxed(call);
        self
    }

    /// Sets what is done after the call so that its results can be compared; it is not part of what is timed.
    #[must_use]
    pub fn observe<const N: usize>(
        mut self,
        observe: impl Fn([&mut Buffer; N]) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.observe = boxed(observe);
        self
    }

    /// Allocates the arguments on a device, BF16 ones widened to F32 on request.
    pub fn allocate(&self, device: &Device, widened: bool) -> Result<Allocated> {
        let pairs = self.arguments.iter().map(|argument| argument.allocate(device, widened));
        let (memory, views) = pairs.collect::<Result<Vec<_>>>()?.into_iter().unzip();
        Ok(Allocated { memory, views })
    }

    /// Makes the call.
    pub fn run(&self, arguments: &mut Allocated) -> Result<()> {
        (self.call)(&mut arguments.views)
    }

    /// Makes the call on newly allocated arguments and returns their memory, guards included.
    pub fn results(&self, device: &Device, widened: bool) -> Result<Vec<Buffer>> {
        let mut arguments = self.allocate(device, widened)?;
        self.run(&mut arguments)?;
        (self.observe)(&mut arguments.views)?;
        Ok(arguments.memory)
    }

    /// Bytes that the call must move: what it reads once, and what it writes once.
    pub fn bytes_moved(&self) -> usize {
        let argument_bytes = |argument: &Argument| {
            let bytes = argument.contents.bits.len() * argument.contents.dtype.size_in_bytes();
            match argument.role {
                Role::Input | Role::Output(_) => bytes,
                Role::Updated(_) => 2 * bytes,
                Role::Scratch | Role::Workspace(_) => 0,
            }
        };
        self.bytes.unwrap_or_else(|| self.arguments.iter().map(argument_bytes).sum())
    }
}

fn boxed<const N: usize>(call: impl Fn([&mut Buffer; N]) -> Result<()> + Send + Sync + 'static) -> Box<Call> {
    Box::new(move |arguments| {
        let arguments: &mut [Buffer; N] = arguments.try_into().expect("a case calls with the arguments it has");
        call(arguments.each_mut())
    })
}

impl Argument {
    fn allocate(&self, device: &Device, widened: bool) -> Result<(Buffer, Buffer)> {
        let (shape, contents) = match &self.role {
            Role::Workspace(elements) => {
                let shape = vec![elements(device.kind())];
                (shape.clone(), poison(DType::F32, &shape))
            }
            _ if widened => (self.shape.clone(), self.contents.widened()),
            _ => (self.shape.clone(), self.contents.clone()),
        };
        let guard = vec![guard(contents.dtype); GUARD];
        let whole = BufferContents { dtype: contents.dtype, bits: [guard.clone(), contents.bits, guard].concat() };
        let mut memory = Buffer::zeros(&[whole.bits.len()], whole.dtype, device)?;
        whole.write_to(&mut memory)?;
        let view = memory.view(GUARD, &shape)?;
        Ok((memory, view))
    }

    /// Whether the call may leave anything in the argument.
    pub fn is_scratch(&self) -> bool {
        matches!(self.role, Role::Scratch | Role::Workspace(_))
    }

    /// Returns what is wrong with the argument's memory after the call: a guard or an input that was written, or an
    /// element of an output that was not.
    pub fn memory_problems(&self, memory: &BufferContents) -> Vec<String> {
        let (name, dtype, mut problems) = (self.name, memory.dtype, Vec::new());
        let end = memory.bits.len() - GUARD;
        let guards = memory.bits[..GUARD].iter().chain(&memory.bits[end..]);
        let outside = guards.filter(|&&bits| bits != guard(dtype)).count();
        if outside > 0 {
            problems.push(format!("{outside} elements written outside of {name}"));
        }
        let inside = &memory.bits[GUARD..end];
        match self.role {
            Role::Input if inside != self.contents.bits => problems.push(format!("{name} is written")),
            Role::Output(_) if matches!(dtype, DType::F32 | DType::BF16) => {
                let unwritten = inside.iter().position(|&bits| bits == poisoned(dtype));
                problems.extend(unwritten.map(|at| format!("{name}[{at}] is not written")));
            }
            _ => {}
        }
        problems
    }
}

/// The poison value: for floats a signaling NaN, which no arithmetic yields, and on which any arithmetic yields a NaN.
fn poisoned(dtype: DType) -> u32 {
    match dtype {
        DType::BF16 => 0x7fad,
        DType::I16 => 0x5bad,
        DType::U8 => 0xba,
        _ => 0x7fad_bad5,
    }
}

fn poison(dtype: DType, shape: &[usize]) -> BufferContents {
    BufferContents { dtype, bits: vec![poisoned(dtype); shape.iter().product()] }
}

/// The value of a guard's elements: a large number, so that reading one changes results.
fn guard(dtype: DType) -> u32 {
    match dtype {
        DType::BF16 | DType::I16 => 0x5ead,
        DType::U8 => 0xea,
        _ => 0x5ead_beef,
    }
}
