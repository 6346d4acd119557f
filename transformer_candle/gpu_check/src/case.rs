//! One call of an operation on two devices: its arguments, what it may write, and the tolerance of its results.
//!
//! Every argument is allocated between guards, outputs and workspaces are filled with a poison value, and the call is
//! made twice: so a case also finds elements left unwritten, out-of-bounds writes, writes into an input, and results
//! that differ from run to run.

use kernels::{Buffer, DType, Device, DeviceKind};

use super::device_under_test::{BufferContents, DeviceUnderTest, relative_error};
use super::report::CheckRow;
use training::{Result, TrainerError};

/// Elements before and behind every argument. A multiple of 256 bytes of any type, so that arguments stay aligned.
const GUARD: usize = 128;
/// The tolerance of one element as a multiple of the tolerance of the whole tensor, relative to the element and to the
/// RMS of its row and tensor: rounding errors are normally distributed, so no correct result comes near, and one wrong
/// element among millions is still found.
const ELEMENT_FACTOR: f64 = 16.0;

/// The role of an argument in the call.
enum Role {
    /// Read only.
    Input,
    /// Overwritten; its relative error must not exceed this bound.
    Output(f64),
    /// Read and written; its relative error must not exceed this bound.
    Updated(f64),
    /// Read and written freely; compared through another argument or not at all.
    Scratch,
    /// F32 elements, as many as the operation needs on the device.
    Workspace(Box<dyn Fn(DeviceKind) -> usize>),
}

struct Argument {
    name: &'static str,
    role: Role,
    shape: Vec<usize>,
    content: BufferContents,
}

type Call = dyn Fn(&mut [Buffer]) -> kernels::Result<()>;

/// An operation with its arguments, run on the device and on the CPU.
pub(super) struct Case {
    name: String,
    sizes: String,
    arguments: Vec<Argument>,
    call: Box<Call>,
    /// Whether the reference gets BF16 arguments widened to F32, instead of the types given.
    widened: bool,
}

impl Case {
    /// A case whose reference is the CPU in F32, with the same input values as the device.
    pub(super) fn new(name: impl Into<String>, sizes: impl Into<String>) -> Self {
        let call = Box::new(|_: &mut [Buffer]| Ok(()));
        Self { name: name.into(), sizes: sizes.into(), arguments: Vec::new(), call, widened: true }
    }

    /// Makes the reference compute in the given types, for operations that are defined bit by bit.
    pub(super) fn in_given_types(mut self) -> Self {
        self.widened = false;
        self
    }

    fn argument(mut self, name: &'static str, role: Role, shape: &[usize], content: BufferContents) -> Self {
        self.arguments.push(Argument { name, role, shape: shape.to_vec(), content });
        self
    }

    pub(super) fn input(self, name: &'static str, shape: &[usize], content: BufferContents) -> Self {
        self.argument(name, Role::Input, shape, content)
    }

    pub(super) fn output(self, name: &'static str, shape: &[usize], dtype: DType, bound: f64) -> Self {
        self.argument(name, Role::Output(bound), shape, poison(dtype, shape))
    }

    pub(super) fn updated(self, name: &'static str, shape: &[usize], content: BufferContents, bound: f64) -> Self {
        self.argument(name, Role::Updated(bound), shape, content)
    }

    /// Adds scratch memory filled with a poison value.
    pub(super) fn scratch(self, name: &'static str, shape: &[usize], dtype: DType) -> Self {
        self.argument(name, Role::Scratch, shape, poison(dtype, shape))
    }

    /// Adds state that the call updates, and that is compared through another argument.
    pub(super) fn state(self, name: &'static str, shape: &[usize], content: BufferContents) -> Self {
        self.argument(name, Role::Scratch, shape, content)
    }

    pub(super) fn workspace(self, elements: impl Fn(DeviceKind) -> usize + 'static) -> Self {
        self.argument("workspace", Role::Workspace(Box::new(elements)), &[], poison(DType::F32, &[0]))
    }

    /// Sets the call, which gets the arguments in the order they were added.
    pub(super) fn call<const N: usize>(
        mut self,
        call: impl Fn([&mut Buffer; N]) -> kernels::Result<()> + 'static,
    ) -> Self {
        self.call = Box::new(move |arguments| {
            let arguments: &mut [Buffer; N] = arguments.try_into().expect("a case calls with the arguments it has");
            call(arguments.each_mut())
        });
        self
    }

    /// Runs the case and compares its results. One that does not fit in the device's memory fails; the next may fit.
    pub(super) fn check(&self, device: &DeviceUnderTest) -> Result<CheckRow> {
        match self.compare(device) {
            Err(error @ TrainerError::Kernel(kernels::Error::OutOfMemory { .. })) => Ok(self.failed(&error)),
            compared => compared,
        }
    }

    /// Returns the row of a case that failed with an error.
    pub(super) fn failed(&self, error: &TrainerError) -> CheckRow {
        CheckRow::new(&self.name, &self.sizes).require(false, || error.to_string())
    }

    fn compare(&self, device: &DeviceUnderTest) -> Result<CheckRow> {
        let reference = self.reference()?;
        let first = self.observe(device, 1)?;
        let second = self.observe(device, 2)?;
        let mut row = CheckRow::new(&self.name, &self.sizes);
        let mut worst: Option<(f64, f64)> = None;
        for (((argument, reference), first), second) in self.arguments.iter().zip(&reference).zip(&first).zip(&second) {
            row = argument.check_memory(row, first, second);
            let (Role::Output(bound) | Role::Updated(bound)) = argument.role else { continue };
            let (ours, exact) = (inner(first).numbers(), inner(reference).numbers());
            let error = relative_error(&ours, &exact);
            if worst.is_none_or(|(largest, of)| fraction_of_bound(error, bound) >= fraction_of_bound(largest, of)) {
                worst = Some((error, bound));
            }
            row = argument.check_elements(row, &ours, &exact, bound);
        }
        Ok(match worst {
            Some((error, bound)) => row.within(error, bound),
            None => row,
        })
    }

    fn observe(&self, device: &DeviceUnderTest, run: usize) -> Result<Vec<BufferContents>> {
        let memories = self.run(&device.device, false)?;
        let named = self.arguments.iter().zip(&memories);
        named.map(|(argument, memory)| device.read(&format!("{}: {}", self.name, argument.name), run, memory)).collect()
    }

    fn reference(&self) -> Result<Vec<BufferContents>> {
        self.run(&Device::Cpu, self.widened)?.iter().map(BufferContents::read).collect()
    }

    /// Makes the call on newly allocated arguments and returns their memory, guards included.
    fn run(&self, device: &Device, widened: bool) -> Result<Vec<Buffer>> {
        let mut views = Vec::with_capacity(self.arguments.len());
        let mut memories = Vec::with_capacity(self.arguments.len());
        for argument in &self.arguments {
            let (memory, view) = argument.allocate(device, widened)?;
            memories.push(memory);
            views.push(view);
        }
        (self.call)(&mut views)?;
        Ok(memories)
    }
}

impl Argument {
    fn allocate(&self, device: &Device, widened: bool) -> Result<(Buffer, Buffer)> {
        let (shape, content) = match &self.role {
            Role::Workspace(elements) => {
                let shape = vec![elements(device.kind())];
                (shape.clone(), poison(DType::F32, &shape))
            }
            _ if widened => (self.shape.clone(), self.content.widened()),
            _ => (self.shape.clone(), self.content.clone()),
        };
        let guard = vec![guard(content.dtype); GUARD];
        let whole = BufferContents { dtype: content.dtype, bits: [guard.clone(), content.bits, guard].concat() };
        let mut memory = Buffer::zeros(&[whole.bits.len()], whole.dtype, device)?;
        whole.write_to(&mut memory)?;
        let view = memory.view(GUARD, &shape)?;
        Ok((memory, view))
    }

    /// Checks guards, inputs, unwritten elements and repeatability.
    fn check_memory(&self, row: CheckRow, first: &BufferContents, second: &BufferContents) -> CheckRow {
        let (name, dtype) = (self.name, first.dtype);
        let end = first.bits.len() - GUARD;
        let guards = first.bits[..GUARD].iter().chain(&first.bits[end..]);
        let outside = guards.filter(|&&bits| bits != guard(dtype)).count();
        let inside = &first.bits[GUARD..end];
        let unwritten = inside.iter().position(|&bits| bits == poisoned(dtype));
        let written = !matches!(self.role, Role::Output(_)) || !is_float(dtype);
        let scratch = matches!(self.role, Role::Scratch | Role::Workspace(_));
        row.require(outside == 0, || format!("{outside} elements written outside of {name}"))
            .require(!matches!(self.role, Role::Input) || inside == self.content.bits, || format!("{name} is written"))
            .require(written || unwritten.is_none(), || format!("{name}[{}] is not written", unwritten.unwrap_or(0)))
            .require(scratch || first.bits == second.bits, || format!("{name} differs from run to run"))
    }

    /// Checks every element against [`ELEMENT_FACTOR`].
    fn check_elements(&self, row: CheckRow, ours: &[f32], exact: &[f32], bound: f64) -> CheckRow {
        let rms = |values: &[f32]| {
            let squares: f64 = values.iter().map(|&value| f64::from(value) * f64::from(value)).sum();
            (squares / values.len().max(1) as f64).sqrt()
        };
        let (all, width) = (rms(exact), self.shape.last().copied().unwrap_or(1).max(1));
        let rows = ours.chunks(width).zip(exact.chunks(width)).enumerate();
        let wrong = rows.flat_map(|(at, (ours, exact))| {
            let around = all + rms(exact);
            let pairs = ours.iter().zip(exact).enumerate();
            pairs.filter_map(move |(column, (&ours, &exact))| {
                let allowed = ELEMENT_FACTOR * bound * (f64::from(exact).abs() + around);
                let near = (f64::from(ours) - f64::from(exact)).abs() <= allowed;
                (!near).then_some((at * width + column, ours, exact))
            })
        });
        let name = self.name;
        match wrong.into_iter().next() {
            None => row,
            Some((at, ours, exact)) => row.require(false, || format!("{name}[{at}] is {ours}, not {exact}")),
        }
    }
}

fn inner(memory: &BufferContents) -> BufferContents {
    BufferContents { dtype: memory.dtype, bits: memory.bits[GUARD..memory.bits.len() - GUARD].to_vec() }
}

/// Returns the error as a fraction of its bound; infinite if it is NaN.
fn fraction_of_bound(error: f64, bound: f64) -> f64 {
    match error / bound {
        // Exact results pass a bound of zero.
        _ if error == 0.0 => 0.0,
        fraction if fraction.is_nan() => f64::INFINITY,
        fraction => fraction,
    }
}

fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16)
}

/// The poison value: for floats a signaling NaN, which no arithmetic yields, and on which any arithmetic yields a NaN.
fn poisoned(dtype: DType) -> u32 {
    match dtype {
        DType::BF16 => 0x7fad,
        DType::I16 => 0x5bad,
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
        _ => 0x5ead_beef,
    }
}

#[cfg(test)]
mod tests {
    use kernels::swiglu;

    use super::*;
    use crate::device_under_test::Random;

    const OUTPUT: &str = "swiglu: out";

    fn case() -> Case {
        let gate_up = BufferContents::from_numbers(Random::new(1).numbers(5 * 6), DType::BF16);
        Case::new("swiglu", "5 x 3")
            .input("gate_up", &[5, 6], gate_up)
            .output("out", &[5, 3], DType::BF16, 4e-3)
            .call(|[gate_up, out]| swiglu::forward(gate_up, out))
    }

    /// The failure of the case when its results are tampered with.
    fn failure(tamper: impl Fn(&str, usize, &mut [u32]) + Send + Sync + 'static) -> Option<String> {
        case().check(&DeviceUnderTest::tampered(Device::Cpu, tamper)).unwrap().failure
    }

    #[test]
    fn a_correct_operation_passes_with_its_error() {
        let row = case().check(&DeviceUnderTest::new(Device::Cpu)).unwrap();
        assert_eq!(row.failure, None);
        assert!(row.error.unwrap() > 0.0, "bf16 rounds");
    }

    #[test]
    fn every_memory_error_is_reported() {
        let at = |what: &'static str, index: usize, bits: u32| {
            failure(move |name, _, memory| {
                if name == what {
                    memory[index] = bits;
                }
            })
        };
        assert_eq!(at(OUTPUT, 3, 0).unwrap(), "1 elements written outside of out");
        assert_eq!(at(OUTPUT, GUARD + 15, 0).unwrap(), "1 elements written outside of out");
        assert_eq!(at("swiglu: gate_up", GUARD + 2, 0).unwrap(), "gate_up is written");
        assert_eq!(at(OUTPUT, GUARD + 4, 0x7fad).unwrap(), "out[4] is not written");
    }

    #[test]
    fn a_differing_second_run_is_reported() {
        let flipped = failure(|name, run, memory| {
            if name == OUTPUT && run == 2 {
                memory[GUARD] ^= 1;
            }
        });
        assert_eq!(flipped.unwrap(), "out differs from run to run");
    }

    #[test]
    fn one_wrong_element_or_a_large_mean_error_fails() {
        let one = failure(|name, _, memory| {
            if name == OUTPUT {
                memory[GUARD + 7] = 0x4000;
            }
        });
        assert!(one.unwrap().starts_with("out[7] is 2, not"));
        let all = failure(|name, _, memory| {
            if name == OUTPUT {
                memory[GUARD..GUARD + 15].iter_mut().for_each(|bits| *bits += 4);
            }
        });
        assert!(all.unwrap().contains("is more than 4.0e-3"));
    }

    #[test]
    fn an_operation_that_computes_from_its_workspace_yields_nan() {
        let case = Case::new("copy", "4")
            .workspace(|_| 4)
            .output("out", &[4], DType::F32, 1.0)
            .call(|[workspace, out]| out.copy_from(workspace));
        assert!(case.check(&DeviceUnderTest::new(Device::Cpu)).unwrap().failure.is_some());
    }
}
